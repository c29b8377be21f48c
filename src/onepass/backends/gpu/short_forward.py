"""Launchers of a forward that need little host time. They are for the common operands. The launcher in forward.py is for all.

launch/prepared.py prepares each launcher. It hands unusual calls to a function `careful`, which computes the same.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from onepass.backends.family import Launches, Tracking, TrainingForward
from onepass.backends.front_door import Layout, New
from onepass.backends.gpu.launch.chain import Part
from onepass.backends.gpu.launch.kernel import dense
from onepass.backends.gpu.launch.prepared import prepared
from onepass.backends.gpu.launch.signature import ALIGNMENT
from onepass.backends.gpu.launch.stream import allocate, current_device
from onepass.core.memory import require_memory
from onepass.core.operands import NO_OPTIONAL, OptionalOperands
from onepass.core.problem import NormProblem
from onepass.core.statistics import packed_shape, packed_stride

from .forward import chain_for, chain_of, counters_for, counters_of, for_odd_address, forward, kernels, parameters, readable


def infer(problem: NormProblem, launches: Launches) -> Callable[..., Tensor] | None:
    """Return a launcher (x, weight, bias, mean, var) -> y.

    Return None if x must be copied, or if there is a residual, a modulation or a mix of norms.
    """
    if problem.copied or problem.addends or problem.scale or problem.shift or problem.spec.mix:
        return None
    general = forward(problem, launches, False)

    def careful(x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor | None, var: Tensor | None) -> Tensor:
        return general(x, weight, bias, mean, var, NO_OPTIONAL).y

    chain, names = chain_for(problem, launches, (), False), ("x", "weight", "bias", "mean", "var")
    given = Layout(problem.stat_stride, problem.stat_shape, torch.float32)
    layouts = {"mean": given, "var": given} if problem.given else None
    return prepared(chain, names, {"y": like_y(problem)}, "y", careful, layouts, counters_of(launches))


def infer_extras(problem: NormProblem, launches: Launches) -> Callable[..., tuple[Tensor, Tensor | None]] | None:
    """Return a launcher (x, weight, bias, residual, scale, shift) -> (y, x + residual).

    Return None if x must be copied, or if there are given statistics or a mix of norms.
    """
    if problem.copied or problem.given or problem.spec.mix:
        return None
    adds, general = problem.addends is not None, forward(problem, launches, False)

    def careful(x: Tensor, weight: Tensor | None, bias: Tensor | None, *extras: Tensor | None) -> tuple[Tensor, Tensor | None]:
        require_memory(("input", "weight", "bias", "residual", "scale", "shift"), (x, weight, bias, *extras))
        result = general(x, weight, bias, None, None, OptionalOperands(*extras))
        return result.y, result.sum

    chain, names = chain_for(problem, launches, (), False, residual=adds), ("x", "weight", "bias", "residual", "scale", "shift")
    total = New(problem.shape, problem.stride, problem.dtype)
    outputs = {"y": like_y(problem), "sum": total} if adds else {"y": like_y(problem)}
    layouts = {"x": Layout(problem.stride), "residual": Layout(problem.stride)} if adds else None
    return prepared(chain, names, outputs, ("y", "sum") if adds else ("y", None), careful, layouts, counters_of(launches))


def train_forward(problem: NormProblem, launches: Launches) -> TrainingForward | None:
    """Return a launcher (x, weight, bias) -> (y, statistics), or None if there are other operands or `_can_train` says no."""
    if problem.track or _has_extras(problem) or not _can_train(problem):
        return None
    return _own_statistics(problem, launches, None, True)


def train_extras(problem: NormProblem, launches: Launches) -> Callable[..., tuple[Tensor, Tensor, Tensor | None]] | None:
    """Return a launcher (x, weight, bias, residual, scale, shift) -> (y, statistics, x + residual).

    Return None if there is neither a residual nor a modulation, or if `_can_train` says no.
    """
    if problem.track or not _has_extras(problem) or not _can_train(problem):
        return None
    return _own_statistics(problem, launches, None, True)


def track(problem: NormProblem, launches: Launches) -> Tracking | None:
    """Return a launcher (x, weight, bias, running_mean, running_var, momentum) -> y that updates the running statistics in place.

    Return None if there are other operands, if there is not one statistic per channel, or if `_can_train` says no.
    """
    return _tracking(problem, launches, False)


def train_track(problem: NormProblem, launches: Launches) -> Tracking | None:
    """As `track`, but the launcher returns (y, mean and rstd in one tensor)."""
    return _tracking(problem, launches, True)


def _tracking(problem: NormProblem, launches: Launches, train: bool) -> Tracking | None:
    if not problem.track or _has_extras(problem) or not _can_train(problem) or len(problem.stat_shape) != 1:
        return None
    made: dict[float, Callable[..., Any]] = {}

    def launch(x: Tensor, weight: Tensor | None, bias: Tensor | None, running_mean: Tensor, running_var: Tensor, momentum: float, /) -> Any:
        run = made.get(momentum)
        if run is None:
            with torch.cuda.device(x.device) if x.is_cuda else nullcontext():
                run = made[momentum] = _own_statistics(problem, launches, momentum, train)
        result = run(x, weight, bias, running_mean, running_var)
        increment_version((running_mean, running_var))  # tells autograd that both tensors were changed in place
        return result

    return launch


def _has_extras(problem: NormProblem) -> bool:
    return bool(problem.addends or problem.scale or problem.shift)


def _can_train(problem: NormProblem) -> bool:
    """Return whether the kernels read x itself, not a copy, and compute its statistics, and the backward reads x, not y."""
    return not (problem.given or problem.spec.mix or problem.from_y or problem.copied)


def _own_statistics(problem: NormProblem, launches: Launches, momentum: float | None, train: bool) -> Callable[..., Any]:
    """Return a launcher (x, weight, bias) -> y that computes the statistics itself.

    - with `train`: it returns (y, statistics)
    - with a residual or a modulation: it also takes residual, scale and shift. Its last result is x + residual, or None
    - with a momentum: it also takes running_mean and running_var, and updates them in place
    """
    adds, extras = bool(problem.addends), _has_extras(problem)
    running = [] if momentum is None else ["running_mean", "running_var"]
    outputs, parts = {"y": like_y(problem)}, {}
    if train:
        count, second = prod(problem.stat_shape), packed_stride(problem)[0]
        outputs["statistics"] = New(packed_shape(problem), packed_stride(problem), torch.float32)
        parts = {"mean": Part("statistics", 0, count), "rstd": Part("statistics", second, second + count)}
    names = ["x", *["residual"] * adds, *parameters(problem), *running]
    made_of = kernels(problem, launches, statistics=train, residual=adds, momentum=momentum)
    chain = chain_of(problem, launches, made_of, names, list(outputs), adds, parts)
    arguments = "x", "weight", "bias", *(["residual", "scale", "shift"] if extras else running)
    odd = for_odd_address(problem, launches, lambda unaligned, planned: _own_statistics(unaligned, planned, momentum, train))

    def careful(*tensors: Tensor | None) -> Any:
        given = dict(zip(arguments, tensors))
        x: Any = given["x"]
        device, residual = x.get_device(), given.get("residual")
        if device != current_device():
            with torch.cuda.device(device):
                return careful(*tensors)
        if odd and x.data_ptr() % ALIGNMENT:
            return odd()(*tensors)
        if residual is not None and not x.stride() == residual.stride() == problem.stride:
            return _add_first(problem, launches, given)
        params = [dense(given[name]) for name in parameters(problem)]
        inputs = [readable(problem, launches, x), *[residual] * adds, *params, *[given[name] for name in running]]
        made = [allocate(*new) for new in outputs.values()]
        total = [allocate(problem.shape, problem.stride, problem.dtype)] * adds
        chain.launch(device, inputs, [*made, *counters_for(launches, device), *total])  # pyright: ignore[reportArgumentType]
        return (*made, *(total or [None])) if extras else tuple(made) if train else made[0]

    layouts = dict.fromkeys(running, Layout((1,), problem.stat_shape, torch.float32))
    layouts |= {"x": Layout(problem.stride), "residual": Layout(problem.stride)} if adds else {}
    returned = (*outputs, "sum" if adds else None) if extras else tuple(outputs) if train else "y"
    written = outputs | ({"sum": New(problem.shape, problem.stride, problem.dtype)} if adds else {})
    return prepared(chain, arguments, written, returned, careful, layouts, counters_of(launches))


def _add_first(problem: NormProblem, launches: Launches, given: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
    """Return (y, statistics, x + residual). torch adds x and the residual, because kernels need equal strides for that."""
    require_memory(("input", "residual"), (given["x"], given["residual"]))
    total = torch.add(given["x"], given["residual"], out=allocate(problem.shape, problem.stride, problem.dtype))
    summed = replace(problem, addends=None)
    launch = _own_statistics(summed, launches, None, True)
    extras = (None, given["scale"], given["shift"]) if _has_extras(summed) else ()
    y, statistics, *_ = launch(total, given["weight"], given["bias"], *extras)
    return y, statistics, total


def like_y(problem: NormProblem) -> New:
    return New(problem.shape, problem.y_stride, problem.dtype)
