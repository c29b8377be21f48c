"""How the team family cuts a backward: which columns form a unit of work, and how many programs share its rows.

Units and teams are those of the forward (team/schedule.py). But x and dy both stay in registers, so a unit is smaller, and its
rows are never read again.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from itertools import product
from math import ceil

from onepass.backends.gpu.launches import VECTOR_BYTES, power_of_two
from onepass.backends.gpu.partials.parameters import parameter_axes
from onepass.backends.gpu.partials.sums import TOO_MANY_AXES, Step, parameter_sums
from onepass.backends.gpu.resident_backward import THREADS, fastest, many_cells, with_registers
from onepass.backends.gpu.walk import AXIS_R, Walk, walk
from onepass.core.device import Device
from onepass.core.problem import NormProblem

from .launch_backward import TeamBackwardLaunch
from .schedule import sets_of_blocks, team_unsupported


def team_backward_unsupported(problem: NormProblem, device: Device) -> list[str]:
    w, reasons = walk(problem), team_unsupported(problem, device)
    if reasons:
        return reasons
    if parameter_axes(problem, w) & AXIS_R:
        return ["parameters differ from row to row: too many sums for one program"]
    if not any(candidates(problem, w, device)):
        return [f"x and dy of a set of {w.reps} x {w.run} are too large for the registers of one team, or need too many partial sums"]
    return [] if team_backward_launches(problem, device, False) else [TOO_MANY_AXES]


@lru_cache(256)  # the planner asks whether there are launches, and then for the launches
def team_backward_launches(problem: NormProblem, device: Device, invariant: bool) -> tuple[Step, ...]:
    return fastest(problem, device, invariant, candidates, with_sums)


def with_sums(problem: NormProblem, main: TeamBackwardLaunch, device: Device) -> tuple[Step, ...]:
    """Return the launch, and the launches that add up its cells."""
    w = main.walk
    axes = [("o", w.outer), ("part", main.members), ("s", w.sets), ("t", w.run)]
    return main, *parameter_sums(problem, axes, w, 1, device)


def candidates(problem: NormProblem, w: Walk, device: Device) -> Iterator[TeamBackwardLaunch]:
    """Yield launches with units of several widths, teams of several sizes and programs of several sizes."""
    most = 1 if device.kind == "cpu" else device.sms  # interpreted programs run one by one
    for (sets, block_j, remainder), threads in product(_widths(problem, w), THREADS):
        block_i = max(threads * VECTOR_BYTES // problem.dtype.itemsize // block_j, 1)
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
            if not many_cells(problem, w, w.reps / members):
                yield from with_registers(problem, w, launch, device)


def _widths(problem: NormProblem, w: Walk) -> Iterator[tuple[int, int, int]]:
    """Yield the sets of a unit, and the columns of its two blocks. With a second block, the unit is one set."""
    for sets in sorted(sets_of_blocks(problem, w)):
        yield sets, power_of_two(sets * w.run), 0
    whole = power_of_two(w.run)
    remainder = power_of_two(w.run - whole // 2)
    if remainder < whole // 2:
        yield 1, whole // 2, remainder
