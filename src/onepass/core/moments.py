"""The moments of a set of elements, (count, mean, M2): how they are computed and merged.

If a norm is not centered, `mean` is None and M2 is the sum of squares. Equations cite docs/theory.md.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor


@dataclass(frozen=True)
class Moments:
    count: int
    mean: Tensor | None
    m2: Tensor

    @property
    def var(self) -> Tensor:
        return self.m2 / self.count

    @property
    def center(self) -> Tensor | None:
        """The mean to subtract. It is 0 where x - mean could overflow, since rstd is 0 there. (44)"""
        if self.mean is None:
            return None
        large = 2.0**-25 * torch.finfo(self.mean.dtype).max
        return self.mean.masked_fill((self.m2 == torch.inf) & (self.mean.abs() > large), 0.0)


PIECE = 1 << 14  # elements; torch sums 2·PIECE elements with several threads, and their number changes the last bits


def total(x: Tensor, dims: Sequence[int]) -> Tensor:
    """The sum over `dims`, which keep size 1. Outer dimensions come first, so that each sum runs along contiguous memory."""
    for dim in dims:
        if x.shape[dim] == x.numel() > PIECE:  # all elements are summed to one number
            x = torch.cat([piece.sum(dim, keepdim=True) for piece in x.split(PIECE, dim)], dim)
        if x.shape[dim] != 1:
            x = x.sum(dim, keepdim=True)
    return x


def average(x: Tensor, dims: Sequence[int]) -> Tensor:
    return total(x, dims) / prod([x.shape[dim] for dim in dims])


Spread = Callable[[Tensor, Tensor], Tensor]  # expands a statistic to the shape in which it is subtracted from x


DOWN = 2.0**-40  # scales elements before they are summed, so that sums do not overflow. A power of two changes no digit.


def middle(x: Tensor, dims: Sequence[int], spread: Spread = lambda stat, x: stat) -> Tensor:
    """The mean over `dims`. It is exact if all elements are equal, and finite for every finite x. (43)"""
    count = prod([x.shape[dim] for dim in dims])
    if not count:
        return average(x, dims)
    first = x.detach()  # the mean depends on it only through rounding
    for dim in dims:
        first = first.narrow(dim, 0, 1)
    away = torch.add(spread(first * -DOWN, x), x, alpha=DOWN)
    return (first * DOWN + total(away, dims) / count) / DOWN


def moments(x: Tensor, dims: Sequence[int], centered: bool = True, spread: Spread = lambda stat, x: stat) -> Moments:
    """Two passes over x: the mean, then the sum of squared differences. (2), (3)"""
    count = prod([x.shape[dim] for dim in dims])
    mean = middle(x, dims, spread) if centered else None
    return Moments(count, mean, total((x if mean is None else x - spread(mean, x)).square(), dims))


def inverse_deviation(var: Tensor, eps: float) -> Tensor:
    """rstd from a computed variance, (4). Without eps, a constant set gets 0 as in torch, so that x_hat is 0 and not 0/0. (44)"""
    if eps:
        return torch.rsqrt(var + eps)
    constant = var < torch.finfo(var.dtype).tiny
    return torch.rsqrt(var.masked_fill(constant, 1)).masked_fill(constant, 0)


def merge_pair(p: Moments, q: Moments) -> Moments:
    """The moments of the union of two disjoint sets, after Chan, Golub and LeVeque. (14), (15)"""
    count = p.count + q.count
    if p.mean is None or q.mean is None:
        return Moments(count, None, p.m2 + q.m2)
    delta = q.mean - p.mean
    mean = p.mean + delta * (q.count / count)
    return Moments(count, mean, p.m2 + q.m2 + delta.square() * (p.count * q.count / count))


def merge_along(p: Moments, dims: Sequence[int]) -> Moments:
    """Merge sets of equal size along `dims`, all at once. (14), (15)"""
    if not dims:
        return p
    assert p.mean is not None
    mean = average(p.mean, dims)
    m2 = total(p.m2, dims) + total((p.mean - mean).square(), dims) * p.count
    return Moments(p.count * prod([p.mean.shape[dim] for dim in dims]), mean, m2)
