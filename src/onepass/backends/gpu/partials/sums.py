"""How the GPU families cut a backward into programs: pure numbers, as `tiling.py` for the forward.

A backward takes sums over sets, c1 and c2, and sums over parameters. Programs leave cells of both, and `Sums` adds those up that belong
together: a parameter's cells are found by the map that finds an element's parameter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, prod

from onepass.backends.gpu.launches import Pass, Passes, power_of_two, warps_for
from onepass.backends.gpu.walk import Walk, walk
from onepass.core.device import Device
from onepass.core.problem import NormProblem
from onepass.core.view import ParamMap

from .parameters import What, maps

Axis = tuple[str, int]  # of cells: what it runs along, and its size


Factor = tuple[int, int]  # size, and the step of what is summed for along it; 0: summed over


@dataclass(frozen=True)
class Sums:
    """One launch: cells [across, kept1, between, kept2, within], summed over all but kept1 and kept2, which step by `to`."""

    what: What
    sizes: tuple[int, int, int, int, int]
    to: tuple[int, int]
    programs: int
    block_i: int
    block_j: int
    warps: int
    leads: bool = False
    follows: bool = False

    @property
    def cells(self) -> int:
        return prod(self.sizes)

    @property
    def none(self) -> bool:
        """Whether every cell is a sum already, in its place."""
        return self.sizes[1] == self.cells and self.to[0] in (0, 1)

    def __str__(self) -> str:
        kept = self.sizes[1] * self.sizes[3]
        if self.none:
            return f"no sums of {self.what}: {kept}, each of one cell"
        return f"sums of {self.what} {self.programs}x[{self.block_i}, {self.block_j}]: {kept}, each of {self.cells // kept} cells"


Step = Pass | Sums


def _factors(axis: Axis, p: ParamMap | None, w: Walk, unit: int) -> list[Factor]:
    """An axis of cells, for the sums over parameters, or over sets (None). `unit`: how many o's a step along segments is."""
    kind, size = axis
    if p is None:
        return [(size, {"o": w.sets, "s": 1}.get(kind, 0))]
    if kind == "o" and p.a:
        return [(size * unit // (p.every * p.period), 0), (p.period, p.a), (p.every // unit, 0)]
    if kind == "t" and p.d:
        return [(size // p.channel_run, p.d), (p.channel_run, 0)]
    return [(size, {"r": p.b, "s": p.c}.get(kind, 0))]


def _slots(factors: Sequence[Factor]) -> list[Factor] | None:
    """Factors as [summed, kept, summed, kept, summed], neighbours taken together where they can be; None if there are more."""
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


def sums_launch(what: What, axes: Sequence[Axis], p: ParamMap | None, w: Walk, unit: int, device: Device) -> Sums | None:
    """None where cells are no sum of five axes."""
    slots = _slots([factor for axis in axes for factor in _factors(axis, p, w, unit)])
    if slots is None:
        return None
    sizes = tuple(size for size, _ in slots)
    kept = sizes[1] * sizes[3]
    reduced = prod(sizes) // kept
    block_i, block_j = min(power_of_two(reduced), 256), min(8 if kept <= 16384 else 32, power_of_two(kept))
    warps = warps_for(block_i * block_j // 4, device)
    return Sums(what, sizes, (slots[1][1], slots[3][1]), ceil(kept / block_j), block_i, block_j, warps)  # pyright: ignore[reportArgumentType]


def parameter_sums(problem: NormProblem, axes: Sequence[Axis], w: Walk, unit: int, device: Device) -> list[Sums]:
    """The sums over parameters."""
    found = [sums_launch(what, axes, p, w, unit, device) for what, p in maps(problem, w)]
    return [sums for sums in found if sums is not None]


def set_sums_of(axes: Sequence[Axis], w: Walk, device: Device) -> list[Sums]:
    """The sums over sets of their parts, where they have more than one."""
    sums = sums_launch("sets", axes, None, w, 1, device)
    assert sums is not None
    return [sums] if sums.cells > w.total else []


TOO_MANY_AXES = "its parameters lie along more axes than one launch sums over"


def why_no_sums(problem: NormProblem, device: Device, passes: Passes) -> list[str]:
    """Whether all sums over parameters are there."""
    sums = [step for step in passes(problem, device, False) if isinstance(step, Sums) and step.what != "sets"]
    return [] if len(sums) == len(list(maps(problem, walk(problem)))) else [TOO_MANY_AXES]
