"""Launchers that need little host time, for calls without the optional operands of core/operands.py.

Each is a launcher in C++ (in_cpp.py) once the front door is open. The functions `launch` in this file do the same in Python. They also
handle the calls that the launcher in C++ hands over.
"""

from __future__ import annotations

from collections.abc import Callable
from ctypes import memmove, memset
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from onepass.backends.family import Tracking, TrainingBackward, TrainingForward
from onepass.backends.front_door import ByNeeds, FrontDoor, Launcher
from onepass.core.allocate import on_cpu
from onepass.core.memory import LOWEST, require_memory
from onepass.core.problem import NormProblem
from onepass.core.statistics import packed_shape, packed_stride

from .in_cpp import described_backward, described_forward
from .problem import NO_GRADIENTS, Call, check_status, checked_addresses, dense, new_gradient, pack_tensors


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
            mean, var = call.stat(mean), call.stat(var)
            m, v = _given_addresses(mean, var)
        at = x.data_ptr()
        if at < LOWEST:
            require_memory(("input",), (x,))
        y = on_cpu(shape, stride, dtype)
        if run(packed, pack(at, 0, w, b, 0, 0, m, 0, v, y.data_ptr(), 0, 0, 0, 0, 0, 0, 0, 0, 0, 0), 1 if small else threads()):
            check_status(1)
        return y

    return described_forward(call, launch, train=False) or launch


def _given_addresses(mean: Tensor | None, var: Tensor | None) -> tuple[int, int]:
    """Return the addresses of given statistics, 0 for no mean."""
    m, v = 0 if mean is None else mean.data_ptr(), var.data_ptr()  # pyright: ignore[reportOptionalMemberAccess]
    if v < LOWEST or (mean is not None and m < LOWEST):
        require_memory(("running_mean", "running_var"), (mean, var))
    return m, v


def track(problem: NormProblem) -> Tracking | None:
    """Return a launcher (x, weight, bias, running_mean, running_var, momentum) -> y that updates the running statistics in place.

    Return None if x must be copied, if there is a modulation or a mix of norms, or if the statistics are not one per channel.
    """
    return _tracking(problem, False)


def train_track(problem: NormProblem) -> Tracking | None:
    """As `track`, but the launcher returns (y, mean and rstd in one tensor)."""
    return _tracking(problem, True)


def _tracking(problem: NormProblem, train: bool) -> Tracking | None:
    call = Call(problem)
    if call.walk.copies or problem.addends or problem.scale or problem.shift or problem.spec.mix or len(problem.stat_shape) != 1:
        return None
    run, packed, names = call.library.track, call.packed(False, False), ("input", "weight", "bias", "running_mean", "running_var")
    stat_shape, stat_stride = packed_shape(problem), packed_stride(problem)

    def launch(x: Tensor, weight: Tensor | None, bias: Tensor | None, running_mean: Tensor, running_var: Tensor, momentum: float, /) -> Any:
        y = on_cpu(problem.shape, problem.y_stride, problem.dtype)
        weight, bias = dense(weight), dense(bias)
        x_at, w, b, m, v = checked_addresses(names, x, weight, bias, running_mean, running_var)
        stats = on_cpu(stat_shape, stat_stride, torch.float32) if train else None
        mean, rstd = (0, 0) if stats is None else (stats.data_ptr(), stats.data_ptr() + 4 * stat_stride[0])
        tensors = pack_tensors(x_at, 0, w, b, 0, 0, mean, rstd, 0, y.data_ptr(), 0, *NO_GRADIENTS)
        check_status(run(packed, tensors, call.threads(), m, v, momentum))
        increment_version((running_mean, running_var))  # tells autograd that both tensors were changed in place
        return (y, stats) if train else y

    return described_forward(call, launch, train, tracks=True) or launch


def train_forward(problem: NormProblem) -> TrainingForward | None:
    """Return a launcher (x, weight, bias, mean, var) -> (y, statistics), or None unless `can_train_minimal`."""
    if problem.track or not can_train_minimal(problem):
        return None
    call, f32, pack = Call(problem), torch.float32, pack_tensors
    run, threads, small = call.library.forward, call.library.threads, call.small
    shape, stride, dtype, centered = problem.shape, problem.y_stride, problem.dtype, problem.spec.centered
    stat_shape, stat_stride = packed_shape(problem), packed_stride(problem)
    given, second, mean_bytes = problem.given, 4 * stat_stride[0], 4 * prod(problem.stat_shape)
    packed = call.packed(given, False)

    def launch(
        x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor | None = None, var: Tensor | None = None, /
    ) -> tuple[Tensor, Tensor]:
        w = b = m = v = 0
        if weight is not None:
            if not (weight.is_cpu and weight.is_contiguous()):
                weight = dense(weight)
            w = weight.data_ptr()  # pyright: ignore[reportOptionalMemberAccess]
        if bias is not None:
            if not (bias.is_cpu and bias.is_contiguous()):
                bias = dense(bias)
            b = bias.data_ptr()  # pyright: ignore[reportOptionalMemberAccess]
        x_at = x.data_ptr()
        if x_at < LOWEST or (w < LOWEST and weight is not None) or (b < LOWEST and bias is not None):
            require_memory(("input", "weight", "bias"), (x, weight, bias))
        y, stats = on_cpu(shape, stride, dtype), on_cpu(stat_shape, stat_stride, f32)
        at = stats.data_ptr()
        if given:  # save a copy of the mean: running statistics may change before the backward
            mean, var = call.stat(mean), call.stat(var)
            m, v = _given_addresses(mean, var)
            memmove(at, m, mean_bytes) if m else memset(at, 0, mean_bytes)
        elif centered:
            m = at
        tensors = pack(x_at, 0, w, b, 0, 0, m, at + second, v, y.data_ptr(), 0, 0, 0, 0, 0, 0, 0, 0, 0, 0)
        if run(packed, tensors, 1 if small else threads()):
            check_status(1)
        return y, stats

    return described_forward(call, launch, train=True) or launch


def train_backward(problem: NormProblem) -> TrainingBackward | None:
    """Return the backward of `train_forward`: (dy, x, weight, bias, statistics, needs) -> dx, dweight, dbias."""
    if not can_train_minimal(problem):
        return None
    call, pack, names = Call(problem), pack_tensors, ("input", "weight", "bias", "statistics", "dy")
    run, packed, threads, small = call.library.backward, call.packed(problem.given, False), call.library.threads, call.small
    shape, stride, dtype, centered = problem.shape, problem.y_stride, problem.dtype, problem.spec.centered
    vector, second = (problem.param_size,), 4 * packed_stride(problem)[0]

    def launch(
        dy: Tensor, x: Tensor, weight: Tensor | None, bias: Tensor | None, statistics: Tensor, needs: tuple[bool, ...], /
    ) -> tuple[Tensor | None, ...]:
        dx = dweight = dbias = None
        to_x = to_weight = to_bias = 0
        w = b = 0
        if needs[0]:
            dx = on_cpu(shape, stride, dtype)
            to_x = dx.data_ptr()
        if weight is not None:
            if needs[1]:
                dweight = on_cpu(vector, (1,), weight.dtype) if weight.dim() == 1 else new_gradient(weight)
                to_weight = dweight.data_ptr()
            if not (weight.is_cpu and weight.is_contiguous()):
                weight = dense(weight)
            w = weight.data_ptr()  # pyright: ignore[reportOptionalMemberAccess]
        if bias is not None:
            if needs[2]:
                dbias = on_cpu(vector, (1,), bias.dtype) if bias.dim() == 1 else new_gradient(bias)
                to_bias = dbias.data_ptr()
            if not (bias.is_cpu and bias.is_contiguous()):
                bias = dense(bias)
            b = bias.data_ptr()  # pyright: ignore[reportOptionalMemberAccess]
        x_at, at, dy_at = x.data_ptr(), statistics.data_ptr(), dy.data_ptr()
        if (
            x_at < LOWEST or at < LOWEST or dy_at < LOWEST
            or (w < LOWEST and weight is not None) or (b < LOWEST and bias is not None)
        ):  # fmt: skip
            require_memory(names, (x, weight, bias, statistics, dy))
        mean = at if centered else 0
        tensors = pack(x_at, 0, w, b, 0, 0, mean, at + second, 0, 0, 0, dy_at, 0, to_x, to_weight, to_bias, 0, 0, 0, 0)
        if run(packed, tensors, 1 if small else threads(), 1):
            check_status(1)
        return dx, dweight, dbias

    def prepare(dy, x, weight: Tensor | None, bias: Tensor | None, statistics, needs: tuple[bool, ...]) -> Launcher:
        return described_backward(call, launch, needs, (weight, bias))

    return ByNeeds(prepare) if FrontDoor.launcher else launch


def can_train_minimal(problem: NormProblem) -> bool:
    """Return whether x, weight, bias and given statistics are the only operands, and x is not copied."""
    operands = problem.addends or problem.scale or problem.shift or problem.spec.mix or problem.from_y
    return not (operands or Call(problem).walk.copies)
