"""What the kernel launches of all families share, and how many programs, warps and stages a launch gets.

A launch consists of plain numbers, so it can be tested, and compiled for a GPU that is not present. The launches of a
family are in its launch.py, its choice of numbers in its schedule.py. The numbers were tuned on an H200;
docs/measured.md has the measurements.

Memory is x[o, r, s, t]. A set is the elements of one o and s, which share a mean and a variance. Its moments are its mean
and its M2, the sum of (x - mean)². A team is a group of programs, its members, that run at the same time and share a unit
of work: one or more sets.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import wraps
from typing import Any, ClassVar, NamedTuple, TypeVar

from onepass.core.device import Device
from onepass.core.problem import NormProblem

from .walk import Walk, walk

LEAST_PEELED = 256  # elements of the shortest run whose ends are peeled off
VECTOR_BYTES = 16  # the most bytes that a thread loads at a time


@dataclass(frozen=True, kw_only=True)
class Launch(ABC):
    """One kernel launch: `programs` programs of `warps` warps, which work on blocks of block_i x block_j elements."""

    name: ClassVar[str]  # the name of the kernel
    programs: int
    warps: int
    block_i: int
    block_j: int

    @property
    def reads(self) -> int:
        """How often the launch reads all of x (in a backward, x and dy)."""
        return 0

    @property
    def needed(self) -> bool:
        """Whether there is anything to launch."""
        return True

    @property
    def what(self) -> str:
        """What the launch does, such as "reduce and apply"."""
        return ""

    @property
    def shape(self) -> str:
        """What a program works on, such as "blocks of 32 x 64"."""
        return f"blocks of {self.block_i} x {self.block_j}"

    def __str__(self) -> str:
        warps, programs = f"{self.warps} warp{'s' * (self.warps > 1)}", f"{self.programs} program{'s' * (self.programs > 1)}"
        return f"{self.name}: {self.what}, {self.shape}, {warps}, {programs}"


@dataclass(frozen=True, kw_only=True)
class ChainedLaunch(Launch):
    """A launch that may overlap with its neighbours, by programmatic dependent launch (PDL)."""

    pdl_trigger: bool = False  # the next launch may start while this one runs
    pdl_wait: bool = False  # this launch may start while the previous one runs, and waits for its results


@dataclass(frozen=True, kw_only=True)
class WalkLaunch(ChainedLaunch):
    """A launch of the row walk or of the tile walk.

    If x is at an address that is no multiple of 16 bytes, each element is loaded alone. A thread with many elements would have too few
    registers for their addresses, so a program may have more warps there.
    """

    unaligned_warps: int = 0  # if more than `warps`


class ForwardOptions(NamedTuple):
    """The options of a forward, which all its launches get."""

    statistics: bool = True  # store mean, rstd and var
    residual: bool = False  # add the residual, if the problem has one
    momentum: float | None = None  # if it is given: update running statistics in place, by (12) and (13) of docs/theory.md
    stress: str | None = None  # what a stress test of the family `ring` delays: see ring/stress.py


@dataclass(frozen=True, kw_only=True)
class ForwardLaunch(Launch):
    """A launch of a forward, as gpu/forward.py uses it."""

    walk: Walk

    @property
    def reads_statistics(self) -> bool:
        """Whether the launch reads the statistics, which were given or computed by a previous launch."""
        return False

    @property
    def partial_moments(self) -> int:
        """How many float32 numbers (means and M2) programs store for each other, or for the next launch."""
        return 0

    @property
    def counters(self) -> int:
        """How many int32 counters the programs need to wait for each other."""
        return 0

    @property
    def counter_protocol(self) -> str:
        """How the programs use the counters: FLIP or RESET. Only launches with the same protocol may share counters."""
        return ""

    def needs_aligned_x(self, problem: NormProblem) -> bool:
        """Whether x is copied first if its address is no multiple of 16 bytes."""
        return False

    @property
    def cooperative(self) -> bool:
        """Whether programs wait for each other, so that all of them must run at the same time."""
        return False

    @property
    def experimental(self) -> bool:
        """Whether the kernel uses Gluon, which is experimental: another version of Triton may not compile it."""
        return False

    @abstractmethod
    def kernel(self, problem: NormProblem, options: ForwardOptions) -> Any:
        """Return the Kernel (of launch/kernel.py) that this launch runs, with its arguments."""


FLIP = "flip"  # a counter protocol: the members of a team together flip the sign of the team's counter


@dataclass(frozen=True, kw_only=True)
class TeamsLaunch(Launch):
    """A launch whose programs form teams. The members of a team run at the same time and share a unit of work."""

    walk: Walk
    members: int
    programs_per_sm: int = 1  # how many programs run at the same time on each multiprocessor

    @property
    def teams(self) -> int:
        return self.programs // self.members

    @property
    @abstractmethod
    def units(self) -> int:
        """How many units of work there are. The teams take them in turn."""

    @property
    def cooperative(self) -> bool:
        return self.members > 1

    @property
    def parts(self) -> int:
        """How many float32 numbers the members store for each other: two for each set and member."""
        return 2 * self.walk.total * self.members if self.cooperative else 0

    @property
    def counters(self) -> int:
        return self.teams if self.cooperative else 0

    @property
    def counter_protocol(self) -> str:
        return FLIP


@dataclass(frozen=True, kw_only=True)
class SharedSetLaunch(TeamsLaunch, ForwardLaunch):
    """Such a launch of a forward."""

    @property
    def what(self) -> str:
        return "reduce and apply"

    @property
    def partial_moments(self) -> int:
        return self.parts


Chained = TypeVar("Chained", bound=Any)  # a ChainedLaunch
Shared = TypeVar("Shared", bound=TeamsLaunch)


def power_of_two(n: int) -> int:
    """Return the smallest power of two that is not below n."""
    return 1 << max(n - 1, 0).bit_length()


def fastest(
    problem: NormProblem,
    device: Device,
    invariant: bool,
    candidates: Callable[[NormProblem, Walk, Device], Iterable[Shared]],
    time: Callable[[NormProblem, Shared, Device], float],
) -> tuple[Shared, ...]:
    """Return a tuple with one launch: the candidate with the least modelled time.

    With `invariant`, the time of one sample decides, so that the choice does not depend on the batch size.
    """
    w = walk(problem)
    found = candidates(problem, replace(w, total=w.sets) if invariant else w, device)
    best = min(found, key=lambda launch: time(problem, launch, device))
    best = replace(best, walk=replace(best.walk, total=w.total))
    return (replace(best, programs=team_programs(best.units, best.members, device, best.programs_per_sm)),)


def team_programs(units: int, members: int, device: Device, programs_per_sm: int = 1) -> int:
    """Return how many programs to launch: a team for each unit of work, but no more teams than can run at the same time."""
    return max(min(units, device.sms * programs_per_sm // members), 1) * members


def block_and_remainder(n: int) -> tuple[int, int]:
    """Return the sizes of two blocks that together hold n elements, each a power of two: (1024, 128) for n = 1152.

    The second size is 0 if n is at most 64, or if two blocks save less than a quarter of a single block.
    """
    whole = power_of_two(n)
    remainder = power_of_two(n - whole // 2)
    return (whole // 2, remainder) if n > 64 and remainder <= whole // 4 else (whole, 0)


def stages_that_fit(problem: NormProblem, device: Device, elements: int, wanted: int, kept: bool = False) -> int:
    """Return the number of stages of a loop over blocks: `wanted`, or fewer if shared memory is too small.

    The loop works on one block of `elements` elements, and loads the next ones, with their parameters, to shared memory. If parameters
    are `kept`, it loads x and the residual only. 1 means that blocks are loaded straight to registers.
    """
    if not device.prefetches:
        return 1
    parameters = problem.weight, problem.bias, problem.scale, problem.shift
    operands = problem.addends or (problem.dtype,) if kept else (problem.dtype, *parameters, *(problem.addends or ()))
    size = elements * sum(dtype.itemsize for dtype in operands if dtype)
    return max(min(wanted, 1 + device.shared // size), 1)


def can_load_ahead(problem: NormProblem, w: Walk) -> bool:
    """Return whether loads ahead go to shared memory, four bytes at a time or more. Otherwise the compiler keeps them in registers.

    A block of 384x16 bfloat16, in runs of 7, spilled 2632 bytes for each thread (Triton 3.6).
    """
    steps = [w.run if w.run > 1 else 0, w.x[1] if w.reps > 1 else 0, w.x[0] if w.outer > 1 else 0]
    return problem.dtype.itemsize >= 4 or not any(step % 2 for step in steps)


def loads_ahead_one_by_one(problem: NormProblem, step: int, stages: int) -> bool:
    """Return whether a loop with several stages would load an unaligned x one element at a time, which is slow.

    `step` is the number of elements from one row of a block to the next.
    Such loads go to shared memory, four bytes at a time: `tile_reread` of 8x80x209x210 took 813 µs (H200, 2026-11-18). Smaller elements
    are loaded straight to registers.
    """
    size = problem.dtype.itemsize
    return stages > 1 and size == 4 and step * size % 16 == 0


def peel_of(problem: NormProblem, w: Walk) -> int:
    """Return the elements of a vector of 16 bytes, if loops over the runs of w should take only whole vectors; else 0.

    They should if runs are long, and begin or end between multiples of 16 bytes. x and y must have equal strides.
    """
    size, steps = problem.dtype.itemsize, (w.run, *w.x) if w.reps > 1 else (w.run, w.x[0], w.x[2])
    odd = any(step * size % VECTOR_BYTES for step in steps)
    return VECTOR_BYTES // size if odd and problem.aligned and w.x == w.y and w.run >= LEAST_PEELED else 0


def loads_row_at_once(problem: NormProblem) -> bool:
    """Return whether programs of `row` load a row of 8193 to 16384 elements at once. Otherwise they load rows ahead, and fewer fit.

    docs/measured.md has the times ("Long rows at once").
    """
    run, adds = walk(problem).run, problem.addends is not None
    return 8192 < run <= 16384 and (problem.dtype.itemsize == 4 or adds or not problem.spec.centered)


def warps_for(threads: int, device: Device) -> int:
    """Return how many warps `threads` threads fill, rounded down to a power of two. More threads than 1024 count as 1024."""
    return max(power_of_two(min(threads, 1024) + 1) // 2 // device.warp, 1)


def chained(device: Device, launches: Sequence[Chained]) -> tuple[Chained, ...]:
    """Return the launches. Each may start before the previous one ends, if the device has programmatic dependent launch."""
    if not device.chains:
        return tuple(launches)
    last = len(launches) - 1
    return tuple(replace(launch, pdl_trigger=at < last, pdl_wait=at > 0) for at, launch in enumerate(launches))


Schedule = Callable[[NormProblem, Device, bool], tuple[Any, ...]]


def with_chaining(schedule: Schedule) -> Schedule:
    """Decorate a schedule, so that its launches are linked by `chained`."""
    return wraps(schedule)(lambda problem, device, invariant: chained(device, schedule(problem, device, invariant)))
