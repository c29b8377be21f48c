"""The tensor that holds mean and rstd of a training forward: one allocation, and one tensor for autograd to save."""

from __future__ import annotations

from math import prod

from torch import Tensor

from .problem import NormProblem


def packed_shape(problem: NormProblem) -> tuple[int, ...]:
    return (2, *problem.stat_shape)


def packed_stride(problem: NormProblem) -> tuple[int, ...]:
    """Return its strides. mean comes first, in the order of x's memory. rstd begins at a multiple of 16 bytes."""
    return (-(-prod(problem.stat_shape) // 4) * 4, *problem.stat_stride)


def unpack(problem: NormProblem, statistics: Tensor) -> tuple[Tensor | None, Tensor]:
    """Return (mean, rstd). mean is None if the norm subtracts none."""
    return statistics[0] if problem.spec.centered else None, statistics[1]
