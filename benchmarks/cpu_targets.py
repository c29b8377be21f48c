"""Measures three targets on this CPU against torch: small forwards, small training steps, and norms beside a busy process.

Run it with `python -m benchmarks.cpu_targets --out results/cpu-small-aarch64.jsonl`. Small means an x of 4 or 64 KB, on one thread.
The busy process keeps one core busy, as a DataLoader worker does, while channels-last GroupNorm runs on two threads.
onepass and torch take turns. A ratio is torch's time by ours, the median over all pairs of turns: above 1, onepass is faster.
The load average at the start, without the busy process, is in each record.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch

from onepass.bench import record, timing
from onepass.bench.record import Record
from onepass.bench.terminal import progress, table
from onepass.dispatch import front_door
from onepass.verify import calls, tensors
from onepass.verify.cases import Case

from .cpu import DTYPES, by_torch, rows, title

SMALL = (4, 64)  # sizes of x in KB
IMAGES = ((1, 320, 64, 64), (4, 320, 64, 64), (16, 320, 64, 64), (16, 640, 32, 32), (8, 128, 128, 128))
TURN = 3e-4  # seconds of a turn. Longer turns would often be interrupted by other processes


class Target(NamedTuple):
    """What a kind of row must reach, in torch's speed."""

    gate: float
    stretch: float


FORWARD, STEP = "small forward", "small training step"
BUSY_FORWARD, BUSY_STEP = "forward beside a busy process", "training step beside a busy process"
TARGETS = {FORWARD: Target(0.95, 1.0), STEP: Target(0.85, 1.0), BUSY_FORWARD: Target(1.0, 1.3), BUSY_STEP: Target(1.0, 1.3)}


class Row(NamedTuple):
    target: str  # a key of TARGETS
    case: Case
    dtype: torch.dtype
    threads: int

    @property
    def name(self) -> str:
        return f"{title(self.case)} {'×'.join(map(str, self.case.shape))} {record.dtype_name(self.dtype)}"


def small_rows(dtypes: Iterable[torch.dtype]) -> Iterator[Row]:
    for dtype in dtypes:
        for kb in SMALL:
            for case in rows(kb, dtype):
                yield Row(FORWARD, case, dtype, 1)
                yield Row(STEP, case, dtype, 1)


def busy_rows() -> Iterator[Row]:
    for shape in IMAGES:
        case = Case("group_norm", shape, "channels_last", groups=32)
        yield Row(BUSY_FORWARD, case, torch.float32, 2)
        yield Row(BUSY_STEP, case, torch.float32, 2)


@contextmanager
def busy_process() -> Iterator[None]:
    """Run a process that never sleeps, on any core."""
    process = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        yield
    finally:
        process.kill()
        process.wait()


def variants(row: Row) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """Return the calls of onepass and of torch: forwards, or training steps that compute all gradients."""
    operands = tensors.make(row.case, row.dtype, on_device=True)
    ours, torchs = calls.onepass_call(row.case, operands), by_torch(row.case, operands)
    if row.target in (FORWARD, BUSY_FORWARD):
        return ours, torchs
    running = operands.running_mean, operands.running_var
    leaves = [t.requires_grad_() for t in operands if t is not None and all(t is not r for r in running)]
    dy = tensors.make_dy(operands, on_device=True)

    def step(forward: Callable[[], calls.Output]) -> Callable[[], Any]:
        def run() -> None:
            output = forward()
            torch.autograd.grad(output[0] if isinstance(output, tuple) else output, leaves, dy)

        return run

    return step(ours), step(torchs)


def pairs_of(ours: Callable[[], Any], torchs: Callable[[], Any], pairs: int) -> list[tuple[float, float]]:
    """Time both in turn, and return the seconds of a call in each turn."""
    for _ in range(3):
        ours()
        torchs()
    repeat = max(1, int(TURN / max(min(timing.once(torchs, 1) for _ in range(3)), 1e-7)))
    return [(timing.once(ours, repeat), timing.once(torchs, repeat)) for _ in range(pairs)]


def measure(row: Row, pairs: int) -> Record:
    torch.set_num_threads(row.threads)
    with torch.set_grad_enabled(row.target in (STEP, BUSY_STEP)):
        found = pairs_of(*variants(row), pairs)
    times = [round(statistics.median(taken) * 1e6, 2) for taken in zip(*found)]
    ratio = statistics.median(torchs / ours for ours, torchs in found)
    fields = {"row": row.name, "target": row.target, "threads": row.threads, "gate": TARGETS[row.target].gate, "pairs": pairs}
    return {**fields, "provider": "onepass", "ratio": round(ratio, 3), "ours_us": times[0], "torch_us": times[1]}


def summary(records: Sequence[Record]) -> str:
    """Return a table of the targets, and below it every row that misses its gate."""
    lines = [["", "rows", "worst", "median", "gate", "stretch", "below the gate", "slowest case"]]
    for name, target in TARGETS.items():
        some = sorted((r for r in records if r["target"] == name), key=lambda r: r["ratio"])
        if some:
            middle, lost = statistics.median(r["ratio"] for r in some), len(losses(some))
            numbers = f"{some[0]['ratio']:.2f}", f"{middle:.2f}", f"{target.gate}", f"{target.stretch}"
            lines.append([name, str(len(some)), *numbers, str(lost), some[0]["row"]])
    lost = [
        f"{r['ratio']:.2f} of {r['gate']}: {r['target']}, {r['row']}, {r['ours_us']} µs, torch {r['torch_us']}" for r in losses(records)
    ]
    return "\n".join([table(lines), *(["", "Below the gate:", *lost] if lost else [])])


def losses(records: Iterable[Record]) -> list[Record]:
    """Return the records below their gate, the slowest first."""
    return sorted((r for r in records if r["ratio"] < r["gate"]), key=lambda r: r["ratio"])


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cpu_targets", description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, help="write the results into this file, one JSON object per line")
    parser.add_argument("--pairs", type=int, default=200, help="pairs of turns for each small row; a busy row has a quarter as many")
    parser.add_argument("--dtypes", default=",".join(map(record.dtype_name, DTYPES)), help="of small rows")
    parser.add_argument("--only", choices=("small", "busy"), help="measure only these rows")
    options = parser.parse_args(arguments)
    front_door.open_now()
    small = [] if options.only == "busy" else list(small_rows(getattr(torch, name) for name in options.dtypes.split(",")))
    busy = [] if options.only == "small" else list(busy_rows())
    origin, threads = {**record.origin("cpu"), "load": round(os.getloadavg()[0], 1)}, torch.get_num_threads()
    try:
        records = [measure(row, options.pairs) | origin for row in progress(small, len(small), lambda row: row.name)]
        with busy_process():
            records += [measure(row, -(-options.pairs // 4)) | origin for row in progress(busy, len(busy), lambda row: row.name)]
    finally:
        torch.set_num_threads(threads)
    if options.out:
        record.write(options.out, records)
    print(summary(records))
    return 0


if __name__ == "__main__":
    sys.exit(main())
