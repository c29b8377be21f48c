from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from onepass.backends.gpu.walk import Walk, axis_mask
from onepass.core.problem import NormProblem
from onepass.core.view import ParamMap

What = Literal["sets", "param", "modulation"]


@dataclass(frozen=True)
class Segments:
    """The sets of a walk by their parameters: `members` of each segment use the same. Along o, as in a ParamMap; or one for each s, too."""

    every: int
    period: int
    members: int
    by_set: bool


def varying_axes(problem: NormProblem, w: Walk) -> tuple[int, int]:
    """On which of o, r, s, t the parameters and the modulation depend that there are."""
    modulated = problem.scale is not None or problem.shift is not None
    return axis_mask(w.param, w) if problem.affine else 0, axis_mask(w.modulation, w) if modulated else 0


def any_axis(both: tuple[int, int]) -> int:
    return both[0] | both[1]


def maps(problem: NormProblem, w: Walk) -> Iterator[tuple[What, ParamMap]]:
    """Of the parameters that there are."""
    if problem.affine:
        yield "param", w.param
    if problem.scale is not None or problem.shift is not None:
        yield "modulation", w.modulation


def segments(problem: NormProblem, w: Walk) -> Segments:
    """The coarsest that fit both maps: cut as often as the finer one, over the longer of their periods."""
    cuts = [p for _, p in maps(problem, w) if p.a and p.period > 1]
    every = min((p.every for p in cuts), default=1)
    period = max((p.every * p.period for p in cuts), default=1) // every
    by_set = w.sets > 1 and any(p.c for _, p in maps(problem, w))
    return Segments(every, period, w.outer // period * (1 if by_set else w.sets), by_set)
