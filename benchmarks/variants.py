"""Measures launches that the families `row`, `tile`, `row_reread` and `tile_reread` could take, but do not: other blocks, warps and stages.

The schedule.py of these families has fixed numbers, which were tuned on some shapes. This script shows where others are faster:
`python -m benchmarks.variants --workers 15` measures the ROWS below, and `--row "layer_norm 3000x5120"` those whose name
contains these words. For each row it prints the fastest launches, their times and the planner's time. Change a schedule only if the
change also helps on shapes of benchmarks/sweep.py.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from onepass.backends.family import FORWARD, Launches
from onepass.backends.gpu.launches import block_and_remainder, chained, power_of_two, stages_that_fit
from onepass.backends.gpu.partials.combine import combine_launch
from onepass.backends.gpu.row.schedule import row_launches, row_parts
from onepass.backends.gpu.tile.schedule import rows_abreast, tile_apply, tile_launches, tile_parts
from onepass.backends.gpu.walk import walk
from onepass.bench.suite import Row, problem_of
from onepass.bench.terminal import progress, table
from onepass.core.device import Device, describe
from onepass.core.problem import NormProblem
from onepass.planning.choose import plan
from onepass.planning.registry import FAMILIES
from onepass.verify.cases import Case

from .launch_times import launch_times
from .precompile import build, finish, new_pool

HALF, BFLOAT = torch.float16, torch.bfloat16
NEAR = 1.3  # families are tried whose cost is at most this many times the least
SHOWN = 4  # how many launches the table has for each row, in addition to the planner's


def _rows() -> Iterator[Row]:
    for shape in ((131072, 96), (100000, 160), (40000, 768), (20000, 1536), (9000, 2560), (3000, 5120), (1500, 12288), (4096, 32768)):
        yield Row(Case("layer_norm", shape), BFLOAT)
    for layout in ("contiguous", "channels_last"):
        yield Row(Case("group_norm", (16, 320, 64, 64), layout, groups=32, activation="silu"), HALF)
        yield Row(Case("batch_norm", (256, 512, 28, 28), layout, running=True, wide=True), HALF)
    yield Row(Case("instance_norm", (256, 512, 28, 28), "channels_last"), HALF)
    yield Row(Case("layer_norm2d", (16, 384, 56, 56)), HALF)
    yield Row(Case("layer_norm", (16, 256, 64, 64), "channels_last", rank=3, granularity="channel"), HALF)


ROWS = tuple(_rows())


def variants(problem: NormProblem, device: Device) -> dict[str, Launches]:
    """Return launches by which a problem can run, by name. The first are the planner's."""
    makers = {"row": _row, "tile": _tile, "row_reread": _row_reread, "tile_reread": _tile_reread}
    known = [family for family in FAMILIES if family.name in makers and not family.unsupported(problem, device, FORWARD)]
    costs = {family.name: family.cost(problem, device, FORWARD, False) for family in known}
    found: dict[str, Launches] = {"planned": plan(problem, device).launches}
    for family, cost in costs.items():
        if cost <= NEAR * min(costs.values()):
            found |= {f"{family} {name}": launches for name, launches in makers[family](problem, device)}
    return found


def _row(problem: NormProblem, device: Device) -> Iterator[tuple[str, Launches]]:
    (base,) = row_launches(problem, device, False)
    w = base.walk
    for block_j, remainder in dict.fromkeys([(power_of_two(w.run), 0), block_and_remainder(w.run)]):
        length = block_j + remainder
        for block_i in (1, 2, 4, 8, 16, 32, 64):
            if length * block_i > max(16384, length):
                continue
            for warps in (1, 2, 4, 8, 16, 32):
                if not 8 <= length * block_i / warps / device.warp <= 64:
                    continue
                cut = replace(base, block_i=block_i, block_j=block_j, remainder=remainder, warps=warps)
                programs = -(-w.total // block_i)
                for stages, each in ((1, 0), (2, 16), (2, 32), (3, 8), (3, 16), (3, 24), (4, 16)):  # `each` warps on a multiprocessor
                    if stages_that_fit(problem, device, length * block_i, stages) != stages:
                        continue
                    most = max(each // warps, 1) * device.sms if stages > 1 else programs
                    yield (
                        f"{block_i}x{block_j}+{remainder} w{warps} s{stages} p{min(programs, most)}",
                        (replace(cut, programs=min(programs, most), stages=stages),),
                    )


def _tile(problem: NormProblem, device: Device) -> Iterator[tuple[str, Launches]]:
    (base,) = tile_launches(problem, device, False)
    w = base.walk
    for block_i, remainder in dict.fromkeys([(power_of_two(w.reps), 0), block_and_remainder(w.reps)]):
        for block_j in (16, 32, 64):
            if block_j < base.block_run or not 2048 <= (block_i + remainder) * block_j <= 32768:
                continue
            blocks = -(-w.sets * base.block_run // block_j)
            for warps in (2, 4, 8, 16, 32):
                if 16 <= (block_i + remainder) * block_j / warps / device.warp <= 128:
                    cut = {"block_i": block_i, "remainder": remainder, "block_j": block_j, "warps": warps}
                    launch = replace(base, **cut, blocks=blocks, programs=w.outer * blocks, stages=1)
                    yield f"{block_i}+{remainder}x{block_j} w{warps}", (launch,)


def _row_reread(problem: NormProblem, device: Device) -> Iterator[tuple[str, Launches]]:
    w, flat = walk(problem, cut=True), walk(problem)
    for size in (2048, 4096, 8192, 16384, 32768):
        for threads in (128, 256, 512, 1024):
            if not 8 <= size / threads <= 64:
                continue
            yield f"{size} t{threads}", (row_parts(w, device, 1, size, threads, reduce=True, apply=True),)
    for programs, size, threads in ((2, 4096, 128), (4, 4096, 256), (4, 2048, 128), (8, 4096, 256)):
        reduced = row_parts(flat, device, -(-programs * device.sms // w.total), size, threads, reduce=True)
        for more, block, others in ((8, 4096, 512), (16, 2048, 128), (8, 4096, 256), (16, 4096, 256)):
            applied = row_parts(w, device, -(-more * device.sms // w.total), block, others, apply=True)
            yield (
                f"{programs}/{size} t{threads}, {more}/{block} t{others}",
                chained(device, (reduced, combine_launch(flat, reduced.parts, device), applied)),
            )


def _tile_reread(problem: NormProblem, device: Device) -> Iterator[tuple[str, Launches]]:
    w = walk(problem)
    abreast = rows_abreast(problem, w)
    applied = [
        tile_apply(problem, w, device, abreast),
        tile_parts(w, device, 16, 128, 256, abreast=abreast),
        tile_parts(w, device, 8, 64, 128, abreast=abreast),
        tile_parts(w, device, 16, 64, 256, abreast=abreast),
    ]
    for programs in (3, 4, 8):
        for width, threads, stages in ((64, 128, 4), (64, 128, 1), (128, 256, 1), (128, 256, 3)):
            stages = stages_that_fit(problem, device, 32 * width, stages)
            reduced = tile_parts(w, device, programs, width, threads, stages, reduce=True, abreast=abreast)
            for number, apply in enumerate(applied):
                yield (
                    f"{programs} {width} t{threads} s{stages}, apply {number}",
                    chained(device, (reduced, combine_launch(w, reduced.parts, device, abreast), apply)),
                )


def _build(row: Row, device: Device, name: str, target: Any) -> None:
    """In another process: compile the kernels of one variant."""
    from onepass.backends.gpu import forward

    problem = problem_of(row)
    for kernel in forward.kernels(problem, variants(problem, device)[name], row.case.running):
        build(kernel.source(), target)


def compile_ahead(rows: Sequence[Row], device: Device, workers: int) -> str:
    """Compile the kernels of all variants in other processes. Return a sentence about it."""
    import triton

    driver: Any = triton.runtime.driver.active
    pool, target = new_pool(workers), driver.get_current_target()
    jobs = [(row, device, name, target) for row in rows for name in variants(problem_of(row), device)]
    return finish(pool, [pool.submit(_build, *job) for job in jobs], 300)


def measure(row: Row, device: Device) -> list[list[str]]:
    """Return lines for a table: the planner's launches, and the fastest of the others."""
    found = variants(problem_of(row), device)
    copy, times = launch_times(row, list(found.values()), list(found))
    first, *others = zip(times, found)
    best = sorted(others)[:SHOWN]
    return [[row.name if line is first else "", line[1], f"{line[0]:.1f}", f"{copy / line[0]:.2f}"] for line in (first, *best)]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.variants", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--row", action="append", default=[], help="only rows whose name contains these words; may be given twice")
    parser.add_argument("--workers", type=int, default=0, help="processes that compile all kernels first (0)")
    args = parser.parse_args(argv)
    rows = [row for row in ROWS if not args.row or any(words in row.name for words in args.row)]
    if not torch.cuda.is_available():
        parser.error("there is no GPU to measure on")
    device = describe(torch.device("cuda"))
    if args.workers:
        print(compile_ahead(rows, device, args.workers), file=sys.stderr, flush=True)
    lines, failed = [["row", "launches", "µs", "of copy"]], 0
    for row in progress(rows, len(rows), lambda row: row.name, log=True):
        try:
            lines += measure(row, device)
        except RuntimeError as error:  # a launch that is wrong or does not run leaves the other rows alone
            failed += 1
            print(error, file=sys.stderr, flush=True)
    print(table(lines))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
