"""The entry point of the command line `onepass`: reads the arguments and runs one command."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from onepass import __version__

from . import bench, demo, doctor, patch, precompile, run, verify


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="onepass", description="Normalization layers for PyTorch, for every memory layout.")
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, command, help in (
        ("demo", demo, "run every norm on this machine, compare errors and times with torch, and draw what each norm averages over"),
        ("doctor", doctor, "print versions, devices, and which kernel each norm uses and why"),
        ("verify", verify, "check every case on every kernel family against two float64 oracles; run this on new hardware"),
        ("run", run, "run one problem of your choice"),
        ("patch", patch, "show what onepass.patch does to your model"),
        ("precompile", precompile, "compile the kernels of your model ahead of time"),
        ("bench", bench, "measure every row of the suite, and compare with torch and with the speed of a copy"),
    ):
        command.add_arguments(commands.add_parser(name, help=help))
    args = parser.parse_args(argv)
    try:
        return args.run(args)
    except (OSError, RuntimeError, ValueError, TypeError, IndexError, ZeroDivisionError, NotImplementedError) as error:
        print(f"onepass: {error}", file=sys.stderr)
        return 2
