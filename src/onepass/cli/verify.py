"""`onepass verify`: check every case on every kernel family and dtype against two float64 oracles."""

from __future__ import annotations

import argparse
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch

from onepass import __version__
from onepass.bench import record
from onepass.bench.record import dtype_name
from onepass.bench.terminal import progress, table
from onepass.planning.registry import FAMILIES
from onepass.verify import calls, cases, matrix


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--op", choices=list(calls.OPS), help="check only this norm")
    parser.add_argument("--only", default="", metavar="SUBSTRING", help="check only cases whose name contains this")
    parser.add_argument("--dtype", choices=[dtype_name(d) for d in matrix.DTYPES], help="check only this dtype")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--reasons", action="store_true", help="print why a family does not support a case")
    parser.add_argument("--out", type=Path, help="also write the results to this file, one JSON object per line")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    which = [case for case in cases.CASES if args.op in (None, case.op) and args.only in case.name]
    dtypes = [d for d in matrix.DTYPES if args.dtype in (None, dtype_name(d))]
    total = len(which) * len(dtypes) * len(FAMILIES)
    print(f"onepass {__version__}, torch {torch.__version__}, {args.device} {record.machine(args.device)}")
    print("forward/backward: the largest error as a fraction of the budget. –: not supported; --reasons prints why.\n")
    cells: dict[tuple[str, str], dict[torch.dtype, matrix.Cell]] = defaultdict(dict)
    for cell in progress(matrix.verify(which, dtypes, args.device, args.seed), total, lambda cell: cell.case.name):
        cells[cell.case.name, cell.family][cell.dtype] = cell
    rows = [["case", "family", *map(dtype_name, dtypes)]]
    rows += [[name, family, *(_cell(row[d]) for d in dtypes)] for (name, family), row in cells.items()]
    print(table(rows))
    every = [cell for row in cells.values() for cell in row.values()]
    failed = [cell for cell in every if not cell.ok]
    for cell in failed:
        print(f"FAILED {cell.case.name}, {cell.family}, {dtype_name(cell.dtype)}: {cell.fault or 'the error exceeds the budget'}")
    if args.reasons:
        print()
        for reason in sorted({reason for cell in every for reason in cell.reasons}):
            print(f"- {reason}")
    if args.out:
        origin = record.origin(args.device)
        record.write(args.out, (_record(cell) | origin for cell in every))
    ran = sum(cell.forward is not None for cell in every)
    print(f"\n{len(every)} cells: {ran - len(failed)} within the budget, {len(every) - ran} not supported, {len(failed)} failed")
    return 1 if failed else 0


def _record(cell: matrix.Cell) -> dict[str, Any]:
    numbers = {"forward": cell.forward, "backward": cell.backward, "ok": cell.ok}
    return {"case": cell.case.name, "family": cell.family, "dtype": dtype_name(cell.dtype), **numbers}


def _cell(cell: matrix.Cell) -> str:
    if cell.forward is None:
        return "–" if cell.reasons else "MISSING"
    text = f"{cell.forward:.2f}/" + ("–" if cell.backward is None else f"{cell.backward:.2f}")
    return text if cell.ok else text + " !"
