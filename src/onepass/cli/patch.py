"""`onepass patch`: show what onepass.patch does to a model."""

from __future__ import annotations

import argparse

from onepass.patching import patch

from . import factory


def add_arguments(parser: argparse.ArgumentParser) -> None:
    factory.add_arguments(parser)
    parser.add_argument("--dry-run", action="store_true", help="change nothing, and print what would change")
    parser.add_argument("--no-fuse", dest="fuse", action="store_false", help="replace norms but fuse none")
    parser.add_argument("--channels-last", action="store_true", help="also convert convolutions to channels_last")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    print(patch(factory.make(args), fuse=args.fuse, dry_run=args.dry_run, channels_last=args.channels_last))
    return 0
