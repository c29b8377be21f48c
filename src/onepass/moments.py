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


def merge(p: Moments, q: Moments) -> Moments:
    """The moments of two disjoint sets taken together, after Chan, Golub and LeVeque. (14), (15)"""
    count = p.count + q.count
    if p.mean is None or q.mean is None:
        return Moments(count, None, p.m2 + q.m2)
    delta = q.mean - p.mean
    mean = p.mean + delta * (q.count / count)
    return Moments(count, mean, p.m2 + q.m2 + delta.square() * (p.count * q.count / count))


def together(p: Moments, dims: Sequence[int]) -> Moments:
    """Sets of equal size along `dims` taken together: (14), (15) for all of them at once."""
    if not dims:
        return p
    assert p.mean is not None
    mean = average(p.mean, dims)
    m2 = total(p.m2, dims) + total((p.mean - mean).square(), dims) * p.count
    return Moments(p.count * prod([p.mean.shape[dim] for dim in dims]), mean, m2)


@dataclass(frozen=True)
class Mix:
    """Statistics as a weighted mean of several norms', all made from the moments of the same sets.

    `means` and `variances` are the norms', of size 1 along the dimensions `over` which each takes the sets together; None in `over`
    marks statistics that were given, not computed.
    """

    sets: Moments
    over: list[list[int] | None]
    means: list[Tensor]
    variances: list[Tensor]
    mean_weight: Tensor
    var_weight: Tensor

    @staticmethod
    def of(sets: Moments, over: Sequence[list[int]], weights: tuple[Tensor, Tensor], last: tuple[Tensor, Tensor] | None) -> Mix:
        """`last`, if any, are given statistics that stand for those of the last norm."""
        computed = [together(sets, dims) for dims in (over if last is None else over[:-1])]
        means, variances = [p.mean for p in computed if p.mean is not None], [p.var for p in computed]
        dims: list[list[int] | None] = [*over]
        if last is not None:
            shape = [1 if dim in over[-1] else n for dim, n in enumerate(sets.m2.shape)]
            dims[-1] = None
            means.append(last[0].to(sets.m2.dtype).reshape(shape))
            variances.append(last[1].to(sets.m2.dtype).reshape(shape))
        return Mix(sets, dims, means, variances, *weights)

    @property
    def mean(self) -> Tensor:
        """(24)"""
        return _weighted(self.mean_weight, self.means).expand(self.sets.m2.shape)

    @property
    def var(self) -> Tensor:
        """(25)"""
        return _weighted(self.var_weight, self.variances).expand(self.sets.m2.shape)

    def gradient(self, c1: Tensor, c2: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """c1 and c2 of the sets, (6) and (7), as (8) needs them for the mix, and the gradients of the weights. (26)-(30)"""
        assert self.sets.mean is not None
        dmean, dvar = -rstd * c1, -0.5 * rstd.square() * c2  # (26)
        to_mean, to_var = torch.zeros_like(dmean), torch.zeros_like(dvar)
        for i, dims in enumerate(self.over):
            if dims is not None:
                shared = self.var_weight[i] * average(dvar, dims)
                to_mean = to_mean + self.mean_weight[i] * average(dmean, dims) + 2 * shared * (self.sets.mean - self.means[i])  # (27)
                to_var = to_var + shared  # (28)
        mixed_c1 = -(to_mean + 2 * to_var * (self.mean - self.sets.mean)) / rstd  # (29)
        mixed_c2 = -2 * to_var / rstd.square()
        if not self.sets.count:  # of no elements, the moments are nan, and nothing depends on them
            return mixed_c1, mixed_c2, torch.zeros_like(self.mean_weight), torch.zeros_like(self.var_weight)
        dmean_weight, dvar_weight = (
            torch.stack([total(d * part, range(d.dim())).sum(-1).sum() * self.sets.count for part in parts]).to(weight.dtype)  # (30)
            for d, parts, weight in ((dmean, self.means, self.mean_weight), (dvar, self.variances, self.var_weight))
        )
        return mixed_c1, mixed_c2, dmean_weight, dvar_weight


def _weighted(weights: Tensor, parts: Sequence[Tensor]) -> Tensor:
    mixed = weights[0] * parts[0]
    for i in range(1, len(parts)):
        mixed = mixed + weights[i] * parts[i]
    return mixed
