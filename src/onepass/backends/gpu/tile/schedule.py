from __future__ import annotations

from math import ceil

from onepass.backends.gpu.launches import Pass, chained, head_and_tail, power_of_two, stages_that_fit, warps_for
from onepass.backends.gpu.partials.schedule import combine_launch
from onepass.backends.gpu.walk import TILE, Walk, walk
from onepass.core.device import Device
from onepass.core.problem import NormProblem

LARGEST_TILE = 16384  # elements that one program can keep in registers
NARROWEST = 16  # columns of a tile


def tile_launches(problem: NormProblem, device: Device, invariant: bool) -> tuple[Pass, ...]:
    """Few warps with many elements each: sums over rows then stay in a thread."""
    w = walk(problem)
    block_run = power_of_two(w.run)
    block_i, tail = head_and_tail(w.reps)
    length = block_i + tail
    block_j = max(min(power_of_two(w.sets) * block_run, 32 if length <= 128 else NARROWEST), block_run)
    each = (128 if length <= 128 else 64) if device.prefetches else 32  # elements for a thread; AMD's compiler spills with more
    warps = warps_for(length * block_j // each, device)
    blocks = ceil(w.sets * block_run / block_j)
    stages = stages_that_fit(problem, device, length * block_j, 3) if length * block_j <= 8192 else 1
    programs = w.outer * blocks if stages == 1 else min(w.outer * blocks, max(8 // warps, 1) * device.sms)
    return (Pass(TILE, w, programs, warps, block_i, block_j, block_run, tail, True, True, True, 1, 1, w.reps, blocks, stages),)


def tile_reread_launches(problem: NormProblem, device: Device, invariant: bool) -> tuple[Pass, ...]:
    w = walk(problem)
    programs = 3 if w.total * w.reps * w.run >= 2**23 else 2
    taken = tile_parts(w, device, programs, 64, 128, stages_that_fit(problem, device, 2048, 4), 256 if invariant else 0, reduce=True)
    return chained(device, (taken, combine_launch(w, taken, device), tile_apply(problem, w, device)))


def tile_apply(problem: NormProblem, w: Walk, device: Device) -> Pass:
    size = w.total * w.reps * w.run
    if w.columns % 128 == 0 and size >= 2**25:
        return tile_parts(w, device, 16, 128, 256, apply=True)
    programs, stages = (16, 4) if size >= 2**23 else (8, 3)
    return tile_parts(w, device, programs, 64, 128, stages_that_fit(problem, device, 2048, stages), apply=True)


def tile_size(problem: NormProblem) -> int:
    """The elements of the smallest block that holds whole sets."""
    w = walk(problem)
    block_run = power_of_two(w.run)
    return sum(head_and_tail(w.reps)) * max(block_run, min(NARROWEST, power_of_two(w.sets) * block_run))


def tile_parts(
    w: Walk,
    device: Device,
    programs: int,
    width: int,
    threads: int,
    stages: int = 1,
    rows: int = 0,
    reduce: bool = False,
    apply: bool = False,
) -> Pass:
    """About so many programs for each multiprocessor, or `rows` for each program. Blocks are 32 rows high, higher where columns are few."""
    block_j = min(power_of_two(w.columns), width)
    block_i = 32 * width // block_j
    blocks = ceil(w.columns / block_j)
    parts = ceil(w.reps / rows) if rows else ceil(programs * device.sms / (w.outer * blocks))
    chunk_r = ceil(ceil(w.reps / block_i) / parts) * block_i
    parts_r = ceil(w.reps / chunk_r)
    return Pass(
        *(TILE, w, w.outer * parts_r * blocks, warps_for(threads, device), block_i, block_j, 1, 0, False, reduce, apply),
        *(parts_r, w.run, chunk_r, blocks, stages),
    )
