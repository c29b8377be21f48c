from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cached_property
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from onepass.core.device import Device, describe
from onepass.core.memory import LOWEST, require_memory
from onepass.core.operands import NO_OPTIONAL, Gradients, OptionalOperands, Result
from onepass.core.problem import NormProblem, bind
from onepass.core.spec import NormSpec
from onepass.planning.choose import Plan, plan
from onepass.planning.explain import ExplainRequested
from onepass.planning.options import Options, batch_invariant, current_options, options_in_context
from onepass.planning.registry import BACKWARD, FORWARD

OPERAND_NAMES = ("input", "weight", "bias", "running_mean", "running_var", *OptionalOperands._fields)


class Launchers:
    """A problem with its launchers: planned once, then called."""

    def __init__(self, problem: NormProblem, device: torch.device, options: Options) -> None:
        self.problem, self.options, self.where = problem, options, device
        self.saved_stride = problem.for_direction(BACKWARD).stride  # of what a backward is handed as x
        self.saved: list[Any] | None = None  # what calls of this kind save for their backward
        self.drops_bias = False  # the bias is not saved: in the backward, the weight stands for it
        self.planned, self.device = settled(problem, device, options)

    @cached_property
    def infer(self) -> Callable[..., Tensor]:
        """The forward where no statistics are wanted; a family may have a shorter way to it."""
        module = family_module(self.planned)
        shorter = getattr(module, "infer", None)
        launch = shorter(self.planned, self.problem) if shorter else None
        if launch and getattr(module, "by_address", False):
            return launch

        def checked(*operands: Tensor | None) -> Tensor:
            if min([t.data_ptr() for t in operands if t is not None]) < LOWEST:
                require_memory(OPERAND_NAMES, operands)
            return launch(*operands) if launch else self.bare(*operands, NO_OPTIONAL).y

        return checked

    @cached_property
    def track(self) -> Callable[..., Tensor] | None:
        """As `infer`, where running statistics are updated too; None if the family leaves that to others."""
        make = getattr(family_module(self.planned), "track", None)
        return make(self.planned, self.problem) if make else None

    @cached_property
    def bare(self) -> Callable[..., Result]:
        """As `forward`; a family may save itself the statistics."""
        make = getattr(family_module(self.planned), "bare", None)
        return make(self.planned, self.problem) if make else self.forward

    @cached_property
    def forward(self) -> Callable[..., Result]:
        module = family_module(self.planned)
        launch = module.forward(self.planned, self.problem)
        if self.problem.addends is None or getattr(module, "adds", False):
            return launch

        def add_first(x: Tensor, weight, bias, mean, var, extras: OptionalOperands) -> Result:
            assert extras.residual is not None
            total = torch.empty_strided(x.shape, self.problem.stride, dtype=self.problem.dtype, device=x.device)
            torch.add(x, extras.residual, out=total)
            return launch(total, weight, bias, mean, var, extras._replace(residual=None))._replace(sum=total)

        return add_first

    @cached_property
    def planned_back(self) -> Plan:
        return plan(self.problem.for_direction(BACKWARD), self.device, BACKWARD, self.options)

    @cached_property
    def backward(self) -> Callable[..., Gradients]:
        return family_module(self.planned_back).backward(self.planned_back, self.problem.for_direction(BACKWARD))

    @cached_property
    def train(self) -> Any:
        """A shorter way through forward and backward, if the family has both and one."""
        make = getattr(family_module(self.planned), "train", None)
        return make(self.problem) if make and self.planned.family == self.planned_back.family else None


def settled(problem: NormProblem, device: torch.device, options: Options) -> tuple[Plan, Device]:
    """The plan of the forward, and the device as it was planned for: without a family of which compiling shows that it cannot run here."""
    described = describe(device)
    while True:
        planned = plan(problem, described, FORWARD, options)
        settle = getattr(family_module(planned), "settle", None)
        reason = settle(planned, problem, device) if settle else ""
        if not reason:
            return planned, described
        lacks = {"ring": "no_ring", "c": "no_c"}.get(planned.family, "no_team")
        described = replace(described, **{lacks: reason})


def family_module(planned: Plan) -> Any:
    return import_module(f"onepass.{planned.module}")


known: dict[tuple[Any, ...], Launchers] = {}


_MOST = 4096  # kinds of call kept ready; serving with ever new shapes must not grow without bound


def prepare(
    key: tuple[Any, ...], problem: NormProblem, device: torch.device, weight: Tensor | None = None, bias: Tensor | None = None
) -> Launchers:
    options = current_options()
    if options.explain:
        raise ExplainRequested(problem, settled(problem, device, options)[1])
    if len(known) >= _MOST:
        known.clear()
    found = Launchers(problem, device, options)
    found.drops_bias = bias_is_not_read(problem.spec, weight, bias, problem.scale is not None or problem.shift is not None)
    known[key] = found
    return found


def bias_is_not_read(spec: NormSpec, weight: Tensor | None, bias: Tensor | None, modulated: bool) -> bool:
    """Whether a backward needs no more of the bias than its shape and dtype, and the weight has the same.

    Then it is not saved, and users may change it in place. Its values are read to take z again, and to take x_hat from y.
    """
    if weight is None or bias is None or spec.activation or spec.from_y or modulated:
        return False
    return weight.dtype == bias.dtype and weight.shape == bias.shape


def launchers_of(
    spec: NormSpec, x: Tensor, weight: Tensor | None, bias: Tensor | None, given: bool, track: bool, extras: OptionalOperands = NO_OPTIONAL
) -> Launchers:
    """The launchers for operands that were checked."""
    problem = bind(spec, x, weight, bias, given, track, extras)
    key = (problem, x.device, options_in_context.get(), batch_invariant.on)
    return known.get(key) or prepare(key, problem, x.device)
