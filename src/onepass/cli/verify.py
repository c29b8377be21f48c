"""`onepass verify`: check every case on every kernel family and dtype against two float64 oracles."""

from __future__ import annotations

import argparse
from collections import defaultdict
from typing import Any

import torch

from onepass import __version__
from onepass.bench import record
from onepass.bench.record import dtype_name
from onepass.bench.terminal import print_table, progress
from onepass.planning.registry import FAMILIES
from onepass.verify import cases, matrix


def run(args: argparse.Namespace) -> int:
    which = [case for case in cases.CASES if args.op in (None, case.op) and args.only in case.name]
    if not which:
        raise ValueError(f"--op {args.op} --only {args.only!r}: no case matches both; leave out one of them")
    dtypes = [d for d in matrix.DTYPES if args.dtype in (None, dtype_name(d))]
    total = len(which) * len(dtypes) * len(FAMILIES)
    print(f"onepass {__version__}, torch {torch.__version__}, {args.device} {record.machine(args.device)}")
    print("A cell is one case, by one kernel family in one dtype. Errors are fractions of the budget (docs/theory.md).\n", flush=True)
    cells = list(progress(matrix.verify(which, dtypes, args.device, args.seed), total, lambda cell: cell.case.name))
    if args.matrix:
        _print_matrix(cells, dtypes)
    failed = [cell for cell in cells if not cell.ok]
    for cell in failed:
        print(f"FAILED {cell.case.name}, {cell.family}, {dtype_name(cell.dtype)}: {cell.fault or 'the error exceeds the budget'}")
    if args.reasons:
        for reason in sorted({reason for cell in cells for reason in cell.reasons}):
            print(f"- {reason}")
        print()
    if args.out:
        origin = record.origin(args.device)
        record.write(args.out, (_record(cell) | origin for cell in cells))
    _print_summary(cells)
    return 1 if failed else 0


def _print_matrix(cells: list[matrix.Cell], dtypes: list[torch.dtype]) -> None:
    """Print forward and backward errors. "–": not supported."""
    rows: dict[tuple[str, str], dict[torch.dtype, matrix.Cell]] = defaultdict(dict)
    for cell in cells:
        rows[cell.case.name, cell.family][cell.dtype] = cell
    print("forward/backward: the largest error. –: not supported; --reasons prints why.")
    print_table(
        [
            ["case", "family", *map(dtype_name, dtypes)],
            *([name, family, *(_cell(row[d]) for d in dtypes)] for (name, family), row in rows.items()),
        ]
    )
    print()


def _print_summary(cells: list[matrix.Cell]) -> None:
    """Print the cells of each norm, and of all."""
    by_norm: dict[str, list[matrix.Cell]] = defaultdict(list)
    for cell in cells:
        by_norm[cell.case.op].append(cell)
    counts = {norm: _counts(found) for norm, found in by_norm.items()}
    print_table(
        [
            ["norm", "cells", "within the budget", "not supported", "failed", "largest error"],
            *([norm, *map(str, counts[norm]), _largest(found)] for norm, found in by_norm.items()),
        ]
    )
    total, within, unsupported, failed = _counts(cells)
    print(f"\n{total} cells: {within} within the budget, {unsupported} not supported, {failed} failed")
    if not failed:
        print("All well. --matrix prints every cell, and --reasons why some are not supported.")


def _counts(cells: list[matrix.Cell]) -> tuple[int, int, int, int]:
    """Return how many cells there are, are within the budget, are not supported, and failed."""
    failed = sum(not cell.ok for cell in cells)
    unsupported = sum(cell.ok and cell.forward is None for cell in cells)
    return len(cells), len(cells) - unsupported - failed, unsupported, failed


def _largest(cells: list[matrix.Cell]) -> str:
    errors = [error for cell in cells for error in (cell.forward, cell.backward) if error is not None]
    return f"{max(errors):.2f}" if errors else "–"


def _record(cell: matrix.Cell) -> dict[str, Any]:
    numbers = {"forward": cell.forward, "backward": cell.backward, "ok": cell.ok}
    return {"case": cell.case.name, "family": cell.family, "dtype": dtype_name(cell.dtype), **numbers}


def _cell(cell: matrix.Cell) -> str:
    if cell.forward is None:
        return "–" if cell.reasons else "MISSING"
    text = f"{cell.forward:.2f}/" + ("–" if cell.backward is None else f"{cell.backward:.2f}")
    return text if cell.ok else text + " !"
