"""Launchers with little Python code, for calls without the optional operands of core/operands.py."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from onepass.backends.family import TrainingBackward, TrainingForward
from onepass.core.allocate import on_cpu
from onepass.core.memory import LOWEST, require_memory
from onepass.core.problem import NormProblem
from onepass.core.statistics import packed_shape, packed_stride

from .problem import NO_GRADIENTS, Call, addresses, check_status, checked_addresses, dense, new_gradient, pack_tensors


def infer(problem: NormProblem) -> Callable[..., Tensor] | None:
    """Return a launcher (x, weight, bias, mean, var) -> y.

    Return None if x must be copied, or if there is a residual, a modulation or a mix of norms.
    """
    call = Call(problem)
    if call.walk.copies or problem.addends or problem.scale or problem.shift or problem.spec.mix:
        return None
    run, threads, given = call.library.forward, call.library.threads, problem.given
    packed, shape, stride, dtype, small = call.packed(given, False), problem.shape, problem.y_stride, problem.dtype, call.small
    pack = pack_tensors

    def launch(x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor | None, var: Tensor | None) -> Tensor:
        w = b = m = v = 0
        if weight is not None:
            if not (weight.is_cpu and weight.is_contiguous()):
                weight = dense(weight)
            w = weight.data_ptr()  # pyright: ignore[reportOptionalMemberAccess]
            if w < LOWEST:
                require_memory(("weight",), (weight,))
        if bias is not None:
            if not (bias.is_cpu and bias.is_contiguous()):
                bias = dense(bias)
            b = bias.data_ptr()  # pyright: ignore[reportOptionalMemberAccess]
            if b < LOWEST:
                require_memory(("bias",), (bias,))
        if given:
            mean, var = _as_given(call, mean), _as_given(call, var)
            m, v = 0 if mean is None else mean.data_ptr(), var.data_ptr()  # pyright: ignore[reportOptionalMemberAccess]
            if v < LOWEST or (mean is not None and m < LOWEST):
                require_memory(("running_mean", "running_var"), (mean, var))
        at = x.data_ptr()
        if at < LOWEST:
            require_memory(("input",), (x,))
        y = on_cpu(shape, stride, dtype)
        if run(packed, pack(at, 0, w, b, 0, 0, m, 0, v, y.data_ptr(), 0, 0, 0, 0, 0, 0, 0, 0, 0, 0), 1 if small else threads()):
            check_status(1)
        return y

    return launch


def _as_given(call: Call, stat: Tensor | None) -> Tensor | None:
    """Return `call.stat(stat)`. The usual running statistic, a contiguous float32 vector, is returned at once as it is."""
    if stat is None or (stat.is_cpu and stat.dtype is torch.float32 and stat.dim() == 1 and stat.is_contiguous()):
        return stat
    require_memory(("running statistic",), (stat,))
    return call.stat(stat)


def track(problem: NormProblem) -> Callable[..., Tensor] | None:
    """Return a launcher (x, weight, bias, running_mean, running_var, momentum) -> y that updates the running statistics in place.

    Return None if x must be copied, if there is a modulation or a mix of norms, or if the statistics are not one per channel.
    """
    call = Call(problem)
    if call.walk.copies or problem.scale or problem.shift or problem.spec.mix or len(problem.stat_shape) != 1:
        return None
    run, packed = call.library.track, call.packed(False, False)

    def launch(x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, var: Tensor, momentum: float) -> Tensor:
        y = on_cpu(problem.shape, problem.y_stride, problem.dtype)
        weight, bias = dense(weight), dense(bias)
        x_at, w, b, m, v = checked_addresses(("input", "weight", "bias", "running_mean", "running_var"), x, weight, bias, mean, var)
        tensors = pack_tensors(x_at, 0, w, b, 0, 0, 0, 0, 0, y.data_ptr(), 0, *NO_GRADIENTS)
        check_status(run(packed, tensors, call.threads(), m, v, momentum))
        increment_version((mean, var))  # tells autograd that both tensors were changed in place
        return y

    return launch


def train_forward(problem: NormProblem) -> TrainingForward | None:
    if not can_train_minimal(problem):
        return None
    call, spec = Call(problem), problem.spec
    run, packed, threads, f32 = call.library.forward, call.packed(False, False), call.threads, torch.float32
    shape, stride, dtype = problem.shape, problem.y_stride, problem.dtype
    stat_shape, stat_stride = packed_shape(problem), packed_stride(problem)
    second = 4 * stat_stride[0]

    def launch(x: Tensor, weight: Tensor | None, bias: Tensor | None, /) -> tuple[Tensor, Tensor]:
        weight, bias = dense(weight), dense(bias)
        x_at, w, b = checked_addresses(("input", "weight", "bias"), x, weight, bias)
        y, stats = on_cpu(shape, stride, dtype), on_cpu(stat_shape, stat_stride, f32)
        at = stats.data_ptr()
        mean = at if spec.centered else 0
        check_status(run(packed, pack_tensors(x_at, 0, w, b, 0, 0, mean, at + second, 0, y.data_ptr(), 0, *NO_GRADIENTS), threads()))
        return y, stats

    return launch


def train_backward(problem: NormProblem) -> TrainingBackward | None:
    if not can_train_minimal(problem):
        return None
    call, spec = Call(problem), problem.spec
    run, packed, threads = call.library.backward, call.packed(False, False), call.threads
    shape, stride, dtype, second = problem.shape, problem.y_stride, problem.dtype, 4 * packed_stride(problem)[0]

    def launch(
        dy: Tensor, x: Tensor, weight: Tensor | None, bias: Tensor | None, statistics: Tensor, needs: tuple[bool, ...], /
    ) -> tuple[Tensor | None, ...]:
        dx = on_cpu(shape, stride, dtype) if needs[0] else None
        dweight = new_gradient(weight) if needs[1] and weight is not None else None
        dbias = new_gradient(bias) if needs[2] and bias is not None else None
        weight, bias = dense(weight), dense(bias)
        x_at, w, b, at, dy_at = checked_addresses(("input", "weight", "bias", "statistics", "dy"), x, weight, bias, statistics, dy)
        mean = at if spec.centered else 0
        operands = x_at, 0, w, b, 0, 0, mean, at + second, 0, 0, 0, dy_at, 0, *addresses(dx, dweight, dbias)
        check_status(run(packed, pack_tensors(*operands, 0, 0, 0, 0), threads(), 1))
        return dx, dweight, dbias

    return launch


def can_train_minimal(problem: NormProblem) -> bool:
    """Whether x, weight and bias are the only operands, and x is not copied."""
    operands = problem.addends or problem.scale or problem.shift or problem.given or problem.track or problem.spec.mix or problem.from_y
    return not (operands or Call(problem).walk.copies)
