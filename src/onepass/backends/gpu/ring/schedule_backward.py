"""How the ring family cuts a backward into blocks in shared memory, and what that costs.

Units, tiles and blocks are those of the forward (ring/schedule.py). A slot of the ring holds a block of x and one of dy, so a ring holds
half as many elements as in the forward.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from math import ceil

from onepass.backends.gpu import constants
from onepass.backends.gpu.launches import team_programs
from onepass.backends.gpu.partials.parameters import maps, parameter_axes
from onepass.backends.gpu.partials.sums import TOO_MANY_AXES, Step, parameter_sums
from onepass.backends.gpu.walk import AXIS_R, Walk, walk
from onepass.core.device import Device
from onepass.core.problem import NormProblem

from .launch_backward import LINES_OF_COLUMN, RingBackwardLaunch
from .schedule import ALIGNMENT, MOST_MASKED, RESERVED, WARPS, cuts, even, sets_per_block

SLOTS = 16384, 8192  # bytes of a block: there is one of x and one of dy in each slot

LEAST_SLOTS = 4


def ring_unsupported(problem: NormProblem, device: Device) -> list[str]:
    if device.no_team or device.no_ring:
        return [device.no_team or device.no_ring]
    w, size = walk(problem), problem.dtype.itemsize
    reasons = []
    if w.reps == 1:
        return ["a set is one run: not built yet"]
    if problem.given:
        reasons.append("the statistics were given: nothing must stay on the chip")
    if problem.spec.mix:
        reasons.append("it cannot mix the statistics of several norms")
    if problem.addends:
        reasons.append("it cannot add the gradient of a sum: blocks go straight to shared memory")
    if not w.dense or (w.outer > 1 and any(steps[0] != w.reps * steps[1] for steps in (w.x, w.y))):
        reasons.append("one descriptor cannot describe x: its rows are not evenly spaced, or its columns not contiguous")
    if min(w.x[1], w.y[1]) < w.columns:
        reasons.append("one descriptor cannot describe x: its rows overlap")
    if any(steps[1] * size % ALIGNMENT for steps in (w.x, w.y)):
        reasons.append(f"rows are {w.x[1] * size} bytes apart, and copies by descriptor begin at multiples of {ALIGNMENT}")
    if max(w.outer * w.reps, w.total) >= 2**31 or w.columns >= 2**20:
        reasons.append("there are more rows or columns than a descriptor can count")
    if parameter_axes(problem, w) & AXIS_R:
        reasons.append("parameters differ from row to row: too many sums for one program")
    if reasons:
        return reasons
    if not any(candidates(problem, w, device)):
        return ["a unit of x and dy is too large for the shared memory of one team"]
    return [] if len(ring_launches(problem, device, False)) == 1 + len(list(maps(problem, w))) else [TOO_MANY_AXES]


@lru_cache(256)  # the planner needs the launches for the cost, and again for the plan
def ring_launches(problem: NormProblem, device: Device, invariant: bool) -> tuple[Step, ...]:
    w = walk(problem)
    main = min(candidates(problem, w, device), key=lambda launch: modelled_time(problem, launch, device))
    axes = [("o", w.outer), ("part", main.members), ("s", w.sets), ("t", w.run)]
    return main, *parameter_sums(problem, axes, w, 1, device)


def ring_cost(problem: NormProblem, device: Device, invariant: bool) -> float:
    return modelled_time(problem, ring_launches(problem, device, invariant)[0], device)


def candidates(problem: NormProblem, w: Walk, device: Device) -> Iterator[RingBackwardLaunch]:
    """Yield launches with blocks of several sizes and teams of several sizes, in which a unit fits into the ring."""
    size = problem.dtype.itemsize
    for block_j, tiles, sets in cuts(w, size):
        if sets == 1 and w.run > 1:
            continue
        for slot in SLOTS:
            block_i = slot // (block_j * size)
            slots = min((device.shared - RESERVED - 4 * 2 * tiles * LINES_OF_COLUMN * block_j) // (2 * slot), 32)
            rows = ceil(w.reps / block_i)
            if slots < LEAST_SLOTS or (block_i * block_j > MOST_MASKED and (w.reps % block_i or w.columns % (tiles * block_j))):
                continue
            for members in sorted({even(rows, device.sms // teams) for teams in range(1, device.sms + 1)}):
                if tiles * ceil(rows / members) > slots:
                    continue
                spans = ceil(w.columns / (tiles * block_j))
                yield RingBackwardLaunch(
                    walk=w,
                    programs=team_programs(w.outer * spans, members, device),
                    warps=WARPS,
                    block_i=block_i,
                    block_j=block_j,
                    resident=True,
                    reduce=True,
                    apply=True,
                    members=members,
                    spans=spans,
                    tiles=tiles,
                    sets=sets,
                    sets_per_block=sets_per_block(w, block_j, tiles, sets),
                    slots=slots,
                )


def modelled_time(problem: NormProblem, launch: RingBackwardLaunch, device: Device) -> float:
    """Return the modelled time of a launch, in microseconds."""
    rounds = ceil(launch.units / launch.teams)
    size = launch.block_i * launch.block_j * problem.dtype.itemsize / 16384
    blocks = launch.tiles * ceil(ceil(launch.walk.reps / launch.block_i) / launch.members)
    busy = blocks * 1.5 * size
    spare = max(launch.slots - blocks, 0) * size * 1.0
    return constants.LAUNCH + rounds * (busy + max(4.0 - spare, 0.3)) + 6
