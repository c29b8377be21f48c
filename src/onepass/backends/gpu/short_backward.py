"""Launchers of a backward that need little host time.

They belong to `train_forward`, `train_extras` and `train_track` of short_forward.py, which save mean and rstd in one tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from math import prod
from typing import Any

import torch
from torch import Tensor

from onepass.backends.family import Launches, TrainingBackward
from onepass.backends.front_door import ByNeeds, New
from onepass.backends.gpu.launch.chain import Chain, Part
from onepass.backends.gpu.launch.kernel import dense
from onepass.backends.gpu.launch.prepared import prepared
from onepass.backends.gpu.launch.stream import allocate, current_device
from onepass.backends.gpu.partials.gradient import PARAMETERS
from onepass.core.operands import Needs
from onepass.core.problem import NormProblem
from onepass.core.statistics import packed_stride

from .backward import aligned, has_sets_of_one, steps_of
from .forward import counters_for, counters_of

Run = Callable[..., tuple[Tensor | None, ...]]
# The arguments of a Run. Without extras it has the first five.
ARGUMENTS: tuple[str, ...] = ("dy", "x", "weight", "bias", "statistics", "scale", "shift", "dsum")


def train_backward(problem: NormProblem, launches: Launches) -> TrainingBackward | None:
    """Return the backward of `train_forward` and `train_track`, or None if there are other operands or `_can_train` says no."""
    if problem.addends or problem.scale or problem.shift or not _can_train(problem):
        return None

    def prepare(dy, x: Tensor, weight: Tensor | None, bias: Tensor | None, statistics, needs: tuple[bool, ...]) -> Run:
        return _run(problem, launches, Needs(*needs), x, (weight, bias))

    return ByNeeds(prepare)


def train_extras_backward(problem: NormProblem, launches: Launches) -> Run | None:
    """Return the backward of `train_extras`: (*ARGUMENTS, needs) -> dx, dweight, dbias, dscale, dshift. Its x is x + residual.

    Return None if there is neither a residual nor a modulation, or if `_can_train` says no.
    """
    if not (problem.addends or problem.scale or problem.shift) or not _can_train(problem):
        return None

    def prepare(dy, x: Tensor, *others: Any) -> Run:
        weight, bias, _, scale, shift, dsum, needs = others
        return _run(problem, launches, Needs(*needs), x, (weight, bias, scale, shift), dsum is not None)

    return ByNeeds(prepare)


def _can_train(problem: NormProblem) -> bool:
    """Return whether the kernels compute the gradients from x itself, not from a copy or y, and from its own statistics."""
    return not (problem.given or problem.spec.mix or problem.from_y or problem.copied or has_sets_of_one(problem))


def _run(problem: NormProblem, launches: Launches, needs: Needs, x: Tensor, params: Sequence[Tensor | None], dsum: bool = False) -> Run:
    """Return a launcher of the gradients in `needs`, compiled for the device of x.

    It reads only shapes and dtypes from `params`. These stay the same in later calls, because a launcher serves one kind of call.
    """
    steps, workspace, gradients = steps_of(problem, launches, needs, dsum)
    count, second = prod(problem.stat_shape), packed_stride(problem)[0]
    parts = {"mean": Part("statistics", 0, count), "rstd": Part("statistics", second, second + count)}
    present = [name for name in PARAMETERS if getattr(problem, name)]
    written = [*gradients, *["counters"] * bool(launches[0].counters)]
    chain = Chain(steps, ["x", "dy", "statistics", *["dsum"] * dsum, *present], written, workspace, parts)
    outputs = {"dx": New(problem.shape, problem.y_stride, problem.dtype)}
    outputs |= {f"d{name}": New(tuple(t.shape), dense(t).stride(), t.dtype) for name, t in zip(PARAMETERS, params) if t is not None}
    outputs = {name: outputs[name] for name in gradients}
    arguments = ARGUMENTS[: 5 if len(params) == 2 else 8]
    returned = ["dx", *(f"d{name}" for name, _ in zip(PARAMETERS, params))]

    def careful(*tensors: Tensor | None) -> tuple[Tensor | None, ...]:
        given = dict(zip(arguments, tensors))
        device = given["x"].get_device()  # pyright: ignore[reportOptionalMemberAccess]
        if device != current_device():
            with torch.cuda.device(device):
                return careful(*tensors)
        made = {name: allocate(*new) for name, new in outputs.items()}
        inputs = [dense(given[name]) if name in PARAMETERS else given[name] for name in chain.inputs]
        inputs[:2] = [aligned(launches, t) for t in inputs[:2]]  # pyright: ignore[reportArgumentType]
        chain.launch(device, inputs, [*made.values(), *counters_for(launches, device)])  # pyright: ignore[reportArgumentType]
        return tuple(made.get(name) for name in returned)

    with torch.cuda.device(x.device) if x.is_cuda else nullcontext():
        found = [name if name in gradients else None for name in returned]
        return prepared(chain, arguments, outputs, found, careful, None, counters_of(launches))
