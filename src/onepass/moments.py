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


def total(x: Tensor, dims: Sequence[int]) -> Tensor:
    """The sum over `dims`, which stay as dimensions of one. Outer ones first: each sum then runs along contiguous memory."""
    for dim in dims:
        if x.shape[dim] != 1:
            x = x.sum(dim, keepdim=True)
    return x


def average(x: Tensor, dims: Sequence[int]) -> Tensor:
    return total(x, dims) / prod([x.shape[dim] for dim in dims])


def moments(x: Tensor, dims: Sequence[int], centered: bool = True, subtract: Callable[[Tensor, Tensor], Tensor] = torch.sub) -> Moments:
    """Two passes over x: the mean, then the squares of what is left. (2), (3)"""
    count = prod([x.shape[dim] for dim in dims])
    mean = average(x, dims) if centered else None
    return Moments(count, mean, total((x if mean is None else subtract(x, mean)).square(), dims))


def merge(p: Moments, q: Moments) -> Moments:
    """The moments of two disjoint sets taken together, after Chan, Golub and LeVeque. (14), (15)"""
    count = p.count + q.count
    if p.mean is None or q.mean is None:
        return Moments(count, None, p.m2 + q.m2)
    delta = q.mean - p.mean
    mean = p.mean + delta * (q.count / count)
    return Moments(count, mean, p.m2 + q.m2 + delta.square() * (p.count * q.count / count))
