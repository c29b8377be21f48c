"""Find how a norm sees memory: x as the four axes x[outer, reps, sets, run], and which parameter each element uses.

Only shapes and strides are read, no data. A *set* is the elements that share one mean and variance: all `reps` and `run` of one
(outer, sets). A *run* is consecutive elements in memory. The index of a parameter has the form of equation (1) of docs/theory.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations_with_replacement, pairwise
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from .spec import Axis


@dataclass(frozen=True)
class View:
    """Sizes and strides of memory seen as x[outer, reps, sets, run].

    Statistics are computed over `reps` and `run`, for each index of `outer` and `sets`. `run` has stride 1.
    """

    outer: int
    reps: int
    sets: int
    run: int
    strides: tuple[int, int, int, int]

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        return self.outer, self.reps, self.sets, self.run


@dataclass(frozen=True)
class ParamMap:
    """The coefficients of equation (1), which gives the index of the parameter that element (o, r, s, t) of a view uses."""

    every: int
    period: int
    a: int
    b: int
    c: int
    channel_run: int
    d: int

    def per_row(self, view: View) -> int:
        """Return how many different parameters one run of elements uses."""
        return view.run // self.channel_run if self.d else 1

    def index(self, o: int, r: int, s: int, t: int) -> int:
        """Return the index of the parameter of element (o, r, s, t), by equation (1)."""
        return (o // self.every % self.period) * self.a + r * self.b + s * self.c + t // self.channel_run * self.d

    def largest(self, reps: int, sets: int, run: int) -> int:
        """Return the largest index that `index` can return for axes of these sizes."""
        return self.index(self.every * self.period - 1, reps - 1, sets - 1, run - 1)

    def __str__(self) -> str:
        terms = []
        if self.a:
            o = f"o // {self.every}" if self.every > 1 else "o"
            terms.append((f"({o} % {self.period})", self.a))
        terms += [("r", self.b), ("s", self.c)]
        terms.append((f"(t // {self.channel_run})" if self.channel_run > 1 else "t", self.d))
        return " + ".join(name if k == 1 else f"{name}·{k}" for name, k in terms if k) or "0"


def dense_stride(x: Tensor) -> tuple[int, ...]:
    """Return the strides of `torch.empty_like(x)`."""
    return torch.empty_like(x, device="meta").stride()


def contiguous_stride(shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(prod(max(n, 1) for n in shape[i + 1 :]) for i in range(len(shape)))


def laid_out(x: Tensor, stride: Sequence[int]) -> Tensor:
    """Return x itself if it has these strides, otherwise a copy that has them."""
    if x.stride() == stride:
        return x
    return torch.empty_strided(x.shape, stride, dtype=x.dtype, device=x.device).copy_(x)


class _Placed(NamedTuple):
    """An axis with more than one element. `x`, `y`, `param` and `modulation` are its strides in these tensors."""

    size: int
    x: int
    y: int
    reduced: bool
    param: int
    modulation: int


def stat_stride(axes: Sequence[Axis], y_stride: Sequence[int]) -> tuple[int, ...]:
    """Return strides that store the statistics densely, in the order of y's memory: contiguous as (outer, sets) of the view."""
    kept = [axis for axis in axes if not axis.reduced]
    strides, step = [0] * len(kept), 1
    for i in sorted(range(len(kept)), key=lambda i: (y_stride[kept[i].dim] * kept[i].within, -i)):
        strides[i] = step
        step *= max(kept[i].size, 1)
    return tuple(strides)


_Views = tuple[View, View, ParamMap, ParamMap]  # the views of x and y, and the maps of (weight, bias) and (scale, shift)


def find_view(axes: Sequence[Axis], x: Sequence[int], y: Sequence[int]) -> _Views | None:
    """Cut the axes, sorted by stride, into outer, reps, sets and run, and return the views and maps of the best cut.

    `x` and `y` are the strides of these tensors. Return None if no cut fits, or if an axis has no elements.
    """
    if any(axis.size == 0 for axis in axes):
        return None
    placed = [_Placed(a.size, x[a.dim] * a.within, y[a.dim] * a.within, a.reduced, a.param, a.modulation) for a in axes if a.size > 1]
    placed.sort(key=lambda axis: axis.y, reverse=True)
    best, found = None, None
    for i, j, k in combinations_with_replacement(range(len(placed) + 1), 3):
        cut = placed[:i], placed[i:j], placed[j:k], placed[k:]
        view = _fit(cut)
        if view is None:
            continue
        # Prefer a long run, then few of the four axes in use, then a large outer.
        rank = (view[0].run, -sum(map(bool, cut)), view[0].outer)
        if best is None or rank > best:
            best, found = rank, view
    return found


def _fit(cut: tuple[list[_Placed], ...]) -> _Views | None:
    outer, reps, sets, run = cut
    if any(axis.reduced for axis in outer + sets) or not all(axis.reduced for axis in reps + run):
        return None
    sizes = [prod(axis.size for axis in part) for part in cut]
    x = [_linear([(axis.size, axis.x) for axis in part]) for part in cut]
    y = [_linear([(axis.size, axis.y) for axis in part]) for part in cut]
    if None in x or None in y or (run and not x[3] == y[3] == 1):
        return None
    param = _param_map([[(axis.size, axis.param) for axis in part] for part in cut])
    modulation = _param_map([[(axis.size, axis.modulation) for axis in part] for part in cut])
    if param is None or modulation is None:
        return None
    x_view, y_view = (View(*sizes, strides=tuple(s)) for s in (x, y))  # pyright: ignore[reportArgumentType]
    return x_view, y_view, param, modulation


def _param_map(cut: Sequence[list[tuple[int, int]]]) -> ParamMap | None:
    """Return the map from elements to parameters, or None if it does not have the form of equation (1).

    `cut` lists, for each of outer, reps, sets and run, its axes as (size, stride in the parameter).
    """
    outer, reps, sets, run = cut
    a, b, c, d = _periodic(outer), _linear(reps), _linear(sets), _periodic(run)
    if a is None or b is None or c is None or d is None or (d[2] and d[0] * d[1] != prod(size for size, _ in run)):
        return None
    return ParamMap(every=a[0], period=a[1], a=a[2], b=b, c=c, channel_run=d[0] if d[2] else 1, d=d[2])


def _linear(axes: list[tuple[int, int]]) -> int | None:
    """Return the stride of axes that are joined into one axis, or None if the elements are not evenly spaced.

    The axes are (size, stride), outermost first. Without axes, the result is 0.
    """
    if any(stride != size * below for (_, stride), (size, below) in pairwise(axes)):
        return None
    return axes[-1][1] if axes else 0


def _periodic(axes: list[tuple[int, int]]) -> tuple[int, int, int] | None:
    """Return (every, period, stride), so that index i of the joined axes uses parameter (i // every % period)·stride.

    The axes are (size, stride in the parameter), outermost first. Return None if the parameters do not have this form.
    """
    used = [i for i, (_, stride) in enumerate(axes) if stride]
    if not used:
        return 1, 1, 0
    middle = axes[used[0] : used[-1] + 1]
    stride = _linear(middle)
    if stride is None or any(not stride for _, stride in middle):
        return None
    return prod(size for size, _ in axes[used[-1] + 1 :]), prod(size for size, _ in middle), stride
