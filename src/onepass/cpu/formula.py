"""The formula family: reduce, combine and apply with torch operations, on the four-axis view, block by block.

Blocks bound the temporaries, whatever the size of x. Sets larger than a block are reduced block by block, their moments merged, and read
again. All sums are taken in one fixed order.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import reduce
from itertools import product
from math import prod

import torch
from torch import Tensor

from ..moments import merge, moments, total
from ..plan import Plan
from ..problem import NormProblem, View, contiguous_stride, laid_out
from ..reference import Gradients, Result, affine, input_gradient, normalize

BLOCK = 1 << 19  # elements; the best of 2**15 to 2**20 on two x86-64 cores, 2026-11-15

# The four axes, with o and t split where the parameter index (1) needs it:
# o = (cycle, period, every), r, s, t = (channel, channel_run)
OUTER = (0, 1, 2)
REDUCED = (3, 5, 6)

Block = tuple[slice, ...] | None  # None: all of it


class _Frame:
    """The tensors of a problem in these seven axes, without a copy where the view allows, and the blocks to walk them in.

    `blocks` lists blocks of whole sets, each with the blocks in which it is read.
    """

    def __init__(self, problem: NormProblem) -> None:
        assert problem.x is not None and problem.y is not None and problem.param is not None
        self.problem, self.p, self.x_view, self.y_view = problem, problem.param, problem.x, problem.y
        self.acc = problem.acc
        self.count = self.x_view.reps * self.x_view.run
        cycle, (outer, reps, sets, run) = self.p.period * self.p.every, problem.x.sizes
        self.size = (outer // cycle, self.p.period, self.p.every, reps, sets, run // self.p.channel_run, self.p.channel_run)
        self.stat_size = tuple(1 if dim in REDUCED else n for dim, n in enumerate(self.size))
        varies = (0, self.p.a, 0, self.p.b, self.p.c, self.p.d, 0)
        self.param_size = tuple(n if stride else 1 for n, stride in zip(self.size, varies))
        self.param_stride = varies
        self.shared = tuple(dim for dim, n in enumerate(self.param_size) if n == 1)  # along these, elements share a parameter
        everything = [slice(0, n) for n in self.size]
        self.blocks = [(whole, list(_cut(whole, REDUCED))) for whole in _cut(everything, OUTER)]
        if len(self.blocks) == len(self.blocks[0][1]) == 1:
            self.blocks = [(None, [None])]

    def _split(self, tensor: Tensor, view: View) -> Tensor:
        o, r, s, t = view.strides
        cycle = self.p.period * self.p.every
        return tensor.as_strided(self.size, (o * cycle, o * self.p.every, o, r, s, t * self.p.channel_run, t))

    def x(self, x: Tensor) -> Tensor:
        return self.y(x) if self.problem.copied else self._split(x, self.x_view)

    def y(self, y: Tensor) -> Tensor:
        """A tensor of x's shape; one that is not laid out like y is copied."""
        return self._split(laid_out(y, self.problem.y_stride), self.y_view)

    def new_y(self, x: Tensor) -> Tensor:
        return torch.empty_strided(x.shape, self.problem.y_stride, dtype=x.dtype, device=x.device)

    def param(self, param: Tensor | None) -> Tensor | None:
        """Of size 1 where it does not vary."""
        return None if param is None else param.to(self.acc).contiguous().as_strided(self.param_size, self.param_stride)

    def new_gradient(self, param: Tensor | None, needed: bool) -> Tensor | None:
        return param.new_zeros(self.param_size, dtype=self.acc) if param is not None and needed else None

    def gradient(self, grad: Tensor | None, param: Tensor | None) -> Tensor | None:
        if grad is None or param is None:
            return None
        dense = torch.empty(param.shape, dtype=param.dtype, device=param.device)
        dense.as_strided(self.param_size, self.param_stride).copy_(grad)
        return dense

    def stat(self, stat: Tensor) -> Tensor:
        dense = laid_out(stat.to(self.acc).reshape(self.problem.stat_shape), self.problem.stat_stride)
        return dense.as_strided(self.stat_size, contiguous_stride(self.stat_size))

    def kept(self, stat: Tensor) -> Tensor:
        """A statistic in seven axes, back in the shape of the kept axes."""
        return stat.as_strided(self.problem.stat_shape, self.problem.stat_stride)


def _cut(region: Sequence[slice], dims: Sequence[int]) -> Iterator[tuple[slice, ...]]:
    """Cut a region along `dims`, outermost first, until a block has at most BLOCK elements or nothing is left to cut."""
    size = prod(cut.stop - cut.start for cut in region)
    cuts = [[cut] for cut in region]
    for dim in dims:
        if size <= BLOCK:
            break
        start, stop = region[dim].start, region[dim].stop
        below = size // (stop - start)
        step = min(max(BLOCK // below, 1), stop - start)
        cuts[dim] = [slice(i, min(i + step, stop)) for i in range(start, stop, step)]
        size = below * step
    return product(*cuts)


def _at(tensor: Tensor, block: Block) -> Tensor:
    """The part of a tensor that belongs to a block; statistics and parameters are of size 1 where they do not vary."""
    if block is None:
        return tensor
    return tensor[tuple(slice(None) if n == 1 else cut for n, cut in zip(tensor.shape, block))]


def _maybe(tensor: Tensor | None, block: Block) -> Tensor | None:
    return None if tensor is None else _at(tensor, block)


def _plus(sum: Tensor | None, term: Tensor) -> Tensor:
    return term if sum is None else sum + term


def _spread(stat: Tensor, x: Tensor) -> Tensor:
    """A statistic, repeated along `run` where rows repeat: a short run would be a short inner loop."""
    return stat if x.shape[3] == 1 else stat.expand(*stat.shape[:5], *x.shape[5:]).contiguous()


def _centered(x: Tensor, mean: Tensor | None) -> Tensor:
    return x if mean is None else x - _spread(mean, x)


def _apply(x: Tensor, mean: Tensor | None, rstd: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    if x.shape[3] == 1:
        return affine(normalize(x, mean, rstd), weight, bias)
    scale = affine(_spread(rstd, x), weight, None)  # one for all the rows that repeat
    return affine(_centered(x, mean), scale, bias)


def forward(plan: Plan, problem: NormProblem):
    frame, spec = _Frame(problem), problem.spec

    def launch(x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor | None, var: Tensor | None) -> Result:
        y = frame.new_y(x)
        x7, y7, w7, b7 = frame.x(x), frame.y(y), frame.param(weight), frame.param(bias)
        var7 = frame.stat(var) if var is not None else x.new_empty(frame.stat_size, dtype=frame.acc)
        rstd7 = torch.empty_like(var7)
        mean7 = frame.stat(mean) if mean is not None else torch.empty_like(var7) if spec.centered else None
        for whole, parts in frame.blocks:
            if not problem.given:
                blocks = (_at(x7, part).to(frame.acc) for part in parts)
                taken = reduce(merge, (moments(x_, REDUCED, spec.centered, _centered) for x_ in blocks))
                _at(var7, whole).copy_(taken.var)
                if mean7 is not None and taken.mean is not None:
                    _at(mean7, whole).copy_(taken.mean)
            torch.rsqrt(_at(var7, whole) + spec.eps, out=_at(rstd7, whole))
            for part in parts:
                x_ = _at(x7, part).to(frame.acc)
                y_ = _apply(x_, _maybe(mean7, part), _at(rstd7, part), _maybe(w7, part), _maybe(b7, part))
                _at(y7, part).copy_(y_)
        return Result(y, None if mean7 is None else frame.kept(mean7), frame.kept(rstd7), frame.kept(var7))

    return launch


def backward(plan: Plan, problem: NormProblem):
    frame = _Frame(problem)

    def launch(
        dy: Tensor,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        mean: Tensor | None,
        rstd: Tensor,
        needs: Sequence[bool],
    ) -> Gradients:
        x7, dy7, w7 = frame.x(x), frame.y(dy), frame.param(weight)
        mean7, rstd7 = None if mean is None else frame.stat(mean), frame.stat(rstd)
        dx = frame.new_y(x) if needs[0] else None
        dx7 = None if dx is None else frame.y(dx)
        dw7, db7 = frame.new_gradient(weight, needs[1]), frame.new_gradient(bias, needs[2])

        def load(part: Block) -> tuple[Tensor, Tensor, Tensor]:
            x_ = _at(x7, part).to(frame.acc)
            x_hat = _centered(x_, _maybe(mean7, part)) * _spread(_at(rstd7, part), x_)
            dy_ = _at(dy7, part).to(frame.acc)
            return x_hat, dy_, affine(dy_, _maybe(w7, part), None)

        for _, parts in frame.blocks:
            c1 = c2 = loaded = None
            for part in parts:
                loaded = load(part)
                x_hat, dy_, wdy = loaded
                if dw7 is not None:
                    _at(dw7, part).add_(total(dy_ * x_hat, frame.shared))  # (10)
                if db7 is not None:
                    _at(db7, part).add_(total(dy_, frame.shared))  # (11)
                if dx7 is not None and not problem.given:
                    c1 = _plus(c1, total(wdy, REDUCED) / frame.count) if problem.spec.centered else None  # (6)
                    c2 = _plus(c2, total(wdy * x_hat, REDUCED) / frame.count)  # (7)
            for part in parts if dx7 is not None else ():
                x_hat, _, wdy = loaded if loaded and len(parts) == 1 else load(part)  # a single block is still at hand
                stats = (None if stat is None else _spread(stat, wdy) for stat in (_at(rstd7, part), c1, c2))
                _at(dx7, part).copy_(input_gradient(wdy, x_hat, *stats))  # pyright: ignore[reportArgumentType]
        return dx, frame.gradient(dw7, weight), frame.gradient(db7, bias)

    return launch
