"""Compute and merge the moments of sets: (count, mean, M2). A *set* is the elements that share one mean and variance.

M2 is the sum of squared differences from the mean. If a norm is not centered, `mean` is None and M2 is the sum of squares.
Numbers in parentheses are equations of docs/theory.md.
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
        """The mean to subtract from x, or None for norms without a mean.

        It is 0 where x - mean could overflow. There rstd is 0, equation (44), and infinity·rstd would be NaN.
        """
        if self.mean is None:
            return None
        large = 2.0**-25 * torch.finfo(self.mean.dtype).max
        return self.mean.masked_fill((self.m2 == torch.inf) & (self.mean.abs() > large), 0.0)


PIECE = 1 << 14  # elements summed at once; torch sums 2·PIECE or more in several threads, and the last bits depend on how many


def total(x: Tensor, dims: Sequence[int]) -> Tensor:
    """Return the sum over `dims`, with keepdim=True.

    The dimensions are summed one by one. List the outer ones first, so that each sum runs along contiguous memory.
    """
    for dim in dims:
        if x.shape[dim] == x.numel() > PIECE:  # one sum of all elements, which torch would split among threads
            x = torch.cat([piece.sum(dim, keepdim=True) for piece in x.split(PIECE, dim)], dim)
        if x.shape[dim] != 1:
            x = x.sum(dim, keepdim=True)
    return x


def average(x: Tensor, dims: Sequence[int]) -> Tensor:
    return total(x, dims) / prod([x.shape[dim] for dim in dims])


Spread = Callable[[Tensor, Tensor], Tensor]  # (statistic, x) -> the statistic, expanded so that x - statistic is fast


DOWN = 2.0**-40  # elements are multiplied by this, so that their sum does not overflow; a power of two changes no digit


def middle(x: Tensor, dims: Sequence[int], spread: Spread = lambda stat, x: stat) -> Tensor:
    """Return the mean over `dims`, by equation (43). It is exact if all elements are equal, and finite if x is."""
    count = prod([x.shape[dim] for dim in dims])
    if not count:
        return average(x, dims)
    first = x.detach()  # needs no gradient: apart from rounding, the mean does not depend on `first`
    for dim in dims:
        first = first.narrow(dim, 0, 1)
    away = torch.add(spread(first * -DOWN, x), x, alpha=DOWN)
    return (first * DOWN + total(away, dims) / count) / DOWN


def moments(x: Tensor, dims: Sequence[int], centered: bool = True, spread: Spread = lambda stat, x: stat) -> Moments:
    """Return the moments over `dims`. Two passes over x compute the mean (2), then the sum of squared differences (3)."""
    count = prod([x.shape[dim] for dim in dims])
    mean = middle(x, dims, spread) if centered else None
    return Moments(count, mean, total((x if mean is None else x - spread(mean, x)).square(), dims))


def inverse_deviation(var: Tensor, eps: float) -> Tensor:
    """Return rstd = 1/sqrt(var + eps), equation (4), for a variance that was computed, not given.

    If eps is 0, the rstd of a constant set is 0, equation (44). Then x_hat is 0, as in torch's batch_norm, and not 0/0.
    """
    if eps:
        return torch.rsqrt(var + eps)
    constant = var < torch.finfo(var.dtype).tiny
    return torch.rsqrt(var.masked_fill(constant, 1)).masked_fill(constant, 0)


def merge_pair(p: Moments, q: Moments) -> Moments:
    """Return the moments of the union of two disjoint sets, by equations (14) and (15), after Chan, Golub and LeVeque."""
    count = p.count + q.count
    if p.mean is None or q.mean is None:
        return Moments(count, None, p.m2 + q.m2)
    delta = q.mean - p.mean
    mean = p.mean + delta * (q.count / count)
    return Moments(count, mean, p.m2 + q.m2 + delta.square() * (p.count * q.count / count))


def merge_along(p: Moments, dims: Sequence[int]) -> Moments:
    """Return the moments of the union of all sets along `dims`, by equations (14) and (15). The sets must have equal counts."""
    if not dims:
        return p
    assert p.mean is not None
    mean = average(p.mean, dims)
    away = p.mean - mean
    m2 = total(torch.addcmul(p.m2, away, away, value=p.count), dims)
    return Moments(p.count * prod([p.mean.shape[dim] for dim in dims]), mean, m2)
