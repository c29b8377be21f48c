"""How teams on Hopper cut a problem: blocks in a ring of shared memory.

A unit is the smallest span of blocks of columns that begins and ends with a set. Of all ways to cut, the one that takes the least time by a
small model of the pipeline; `ring_cost` is that time.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from math import ceil, lcm

from onepass.backends.gpu.launches import Pass, power_of_two, programs_of, quickest
from onepass.backends.gpu.walk import RING, Walk, axis_mask, walk
from onepass.core.device import Device
from onepass.core.problem import NormProblem

ALIGNED = 16  # bytes: copies by descriptor begin there


WARPS = 8  # of those that reduce, and of those that apply. H200, 2026-11-15: with 4 and 4 they fall behind


SLOT = 16384  # bytes of a block


OTHER = 9216  # bytes of shared memory for all but blocks and lines: barriers, moments, what the compiler takes


BACK, SPARE = 3, 4  # slots for blocks that come again, and for those that pass; the others keep theirs


SETS = 32  # of a unit, that few warps combine: 64 take 17 us


# H200, 2026-11-15, in microseconds.
LAUNCH = 3.0


EXCHANGE = 8.0  # from the last block of a unit in shared memory to the first one out of it


BLOCK = 1.25  # to load, reduce, apply and store a block of 16 KB, all multiprocessors at it


UNIT, TILE, SET = 3.2, 0.8, 0.1  # to publish a unit's moments and combine them, and more for each of its tiles and sets


NARROW = 1.1  # chunks of 128 bytes against those of 256, where teams do not read them side by side


AGAIN = 0.4  # of a block's time, once more, for one that comes again


SCALE = 4 / 3  # to the scale of the other families' costs, which count 3 TB/s where 4 are measured


def ring_unsupported(problem: NormProblem, device: Device) -> list[str]:
    if device.no_team or device.no_ring:
        return [device.no_team or device.no_ring]
    w, size = walk(problem), problem.dtype.itemsize
    if w.reps == 1:
        return ["a set is one run: there is nothing to share"]
    reasons = []
    if not w.dense or (w.outer > 1 and w.x[0] != w.reps * w.x[1]):
        reasons.append("rows are not evenly spaced, or columns not contiguous, as one descriptor of x needs them")
    if w.x[1] < w.columns:
        reasons.append("rows of x overlap, and those of a descriptor do not")
    if w.x[1] * size % ALIGNED:
        reasons.append(f"rows are {w.x[1] * size} bytes apart, and copies by descriptor begin at multiples of {ALIGNED}")
    if max(w.outer * w.reps, w.total) >= 2**31 or w.columns >= 2**20:
        reasons.append("there are more rows or columns than a descriptor counts")
    if problem.addends:
        reasons.append("a residual is added where blocks are read through registers")
    if (axis_mask(w.param, w) | axis_mask(w.modulation, w)) & 2:
        reasons.append("each row has parameters of its own")
    if not reasons and not any(_cuts(problem, w, device)):
        reasons.append(f"more than {SETS} sets of {w.run} columns have to be combined at a time")
    return reasons


@lru_cache(256)  # asked for its cost, and for itself
def ring_launches(problem: NormProblem, device: Device, invariant: bool) -> tuple[Pass, ...]:
    return quickest(problem, device, invariant, _cuts, _time)


def ring_cost(problem: NormProblem, device: Device, invariant: bool) -> float:
    (step,) = ring_launches(problem, device, invariant)
    if invariant:  # the choice must not depend on how much there is
        again = 1 - min(step.keep / _blocks(step), 1)
        return (1 + AGAIN * again) / 1e3
    return SCALE * _time(problem, step, device)


def _cuts(problem: NormProblem, w: Walk, device: Device) -> Iterator[Pass]:
    size = problem.dtype.itemsize
    for block_j in (32, 64, 128):
        span = min(lcm(block_j, w.run), ceil(w.columns / block_j) * block_j)
        tiles, sets = span // block_j, min(ceil(span / w.run), w.sets)
        near = _near(w, block_j, tiles, sets)
        if not min(128, w.columns * size) <= block_j * size <= 256 or sets > SETS:
            continue
        for slot in (SLOT, SLOT // 2):
            block_i = slot // (block_j * size)
            slots = min((device.shared - OTHER - tiles * 32 * block_j) // slot, 32)
            if slots < BACK + SPARE + 2:
                continue
            rows = ceil(w.reps / block_i)
            for members in sorted({_even(rows, device.sms // teams) for teams in range(1, device.sms + 1)}):
                spans, fits = ceil(w.columns / span), tiles * ceil(rows / members) <= slots
                yield Pass(
                    *(RING, w, programs_of(w.outer * spans, members, device), WARPS, block_i, block_j, near, 0, fits, True, True),
                    *(members, 1, block_i, spans, slots if fits else slots - BACK),
                    sets=sets,
                    tiles=tiles,
                    keep=slots if fits else slots - BACK - SPARE,
                    back=0 if fits else BACK,
                )


def _even(rows: int, most: int) -> int:
    """Members for so many rows of blocks: no more than leave the busiest one as many blocks."""
    return ceil(rows / ceil(rows / most))


def _near(w: Walk, block_j: int, tiles: int, sets: int) -> int:
    """How many sets one block of columns meets, as a power of two."""
    return max(power_of_two(sets if tiles == 1 else min((block_j - 2) // w.run + 2, sets)), 2)


def _blocks(step: Pass) -> int:
    """Of a unit, for its busiest member."""
    return step.tiles * ceil(ceil(step.walk.reps / step.block_i) / step.parts_r)


def _time(problem: NormProblem, step: Pass, device: Device) -> float:
    """Microseconds. A team has as many units in the ring as it holds; the last one's exchange is hidden by the others."""
    rounds, blocks = ceil(step.units / step.teams), _blocks(step)
    size = step.block_i * step.block_j * problem.dtype.itemsize / SLOT
    block = BLOCK * size * max(0.5 + 0.5 * step.programs / device.sms, 0.6)
    if step.block_j * problem.dtype.itemsize < 256 and step.teams == 1:
        block *= NARROW
    again = max(blocks - step.keep, 0)
    spare = max(step.stages - min(blocks, step.keep), 1)
    handed = UNIT + TILE * step.tiles + SET * step.sets
    unit = max(blocks * block, handed, EXCHANGE * min(blocks, step.keep) / spare) + again * AGAIN * block
    return LAUNCH + EXCHANGE + blocks * block / 2 + rounds * unit
