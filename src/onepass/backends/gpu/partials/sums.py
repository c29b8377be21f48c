"""The launch that adds up cells, and how cells become sums.

A backward needs sums over sets, c1 and c2, and sums over parameters. Programs store partial sums of both, called cells.
`SumsLaunch` adds the cells that belong together. The map that gives the parameter of an element also gives the
parameter of a cell.
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

Axis = tuple[str, int]  # of the cells: what it runs along ("o", "r", "s", "t" or "part"), and its size

Factor = tuple[int, int]  # a part of an axis: its size, and its stride in the sums; 0 means that it is summed over

NAMES = {"sets": ("c1", "c2"), "param": ("weight", "bias"), "modulation": ("scale", "shift")}  # a launch has two sums

WORDS = {"sets": "sets", "param": "weight and bias", "modulation": "scale and shift"}


class SumPointers(NamedTuple):
    cells1_ptr: Pointer
    cells2_ptr: Pointer
    sum1_ptr: Pointer
    sum2_ptr: Pointer


class SumSizes(NamedTuple):
    """Cells are [across, kept1, between, kept2, within].

    The two kept axes have the strides stride1 and stride2 in the sums.
    """

    kept1: Index
    between: Index
    kept2: Index
    within: Index
    stride1: Index
    stride2: Index
    kept: Count  # the number of sums, kept1·kept2
    reduced: Count  # the number of cells of each sum


class SumsMode(NamedTuple):
    block_i: int
    block_j: int
    wide: bool  # programs are numbered in 64 bits
    pdl_trigger: bool
    pdl_wait: bool


@dataclass(frozen=True, kw_only=True)
class SumsLaunch(ChainedLaunch):
    """Adds up cells [across, kept1, between, kept2, within] over all axes but kept1 and kept2.

    Along J lie sums, along I their cells.
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
        """False if every cell is a sum already, and in its place."""
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
        from onepass.backends.gpu.launch.launcher import Kernel

        from .sums_kernel import add_up

        return Kernel(add_up, self.arguments(problem, options.needs), self.programs, self.warps, pdl=self.pdl_wait)


Step = BackwardLaunch | SumsLaunch


def _factors(axis: Axis, p: ParamMap | None, w: Walk, unit: int) -> list[Factor]:
    """Split an axis of cells into factors, for sums over parameters, or over sets if p is None.

    A step along "o" is `unit` values of o.
    """
    kind, size = axis
    if p is None:
        return [(size, {"o": w.sets, "s": 1}.get(kind, 0))]
    if kind == "o" and p.a:
        return [(size * unit // (p.every * p.period), 0), (p.period, p.a), (p.every // unit, 0)]
    if kind == "t" and p.d:
        return [(size // p.channel_run, p.d), (p.channel_run, 0)]
    return [(size, {"r": p.b, "s": p.c}.get(kind, 0))]


def _slots(factors: Sequence[Factor]) -> list[Factor] | None:
    """Factors as [summed, kept, summed, kept, summed], with neighbours merged; None if that takes more than five."""
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
    """The launch that adds up these cells. None if they need more than five axes."""
    slots = _slots([factor for axis in axes for factor in _factors(axis, p, w, unit)])
    if slots is None:
        return None
    sizes = tuple(size for size, _ in slots)
    kept = sizes[1] * sizes[3]
    reduced = prod(sizes) // kept
    block_i, block_j = min(power_of_two(reduced), 256), min(8 if kept <= 16384 else 32, power_of_two(kept))
    return SumsLaunch(
        of=of,
        sizes=sizes,  # pyright: ignore[reportArgumentType]
        strides=(slots[1][1], slots[3][1]),
        programs=ceil(kept / block_j),
        warps=warps_for(block_i * block_j // 4, device),
        block_i=block_i,
        block_j=block_j,
    )


def parameter_sums(problem: NormProblem, axes: Sequence[Axis], w: Walk, unit: int, device: Device) -> list[SumsLaunch]:
    """The launches that add up the gradients of parameters."""
    found = [sums_launch(of, axes, p, w, unit, device) for of, p in maps(problem, w)]
    return [sums for sums in found if sums is not None]


def set_sums(axes: Sequence[Axis], w: Walk, device: Device) -> list[SumsLaunch]:
    """The launch that adds up the parts of sets, if sets have more than one part."""
    sums = sums_launch("sets", axes, None, w, 1, device)
    assert sums is not None
    return [sums] if sums.cells > w.total else []


TOO_MANY_AXES = "its parameters lie along more axes than one launch can sum over"


def why_no_sums(problem: NormProblem, device: Device, schedule: Schedule) -> list[str]:
    """The reason if a schedule lacks the sums over some parameters."""
    sums = [step for step in schedule(problem, device, False) if isinstance(step, SumsLaunch) and step.of != "sets"]
    return [] if len(sums) == len(list(maps(problem, walk(problem)))) else [TOO_MANY_AXES]
