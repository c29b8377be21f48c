"""`onepass bench`: measure norms, and compare with torch and with the speed of a copy."""

from __future__ import annotations

import argparse

import torch

from onepass import __version__
from onepass.bench import record
from onepass.bench.measure import measure
from onepass.bench.providers import OURS, PROVIDERS
from onepass.bench.record import Record
from onepass.bench.suite import BACKWARD_SUITE, SUITE, Row
from onepass.bench.terminal import print_table, progress
from onepass.dispatch import front_door


def run(args: argparse.Namespace) -> int:
    chosen = [row for row in (*SUITE, *BACKWARD_SUITE) if args.op in (None, row.case.op) and args.only in row.name]
    chosen = [row for row in chosen if args.direction in (None, row.direction)]
    if args.list:
        print_table([["row", "MB", "target"], *([row.name, f"{row.nbytes / 1e6:.0f}", row.goal] for row in chosen)])
        return 0
    limit = args.limit if args.limit is not None else 64 if args.device == "cpu" else float("inf")
    rows = [row for row in chosen if row.nbytes <= limit * 1e6]
    if not rows:
        raise ValueError(
            f"{len(chosen)} rows match --op, --direction and --only, and none of them is within --limit {limit:g} MB; see --list"
        )
    providers = {name: provider for name, provider in PROVIDERS.items() if name in (args.provider or PROVIDERS)}
    print(f"onepass {__version__}, torch {torch.__version__}, {args.device} {record.machine(args.device)}")
    if len(rows) < len(chosen):
        print(f"{len(chosen) - len(rows)} rows over {limit:g} MB are skipped; --limit changes this")
    front_door.open_now()
    results: dict[Row, dict[str, Record]] = {}
    for row in progress(rows, len(rows), lambda row: row.name, log=True):
        records = measure(row, args.device, providers)
        results[row] = {result["provider"]: result for result in records}
        if args.out:  # written after every row, so that an interrupted run keeps its results
            record.write(args.out, record.merge(record.read(args.out) if args.out.exists() else [], records))
    print()
    print_table([_HEAD, *(_line(row, found) for row, found in results.items())])
    print("Times in µs. fraction: speed relative to a copy. host: CPU time of a call. MB more: memory of a backward besides its gradients.")
    failed = [result for found in results.values() for result in found.values() if "error" in result]
    for result in failed:
        print(f"FAILED {result['row']} by {result['provider']}: {result['error']}")
    return 1 if any(result["provider"] == OURS for result in failed) else 0


_HEAD = ["row", "plan", "onepass", "(quartiles)", "fraction", "target", "torch", "torch.compile", "copy", "host", "torch's host", "MB more"]


def _line(row: Row, found: dict[str, Record]) -> list[str]:
    ours, copy = found.get(OURS, {}), next(iter(found.values()))["copy_us"]

    def number(provider: str, field: str = "us") -> str:
        value = found.get(provider, {}).get(field)
        return "–" if value is None else f"{value:.1f}"

    spread = f"{number(OURS, 'low_us')}-{number(OURS, 'high_us')}" if "us" in ours else ""
    fraction = f"{ours['fraction']:.2f}" if "us" in ours else "FAILED" if "error" in ours else "–"
    target = row.goal + (" ✓" if ours.get("met") else "")
    times = number(OURS), spread, fraction, target, number("torch"), number("torch.compile"), f"{copy:.1f}"
    return [row.name, ours.get("plan") or "–", *times, number(OURS, "host_us"), number("torch", "host_us"), record.extra_mb(ours)]
