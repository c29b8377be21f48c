"""A norm bound to memory: x seen as four axes, and which parameter belongs to which element.

Memory layout lives here and nowhere else. Nothing here touches data: `bind` reads shapes, strides and dtypes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import combinations_with_replacement, pairwise
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from .spec import Axis, NormSpec


@dataclass(frozen=True)
class View:
    """Memory as x[outer, reps, sets, run]: `reps` and `run` are reduced, `outer` and `sets` are kept. `run` has stride 1."""

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
    """Which parameter the element (o, r, s, t) uses: (1) in docs/theory.md."""

    every: int
    period: int
    a: int
    b: int
    c: int
    channel_run: int
    d: int

    def per_row(self, view: View) -> int:
        """How many parameters one row of `run` elements uses."""
        return view.run // self.channel_run if self.d else 1

    def index(self, o: int, r: int, s: int, t: int) -> int:
        """The definition, (1); kernels realise it by strides."""
        return (o // self.every % self.period) * self.a + r * self.b + s * self.c + t // self.channel_run * self.d

    def largest(self, reps: int, sets: int, run: int) -> int:
        """The largest index into the parameter."""
        return self.index(self.every * self.period - 1, reps - 1, sets - 1, run - 1)

    def __str__(self) -> str:
        terms = []
        if self.a:
            o = f"o // {self.every}" if self.every > 1 else "o"
            terms.append((f"({o} % {self.period})", self.a))
        terms += [("r", self.b), ("s", self.c)]
        terms.append((f"(t // {self.channel_run})" if self.channel_run > 1 else "t", self.d))
        return " + ".join(name if k == 1 else f"{name}·{k}" for name, k in terms if k) or "0"


class Extras(NamedTuple):
    """The operands that few calls have, beside x, weight, bias and given statistics."""

    residual: Tensor | None = None  # added to x first; in a backward, what is added to dx last: the gradient that arrives at the sum
    scale: Tensor | None = None  # modulation: (1 + scale) and shift after the affine step
    shift: Tensor | None = None
    mean_weight: Tensor | None = None  # of a mix: the norms' weights, which sum to one
    var_weight: Tensor | None = None
    running_mean: Tensor | None = None  # of a mix: statistics that stand for the last norm's
    running_var: Tensor | None = None


NONE = Extras()


@dataclass(frozen=True)
class NormProblem:
    """A spec bound to tensors. Two calls with equal problems run the same plan.

    With a residual, what is normalized is the sum: shape, dtype, strides and views are the sum's.
    """

    spec: NormSpec
    shape: tuple[int, ...]
    dtype: torch.dtype
    weight: torch.dtype | None
    bias: torch.dtype | None
    given: bool  # mean and variance are operands, not computed: evaluation mode
    last_given: bool  # the same, of the last norm of a mix
    track: bool  # the variance is wanted beside rstd, for running statistics
    x: View | None  # None: this memory has no four-axis view
    y: View | None
    stride: tuple[int, ...]  # of x
    y_stride: tuple[int, ...]  # of y and dx: dense, in the order of x's memory
    param: ParamMap | None
    stat_shape: tuple[int, ...]  # of mean and rstd: the kept axes, in logical order
    stat_stride: tuple[int, ...]  # dense, in the order of x's memory
    copied: str  # why x must be copied before this view exists, or ""
    scale: torch.dtype | None
    shift: torch.dtype | None
    modulation: ParamMap | None  # which scale and shift an element uses
    addends: tuple[torch.dtype, torch.dtype] | None  # of x and residual

    @property
    def acc(self) -> torch.dtype:
        """The dtype of sums and statistics."""
        return accumulator(self.dtype)

    @property
    def affine(self) -> bool:
        return self.weight is not None or self.bias is not None

    @property
    def tail(self) -> bool:
        """Whether anything follows the affine step."""
        return self.scale is not None or self.shift is not None or bool(self.spec.activation)

    @property
    def from_y(self) -> bool:
        """Whether the backward is handed y in the place of x."""
        return self.spec.from_y

    def seen(self, direction: str) -> NormProblem:
        """The problem that is planned for a direction: in a backward that is handed y, x lies as y does."""
        if direction == "forward" or not self.from_y:
            return self
        return replace(self, x=self.y, stride=self.y_stride, copied="")

    @property
    def param_size(self) -> int:
        """How many elements weight and bias have."""
        return prod(axis.size for axis in self.spec.factor(self.shape) if axis.param)

    @property
    def modulation_size(self) -> int:
        """How many elements scale and shift have."""
        return prod(axis.size for axis in self.spec.factor(self.shape) if axis.modulation)

    def min_bytes(self, direction: str) -> int:
        """Bytes any kernel must move: x read and y written, or x and dy read and dx written; and each parameter once.

        With a residual both addends are read and the sum is written too; its backward reads the sum, and the gradient that arrives there.
        """
        params = sum(dtype.itemsize for dtype in (self.weight, self.bias) if dtype) * self.param_size
        params += sum(dtype.itemsize for dtype in (self.scale, self.shift) if dtype) * self.modulation_size
        element = self.dtype.itemsize * (2 if direction == "forward" else 3)
        if self.addends:
            element += sum(dtype.itemsize for dtype in self.addends) if direction == "forward" else self.dtype.itemsize
        return prod(self.shape) * element + params


def accumulator(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def bind(
    spec: NormSpec,
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    given: bool = False,
    track: bool = False,
    extras: Extras = NONE,
) -> NormProblem:
    """Bind a spec to tensors.

    Example: `bind(spec.group_norm(32), torch.empty(2, 320, 8, 8)).x` is `View(outer=64, reps=1, sets=1, run=640, ...)`.
    """
    addends = None
    if extras.residual is not None:
        addends = x.dtype, extras.residual.dtype
        # The sum: dense, in the order of x's memory.
        x = torch.empty_like(x, dtype=torch.promote_types(x.dtype, extras.residual.dtype), device="meta")
    shape, stride, y_stride = tuple(x.shape), x.stride(), dense_stride(x)
    axes = spec.factor(shape)
    found, copied = _view(axes, stride, y_stride), ""
    if found is None and stride != y_stride:
        found, copied = _view(axes, y_stride, y_stride), f"no four-axis view of strides {tuple(stride)}"
    x_view, y_view, param, modulation = found or (None, None, None, None)
    return NormProblem(
        spec=spec,
        shape=shape,
        dtype=x.dtype,
        weight=None if weight is None else weight.dtype,
        bias=None if bias is None else bias.dtype,
        given=given,
        last_given=extras.running_mean is not None,
        track=track,
        x=x_view,
        y=y_view,
        stride=stride,
        y_stride=y_stride,
        param=param,
        stat_shape=tuple(spec.kept_shape(shape)),
        stat_stride=_stat_stride(axes, y_stride),
        copied=copied if found else "",
        scale=None if extras.scale is None else extras.scale.dtype,
        shift=None if extras.shift is None else extras.shift.dtype,
        modulation=modulation,
        addends=addends,
    )


def summed_like(x: Tensor, residual: Tensor | None) -> Tensor:
    """x; with a residual, a tensor like their sum in all but memory and strides."""
    return x if residual is None else x.new_empty((), dtype=torch.promote_types(x.dtype, residual.dtype)).expand(x.shape)


def dense_stride(x: Tensor) -> tuple[int, ...]:
    """The strides of `torch.empty_like(x)`."""
    return torch.empty_like(x, device="meta").stride()


def contiguous_stride(shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(prod(max(n, 1) for n in shape[i + 1 :]) for i in range(len(shape)))


def laid_out(x: Tensor, stride: Sequence[int]) -> Tensor:
    """x with these dense strides: itself, or a copy."""
    if x.stride() == stride:
        return x
    return torch.empty_strided(x.shape, stride, dtype=x.dtype, device=x.device).copy_(x)


class _Placed(NamedTuple):
    """An axis of more than one element, placed in the memory of x, y, parameters and modulation."""

    size: int
    x: int
    y: int
    reduced: bool
    param: int
    modulation: int


def _stat_stride(axes: Sequence[Axis], y_stride: Sequence[int]) -> tuple[int, ...]:
    """Dense strides for the kept axes, ordered as x orders them: the statistics are then contiguous as (outer, sets)."""
    kept = [axis for axis in axes if not axis.reduced]
    strides, step = [0] * len(kept), 1
    for i in sorted(range(len(kept)), key=lambda i: (y_stride[kept[i].dim] * kept[i].within, -i)):
        strides[i] = step
        step *= max(kept[i].size, 1)
    return tuple(strides)


_Views = tuple[View, View, ParamMap, ParamMap]  # of x, y, parameters, modulation


def _view(axes: Sequence[Axis], x: Sequence[int], y: Sequence[int]) -> _Views | None:
    """The best way to cut the axes, in memory order, into outer, reps, sets and run; None where there is no way."""
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
        # A long run first, then few axes, then outer rather than sets.
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
    """The map (1) of axes given as (size, stride into the parameter); None if the index is not of that form."""
    outer, reps, sets, run = cut
    a, b, c, d = _periodic(outer), _linear(reps), _linear(sets), _periodic(run)
    if a is None or b is None or c is None or d is None or (d[2] and d[0] * d[1] != prod(size for size, _ in run)):
        return None
    return ParamMap(every=a[0], period=a[1], a=a[2], b=b, c=c, channel_run=d[0] if d[2] else 1, d=d[2])


def _linear(axes: list[tuple[int, int]]) -> int | None:
    """The stride of consecutive (size, stride) axes taken as one; None if they are not evenly spaced."""
    if any(stride != size * below for (_, stride), (size, below) in pairwise(axes)):
        return None
    return axes[-1][1] if axes else 0


def _periodic(axes: list[tuple[int, int]]) -> tuple[int, int, int] | None:
    """(every, period, stride) such that index i along these axes uses parameter (i // every % period)·stride; None if no such."""
    used = [i for i, (_, stride) in enumerate(axes) if stride]
    if not used:
        return 1, 1, 0
    middle = axes[used[0] : used[-1] + 1]
    stride = _linear(middle)
    if stride is None or any(not stride for _, stride in middle):
        return None
    return prod(size for size, _ in axes[used[-1] + 1 :]), prod(size for size, _ in middle), stride
