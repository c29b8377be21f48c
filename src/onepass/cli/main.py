"""The entry point of the command line `onepass`: reads the arguments, and imports and runs one command."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib import import_module

from .arguments import parser

ERRORS = OSError, RuntimeError, ValueError, TypeError, ImportError, IndexError, ZeroDivisionError, NotImplementedError


def main(argv: Sequence[str] | None = None) -> int:
    args = parser().parse_args(argv)
    try:
        if "device" in args:
            import_module("onepass.cli.devices").require(args.device)
        return import_module(f"onepass.cli.{args.command}").run(args)
    except BrokenPipeError:  # the reader, such as `head`, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # so that Python does not complain when it flushes
        return 1
    except ERRORS as error:
        print(f"onepass: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("onepass: interrupted", file=sys.stderr)
        return 130
