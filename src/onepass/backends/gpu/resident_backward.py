"""What the families `team` and `whole_set` share in a backward: programs that keep x and dy in registers until sums are known.

A unit of work is one set or more. The programs of a team share a unit. A cell is a partial sum of the gradient of a parameter.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from math import ceil
from typing import TypeVar

from onepass.core.device import Device
from onepass.core.problem import NormProblem

from . import constants
from .launches import chained, power_of_two, team_programs
from .partials.gradient import SharedSetBackwardLaunch
from .partials.parameters import maps
from .partials.sums import Step
from .walk import Walk, walk

THREADS = 128, 256, 512  # of a program

PER_THREAD = 40  # the most elements of x that a thread keeps, with as many of dy

# Of a multiprocessor; of a thread, besides those for x and dy; and more of a thread, for masks, and for gelu.
REGISTERS, OTHER_REGISTERS, MORE_REGISTERS = 65536, 80, 24

MOST_CELLS, SMALL = 0.02, 2**24  # the memory for cells, as a fraction of x, if x has more than SMALL bytes

MASKED = 1.1  # a factor of the traffic, for masks; assumed, not measured


@dataclass(frozen=True, kw_only=True)
class ResidentBackwardLaunch(SharedSetBackwardLaunch):
    """A launch whose programs keep x and dy of their share of a unit in registers."""

    @property
    @abstractmethod
    def elements(self) -> int:
        """How many elements of x a program has room for."""

    @property
    @abstractmethod
    def full(self) -> bool:
        """Whether all programs use all of that room, so that no masks are needed."""

    @property
    @abstractmethod
    def sets_of_unit(self) -> int: ...


Resident = TypeVar("Resident", bound=ResidentBackwardLaunch)


def fastest(
    problem: NormProblem,
    device: Device,
    invariant: bool,
    candidates: Callable[[NormProblem, Walk, Device], Iterable[Resident]],
    with_sums: Callable[[NormProblem, Resident, Device], tuple[Step, ...]],
) -> tuple[Step, ...]:
    """Return the candidate with the least modelled time, and the launches that add up its cells; nothing if no launch can add them up.

    With `invariant`, the time of one sample decides, so that the choice does not depend on the batch size.
    """
    w = walk(problem)
    found = candidates(problem, replace(w, total=w.sets) if invariant else w, device)
    by_time = sorted(found, key=lambda launch: modelled_time(problem, launch, device))
    planned = (with_sums(problem, for_all(w, launch, device), device) for launch in by_time)
    summed = 1 + len(list(maps(problem, w)))
    return chained(device, next((launches for launches in planned if len(launches) == summed), ()))


def with_registers(problem: NormProblem, w: Walk, launch: Resident, device: Device) -> Iterator[Resident]:
    """Yield the launch, with as many programs as can run at the same time, and a limit of registers for that.

    Yield nothing if the elements of a program do not fit into its registers.
    """
    threads = 32 * launch.warps
    kept = ceil(launch.elements / threads)
    more = MORE_REGISTERS * ((not launch.full) + ("gelu" in problem.spec.activation))
    registers = min(OTHER_REGISTERS + more + ceil(2 * kept * problem.dtype.itemsize / 4), 255)  # of a thread
    at_once = REGISTERS // (registers * threads)  # programs of a multiprocessor
    if kept <= PER_THREAD and at_once:
        limit = min(REGISTERS // (at_once * threads) // 8 * 8, 255)
        yield for_all(w, replace(launch, programs_per_sm=at_once, max_registers=limit), device)


def for_all(w: Walk, launch: Resident, device: Device) -> Resident:
    """Return a launch for all samples of w. It may be planned for one. Programs that wait for each other must all run at the same time."""
    launch = replace(launch, walk=w)
    at_once = team_programs(launch.units, launch.members, device, launch.programs_per_sm)
    return replace(launch, programs=at_once if launch.cooperative else launch.units)


def many_cells(problem: NormProblem, w: Walk, rows: float) -> bool:
    """Return whether cells take much memory, for a large x. Each cell of a parameter belongs to `rows` elements."""
    size = problem.dtype.itemsize
    return any(maps(problem, w)) and MOST_CELLS * rows * size < 8 and w.total * w.reps * w.run * size > SMALL


def modelled_time(problem: NormProblem, launch: ResidentBackwardLaunch, device: Device) -> float:
    """Return the modelled time of a launch, in microseconds. It compares these launches with one another, and was not measured yet."""
    w, size = launch.walk, problem.dtype.itemsize
    rounds = ceil(launch.units / launch.teams)
    elements = launch.elements * rounds * ceil(launch.programs / device.sms)  # of a multiprocessor
    moved = 3 * size * max(elements * device.sms, w.total * w.reps * w.run) / (constants.BANDWIDTH * constants.SPEED["team"])
    moved *= 1.0 if launch.full else MASKED
    if launch.members == 1:
        return constants.LAUNCH + moved + (rounds - 1) * constants.REFILL
    exchange = constants.BARRIER + power_of_two(launch.members) * power_of_two(launch.sets_of_unit) / 128 * constants.MERGE
    return constants.LAUNCH + moved + (rounds - 1) * constants.STALL + exchange
