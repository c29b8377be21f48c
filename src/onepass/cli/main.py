"""The command line: onepass demo | doctor | run | verify | patch | bench."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from onepass import __version__

from . import bench, demo, doctor, patch, run, verify


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="onepass", description="Normalization layers for PyTorch, as one core in every memory layout.")
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="command", required=True)
    demo.add_arguments(
        commands.add_parser("demo", help="run every norm here, verified and timed beside torch, and draw what they average over")
    )
    doctor.add_arguments(commands.add_parser("doctor", help="versions, devices, and what each norm would run on"))
    verify.add_arguments(commands.add_parser("verify", help="the whole case list against both oracles; run this on new hardware"))
    run.add_arguments(commands.add_parser("run", help="one problem of your choice"))
    patch.add_arguments(commands.add_parser("patch", help="what onepass.patch does to a model of yours"))
    bench.add_arguments(commands.add_parser("bench", help="the speed of every row of the suite, beside torch and the speed of a copy"))
    args = parser.parse_args(argv)
    try:
        return args.run(args)
    except (OSError, RuntimeError, ValueError, TypeError, IndexError, ZeroDivisionError, NotImplementedError) as error:
        print(f"onepass: {error}", file=sys.stderr)
        return 2
