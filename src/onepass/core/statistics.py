"""The tensor that holds mean and rstd of a training forward: one allocation, and one tensor for autograd to save."""

from __future__ import annotations

from math import prod

import torch
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


def repack(problem: NormProblem, mean: Tensor | None, rstd: Tensor) -> Tensor | None:
    """Return the one tensor that `unpack` took mean and rstd from, found by their addresses. None if they come from elsewhere."""
    distance, start = packed_stride(problem)[0], rstd.storage_offset() - packed_stride(problem)[0]
    if start < 0 or rstd.dtype != torch.float32 or rstd.stride() != problem.stat_stride or rstd.shape != problem.stat_shape:
        return None
    if problem.spec.centered and (
        mean is None
        or mean.data_ptr() + 4 * distance != rstd.data_ptr()
        or mean.dtype != torch.float32
        or mean.stride() != problem.stat_stride
    ):
        return None
    return rstd.as_strided(packed_shape(problem), packed_stride(problem), start)
