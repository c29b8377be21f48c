"""The aten family: torch's own kernels called on the view, each for the views it walks.

"rows" normalizes contiguous rows with one parameter per element of a row, "row_groups" rows in which runs of elements share a parameter,
"channels" the middle one of three axes, "given" that axis by given statistics. torch keeps statistics in x's dtype unless the parameters
are fp32, so parameters are handed over in the accumulator's dtype wherever statistics come back.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..plan import Plan
from ..problem import NormProblem, contiguous_stride, laid_out
from ..reference import Result

Statistics = tuple[Tensor, Tensor, Tensor, Tensor | None]  # y, mean, rstd, var
Gradients = tuple[Tensor | None, Tensor | None, Tensor | None]


class _Rows:
    def __init__(self, problem: NormProblem) -> None:
        assert problem.x is not None
        self.shape, self.eps = (problem.x.outer, problem.x.run), problem.spec.eps

    def forward(self, x: Tensor, weight: Tensor | None, bias: Tensor | None, *_: object) -> Statistics:
        return *torch.native_layer_norm(x, self.shape[1:], weight, bias, self.eps), None

    def backward(self, dy: Tensor, x: Tensor, weight, bias, mean: Tensor, rstd: Tensor, needs: list[bool]) -> Gradients:
        column = self.shape[0], 1
        return torch.ops.aten.native_layer_norm_backward(
            dy, x, self.shape[1:], mean.view(column), rstd.view(column), weight, bias, needs
        )


class _RowGroups:
    def __init__(self, problem: NormProblem) -> None:
        assert problem.x is not None and problem.param is not None
        x, p = problem.x, problem.param
        per_row = x.run // p.channel_run if p.d else 1  # parameters in a row
        self.shape = x.outer // p.period, p.period * per_row, x.run // per_row
        self.groups, self.eps = p.period, problem.spec.eps

    def forward(self, x: Tensor, weight: Tensor | None, bias: Tensor | None, *_: object) -> Statistics:
        return *torch.native_group_norm(x, weight, bias, *self.shape, self.groups, self.eps), None

    def backward(self, dy: Tensor, x: Tensor, weight, bias, mean: Tensor, rstd: Tensor, needs: list[bool]) -> Gradients:
        sets = self.shape[0], self.groups
        return torch.ops.aten.native_group_norm_backward(
            dy, x, mean.view(sets), rstd.view(sets), weight, *self.shape, self.groups, needs
        )


class _Channels:
    def __init__(self, problem: NormProblem) -> None:
        assert problem.x is not None
        self.shape, self.eps, self.acc = problem.x.sizes[1:], problem.spec.eps, problem.acc
        self.count = problem.x.reps * problem.x.run

    def forward(self, x: Tensor, weight: Tensor | None, bias: Tensor | None, *_: object) -> Statistics:
        # With momentum 1 the kernel leaves the batch's own mean and unbiased variance in the running ones.
        running = torch.zeros((2, self.shape[1]), dtype=self.acc, device=x.device)
        y, mean, rstd = torch.native_batch_norm(x, weight, bias, running[0], running[1], True, 1.0, self.eps)
        return y, mean, rstd, running[1] * ((self.count - 1) / self.count)

    def backward(self, dy: Tensor, x: Tensor, weight, bias, mean: Tensor, rstd: Tensor, needs: list[bool]) -> Gradients:
        return torch.ops.aten.native_batch_norm_backward(dy, x, weight, None, None, mean, rstd, True, self.eps, needs)


class _Given(_Channels):
    def forward(self, x: Tensor, weight, bias, mean: Tensor, var: Tensor) -> Statistics:
        mean, var = (stat.to(self.acc).contiguous().view(-1) for stat in (mean, var))
        y = torch.native_batch_norm(x, weight, bias, mean, var, False, 0.0, self.eps)[0]
        return y, mean, torch.rsqrt(var + self.eps), var


KERNELS = {"rows": _Rows, "row_groups": _RowGroups, "channels": _Channels, "given": _Given}


def infer(plan: Plan, problem: NormProblem):
    spec = problem.spec
    if plan.variant == "rows" and spec.params == spec.reduced and problem.stride == contiguous_stride(problem.shape):
        # Nothing to pack: this is the call that must cost little more than torch's own.
        tail, eps = problem.shape[-len(spec.reduced.split()) :], spec.eps
        return lambda x, weight, bias, mean, var: torch.layer_norm(x, tail, weight, bias, eps, False)
    launch = forward(plan, problem)
    return lambda x, weight, bias, mean, var: launch(x, weight, bias, mean, var).y


def forward(plan: Plan, problem: NormProblem):
    kernel = KERNELS[plan.variant](problem)
    half = problem.dtype != problem.acc

    def launch(x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor | None, var: Tensor | None) -> Result:
        if half and weight is None and bias is None:
            weight = torch.ones(kernel.shape[1], dtype=problem.acc, device=x.device)
        weight, bias = (None if p is None else p.to(problem.acc).contiguous().view(-1) for p in (weight, bias))
        y, mean, rstd, var = kernel.forward(_packed(x, problem, kernel.shape), weight, bias, mean, var)
        shape, stride = problem.stat_shape, problem.stat_stride
        mean, var = (None if stat is None else stat.as_strided(shape, stride) for stat in (mean, var))
        return Result(y.as_strided(problem.shape, problem.y_stride), mean, rstd.as_strided(shape, stride), var)

    return launch


def backward(plan: Plan, problem: NormProblem):
    kernel = KERNELS[plan.variant](problem)

    def launch(
        dy: Tensor, x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, rstd: Tensor, needs: Sequence[bool]
    ) -> Gradients:
        mean, rstd = (laid_out(stat, problem.stat_stride).as_strided((stat.numel(),), (1,)) for stat in (mean, rstd))
        flat = (None if p is None else p.to(problem.acc).contiguous().view(-1) for p in (weight, bias))
        mask = [needs[0], needs[1] and weight is not None, needs[2] and bias is not None]
        dy, x = (_packed(t, problem, kernel.shape) for t in (dy, x))
        dx, dweight, dbias = kernel.backward(dy, x, *flat, mean, rstd, mask)
        return (
            dx.as_strided(problem.shape, problem.y_stride) if mask[0] and dx is not None else None,
            dweight.view_as(weight).to(weight.dtype) if mask[1] and weight is not None and dweight is not None else None,
            dbias.view_as(bias).to(bias.dtype) if mask[2] and bias is not None and dbias is not None else None,
        )

    return launch


def _packed(x: Tensor, problem: NormProblem, shape: Sequence[int]) -> Tensor:
    """x, laid out like y, as a contiguous tensor of the kernel's shape."""
    return laid_out(x, problem.y_stride).as_strided(shape, contiguous_stride(shape))
