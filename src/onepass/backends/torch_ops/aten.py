"""The aten family: torch's own kernels, called on the view of memory (core/view.py). Each variant is for certain views:

- "rows": a set is a contiguous row, and each element of a row has its own parameter, as in torch.layer_norm and torch.rms_norm;
- "row_groups": a set is a contiguous row, and consecutive elements of a row share a parameter, as in torch.group_norm;
- "channels": x has three axes, and each index of the middle axis is a set, as in torch.batch_norm;
- "given": as "channels", with given statistics.

A *set* is the elements that share one mean and variance. Parameters are passed in the dtype of sums, float32 or float64, since
torch otherwise returns statistics in x's dtype. If a modulation or an activation follows the affine step, x is passed in the
dtype of sums, too, and elementwise operations apply it to the result.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from onepass.backends.cost import torch_cost
from onepass.backends.family import Backward, Direction, Family, Forward, Launches
from onepass.core.arithmetic import affine, normalize
from onepass.core.device import Device
from onepass.core.operands import Gradients, Needs, OptionalOperands, Result, SavedTensors
from onepass.core.problem import NormProblem
from onepass.core.reference import Axes
from onepass.core.view import contiguous_stride, laid_out

from .aten_support import unsupported, variant


class _Rows:
    def __init__(self, problem: NormProblem) -> None:
        assert problem.x is not None
        spec = problem.spec
        self.as_it_is = _contiguous(problem) and spec.axes.endswith(spec.reduced) and spec.params == spec.reduced
        self.shape = problem.shape if self.as_it_is else (problem.x.outer, problem.x.run)
        self.row = problem.shape[-len(spec.reduced.split()) :] if self.as_it_is else (problem.x.run,)
        self.column = *self.shape[: len(self.shape) - len(self.row)], *(1 for _ in self.row)
        self.eps, self.centered = spec.eps, spec.centered
        self.param_shape = self.row

    def infer(self, problem: NormProblem):
        row, eps = self.row, self.eps
        if self.centered:
            return lambda x, weight, bias, mean, var: torch.layer_norm(x, row, weight, bias, eps, False)
        if problem.weight in (None, problem.dtype):
            return lambda x, weight, bias, mean, var: torch.rms_norm(x, row, weight, eps)

    def forward(self, x: Tensor, weight: Tensor | None, bias: Tensor | None, *_: Any) -> Result:
        if self.centered:
            return Result(*torch.native_layer_norm(x, self.row, weight, bias, self.eps), var=None)
        y, rstd = torch.ops.aten._fused_rms_norm(x, self.row, weight, self.eps)
        return Result(y, None, rstd, None)

    def backward(self, dy: Tensor, x: Tensor, weight, bias, mean: Tensor, rstd: Tensor, needs: list[bool]) -> tuple[Tensor | None, ...]:
        mean, rstd = mean.view(self.column), rstd.view(self.column)
        return torch.ops.aten.native_layer_norm_backward(dy, x, self.row, mean, rstd, weight, bias, needs)


class _RowGroups:
    def __init__(self, problem: NormProblem) -> None:
        assert problem.x is not None and problem.param is not None
        x, p = problem.x, problem.param
        per_row = p.per_row(x)
        self.sizes = x.outer // p.period, p.period * per_row, x.run // per_row  # samples, channels, positions
        self.as_it_is = _contiguous(problem) and problem.shape[:2] == self.sizes[:2]
        self.shape = problem.shape if self.as_it_is else self.sizes
        self.groups, self.eps, self.param_shape = p.period, problem.spec.eps, self.sizes[1:2]

    def infer(self, problem: NormProblem):
        groups, eps = self.groups, self.eps
        return lambda x, weight, bias, mean, var: torch.group_norm(x, groups, weight, bias, eps, False)

    def forward(self, x: Tensor, weight: Tensor | None, bias: Tensor | None, *_: Any) -> Result:
        return Result(*torch.native_group_norm(x, weight, bias, *self.sizes, self.groups, self.eps), var=None)

    def backward(self, dy: Tensor, x: Tensor, weight, bias, mean: Tensor, rstd: Tensor, needs: list[bool]) -> tuple[Tensor | None, ...]:
        if weight is None and needs[2]:  # torch 2.13 cannot compute the gradient of a bias without a weight
            weight = x.new_ones(self.param_shape, dtype=rstd.dtype)
        # torch computes Σ dy·x - mean·Σ dy, which loses digits if the mean is large. So pass x - mean as x, and 0 as the mean.
        x, mean = (x.view(len(mean), -1) - mean[:, None]).view(x.shape), torch.zeros_like(mean)
        sets, dy = (self.sizes[0], self.groups), dy.to(x.dtype)
        return torch.ops.aten.native_group_norm_backward(dy, x, mean.view(sets), rstd.view(sets), weight, *self.sizes, self.groups, needs)


class _Channels:
    def __init__(self, problem: NormProblem) -> None:
        assert problem.x is not None
        sizes = problem.x.sizes[1:]
        self.as_it_is = _contiguous(problem) and problem.shape[:2] == sizes[:2]
        self.shape = problem.shape if self.as_it_is else sizes
        self.eps, self.acc, self.given = problem.spec.eps, problem.acc, problem.given
        self.count, self.param_shape = problem.x.reps * problem.x.run, sizes[1:2]

    def infer(self, problem: NormProblem):
        eps, training = self.eps, not self.given
        if problem.dtype == self.acc:
            return lambda x, weight, bias, mean, var: torch.batch_norm(x, weight, bias, mean, var, training, 0.0, eps, False)

    def forward(self, x: Tensor, weight: Tensor | None, bias: Tensor | None, *_: Any) -> Result:
        # With momentum 1, the running statistics become the batch's mean and unbiased variance.
        running = torch.zeros((2, *self.param_shape), dtype=self.acc, device=x.device)
        y, mean, rstd = torch.native_batch_norm(x, weight, bias, running[0], running[1], True, 1.0, self.eps)
        return Result(y, mean, rstd, running[1] * ((self.count - 1) / self.count))

    def backward(self, dy: Tensor, x: Tensor, weight, bias, mean: Tensor, rstd: Tensor, needs: list[bool]) -> tuple[Tensor | None, ...]:
        return torch.ops.aten.native_batch_norm_backward(dy, x, weight, None, None, mean, rstd, True, self.eps, needs)


class _Given(_Channels):
    def forward(self, x: Tensor, weight: Tensor | None, bias: Tensor | None, *given: Any) -> Result:
        mean, var = (stat.to(self.acc).contiguous().view(-1) for stat in given)
        y = torch.native_batch_norm(x, weight, bias, mean, var, False, 0.0, self.eps)[0]
        return Result(y, mean, torch.rsqrt(var + self.eps), var)


KERNELS = {"rows": _Rows, "row_groups": _RowGroups, "channels": _Channels, "given": _Given}


def infer(problem: NormProblem) -> Callable[..., Tensor] | None:
    """Return a launcher that calls torch's function on x as it is.

    Return None if x needs another shape or strides, or if torch's function lacks a step, such as adding a weight offset.
    """
    kernel, spec = KERNELS[variant(problem)](problem), problem.spec
    plain = spec.params and not spec.weight_offset and not problem.has_post_affine
    return kernel.infer(problem) if kernel.as_it_is and plain else None


def forward(problem: NormProblem) -> Forward:
    kernel = KERNELS[variant(problem)](problem)
    half = problem.dtype != problem.acc

    def launch(
        x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor | None, var: Tensor | None, optional: OptionalOperands, /
    ) -> Result:
        if half and weight is None and bias is None:
            weight = torch.ones(kernel.param_shape, dtype=problem.acc, device=x.device)
        else:
            weight = _weight(weight, problem, kernel.param_shape)
        y, mean, rstd, var = kernel.forward(_packed(x, problem, kernel), weight, _param(bias, problem, kernel.param_shape), mean, var)[:4]
        mean, var = (None if stat is None else stat.as_strided(problem.stat_shape, problem.stat_stride) for stat in (mean, var))
        return Result(_unpacked(y, problem, kernel), mean, rstd.as_strided(problem.stat_shape, problem.stat_stride), var)

    def with_post_affine(x: Tensor, weight, bias, mean, var, optional: OptionalOperands, /) -> Result:
        result = launch(x, weight, bias, mean, var, optional)
        axes = Axes(problem.spec, result.y)
        y = result.y if result.y.dtype == problem.dtype else torch.empty_like(result.y, dtype=problem.dtype)
        axes.post_affine(optional.scale, optional.shift).into(y.view(axes.shape), axes.x(result.y))
        return result._replace(y=y)

    return with_post_affine if problem.has_post_affine else launch


def backward(problem: NormProblem) -> Backward:
    kernel = KERNELS[variant(problem)](problem)

    def launch(dy: Tensor, dsum: Tensor | None, saved: SavedTensors, needs: Sequence[bool], /) -> Gradients:
        needs, (x, weight, bias, mean, rstd) = Needs(*needs), saved[:5]
        assert mean is not None
        mean, rstd = (laid_out(stat, problem.stat_stride).as_strided((stat.numel(),), (1,)) for stat in (mean, rstd))
        params = _weight(weight, problem, kernel.param_shape), _param(bias, problem, kernel.param_shape)
        mask = [needs.x, needs.weight and weight is not None, needs.bias and bias is not None]
        dy, x = (_packed(t, problem, kernel) for t in (dy, x))
        dx, *grads = kernel.backward(dy, x, *params, mean, rstd, mask)
        dweight, dbias = (
            grad.view(param.shape).to(param.dtype) if needed and grad is not None and param is not None else None
            for grad, param, needed in zip(grads, (weight, bias), mask[1:])
        )
        dx = _unpacked(dx, problem, kernel) if mask[0] and dx is not None else None
        if dx is not None and dsum is not None:
            dx += dsum
        return Gradients(None if dx is None else dx.to(problem.dtype), dweight, dbias)

    def with_post_affine(dy: Tensor, dsum: Tensor | None, saved: SavedTensors, needs: Sequence[bool], /) -> Gradients:
        wanted, axes = Needs(*needs), Axes(problem.spec, saved.x)
        x_hat = normalize(axes.x(saved.x), axes.stat(saved.mean), saved.rstd.reshape(axes.stat_shape))
        u = affine(x_hat, axes.weight(saved.weight), axes.bias(saved.bias))
        dz, du = axes.post_affine(saved.scale, saved.shift).backward(axes.x(dy), u)
        grads = launch(du.reshape(problem.shape), dsum, saved, needs)
        scale, shift = saved.scale, saved.shift
        return grads._replace(
            dscale=axes.modulation.sum(dz * u, scale) if scale is not None and wanted.scale else None,
            dshift=axes.modulation.sum(dz, shift) if shift is not None and wanted.shift else None,
        )

    return with_post_affine if problem.has_post_affine else launch


def _packed(x: Tensor, problem: NormProblem, kernel: Any) -> Tensor:
    """Return x with y's order in memory and the kernel's shape.

    If a modulation or an activation follows the affine step, x is also converted to the dtype of sums.
    """
    x = laid_out(x.to(problem.acc) if problem.has_post_affine else x, problem.y_stride)
    return x if kernel.as_it_is else x.as_strided(kernel.shape, contiguous_stride(kernel.shape))


def _unpacked(y: Tensor, problem: NormProblem, kernel: Any) -> Tensor:
    """Return the kernel's result with x's shape and y's strides. It is not a view: users could not change a view in place."""
    if kernel.as_it_is:
        return y
    return y.new_empty(0).set_(y.untyped_storage(), y.storage_offset(), problem.shape, problem.y_stride)  # pyright: ignore


def _param(param: Tensor | None, problem: NormProblem, shape: Sequence[int]) -> Tensor | None:
    if param is None or (param.dtype == problem.acc and param.shape == shape and param.is_contiguous()):
        return param
    return param.to(problem.acc).contiguous().view(shape)


def _weight(weight: Tensor | None, problem: NormProblem, shape: Sequence[int]) -> Tensor | None:
    weight, offset = _param(weight, problem, shape), problem.spec.weight_offset
    return weight if weight is None or not offset else weight + offset


def _contiguous(problem: NormProblem) -> bool:
    return problem.stride == contiguous_stride(problem.shape)


class Aten(Family):
    name = "aten"
    summary = "torch's own kernel on the view"

    def unsupported(self, problem: NormProblem, device: Device, direction: Direction) -> list[str]:
        return unsupported(problem, device, direction)

    def cost(self, problem: NormProblem, device: Device, direction: Direction, batch_invariant: bool) -> float:
        return torch_cost(1, problem, device, direction)

    def variant(self, problem: NormProblem) -> str:
        return variant(problem)

    def forward(self, problem: NormProblem, launches: Launches, statistics: bool) -> Forward:
        return forward(problem)

    def backward(self, problem: NormProblem, launches: Launches) -> Backward:
        return backward(problem)

    def infer(self, problem: NormProblem, launches: Launches) -> Callable[..., Tensor] | None:
        return infer(problem)
