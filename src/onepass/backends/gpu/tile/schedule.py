"""The launches that compute a forward by the tile walk, and their sizes, which were tuned on an H200.

The tile walk reads memory across sets. A set is the elements that share one mean and variance. In `x[o, r, s, t]` a set is
one (o, s), a row is one r, and a column is one (s, t). A part is the rows that one program works on.
"""

from __future__ import annotations

from math import ceil

from onepass.backends.gpu.launches import (
    ForwardLaunch,
    block_and_remainder,
    can_load_ahead,
    chained,
    power_of_two,
    stages_that_fit,
    warps_for,
)
from onepass.backends.gpu.partials.combine import combine_launch
from onepass.backends.gpu.walk import Walk, walk
from onepass.core.device import Device
from onepass.core.problem import NormProblem

from .launch import TileLaunch

LARGEST_TILE = 16384  # elements of the largest block that fits in the registers of one program
NARROWEST = 16  # columns of the narrowest block, unless there are fewer columns


def tile_launches(problem: NormProblem, device: Device, invariant: bool) -> tuple[TileLaunch, ...]:
    """Return a tuple of one launch, whose programs keep whole sets in registers.

    Programs have few warps. So each thread has many elements, and adds up rows by itself.
    """
    w = walk(problem)
    block_run = power_of_two(w.run)
    block_i, remainder = block_and_remainder(w.reps)
    length = block_i + remainder
    block_j = max(min(power_of_two(w.sets) * block_run, 32 if length <= 128 else NARROWEST), block_run)
    per_thread = (128 if length <= 128 else 64) if device.prefetches else 32  # elements; on AMD, more than 32 spill registers
    threads, one_by_one = length * block_j // per_thread, not can_load_ahead(problem, w)
    warps = warps_for(power_of_two(threads) if one_by_one and remainder else threads, device)  # more loads: addresses take registers
    blocks = ceil(w.sets * block_run / block_j)
    stages = 1 if one_by_one or length * block_j > 8192 else stages_that_fit(problem, device, length * block_j, 3)
    programs = w.outer * blocks if stages == 1 else min(w.outer * blocks, max(8 // warps, 1) * device.sms)
    launch = TileLaunch(
        walk=w,
        programs=programs,
        warps=warps,
        unaligned_warps=warps_for(length * block_j // 16, device),
        block_i=block_i,
        block_j=block_j,
        blocks=blocks,
        chunk_r=w.reps,
        block_run=block_run,
        remainder=remainder,
        stages=stages,
        resident=True,
        reduce=True,
    )
    return (launch,)


def tile_reread_launches(problem: NormProblem, device: Device, invariant: bool) -> tuple[ForwardLaunch, ...]:
    """Return three launches: reduce parts of sets, combine the parts, apply."""
    w = walk(problem)
    programs = 3 if w.total * w.reps * w.run >= 2**23 else 2
    stages = stages_that_fit(problem, device, 2048, 4)
    reduced = tile_parts(w, device, programs, 64, 128, stages, 256 if invariant else 0, reduce=True)
    return chained(device, (reduced, combine_launch(w, reduced.parts, device), tile_apply(problem, w, device)))


def tile_apply(problem: NormProblem, w: Walk, device: Device) -> TileLaunch:
    size = w.total * w.reps * w.run
    if w.columns % 128 == 0 and size >= 2**25:
        return tile_parts(w, device, 16, 128, 256)
    programs, stages = (16, 4) if size >= 2**23 else (8, 3)
    return tile_parts(w, device, programs, 64, 128, stages_that_fit(problem, device, 2048, stages))


def tile_size(problem: NormProblem) -> int:
    """Return the number of elements of the smallest block that holds whole sets."""
    w = walk(problem)
    block_run = power_of_two(w.run)
    return sum(block_and_remainder(w.reps)) * max(block_run, min(NARROWEST, power_of_two(w.sets) * block_run))


def tile_parts(
    w: Walk, device: Device, programs: int, width: int, threads: int, stages: int = 1, rows: int = 0, reduce: bool = False, height: int = 32
) -> TileLaunch:
    """Return a launch with about `rows` rows for each program; if `rows` is 0, `programs` programs for each multiprocessor.

    A block has `width` columns and `height` rows, or fewer columns and more rows.
    """
    block_j = min(power_of_two(w.columns), width)
    block_i = height * width // block_j
    blocks = ceil(w.columns / block_j)
    parts = ceil(w.reps / rows) if rows else ceil(programs * device.sms / (w.outer * blocks))
    chunk_r = ceil(ceil(w.reps / block_i) / parts) * block_i
    parts_r = ceil(w.reps / chunk_r)
    return TileLaunch(
        walk=w,
        programs=w.outer * parts_r * blocks,
        warps=warps_for(threads, device),
        unaligned_warps=warps_for(block_i * block_j // 8, device),
        block_i=block_i,
        block_j=block_j,
        blocks=blocks,
        parts_r=parts_r,
        chunk_r=chunk_r,
        stages=stages,
        reduce=reduce,
    )
