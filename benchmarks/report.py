"""Writes the tables of docs/measured.md, or with --models that of docs/benchmarks.md, from the files in results/."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from onepass.bench import record

from . import report_models, report_suite


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.report", description=__doc__)
    parser.add_argument("--models", action="store_true", help="the table of whole models instead")
    parser.add_argument(
        "--results", type=Path, help="read these results (default: results/bench-h200.jsonl, or with --models results/models-h200.jsonl)"
    )
    parser.add_argument(
        "--docs", type=Path, help="write the table into this file (default: docs/measured.md, or with --models docs/benchmarks.md)"
    )
    parser.add_argument("--check", action="store_true", help="only check that the table agrees with the results")
    args = parser.parse_args(argv)
    try:
        return run(args)
    except (OSError, ValueError) as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 2


def run(args: argparse.Namespace) -> int:
    results, docs = ("models-h200.jsonl", "docs/benchmarks.md") if args.models else ("bench-h200.jsonl", "docs/measured.md")
    results, docs = args.results or Path("results") / results, args.docs or Path(docs)
    old = docs.read_text()
    new = (report_models if args.models else report_suite).updated(old, record.read(results))
    if old == new:
        print(f"{docs} is up to date with {results}")
        return 0
    if args.check:
        print(f"{docs} is not up to date with {results}; run `python -m benchmarks.report{' --models' * args.models}`")
        return 1
    docs.write_text(new)
    print(f"{docs} written from {results}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
