"""The launch that adds up cells, and how the axes of cells are arranged for it.

A backward needs sums over sets (c1 and c2), and for each parameter a sum over the elements that use it. A set is the
elements that share one mean and variance. Programs store partial sums of both kinds, called cells. `SumsLaunch` adds the
cells of each sum. The axes of cells are axes of `x[o, r, s, t]`, or count parts: the shares of different programs. So the
map that gives the parameter of an element, equation (1) of docs/theory.md, also gives the parameter of a cell.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, prod
from typing import Any, ClassVar, NamedTuple

import torch

from onepass.backends.gpu.launch.fields import Count, Index, Pointer
from onepass.backends.gpu.launches import ChainedLaunch, Schedule, power_of_two, warps_for
from onepass.backends.gpu.walk import Walk, walk
from onepass.core.device import Device
from onepass.core.operands import Needs
from onepass.core.problem import NormProblem
from onepass.core.view import ParamMap

from .gradient import BackwardLaunch, BackwardOptions
from .parameters import Summed, maps

Axis = tuple[str, int]  # an axis of the cells: its name ("o", "r", "s", "t" or "part") and its size

Factor = tuple[int, int]  # an Axis is split into factors: (size, stride in the sums), where stride 0 means summed over

NAMES = {"sets": ("c1", "c2"), "param": ("weight", "bias"), "modulation": ("scale", "shift")}  # the two sums of each launch

WORDS = {"sets": "sets", "param": "weight and bias", "modulation": "scale and shift"}


class SumPointers(NamedTuple):
    cells1_ptr: Pointer
    cells2_ptr: Pointer
    sum1_ptr: Pointer
    sum2_ptr: Pointer


class SumSizes(NamedTuple):
    """The sizes of cells [across, kept1, between, kept2, within], and of the sums over all axes but kept1 and kept2.

    In the sums, kept1 has the stride stride1, and kept2 has stride2.
    """

    kept1: Index
    between: Index
    kept2: Index
    within: Index
    stride1: Index
    stride2: Index
    kept: Count  # the number of sums, kept1·kept2
    reduced: Count  # the number of cells in each sum


class SumsMode(NamedTuple):
    block_i: int
    block_j: int
    wide: bool  # the program id is a 64-bit integer
    pdl_trigger: bool
    pdl_wait: bool


@dataclass(frozen=True, kw_only=True)
class SumsLaunch(ChainedLaunch):
    """A launch of `add_up`, which sums cells [across, kept1, between, kept2, within] over all axes but kept1 and kept2.

    A block is [I, J]: J indexes sums, I indexes the cells of a sum.
    """

    name: ClassVar[str] = "sums"
    of: Summed
    sizes: tuple[int, int, int, int, int]
    strides: tuple[int, int]  # of kept1 and kept2 in the sums, in elements

    @property
    def cells(self) -> int:
        return prod(self.sizes)

    @property
    def sums(self) -> int:
        return self.sizes[1] * self.sizes[3]

    @property
    def needed(self) -> bool:
        """Whether there is anything to add up. False if each sum is one cell, and the cells are in the order of the sums."""
        return self.sizes[1] != self.cells or self.strides[0] not in (0, 1)

    @property
    def what(self) -> str:
        return f"{self.sums} of {self.cells // self.sums} cells each, for {WORDS[self.of]}"

    def __str__(self) -> str:
        return super().__str__() if self.needed else f"no sums for {WORDS[self.of]}: each of {self.sums} has one cell"

    def arguments(self, problem: NormProblem, needs: Needs) -> tuple[Any, ...]:
        fp32 = torch.float32
        if self.of == "sets":
            targets = fp32 if problem.spec.centered else None, fp32
        else:
            targets = tuple(getattr(problem, name) if getattr(needs, name) else None for name in NAMES[self.of])
        _, kept1, between, kept2, within = self.sizes
        return (
            SumPointers(*(fp32 if target else None for target in targets), *targets),
            SumSizes(kept1, between, kept2, within, *self.strides, self.sums, self.cells // self.sums),
            SumsMode(self.block_i, self.block_j, self.cells >= 2**30, self.pdl_trigger, self.pdl_wait),
        )

    def kernel(self, problem: NormProblem, options: BackwardOptions) -> Any:
        from onepass.backends.gpu.launch.kernel import Kernel

        from .sums_kernel import add_up

        return Kernel(add_up, self.arguments(problem, options.needs), self.programs, self.warps, pdl=self.pdl_wait)


MOST_JOINT_WARPS = 8  # with 16, the code for both launches spills on an A100


class SecondSumPointers(NamedTuple):
    """The operands of the second launch of a JointSums."""

    cells3_ptr: Pointer
    cells4_ptr: Pointer
    sum3_ptr: Pointer
    sum4_ptr: Pointer


class JointSplit(NamedTuple):
    first: Count  # how many programs work for the first launch; the others work for the second


@dataclass(frozen=True, kw_only=True)
class JointSums(ChainedLaunch):
    """Two launches of `add_up` in one. The first adds up sums over sets, the second gradients of parameters."""

    name: ClassVar[str] = "sums"
    both: tuple[SumsLaunch, SumsLaunch]

    @property
    def what(self) -> str:
        return " and ".join(launch.what for launch in self.both)

    @property
    def shape(self) -> str:
        return " and ".join(launch.shape for launch in self.both)

    def kernel(self, problem: NormProblem, options: BackwardOptions) -> Any:
        from onepass.backends.gpu.launch.kernel import Kernel

        from .sums_kernel import add_up_both

        first, second = (launch.arguments(problem, options.needs) for launch in self.both)
        mode = first[2]._replace(wide=first[2].wide or second[2].wide, pdl_trigger=self.pdl_trigger, pdl_wait=self.pdl_wait)
        arguments = first[0], SecondSumPointers(*second[0]), first[1], second[1], JointSplit(self.both[0].programs), mode, second[2]
        return Kernel(add_up_both, arguments, self.programs, self.warps, pdl=self.pdl_wait)


Step = BackwardLaunch | SumsLaunch | JointSums


def parts_of(step: Any) -> tuple[SumsLaunch, ...]:
    """Return the sums that a step of a backward computes: none, one or two launches of `add_up`."""
    return step.both if isinstance(step, JointSums) else (step,) if isinstance(step, SumsLaunch) else ()


def with_joint_sums(sets: Sequence[SumsLaunch], apply: BackwardLaunch, parameters: Sequence[SumsLaunch]) -> tuple[Step, ...]:
    """Return the launches that follow one which stored cells of both kinds, for sets and for parameters.

    A launch takes 3 µs, so one launch adds up the cells of sets and those of the first parameters.
    """
    if not (sets and parameters and parameters[0].needed):
        return (*sets, apply, *parameters)
    both = sets[0], parameters[0]
    warps, block_i, block_j = (max(getattr(launch, name) for launch in both) for name in ("warps", "block_i", "block_j"))
    warps = min(warps, MOST_JOINT_WARPS)
    joint = JointSums(both=both, programs=sum(launch.programs for launch in both), warps=warps, block_i=block_i, block_j=block_j)
    return (joint, apply, *parameters[1:])


def _factors(axis: Axis, p: ParamMap | None, w: Walk, unit: int) -> list[Factor]:
    """Return the factors of an axis of cells: [(4, 1), (3, 0)] for ("t", 12), if each 3 elements along t share a parameter.

    `p` gives the parameter of an element. None means sums over sets. A step along "o" is `unit` values of o.
    """
    kind, size = axis
    if p is None:
        return [(size, {"o": w.sets, "s": 1}.get(kind, 0))]
    if kind == "o" and p.a:
        return [(size * unit // (p.every * p.period), 0), (p.period, p.a), (p.every // unit, 0)]
    if kind == "t" and p.d:
        return [(size // p.channel_run, p.d), (p.channel_run, 0)]
    return [(size, {"r": p.b, "s": p.c}.get(kind, 0))]


def five_factors(factors: Sequence[Factor]) -> list[Factor] | None:
    """Merge neighbouring factors, and return five as [summed, kept, summed, kept, summed], or None if five are too few.

    A slot that no factor fills has size 1.
    """
    merged: list[Factor] = []
    for size, to in factors:
        if size == 1:
            continue
        if merged and bool(merged[-1][1]) == bool(to) and (not to or merged[-1][1] == size * to):
            merged[-1] = merged[-1][0] * size, to
        else:
            merged.append((size, to))
    slots: list[Factor] = []
    for size, to in merged:
        if len(slots) % 2 != bool(to):
            slots.append((1, 0))
        slots.append((size, to))
    return slots + [(1, 0)] * (5 - len(slots)) if len(slots) <= 5 else None


def sums_launch(of: Summed, axes: Sequence[Axis], p: ParamMap | None, w: Walk, unit: int, device: Device) -> SumsLaunch | None:
    """Return the launch that adds up cells with these axes, or None if `five_factors` needs more than five factors for them."""
    found = five_factors([factor for axis in axes for factor in _factors(axis, p, w, unit)])
    if found is None:
        return None
    sizes = tuple(size for size, _ in found)
    kept = sizes[1] * sizes[3]
    reduced = prod(sizes) // kept
    block_i, block_j = min(power_of_two(reduced), 256), min(8 if kept <= 16384 else 32, power_of_two(kept))
    return SumsLaunch(
        of=of,
        sizes=sizes,  # pyright: ignore[reportArgumentType]
        strides=(found[1][1], found[3][1]),
        programs=ceil(kept / block_j),
        warps=warps_for(block_i * block_j // 4, device),
        block_i=block_i,
        block_j=block_j,
    )


def parameter_sums(problem: NormProblem, axes: Sequence[Axis], w: Walk, unit: int, device: Device) -> list[SumsLaunch]:
    """Return the launches that add up cells to gradients: one for weight and bias, one for scale and shift.

    A launch is missing if the problem does not have its parameters, or if `sums_launch` returns None.
    """
    found = [sums_launch(of, axes, p, w, unit, device) for of, p in maps(problem, w)]
    return [sums for sums in found if sums is not None]


def set_sums(axes: Sequence[Axis], w: Walk, device: Device) -> list[SumsLaunch]:
    """Return a list with the launch that adds up the partial sums of c1 and c2; an empty list if each set has only one."""
    sums = sums_launch("sets", axes, None, w, 1, device)
    assert sums is not None
    return [sums] if sums.cells > w.total else []


TOO_MANY_AXES = "its parameters lie along more axes than one launch can sum over"


def why_no_sums(problem: NormProblem, device: Device, schedule: Schedule) -> list[str]:
    """Return a list with the reason why a schedule cannot sum the gradients of all parameters; empty if it can."""
    sums = [part for step in schedule(problem, device, False) for part in parts_of(step) if part.of != "sets"]
    return [] if len(sums) == len(list(maps(problem, walk(problem)))) else [TOO_MANY_AXES]
