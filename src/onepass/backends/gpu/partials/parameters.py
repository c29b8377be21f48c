"""Which parameters a problem has, and which sets use the same ones."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from onepass.backends.gpu.walk import Walk, axis_mask
from onepass.core.problem import NormProblem
from onepass.core.view import ParamMap

Summed = Literal["sets", "param", "modulation"]  # what cells are added up for


@dataclass(frozen=True)
class Segments:
    """Groups of sets that use the same parameters. Each has `members` sets.

    A segment has `every` consecutive values of o out of each `every` * `period`, as in a ParamMap.
    """

    every: int
    period: int
    members: int
    by_set: bool  # each s has its own segments


def varying_axes(problem: NormProblem, w: Walk) -> tuple[int, int]:
    """The axis masks of weight and bias, and of scale and shift; 0 for those that the problem does not have."""
    modulated = problem.scale is not None or problem.shift is not None
    return axis_mask(w.param, w) if problem.affine else 0, axis_mask(w.modulation, w) if modulated else 0


def parameter_axes(problem: NormProblem, w: Walk) -> int:
    """The axes on which any parameter depends."""
    param, modulation = varying_axes(problem, w)
    return param | modulation


def maps(problem: NormProblem, w: Walk) -> Iterator[tuple[Summed, ParamMap]]:
    """The maps of the parameters that the problem has."""
    if problem.affine:
        yield "param", w.param
    if problem.scale is not None or problem.shift is not None:
        yield "modulation", w.modulation


def segments(problem: NormProblem, w: Walk) -> Segments:
    """The largest segments that fit both maps: those of the finer map, over the longer period."""
    cuts = [p for _, p in maps(problem, w) if p.a and p.period > 1]
    every = min((p.every for p in cuts), default=1)
    period = max((p.every * p.period for p in cuts), default=1) // every
    by_set = w.sets > 1 and any(p.c for _, p in maps(problem, w))
    return Segments(every, period, w.outer // period * (1 if by_set else w.sets), by_set)
