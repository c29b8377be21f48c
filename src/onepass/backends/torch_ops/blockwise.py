"""The blockwise family: torch operations on the view x[outer, reps, sets, run] of core/view.py, block by block.

Blocks limit the size of temporary tensors. A *set* is the elements that share one mean and variance: `reps` runs of `run`
consecutive elements. If a set is larger than a block, the moments of its blocks are merged, and its blocks are read again to be
normalized. Sums are always taken in the same order.
Numbers in parentheses are equations of docs/theory.md.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import reduce
from itertools import pairwise, product
from math import prod

import torch
from torch import Tensor

from onepass.backends.cost import torch_cost
from onepass.backends.family import Backward, Direction, Family, Forward, Launches
from onepass.core.arithmetic import PostAffine, affine, affine_inverse, input_gradient, normalize
from onepass.core.device import Device
from onepass.core.mixing import MixedStatistics, MixOperands, mix_statistics
from onepass.core.moments import Moments, inverse_deviation, merge_pair, moments, total
from onepass.core.operands import Gradients, Needs, OptionalOperands, Result, SavedTensors
from onepass.core.problem import NormProblem
from onepass.core.view import ParamMap, View, contiguous_stride, laid_out

BLOCK = 1 << 19  # most elements in a block; the fastest of 2**15 to 2**20 on two x86-64 cores (2026-11-15)


Block = tuple[slice, ...] | None  # a slice for each dimension; None for the whole tensor


def _factors(extent: int, *cuts: int) -> list[tuple[int, int]]:
    """Split an axis of `extent` elements into factors, and return them as (size, step), outermost first.

    The steps are 1 and the `cuts`. Each cut must divide the next larger one. Example: `_factors(12, 3)` is [(4, 3), (3, 1)].
    """
    ends = sorted({1, extent, *cuts})
    return [(above // below, below) for below, above in reversed(list(pairwise(ends)))] or [(1, 1)]


class _Indexed:
    """The sizes and strides of a parameter on the axes of `_Frame`. Its size is 1 along axes where it does not vary."""

    def __init__(self, p: ParamMap, outer: list[tuple[int, int]], reps: int, sets: int, run: list[tuple[int, int]]) -> None:
        end = p.every * p.period
        inside = [step // p.every * p.a if p.every <= step < end else 0 for _, step in outer]
        along = [step // p.channel_run * p.d if step >= p.channel_run else 0 for _, step in run]
        self.stride = (*inside, p.b, p.c, *along)
        sizes = (*(n for n, _ in outer), reps, sets, *(n for n, _ in run))
        self.size = tuple(n if stride else 1 for n, stride in zip(sizes, self.stride))
        self.shared = tuple(dim for dim, n in enumerate(self.size) if n == 1)  # the axes along which elements share a parameter

    def spread(self, param: Tensor | None, acc: torch.dtype, offset: float = 0.0) -> Tensor | None:
        if param is None:
            return None
        dense = param.to(acc).contiguous().as_strided(self.size, self.stride)
        return dense + offset if offset else dense

    def new_gradient(self, param: Tensor | None, needed: bool, acc: torch.dtype) -> Tensor | None:
        return param.new_zeros(self.size, dtype=acc) if param is not None and needed else None

    def gradient(self, grad: Tensor | None, param: Tensor | None) -> Tensor | None:
        if grad is None or param is None:
            return None
        dense = torch.empty(param.shape, dtype=param.dtype, device=param.device)
        dense.as_strided(self.size, self.stride).copy_(grad)
        return dense


class _Frame:
    """How the tensors of a problem are seen as outer, reps, sets and run, and the blocks in which they are processed.

    `outer` and `run` are split into several axes, so that strides replace the divisions in the parameter index, equation (1).
    `blocks` lists pairs (whole, parts): a block of whole sets, and the smaller blocks in which it is read.
    """

    def __init__(self, problem: NormProblem) -> None:
        x, y, p, m = problem.x, problem.y, problem.param, problem.modulation
        assert x is not None and y is not None and p is not None and m is not None
        self.problem, self.x_view, self.y_view, self.acc = problem, x, y, problem.acc
        self.count = x.reps * x.run
        self.outer = _factors(x.outer, p.every, p.every * p.period, m.every, m.every * m.period)
        self.run = _factors(x.run, p.channel_run, m.channel_run)
        self.size = (*(n for n, _ in self.outer), x.reps, x.sets, *(n for n, _ in self.run))
        self.reps = len(self.outer)  # the index of the dimension `reps`; `sets` is the next one
        self.reduced = (self.reps, *range(self.reps + 2, len(self.size)))
        self.stat_size = tuple(1 if dim in self.reduced else n for dim, n in enumerate(self.size))
        self.params, self.modulation = (_Indexed(q, self.outer, x.reps, x.sets, self.run) for q in (p, m))
        everything = [slice(0, n) for n in self.size]
        self.blocks = [(whole, list(_cut(whole, self.reduced))) for whole in _cut(everything, range(self.reps))]
        if len(self.blocks) == len(self.blocks[0][1]) == 1:
            self.blocks = [(None, [None])]

    def _split(self, tensor: Tensor, view: View) -> Tensor:
        o, r, s, t = view.strides
        return tensor.as_strided(self.size, (*(o * step for _, step in self.outer), r, s, *(t * step for _, step in self.run)))

    def x(self, x: Tensor) -> Tensor:
        return self.y(x) if self.problem.copied else self._split(x, self.x_view)

    def y(self, y: Tensor) -> Tensor:
        """Return a tensor of x's shape seen with the axes of the frame. It is copied first if it does not have y's strides."""
        return self._split(laid_out(y, self.problem.y_stride), self.y_view)

    def new_y(self, x: Tensor) -> Tensor:
        return torch.empty_strided(x.shape, self.problem.y_stride, dtype=x.dtype, device=x.device)

    def weight(self, weight: Tensor | None) -> Tensor | None:
        return self.params.spread(weight, self.acc, self.problem.spec.weight_offset)

    def bias(self, bias: Tensor | None) -> Tensor | None:
        return self.params.spread(bias, self.acc)

    def post_affine(self, scale: Tensor | None, shift: Tensor | None) -> PostAffine:
        gain, term = self.modulation.spread(scale, self.acc, 1.0), self.modulation.spread(shift, self.acc)
        return PostAffine(gain, term, self.problem.spec.activation)

    def stat(self, stat: Tensor) -> Tensor:
        dense = laid_out(stat.to(self.acc).reshape(self.problem.stat_shape), self.problem.stat_stride)
        return dense.as_strided(self.stat_size, contiguous_stride(self.stat_size))

    def kept(self, stat: Tensor) -> Tensor:
        """Return a statistic of the frame in the shape that launchers return: `stat_shape` of the problem."""
        return stat.as_strided(self.problem.stat_shape, self.problem.stat_stride)

    def mix(self, mean: Tensor, var: Tensor, operands: MixOperands) -> MixedStatistics:
        sets = Moments(self.count, self.kept(mean), self.kept(var) * self.count)
        return mix_statistics(self.problem.spec, self.problem.shape, sets, operands)

    def spread(self, stat: Tensor, x: Tensor) -> Tensor:
        """Return a statistic for elementwise operations with x.

        If a set has several runs, the statistic is repeated along `run`, so that torch's inner loops cover several runs.
        """
        if x.shape[self.reps] == 1:
            return stat
        return stat.expand(*stat.shape[: self.reps + 2], *x.shape[self.reps + 2 :]).contiguous()

    def centered(self, x: Tensor, mean: Tensor | None) -> Tensor:
        return x if mean is None else x - self.spread(mean, x)

    def apply(self, x: Tensor, mean: Tensor | None, rstd: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        if x.shape[self.reps] == 1:
            return affine(normalize(x, mean, rstd), weight, bias)
        scale = affine(self.spread(rstd, x), weight, None)  # rstd·weight, usually the same for all reps
        return affine(self.centered(x, mean), scale, bias)


def _cut(region: Sequence[slice], dims: Sequence[int]) -> Iterator[tuple[slice, ...]]:
    """Cut a region, one slice per dimension, into blocks, and return them.

    It is cut along `dims`, in this order, until a block has at most BLOCK elements or no dimension is left to cut.
    """
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
    """Return the part of a tensor that belongs to a block. Dimensions of size 1, along which it does not vary, stay whole."""
    if block is None:
        return tensor
    return tensor[tuple(slice(None) if n == 1 else cut for n, cut in zip(tensor.shape, block))]


def _maybe(tensor: Tensor | None, block: Block) -> Tensor | None:
    return None if tensor is None else _at(tensor, block)


def _post_affine_at(post: PostAffine, block: Block) -> PostAffine:
    return PostAffine(_maybe(post.gain, block), _maybe(post.shift, block), post.activation)


def forward(problem: NormProblem) -> Forward:
    frame, spec = _Frame(problem), problem.spec

    def launch(
        x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor | None, var: Tensor | None, optional: OptionalOperands, /
    ) -> Result:
        y = frame.new_y(x)
        x_all, y_all, w_all, b_all, post_all = (
            frame.x(x),
            frame.y(y),
            frame.weight(weight),
            frame.bias(bias),
            frame.post_affine(optional.scale, optional.shift),
        )
        var_all = frame.stat(var) if var is not None else x.new_empty(frame.stat_size, dtype=frame.acc)
        mean_all = frame.stat(mean) if mean is not None else torch.empty_like(var_all) if spec.centered else None

        def reduce_(whole: Block, parts: Sequence[Block]) -> None:
            blocks = (_at(x_all, part).to(frame.acc) for part in parts)
            taken = reduce(merge_pair, (moments(x_, frame.reduced, spec.centered, frame.spread) for x_ in blocks))
            _at(var_all, whole).copy_(taken.var)
            center = taken.center
            if mean_all is not None and center is not None:
                _at(mean_all, whole).copy_(center)

        def apply(parts: Sequence[Block], mean: Tensor | None, rstd: Tensor) -> None:
            for part in parts:
                x_ = _at(x_all, part).to(frame.acc)
                u = frame.apply(x_, _maybe(mean, part), _at(rstd, part), _maybe(w_all, part), _maybe(b_all, part))
                _post_affine_at(post_all, part).into(_at(y_all, part), u)

        if problem.given:
            rstd_all = torch.rsqrt(var_all + spec.eps)
            for _, parts in frame.blocks:
                apply(parts, mean_all, rstd_all)
        elif spec.mix:
            assert mean_all is not None
            for whole, parts in frame.blocks:
                reduce_(whole, parts)
            mixed = frame.mix(mean_all, var_all, optional)
            rstd_all = torch.rsqrt(frame.stat(mixed.var) + spec.eps)
            mixed_mean = frame.stat(mixed.mean)
            for _, parts in frame.blocks:
                apply(parts, mixed_mean, rstd_all)
        else:
            rstd_all = torch.empty_like(var_all)
            for whole, parts in frame.blocks:  # a block of whole sets is still in the cache when it is read again
                reduce_(whole, parts)
                _at(rstd_all, whole).copy_(inverse_deviation(_at(var_all, whole), spec.eps))
                apply(parts, mean_all, rstd_all)
        return Result(y, None if mean_all is None else frame.kept(mean_all), frame.kept(rstd_all), frame.kept(var_all))

    return launch


def backward(problem: NormProblem) -> Backward:
    frame, spec = _Frame(problem), problem.spec

    def launch(dy: Tensor, dsum: Tensor | None, saved: SavedTensors, needs: Sequence[bool], /) -> Gradients:
        needs = Needs(*needs)
        x, weight, bias, mean, rstd, var = saved[:6]
        x_all, dy_all, w_all, b_all = frame.x(x), frame.y(dy), frame.weight(weight), frame.bias(bias)
        post_all = frame.post_affine(saved.scale, saved.shift)
        mean_all, rstd_all = None if mean is None else frame.stat(mean), frame.stat(rstd)
        mixed = None
        if spec.mix:
            assert mean_all is not None and var is not None
            mixed = frame.mix(mean_all, frame.stat(var), saved)
            mean_all = frame.stat(mixed.mean)
        dx = frame.new_y(x) if needs.x else None
        dx_all = None if dx is None else frame.y(dx)
        dsum_all = None if dsum is None else frame.y(dsum)
        params = [frame.params.new_gradient(p, needed, frame.acc) for p, needed in zip((weight, bias), needs[1:3])]
        per_sample = [frame.modulation.new_gradient(p, needed, frame.acc) for p, needed in zip((saved.scale, saved.shift), needs[3:5])]
        reduces = not problem.given and (needs.x or mixed is not None)
        c2 = torch.zeros_like(rstd_all) if reduces else None
        c1 = torch.zeros_like(rstd_all) if reduces and spec.centered else None

        def load(part: Block) -> tuple[Tensor, ...]:
            """Return (x_hat, u, dz, du, gradient of x_hat). u is correct only if a modulation or activation needs it."""
            x_, dy_ = (_at(t, part).to(frame.acc) for t in (x_all, dy_all))
            w_, b_, post = _maybe(w_all, part), _maybe(b_all, part), _post_affine_at(post_all, part)
            if problem.from_y:
                u = post.inverse(x_)
                x_hat = affine_inverse(u, w_, b_)
            else:
                x_hat = frame.centered(x_, _maybe(mean_all, part)) * frame.spread(_at(rstd_all, part), x_)
                u = affine(x_hat, w_, b_) if problem.has_post_affine else x_hat
            dz, du = post.backward(dy_, u) if problem.has_post_affine else (dy_, dy_)
            return x_hat, u, dz, du, affine(du, w_, None)

        def reduce_(parts: Sequence[Block]) -> tuple[Tensor, ...] | None:
            loaded = None
            for part in parts:
                loaded = load(part)
                x_hat, u, dz, du, wdy = loaded
                for grad, terms in zip(params, ((du, x_hat), (du, None))):
                    _add(grad, part, terms, frame.params.shared)  # equations (10), (11)
                for grad, terms in zip(per_sample, ((dz, u), (dz, None))):
                    _add(grad, part, terms, frame.modulation.shared)  # equations (34), (35)
                _add(c1, part, (wdy, None), frame.reduced, frame.count)  # equation (6)
                _add(c2, part, (wdy, x_hat), frame.reduced, frame.count)  # equation (7)
            return loaded if len(parts) == 1 else None  # a single block need not be loaded again

        def apply(parts: Sequence[Block], loaded: tuple[Tensor, ...] | None, *stats: Tensor | None) -> None:
            if dx_all is None:
                return
            for part in parts:
                x_hat, *_, wdy = loaded or load(part)
                here = (None if stat is None else frame.spread(_at(stat, part), wdy) for stat in (rstd_all, *stats))
                dx_ = input_gradient(wdy, x_hat, *here)  # pyright: ignore[reportArgumentType]
                _at(dx_all, part).copy_(dx_ if dsum_all is None else dx_ + _at(dsum_all, part))

        dmean_weight = dvar_weight = None
        if mixed is None:
            for _, parts in frame.blocks:
                apply(parts, reduce_(parts), c1, c2)
        else:
            assert c1 is not None and c2 is not None
            for _, parts in frame.blocks:
                reduce_(parts)
            *cs, dmean_weight, dvar_weight = mixed.gradient(frame.kept(c1), frame.kept(c2), rstd)
            for _, parts in frame.blocks:
                apply(parts, None, *(frame.stat(c) for c in cs))
        dweight, dbias = (frame.params.gradient(grad, param) for grad, param in zip(params, (weight, bias)))
        dscale, dshift = (frame.modulation.gradient(grad, param) for grad, param in zip(per_sample, (saved.scale, saved.shift)))
        return Gradients(dx, dweight, dbias, dscale, dshift, dmean_weight, dvar_weight)

    return launch


def _add(sums: Tensor | None, part: Block, terms: tuple[Tensor, Tensor | None], dims: Sequence[int], count: int = 1) -> None:
    """Sum the product of `terms` over `dims`, divide the sum by `count`, and add the result to `sums` at this block."""
    if sums is not None:
        first, second = terms
        sum_ = total(first if second is None else first * second, dims)
        _at(sums, part).add_(sum_ if count == 1 else sum_ / count)


class Blockwise(Family):
    name = "blockwise"
    summary = "reduce, combine and apply by torch operations on the view, block by block"

    def unsupported(self, problem: NormProblem, device: Device, direction: Direction) -> list[str]:
        return [] if problem.x is not None else [problem.why_no_view]

    def cost(self, problem: NormProblem, device: Device, direction: Direction, batch_invariant: bool) -> float:
        return torch_cost(8, problem, device, direction)

    def forward(self, problem: NormProblem, launches: Launches, statistics: bool) -> Forward:
        return forward(problem)

    def backward(self, problem: NormProblem, launches: Launches) -> Backward:
        return backward(problem)
