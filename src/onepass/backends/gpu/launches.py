"""A kernel launch as plain numbers, and how many programs, warps and stages it has.

The sizes were tuned on an H200; docs/measured.md has the measurements.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import wraps
from typing import Any, TypeVar

from onepass.core.device import Device
from onepass.core.problem import NormProblem

from .walk import TILE, Walk, walk

Launch = TypeVar("Launch", bound=Any)  # a dataclass with `leads` and `follows`


REGISTERS = 128  # for a thread at most, of programs that must run beside each other on a multiprocessor


@dataclass(frozen=True)
class Pass:
    """One launch. A program has blocks of block_i x block_j elements. A set is cut in parts_r x parts_t, every chunk_r and chunk_t.

    The row walk counts chunk_t in blocks; the tile walk parts every column from the next, and chunk_t is how many blocks of them there are.
    A team does too, but has whole sets in a block: parts_r members share the rows of a unit, one o and one block of columns (of a ring, one
    span of `tiles` blocks, chunk_t in all). Those of a set alone have block_i threads, each with `tiles` vectors of block_j elements.
    """

    kernel: str
    walk: Walk
    programs: int
    warps: int
    block_i: int
    block_j: int
    block_run: int = 1  # tile, resident: columns for each set; team: the same, or 0 where a run is no power of two; ring: sets in a block
    tail: int = 0  # resident: a second block along the set, where a power of two is too short
    resident: bool = False
    reduce: bool = False
    apply: bool = False
    parts_r: int = 1
    parts_t: int = 1
    chunk_r: int = 1
    chunk_t: int = 1
    stages: int = 1  # blocks in flight at a time
    leads: bool = False  # the next launch may start while this one runs
    follows: bool = False  # and waits for it
    sets: int = 1  # team: whole ones in a block; ring: in a unit
    tiles: int = 1  # ring: blocks of columns in a unit; alone: vectors for a thread
    keep: int = 0  # ring: of a unit's blocks, how many stay in shared memory
    back: int = 0  # ring: slots for the others, which come again
    beside: int = 1  # programs for each multiprocessor, where they must run at the same time; else any number
    across: Any = None  # backward: sums over a parameter go from set to set; parts_r x parts_t are then of each segment

    @property
    def teams(self) -> int:
        return self.programs // self.parts_r

    @property
    def units(self) -> int:
        return self.walk.outer * self.chunk_t

    def __str__(self) -> str:
        what = "+".join(word for word, there in (("reduce", self.reduce), ("apply", self.apply), ("across", self.across)) if there)
        return f"{self.kernel} {what or 'parts'} {self.programs}x[{self.block_i}, {self.block_j}], {self.warps} warps"


def power_of_two(n: int) -> int:
    """The next one, n itself if it is one."""
    return 1 << max(n - 1, 0).bit_length()


def quickest(
    problem: NormProblem,
    device: Device,
    invariant: bool,
    cuts: Callable[[NormProblem, Walk, Device], Iterable[Pass]],
    time: Callable[[NormProblem, Pass, Device], float],
) -> tuple[Pass, ...]:
    """A team's launch: the cut that takes the least time, of one sample where batches must not matter, for all that there is."""
    w = walk(problem)
    found = cuts(problem, replace(w, total=w.sets) if invariant else w, device)
    best = min(found, key=lambda step: time(problem, step, device))
    return (replace(best, walk=w, programs=programs_of(w.outer * best.chunk_t, best.parts_r, device, best.beside)),)


def programs_of(units: int, members: int, device: Device, beside: int = 1) -> int:
    """Of as many teams as there are units, or multiprocessors for."""
    return max(min(units, device.sms * beside // members), 1) * members


def head_and_tail(n: int) -> tuple[int, int]:
    """Two powers of two for n elements, where that spares a quarter of the next one; else that one, and 0."""
    whole = power_of_two(n)
    tail = power_of_two(n - whole // 2)
    return (whole // 2, tail) if n > 64 and tail <= whole // 4 else (whole, 0)


def stages_that_fit(problem: NormProblem, device: Device, elements: int, wanted: int) -> int:
    """How many blocks fit in shared memory at a time, parameters included; 1: the one at work, in registers."""
    if not device.prefetches:
        return 1
    operands = problem.dtype, problem.weight, problem.bias, problem.scale, problem.shift, *(problem.addends or ())
    size = elements * sum(dtype.itemsize for dtype in operands if dtype)
    return max(min(wanted, 1 + device.shared // size), 1)


def warps_for(threads: int, device: Device) -> int:
    """A power of two of them, for at most 1024 threads."""
    return max(power_of_two(min(threads, 1024) + 1) // 2 // device.warp, 1)


def chained(device: Device, steps: Sequence[Launch]) -> tuple[Launch, ...]:
    """Launches, each of which starts while the one before ends, where the device can."""
    if not device.chains:
        return tuple(steps)
    last = len(steps) - 1
    return tuple(replace(step, leads=i < last, follows=i > 0) for i, step in enumerate(steps))


def filled_fraction(step: Pass) -> float:
    """What fraction of the lanes that keep a set has an element of it, in the tile walk, whose instructions count."""
    w = step.walk
    return w.reps * w.run / ((step.block_i + step.tail) * step.block_run) if step.kernel == TILE else 1.0


Passes = Callable[[NormProblem, Device, bool], tuple[Any, ...]]


def with_chaining(passes: Passes) -> Passes:
    """With its launches chained."""
    return wraps(passes)(lambda problem, device, invariant: chained(device, passes(problem, device, invariant)))
