"""How the team family cuts a backward: which columns form a unit of work, and how many programs share its rows.

Units and teams are those of the forward (team/schedule.py). But x and dy both stay in registers, so a unit is smaller, and its
rows are never read again.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from itertools import product
from math import ceil

from onepass.backends.gpu import constants
from onepass.backends.gpu.launches import VECTOR_BYTES, chained, power_of_two, team_programs
from onepass.backends.gpu.partials.parameters import maps, parameter_axes
from onepass.backends.gpu.partials.sums import TOO_MANY_AXES, Step, parameter_sums
from onepass.backends.gpu.walk import AXIS_R, Walk, walk
from onepass.core.device import Device
from onepass.core.problem import NormProblem

from .launch_backward import TeamBackwardLaunch
from .schedule import WIDEST, sets_of_blocks

THREADS = 128, 256, 512  # of a program

PER_THREAD = 48  # the most elements of x that a thread keeps, with as many of dy

REGISTERS, OTHER_REGISTERS = 65536, 80  # of a multiprocessor; of a thread, besides those for x and dy

MASKED = 1.1  # a factor of the traffic, for masks; assumed, not measured

MOST_CELLS, SMALL = 0.02, 2**24  # the memory for cells, as a fraction of x, if x has more than SMALL bytes


def team_backward_unsupported(problem: NormProblem, device: Device) -> list[str]:
    if device.no_team:
        return [device.no_team]
    w = walk(problem)
    if w.reps == 1:
        return ["a set is one run: there is nothing to share"]
    if w.run > WIDEST:
        return [f"a run of {w.run} is longer than the {WIDEST} columns of a block"]
    if parameter_axes(problem, w) & AXIS_R:
        return ["parameters differ from row to row: too many sums for one program"]
    if not any(candidates(problem, w, device)):
        return [f"x and dy of a set of {w.reps} x {w.run} are too large for the registers of one team, or need too many partial sums"]
    return [] if len(team_backward_launches(problem, device, False)) == 1 + len(list(maps(problem, w))) else [TOO_MANY_AXES]


@lru_cache(256)  # the planner needs the launches for the cost, and again for the plan
def team_backward_launches(problem: NormProblem, device: Device, invariant: bool) -> tuple[Step, ...]:
    """Return the fastest launch by the model, and launches that add up its cells.

    With `invariant`, the time of one sample decides, so that the choice does not depend on the batch size.
    """
    w = walk(problem)
    found = candidates(problem, replace(w, total=w.sets) if invariant else w, device)
    main = min(found, key=lambda launch: modelled_time(problem, launch, device))
    return chained(device, with_sums(problem, for_all(w, main, device), device))


def for_all(w: Walk, launch: TeamBackwardLaunch, device: Device) -> TeamBackwardLaunch:
    """Return a launch for all samples of w, as many at a time as fit. The launch may be planned for one."""
    launch = replace(launch, walk=w)
    return replace(launch, programs=team_programs(launch.units, launch.members, device, launch.programs_per_sm))


def with_sums(problem: NormProblem, main: TeamBackwardLaunch, device: Device) -> tuple[Step, ...]:
    """Return the launch, and the launches that add up its cells."""
    w = main.walk
    axes = [("o", w.outer), ("part", main.members), ("s", w.sets), ("t", w.run)]
    return main, *parameter_sums(problem, axes, w, 1, device)


def candidates(problem: NormProblem, w: Walk, device: Device) -> Iterator[TeamBackwardLaunch]:
    """Yield launches with units of several widths, teams of several sizes and programs of several sizes."""
    size, most = problem.dtype.itemsize, 1 if device.kind == "cpu" else device.sms  # interpreted programs run one by one
    for (sets, block_j, remainder), threads in product(_widths(problem, w), THREADS):
        block_i = max(threads * VECTOR_BYTES // size // block_j, 1)
        for rows in sorted({ceil(w.reps / (most // teams)) for teams in range(1, most + 1)}):
            members = ceil(w.reps / rows)
            launch = TeamBackwardLaunch(
                walk=w,
                programs=members,
                warps=threads // 32,
                block_i=min(block_i, power_of_two(rows)),
                block_j=block_j,
                resident=True,
                reduce=True,
                apply=True,
                members=members,
                rows=rows,
                blocks=ceil(w.sets / sets),
                sets=sets,
                remainder=remainder,
            )
            kept = ceil(launch.elements / threads)
            at_once = REGISTERS // (registers_of(problem, kept) * threads)  # programs of a multiprocessor
            many_cells = 8 * members > MOST_CELLS * w.reps * size and w.total * w.reps * w.run * size > SMALL
            if kept > PER_THREAD or not at_once or many_cells:
                continue
            limit = min(REGISTERS // (at_once * threads) // 8 * 8, 255)
            yield for_all(w, replace(launch, programs_per_sm=at_once, max_registers=limit), device)


def registers_of(problem: NormProblem, kept: int) -> int:
    """Return about how many registers a thread needs that keeps `kept` elements of x and of dy."""
    return min(OTHER_REGISTERS + ceil(2 * kept * problem.dtype.itemsize / 4), 255)


def _widths(problem: NormProblem, w: Walk) -> Iterator[tuple[int, int, int]]:
    """Yield the sets of a unit, and the columns of its two blocks. With a second block, the unit is one set."""
    for sets in sorted(sets_of_blocks(problem, w)):
        yield sets, power_of_two(sets * w.run), 0
    whole = power_of_two(w.run)
    remainder = power_of_two(w.run - whole // 2)
    if remainder < whole // 2:
        yield 1, whole // 2, remainder


def modelled_time(problem: NormProblem, launch: TeamBackwardLaunch, device: Device) -> float:
    """Return the modelled time of a launch, in microseconds. It compares these launches with one another, and was not measured yet."""
    w, size = launch.walk, problem.dtype.itemsize
    rounds = ceil(launch.units / launch.teams)
    elements = launch.elements * rounds * ceil(launch.programs / device.sms)  # of a multiprocessor
    moved = 3 * size * max(elements * device.sms, w.total * w.reps * w.run) / (constants.BANDWIDTH * constants.SPEED["team"])
    moved *= 1.0 if launch.full_rows and launch.full_columns else MASKED
    if launch.members == 1:
        return constants.LAUNCH + moved + (rounds - 1) * constants.REFILL
    exchange = constants.BARRIER + power_of_two(launch.members) * power_of_two(launch.sets) / 128 * constants.MERGE
    return constants.LAUNCH + moved + (rounds - 1) * constants.STALL + exchange
