"""Launchers with a residual or a modulation that need little host time. They exist only while the front door is open.

They are launchers in C++ (in_cpp.py), and hand unusual calls to the launchers of launch.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from onepass.backends.front_door import ByNeeds, FrontDoor, Launcher
from onepass.core.allocate import on_cpu
from onepass.core.memory import require_memory
from onepass.core.operands import Needs, OptionalOperands, SavedTensors
from onepass.core.problem import NormProblem
from onepass.core.statistics import packed_shape, packed_stride, unpack

from .in_cpp import EXTRAS, PARAMETERS, described_backward, described_forward
from .launch import backward, forward
from .problem import Call


def infer_extras(problem: NormProblem) -> Launcher | None:
    """Return a launcher (x, weight, bias, residual, scale, shift) -> (y, x + residual), or None unless `_has_launcher`."""
    return _forward(problem, False) if _has_launcher(problem) else None


def train_extras(problem: NormProblem) -> Launcher | None:
    """As `infer_extras`, but the launcher returns (y, statistics, x + residual)."""
    return _forward(problem, True) if _has_launcher(problem) else None


def train_extras_backward(problem: NormProblem) -> Callable[..., Any] | None:
    """Return (dy, x, weight, bias, statistics, scale, shift, dsum, needs) -> the gradients, or None unless `_has_launcher`."""
    if not _has_launcher(problem):
        return None
    call, general, names = Call(problem), backward(problem), ("dy", "input", "weight", "bias", "statistics", "scale", "shift", "dsum")

    def careful(*given: Any) -> tuple[Tensor | None, ...]:
        require_memory(names, given[:-1])
        dy, x, weight, bias, statistics, scale, shift, dsum, needs = given
        saved = SavedTensors(x, weight, bias, *unpack(problem, statistics), None, scale, shift)
        return general(dy, dsum, saved, Needs(*needs))[:5]

    def prepare(*given: Any) -> Launcher:
        _, _, weight, bias, _, scale, shift, dsum, needs = given
        return described_backward(call, careful, needs, (weight, bias, scale, shift), dsum is not None)

    return ByNeeds(prepare)


def _has_launcher(problem: NormProblem) -> bool:
    """Return whether there is a residual or a modulation, x is not copied, and the front door is open."""
    extras = problem.addends or problem.scale or problem.shift
    others = problem.given or problem.track or problem.spec.mix or problem.from_y
    return bool(FrontDoor.launcher and extras and not others and not Call(problem).walk.copies)


def _forward(problem: NormProblem, train: bool) -> Launcher | None:
    call, general, names = Call(problem), forward(problem), ("input", *PARAMETERS[:2], *EXTRAS)
    after_sum = _forward(replace(problem, addends=None), train) if problem.addends else None

    def careful(x: Tensor, weight: Tensor | None, bias: Tensor | None, *extras: Tensor | None) -> tuple[Tensor | None, ...]:
        require_memory(names, (x, weight, bias, *extras))
        residual, *modulation = extras
        if after_sum and residual is not None and residual.is_cpu and not x.stride() == residual.stride() == problem.stride:
            total = torch.add(x, residual, out=on_cpu(problem.shape, problem.stride, problem.dtype))
            return *after_sum(total, weight, bias, None, *modulation)[:-1], total
        result = general(x, weight, bias, None, None, OptionalOperands(*extras))
        if not train:
            return result.y, result.sum
        statistics = on_cpu(packed_shape(problem), packed_stride(problem), torch.float32)
        for kept, computed in zip(unpack(problem, statistics), (result.mean, result.rstd)):
            if kept is not None and computed is not None:
                kept.copy_(computed)
        return result.y, statistics, result.sum

    return described_forward(call, careful, train, extras=True)
