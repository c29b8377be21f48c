"""Which parameters a problem has, along which axes they vary, and which sets use the same ones.

A set is the elements that share one mean and variance, one (o, s) of `x[o, r, s, t]`. A ParamMap says which parameter an
element uses, by equation (1) of docs/theory.md. Weight and bias have one map. Scale and shift, called the modulation,
have another. A mask of axes has the bits AXIS_O to AXIS_T of walk.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from onepass.backends.gpu.walk import Walk, axis_mask
from onepass.core.problem import NormProblem
from onepass.core.view import ParamMap

Summed = Literal["sets", "param", "modulation"]  # what a sum is for: c1 and c2, weight and bias, or scale and shift


@dataclass(frozen=True)
class Segments:
    """How sets are divided into segments: groups of `members` sets that use the same parameters.

    A segment has `every` consecutive values of o out of each `every` * `period`: with every = 1 and period = 2, one segment
    has the even o and another the odd o. In the tile walk, `members` counts values of o, not sets.
    """

    every: int
    period: int
    members: int
    by_set: bool  # sets with different s are in different segments


def varying_axes(problem: NormProblem, w: Walk) -> tuple[int, int]:
    """Return two masks of axes: those along which weight and bias vary, and those along which scale and shift vary.

    A mask is 0 if the problem does not have these parameters.
    """
    modulated = problem.scale is not None or problem.shift is not None
    return axis_mask(w.param, w) if problem.affine else 0, axis_mask(w.modulation, w) if modulated else 0


def parameter_axes(problem: NormProblem, w: Walk) -> int:
    """Return the mask of the axes along which any parameter varies."""
    param, modulation = varying_axes(problem, w)
    return param | modulation


def per_element(problem: NormProblem) -> bool:
    """Return whether each element of a run has a weight of its own."""
    p = problem.param
    return problem.affine and p is not None and p.channel_run == 1 and p.d != 0


def maps(problem: NormProblem, w: Walk) -> Iterator[tuple[Summed, ParamMap]]:
    """Yield ("param", map of weight and bias) and ("modulation", map of scale and shift), each if the problem has any."""
    if problem.affine:
        yield "param", w.param
    if problem.scale is not None or problem.shift is not None:
        yield "modulation", w.modulation


def segments(problem: NormProblem, w: Walk) -> Segments:
    """Return the division of all sets into segments, groups of sets that use the same parameters.

    Weight and bias have one ParamMap, scale and shift another. Segments get the smaller `every` of the two, and the larger
    `every` * `period`.
    """
    cuts = [p for _, p in maps(problem, w) if p.a and p.period > 1]
    every = min((p.every for p in cuts), default=1)
    period = max((p.every * p.period for p in cuts), default=1) // every
    by_set = w.sets > 1 and any(p.c for _, p in maps(problem, w))
    return Segments(every, period, w.outer // period * (1 if by_set else w.sets), by_set)


def channel_of(problem: NormProblem, w: Walk) -> int:
    """Return how many elements of a run have the same parameters, or 0 if scale and shift differ from weight and bias in this."""
    found = {p.channel_run for _, p in maps(problem, w) if p.d}
    return w.run if not found else found.pop() if len(found) == 1 else 0
