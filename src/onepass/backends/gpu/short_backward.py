"""Launchers of a backward with little host time: those of the forwards in short_forward.py that training uses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from math import prod

import torch
from torch import Tensor

from onepass.backends.family import Launches, TrainingBackward
from onepass.backends.gpu.launch.chain import Chain, Part
from onepass.backends.gpu.launch.kernel import dense
from onepass.backends.gpu.launch.prepared import New, prepared
from onepass.backends.gpu.launch.stream import allocate, current_device
from onepass.backends.gpu.partials.gradient import PARAMETERS
from onepass.core.operands import Needs
from onepass.core.problem import NormProblem
from onepass.core.statistics import packed_stride

from .backward import has_sets_of_one, steps_of


def train_backward(problem: NormProblem, launches: Launches) -> TrainingBackward | None:
    """Return the backward of `train_forward` in short_forward.py, or None if the call has more operands than x, weight and bias."""
    if problem.addends or problem.scale or problem.shift:
        return None
    launch = train_extras_backward(problem, launches)
    if launch is None:
        return None

    def plain(
        dy: Tensor, x: Tensor, weight: Tensor | None, bias: Tensor | None, statistics: Tensor, needs: tuple[bool, ...], /
    ) -> tuple[Tensor | None, ...]:
        return launch(dy, x, weight, bias, statistics, None, None, None, needs)

    return plain


def train_extras_backward(problem: NormProblem, launches: Launches) -> Callable[..., tuple[Tensor | None, ...]] | None:
    """Return (dy, x, weight, bias, statistics, scale, shift, dsum, needs) -> dx, dweight and so on, or None if it cannot."""
    if problem.given or problem.spec.mix or problem.from_y or problem.copied or has_sets_of_one(problem):
        return None
    made: dict[tuple[bool, ...], Callable[..., tuple[Tensor | None, ...]]] = {}

    def launch(
        dy: Tensor,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        statistics: Tensor,
        scale: Tensor | None,
        shift: Tensor | None,
        dsum: Tensor | None,
        needs: tuple[bool, ...],
    ) -> tuple[Tensor | None, ...]:
        key = needs if dsum is None else (*needs, True, True)
        run = made.get(key)
        if run is None:
            with torch.cuda.device(x.device) if x.is_cuda else nullcontext():
                run = made[key] = _train_backward(problem, launches, Needs(*needs), dsum is not None, (weight, bias, scale, shift))
        return run(dy, x, weight, bias, statistics, scale, shift, dsum)

    return launch


def _train_backward(
    problem: NormProblem, launches: Launches, needs: Needs, dsum: bool, params: Sequence[Tensor | None]
) -> Callable[..., tuple[Tensor | None, ...]]:
    """Return the launcher of these gradients, for the current device.

    Later parameters have the shapes and dtypes of those given here, because a launcher serves one kind of call.
    """
    steps, workspace, gradients, _ = steps_of(problem, launches, needs, dsum)
    count, second = prod(problem.stat_shape), packed_stride(problem)[0]
    parts = {"mean": Part("statistics", 0, count), "rstd": Part("statistics", second, second + count)}
    present = [name for name in PARAMETERS if getattr(problem, name)]
    chain = Chain(steps, ["x", "dy", "statistics", *["dsum"] * dsum, *present], gradients, workspace, parts)
    outputs = {"dx": New(problem.shape, problem.y_stride, problem.dtype)}
    outputs |= {f"d{name}": New(tuple(t.shape), dense(t).stride(), t.dtype) for name, t in zip(PARAMETERS, params) if t is not None}
    outputs = {name: outputs[name] for name in gradients}
    arguments, returned = (
        ("dy", "x", "weight", "bias", "statistics", "scale", "shift", "dsum"),
        ("dx", "dweight", "dbias", "dscale", "dshift"),
    )
    returned = returned if problem.addends or problem.scale or problem.shift else returned[:3]

    def careful(*tensors: Tensor | None) -> tuple[Tensor | None, ...]:
        given = dict(zip(arguments, tensors))
        device = given["x"].get_device()  # pyright: ignore[reportOptionalMemberAccess]
        if device != current_device():
            with torch.cuda.device(device):
                return careful(*tensors)
        made = {name: allocate(*new) for name, new in outputs.items()}
        inputs = [dense(given[name]) if name in PARAMETERS else given[name] for name in chain.inputs]
        chain.launch(device, inputs, list(made.values()))  # pyright: ignore[reportArgumentType]
        return tuple(made.get(name) for name in returned)

    code = ", ".join(name if name in gradients else "None" for name in returned)
    return prepared(chain, arguments, outputs, code, careful)
