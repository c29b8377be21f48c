"""Moments of a set of elements, (count, mean, M2), and how they are taken and merged.

`mean` is None for norms that are not centered; M2 is then the sum of squares. Equations cite docs/theory.md.
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
        """The mean as it is subtracted: 0 where x - mean may overflow and rstd is 0 in any case. (44)"""
        if self.mean is None:
            return None
        large = 2.0**-25 * torch.finfo(self.mean.dtype).max
        return self.mean.masked_fill((self.m2 == torch.inf) & (self.mean.abs() > large), 0.0)


PIECE = 1 << 14  # elements; torch shares the sum of twice as many among its threads, and their number would decide the last bits


def total(x: Tensor, dims: Sequence[int]) -> Tensor:
    """The sum over `dims`, which stay as dimensions of one. Outer ones first: each sum then runs along contiguous memory."""
    for dim in dims:
        if x.shape[dim] == x.numel() > PIECE:  # to one number
            x = torch.cat([piece.sum(dim, keepdim=True) for piece in x.split(PIECE, dim)], dim)
        if x.shape[dim] != 1:
            x = x.sum(dim, keepdim=True)
    return x


def average(x: Tensor, dims: Sequence[int]) -> Tensor:
    return total(x, dims) / prod([x.shape[dim] for dim in dims])


Spread = Callable[[Tensor, Tensor], Tensor]  # a statistic, as it is subtracted from x


DOWN = 2.0**-40  # elements are multiplied by it before they are summed: it changes no digit, and there are fewer of them in a set


def middle(x: Tensor, dims: Sequence[int], spread: Spread = lambda stat, x: stat) -> Tensor:
    """The mean over `dims`. If all elements are equal, it is exactly their value, and it overflows for no finite x. (43)"""
    count = prod([x.shape[dim] for dim in dims])
    if not count:
        return average(x, dims)
    first = x.detach()  # the mean does not depend on it, but for rounding
    for dim in dims:
        first = first.narrow(dim, 0, 1)
    away = torch.add(spread(first * -DOWN, x), x, alpha=DOWN)
    return (first * DOWN + total(away, dims) / count) / DOWN


def moments(x: Tensor, dims: Sequence[int], centered: bool = True, spread: Spread = lambda stat, x: stat) -> Moments:
    """Two passes over x: the mean, then the squares of what is left. (2), (3)"""
    count = prod([x.shape[dim] for dim in dims])
    mean = middle(x, dims, spread) if centered else None
    return Moments(count, mean, total((x if mean is None else x - spread(mean, x)).square(), dims))


def inverse_deviation(var: Tensor, eps: float) -> Tensor:
    """rstd of a computed variance, (4). Without eps, a constant set has 0, as in torch: x_hat is then 0 and not 0/0. (44)"""
    if eps:
        return torch.rsqrt(var + eps)
    constant = var < torch.finfo(var.dtype).tiny
    return torch.rsqrt(var.masked_fill(constant, 1)).masked_fill(constant, 0)


def merge_pair(p: Moments, q: Moments) -> Moments:
    """The moments of two disjoint sets taken together, after Chan, Golub and LeVeque. (14), (15)"""
    count = p.count + q.count
    if p.mean is None or q.mean is None:
        return Moments(count, None, p.m2 + q.m2)
    delta = q.mean - p.mean
    mean = p.mean + delta * (q.count / count)
    return Moments(count, mean, p.m2 + q.m2 + delta.square() * (p.count * q.count / count))


def merge_along(p: Moments, dims: Sequence[int]) -> Moments:
    """Sets of equal size along `dims` taken together: (14), (15) for all of them at once."""
    if not dims:
        return p
    assert p.mean is not None
    mean = average(p.mean, dims)
    m2 = total(p.m2, dims) + total((p.mean - mean).square(), dims) * p.count
    return Moments(p.count * prod([p.mean.shape[dim] for dim in dims]), mean, m2)
