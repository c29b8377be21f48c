"""How the ring family cuts a problem into blocks in shared memory.

A unit of work is the shortest span of blocks of columns that begins and ends with a set. A small model of the pipeline
gives the time of every candidate. The schedule is the fastest one, and its time is the cost: a constant below changes both.
So compare the launches of the whole suite before and after a change, not only the families.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from math import ceil, lcm

from onepass.backends.gpu.cost import LAUNCH_US
from onepass.backends.gpu.launches import fastest, power_of_two, team_programs
from onepass.backends.gpu.walk import AXIS_R, Walk, axis_mask, walk
from onepass.core.device import Device
from onepass.core.problem import NormProblem

from .launch import RingLaunch

ALIGNMENT = 16  # bytes: where the rows of a descriptor begin

WARPS = 8  # of `reduce`, and of `apply`. H200, 2026-11-15: with 4 each they fall behind

SLOT = 16384  # bytes of a block

RESERVED = 9216  # bytes of shared memory for barriers, moments and the compiler; the ring and `lines` have the rest

BACK, SPARE = 3, 4  # slots for blocks that are read again, and for blocks that `reduce` drops; the other slots keep their blocks

MOST_SETS = 32  # of a unit, which few warps combine: 64 sets take 17 us

# H200, 2026-11-15, in microseconds.
EXCHANGE = 8.0  # from the last block of a unit in shared memory to the first one out of it
BLOCK_US = 1.25  # to load, reduce, apply and store a block of 16 KB, on all multiprocessors
UNIT, TILE, SET = 3.2, 0.8, 0.1  # to publish and combine a unit's moments, and more for each of its tiles and sets

# H200, 2026-11-15, as factors of a block's time.
NARROW = 1.1  # for chunks of 128 bytes instead of 256, if there is one team. Several teams read their chunks side by side
AGAIN = 0.4  # more for a block that is read again

SCALE = 4 / 3  # to the scale of the other families' costs, which count 3 TB/s where 4 TB/s are measured


def ring_unsupported(problem: NormProblem, device: Device) -> list[str]:
    if device.no_team or device.no_ring:
        return [device.no_team or device.no_ring]
    w, size = walk(problem), problem.dtype.itemsize
    if w.reps == 1:
        return ["a set is one run: there is nothing to share"]
    reasons = []
    if not w.dense or (w.outer > 1 and w.x[0] != w.reps * w.x[1]):
        reasons.append("one descriptor cannot describe x: its rows are not evenly spaced, or its columns not contiguous")
    if w.x[1] < w.columns:
        reasons.append("one descriptor cannot describe x: its rows overlap")
    if w.x[1] * size % ALIGNMENT:
        reasons.append(f"rows are {w.x[1] * size} bytes apart, and copies by descriptor begin at multiples of {ALIGNMENT}")
    if max(w.outer * w.reps, w.total) >= 2**31 or w.columns >= 2**20:
        reasons.append("there are more rows or columns than a descriptor can count")
    if problem.addends:
        reasons.append("it cannot add a residual: blocks go straight to shared memory")
    if (axis_mask(w.param, w) | axis_mask(w.modulation, w)) & AXIS_R:
        reasons.append("each row has its own parameters")
    if not reasons and not any(_candidates(problem, w, device)):
        reasons.append(f"more than {MOST_SETS} sets of {w.run} columns would be combined at a time")
    return reasons


@lru_cache(256)  # the planner needs it for the cost and for the plan
def ring_launches(problem: NormProblem, device: Device, invariant: bool) -> tuple[RingLaunch, ...]:
    return fastest(problem, device, invariant, _candidates, _time)


def ring_cost(problem: NormProblem, device: Device, invariant: bool) -> float:
    (launch,) = ring_launches(problem, device, invariant)
    if invariant:  # the choice must not depend on the size of the batch
        again = 1 - min(launch.keep / launch.blocks, 1)
        return (1 + AGAIN * again) / 1e3
    return SCALE * _time(problem, launch, device)


def _candidates(problem: NormProblem, w: Walk, device: Device) -> Iterator[RingLaunch]:
    """Blocks of several sizes, by teams of several sizes."""
    size = problem.dtype.itemsize
    for block_j in (32, 64, 128):
        span = min(lcm(block_j, w.run), ceil(w.columns / block_j) * block_j)  # columns of a unit
        tiles, sets = span // block_j, min(ceil(span / w.run), w.sets)
        if not min(128, w.columns * size) <= block_j * size <= 256 or sets > MOST_SETS:
            continue
        for slot in (SLOT, SLOT // 2):
            block_i = slot // (block_j * size)
            slots = min((device.shared - RESERVED - tiles * 32 * block_j) // slot, 32)
            if slots < BACK + SPARE + 2:
                continue
            rows = ceil(w.reps / block_i)  # of blocks
            for members in sorted({_even(rows, device.sms // teams) for teams in range(1, device.sms + 1)}):
                spans, fits = ceil(w.columns / span), tiles * ceil(rows / members) <= slots
                yield RingLaunch(
                    walk=w,
                    programs=team_programs(w.outer * spans, members, device),
                    warps=WARPS,
                    block_i=block_i,
                    block_j=block_j,
                    members=members,
                    spans=spans,
                    tiles=tiles,
                    sets=sets,
                    sets_per_block=_sets_per_block(w, block_j, tiles, sets),
                    slots=slots if fits else slots - BACK,
                    keep=slots if fits else slots - BACK - SPARE,
                    back=0 if fits else BACK,
                )


def _even(rows: int, most: int) -> int:
    """The smallest team whose busiest member has no more of the `rows` rows of blocks than in a team of `most`."""
    return ceil(rows / ceil(rows / most))


def _sets_per_block(w: Walk, block_j: int, tiles: int, sets: int) -> int:
    """How many sets a block of columns overlaps at most, rounded up to a power of two."""
    return max(power_of_two(sets if tiles == 1 else min((block_j - 2) // w.run + 2, sets)), 2)


def _time(problem: NormProblem, launch: RingLaunch, device: Device) -> float:
    """Microseconds. The ring holds several units, and the exchange of one is hidden behind the others."""
    rounds, blocks = ceil(launch.units / launch.teams), launch.blocks
    size = launch.block_i * launch.block_j * problem.dtype.itemsize / SLOT
    block = BLOCK_US * size * max(0.5 + 0.5 * launch.programs / device.sms, 0.6)
    if launch.block_j * problem.dtype.itemsize < 256 and launch.teams == 1:
        block *= NARROW
    again = max(blocks - launch.keep, 0)
    spare = max(launch.slots - min(blocks, launch.keep), 1)
    exchanged = UNIT + TILE * launch.tiles + SET * launch.sets
    unit_time = max(blocks * block, exchanged, EXCHANGE * min(blocks, launch.keep) / spare) + again * AGAIN * block
    first = blocks * block / 2  # until the ring is full: loads of the first unit, which nothing hides
    return LAUNCH_US + EXCHANGE + first + rounds * unit_time
