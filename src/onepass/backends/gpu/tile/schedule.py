"""The launches that compute a forward by the tile walk, and their sizes, which were tuned on an H200.

The tile walk reads memory across sets. A set is the elements that share one mean and variance. In `x[o, r, s, t]` a set is
one (o, s), a row is one r, and a column is one (s, t). A part is the rows that one program works on.
"""

from __future__ import annotations

from math import ceil, gcd, prod

from onepass.backends.gpu.launches import (
    VECTOR_BYTES,
    ForwardLaunch,
    block_and_remainder,
    can_load_ahead,
    chained,
    power_of_two,
    stages_that_fit,
    warps_for,
)
from onepass.backends.gpu.partials.combine import combine_launch
from onepass.backends.gpu.walk import AXIS_R, Walk, axis_mask, walk
from onepass.core.device import Device
from onepass.core.problem import NormProblem

from .launch import TileLaunch

LARGEST_TILE = 16384  # elements of the largest block that fits in the registers of one program
NARROWEST = 16  # columns of the narrowest block, unless there are fewer columns
WIDTH = 64  # columns of a block of `tile_reread`, unless there are fewer

# Rows abreast:
LEAST_ROWS = 64  # at least this many rows must remain
MOST_ABREAST = 64  # at most this many rows of x are in one row
MOST_EMPTY = 0.06  # at most this part of a block's columns should be empty
# The fewest elements of x, if its rows begin between multiples of 16 bytes. A smaller x gains less than more partial moments cost.
LEAST_UNALIGNED = 2**22
LEAST_ALIGNED = 2**24  # the same, if its rows begin at multiples of 16 bytes


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
    stages = _stages(problem, device, 4)
    abreast = rows_abreast(problem, w, invariant)
    reduced = tile_parts(w, device, programs, WIDTH, 128, stages, 256 if invariant else 0, reduce=True, abreast=abreast)
    combine = combine_launch(w, reduced.parts, device, abreast)
    return chained(device, (reduced, combine, tile_apply(problem, w, device, abreast)))


def tile_apply(problem: NormProblem, w: Walk, device: Device, abreast: int = 1) -> TileLaunch:
    size = w.total * w.reps * w.run
    if size >= 2**25 and (w.columns % 128 == 0 or (abreast > 1 and problem.dtype.itemsize == 2)):
        return tile_parts(w, device, 16, 128, 256, abreast=abreast)
    programs, stages = (16, 4) if size >= 2**23 else (8, 3)
    return tile_parts(w, device, programs, WIDTH, 128, _stages(problem, device, stages), abreast=abreast)


def _stages(problem: NormProblem, device: Device, wanted: int) -> int:
    """Return the stages of a launch of `tile_reread`. Loads ahead of single elements of 4 bytes are slow, so there are none."""
    one_by_one = not problem.aligned and problem.dtype.itemsize == 4
    return 1 if one_by_one else stages_that_fit(problem, device, 2048, wanted)


def rows_abreast(problem: NormProblem, w: Walk, invariant: bool = False) -> int:
    """Return how many rows of x a block takes abreast, as one row.

    With more rows abreast, rows of few columns fill a block, and rows of odd length begin at multiples of 16 bytes. Return 1 if neither is
    needed, if the rows of x are not contiguous, if parameters differ from row to row, or if x is small. With `invariant`, one sample
    counts as x.
    """
    follow = w.dense and w.x[1] == w.y[1] == w.columns
    if not follow or (axis_mask(w.param, w) | axis_mask(w.modulation, w)) & AXIS_R:
        return 1
    least = VECTOR_BYTES // gcd(w.columns * problem.dtype.itemsize, VECTOR_BYTES)  # rows, so that the next begin at a multiple
    elements = prod(problem.shape) // (w.outer if invariant else 1)
    if elements < (LEAST_UNALIGNED if least > 1 else LEAST_ALIGNED):
        return 1
    choices = range(least, min(w.reps // LEAST_ROWS, MOST_ABREAST) + 1, least)

    def empty(abreast: int) -> float:
        columns = w.columns * abreast
        block_j = min(power_of_two(columns), WIDTH)
        return 1 - columns / (ceil(columns / block_j) * block_j)

    full = [abreast for abreast in choices if empty(abreast) <= MOST_EMPTY]
    return full[0] if full else min(choices, key=empty, default=1)


def tile_size(problem: NormProblem) -> int:
    """Return the number of elements of the smallest block that holds whole sets."""
    w = walk(problem)
    block_run = power_of_two(w.run)
    return sum(block_and_remainder(w.reps)) * max(block_run, min(NARROWEST, power_of_two(w.sets) * block_run))


def tile_parts(
    w: Walk,
    device: Device,
    programs: int,
    width: int,
    threads: int,
    stages: int = 1,
    rows: int = 0,
    reduce: bool = False,
    height: int = 32,
    abreast: int = 1,
) -> TileLaunch:
    """Return a launch with about `rows` rows for each program; if `rows` is 0, `programs` programs for each multiprocessor.

    A block has `width` columns and `height` rows, or fewer columns and more rows. One of its rows is `abreast` rows of x.
    """
    columns, all_rows = w.columns * abreast, ceil(w.reps / abreast)
    block_j = min(power_of_two(columns), width)
    block_i = height * width // block_j
    blocks = ceil(columns / block_j)
    parts = ceil(all_rows / rows) if rows else ceil(programs * device.sms / (w.outer * blocks))
    chunk_r = ceil(ceil(all_rows / block_i) / parts) * block_i
    parts_r = ceil(all_rows / chunk_r)
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
        abreast=abreast,
        stages=stages,
        reduce=reduce,
    )
