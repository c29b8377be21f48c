"""What every kernel of a walk is called with: its numbers, and statistics as it indexes them."""

from __future__ import annotations

from dataclasses import astuple

import torch
from torch import Tensor

from onepass.core.problem import NormProblem
from onepass.core.view import laid_out

from .launches import Pass
from .walk import Walk

_MAP = ("every", "period", "o", "r", "s", "run", "t")


def scalar_args(w: Walk, flat: bool) -> dict[str, int]:
    """Sizes, strides and parameter maps; `flat`: columns are contiguous, so that those of s are of no use."""
    x_s, y_s = (0, 0) if flat else (w.x[2], w.y[2])
    return {
        **{"total": w.total, "reps": w.reps, "sets": w.sets, "run": w.run},
        **dict(zip(("x_o", "x_r", "x_s", "y_o", "y_r", "y_s"), (*w.x[:2], x_s, *w.y[:2], y_s))),
        **{f"p_{name}": n for name, n in zip(_MAP, astuple(w.param))},
        **{f"m_{name}": n for name, n in zip(_MAP, astuple(w.modulation))},
    }


def wide(step: Pass) -> bool:
    """Whether the number of a program, or what is counted from it, may pass 2³¹."""
    w = step.walk
    return max(step.programs * step.block_i, w.total, w.reps, w.run, w.columns) >= 2**30


def near(w: Walk) -> bool:
    """Whether all elements of x and y, and those that lanes past the end would have, are within 2³¹ of the first."""
    return all(o * w.outer + 2 * r * w.reps + 2 * s * w.sets + 2 * w.run < 2**31 for o, r, s in (w.x, w.y))


def wide_parameters(w: Walk) -> set[str]:
    """The steps of those parameter maps whose indices pass 2³¹."""
    return {
        f"{letter}_{name}"
        for letter, p in (("p", w.param), ("m", w.modulation))
        if p.largest(w.reps, w.sets, w.run) >= 2**31
        for name in "orst"
    }


def statistic(stat: Tensor | None, problem: NormProblem) -> Tensor | None:
    """A statistic, contiguous as (outer, sets)."""
    if stat is None or (stat.dtype == torch.float32 and stat.stride() == problem.stat_stride and stat.shape == problem.stat_shape):
        return stat
    return laid_out(stat.to(torch.float32).reshape(problem.stat_shape), problem.stat_stride)
