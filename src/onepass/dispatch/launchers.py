"""The launchers of a call, found by one key in one cache.

The *kind* of a call is everything that decides how it runs: the norm and its arguments, the current options, and the shapes,
strides, dtypes and devices of its tensors. Calls of the same kind share their Launchers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from onepass.backends.family import (
    BACKWARD,
    FORWARD,
    Backward,
    Direction,
    Forward,
    Launches,
    PlannedLaunches,
    Tracking,
    TrainingBackward,
    TrainingForward,
)
from onepass.backends.front_door import ByNeeds, FrontDoor
from onepass.backends.gpu.launches import VECTOR_BYTES
from onepass.core.device import Device, describe
from onepass.core.memory import LOWEST, require_memory
from onepass.core.operands import NO_OPTIONAL, OptionalOperands, Result
from onepass.core.problem import NormProblem
from onepass.core.spec import NormSpec
from onepass.core.statistics import packed_stride
from onepass.planning.choose import Plan, plan
from onepass.planning.explain import ExplainRequested
from onepass.planning.options import Options, batch_invariant, current_options, options_in_context
from onepass.planning.registry import family_named

from . import front_door
from .recent import MAX_VARIANTS, Same, forget_recent, same_as
from .slower import tell_plan

Define = Callable[..., NormSpec]  # (x, weight, bias, *args) -> the spec; it checks its arguments
Kind = tuple[Any, ...]

OPERAND_NAMES = ("input", "weight", "bias", "running_mean", "running_var", *OptionalOperands._fields)
MAX_KINDS = 4096  # the cache is cleared at this size, so that ever new shapes do not fill the memory

_known: dict[Kind, Launchers] = {}
find = _known.get


def forget_all() -> None:
    """Forget all kinds of calls."""
    _known.clear()
    forget_recent()


front_door.State.listeners.append(forget_all)  # so that launchers in C++ take the place of launchers in Python


def kind_of(define: Define, args: tuple[Any, ...], x: Tensor, weight: Tensor | None, bias: Tensor | None, others: Any) -> Kind:
    """Return the key of a call. `others` is whatever else decides how it runs, such as `signatures_of` further tensors.

    The devices of weight and bias are not part of the key. The launchers check them.
    """
    return (
        define, args, options_in_context.get(), batch_invariant.on, x.shape, x.stride(), x.dtype, x.is_cpu or x.device,
        weight is None or weight.shape, weight is None or weight.dtype, bias is None or bias.shape, bias is None or bias.dtype, others,
    )  # fmt: skip


def signatures_of(tensors: Sequence[Tensor | None]) -> tuple[Any, ...]:
    """Return (shape, dtype, device) of each tensor, or None for None, as part of a key."""
    return tuple([None if t is None else (t.shape, t.dtype, t.device) for t in tensors])


def prepare(kind: Kind, problem: NormProblem, x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None) -> Launchers:
    """Plan a new kind of call, and remember it."""
    front_door.start()
    options, device = current_options(), x.device
    if options.explain:
        if x.is_cuda and x.data_ptr() % VECTOR_BYTES:
            problem = replace(problem, aligned=False)
        raise ExplainRequested(problem, plan_launchable(problem, device, options)[1])
    found = Launchers(problem, device, options)
    found.drops_bias = bias_is_not_read(problem.spec, weight, bias, problem.scale is not None or problem.shift is not None)
    remember(kind, found)
    return found


def remember(kind: Kind, found: Launchers) -> None:
    """Add launchers to the cache."""
    if len(_known) >= MAX_KINDS:
        forget_all()
    _known[kind] = found


def known() -> list[Launchers]:
    """Return the launchers in the cache, each once."""
    return list({id(found): found for found in _known.values()}.values())


def why_no_library() -> str:
    """Return why a known call could not use the C kernels that its first plan chose, or "" if there is no such call."""
    for found in known():
        reason = found._described.no_c
        if reason != describe(found.device).no_c:
            return reason
    return ""


def plan_launchable(
    problem: NormProblem, device: torch.device, options: Options, direction: Direction = FORWARD, described: Device | None = None
) -> tuple[Plan, Device]:
    """Return the plan of a direction, and the Device it was made for. `described` may say what is known of the device already.

    Some families must compile to find out whether they can run here. If one cannot, its reason is stored in the Device, and the
    planner chooses again.
    """
    described = described or describe(device)
    while True:
        chosen = plan(problem, described, direction, options)
        family = family_named(chosen.family)
        reason = family.check_launchable(problem, chosen.launches, device, direction)
        if not reason:
            return chosen, described
        described = replace(described, **{family.disabled_by: reason})


def bias_is_not_read(spec: NormSpec, weight: Tensor | None, bias: Tensor | None, modulated: bool) -> bool:
    """Return whether a backward needs only the shape and dtype of the bias, and can take them from the weight.

    Then the bias is not saved, and users may change it in place. A backward needs the values of the bias in two cases: it computes z
    again, or it computes x_hat from y.
    """
    if weight is None or bias is None or spec.activation or spec.from_y or modulated:
        return False
    return weight.dtype == bias.dtype and weight.shape == bias.shape


class Again(NamedTuple):
    """How the autograd function in C++ runs a backward again, for tensors like these (src/front_door/remembered.h)."""

    needs: tuple[bool, ...]  # which inputs of the forward need a gradient
    tensors: tuple[Tensor | None, ...]  # the gradients of the outputs, and the saved tensors
    launch: Callable[..., Any] | None
    arguments: tuple[int, ...]  # of `launch`: places among the tensors, -1 for None
    last_argument: Any
    results: tuple[int, ...]  # for each input, the place of its gradient among the results of `launch`, -1 for None


class Launchers:
    """The launchers of one kind of call, each made on first use."""

    def __init__(self, problem: NormProblem, device: torch.device, options: Options) -> None:
        self.problem, self.options, self.device = problem, options, device
        self.saved_stride = problem.for_direction(BACKWARD).stride  # the strides of the saved x
        self.packed_stride = packed_stride(problem)  # the strides of the tensor that holds mean and rstd
        self.saved: list[Any] | None = None  # the signatures of the tensors that calls of this kind save
        self.packed: list[Any] | None = None  # the same for calls that save mean and rstd in one tensor
        self.checked: dict[int, tuple[Same, ...]] = {}  # number of tensors -> comparisons with tensors that a backward has checked
        self.remembered = FrontDoor.memory() if FrontDoor.memory else None  # the same comparisons for the autograd function in C++, or None
        self.drops_bias = False  # the bias is not saved; the backward takes its shape and dtype from the weight
        self.plan, self._described = plan_launchable(problem, device, options)
        self._launches = self.plan.launches
        if self._launches and not options.invariant:  # with `batch_invariant`, results must not depend on the address either
            self._launches = PlannedLaunches(self._launches, self._for_odd_address)
        self._tell(self.plan)
        self._family = family_named(self.plan.family)

    def _tell(self, found: Plan) -> None:
        if self.options.family is None:  # otherwise the user has chosen
            tell_plan(self.problem, found, self.device.type)

    def _for_odd_address(self) -> tuple[NormProblem, Launches]:
        """Plan the forward again, for an x whose address is no multiple of 16 bytes."""
        problem = replace(self.problem, aligned=False)
        launches = plan_launchable(problem, self.device, self.options)[0].launches
        return problem, launches or self.plan.launches

    def _on_device(self) -> AbstractContextManager[None]:
        """Make the device of the call current: some families compile launchers for the current device."""
        return torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext()

    def remember_checked(self, tensors: Sequence[Tensor], again: Again | None) -> None:
        """Remember tensors that a backward of this kind has checked. Later tensors like them need no check."""
        same, n = same_as(tensors), len(tensors)
        if same is not None:
            self.checked[n] = (same, *self.checked.get(n, ())[: MAX_VARIANTS - 1])
        if again and FrontDoor.remember and self.remembered is not None:
            given = [again.tensors[at] if at >= 0 else None for at in again.arguments]
            in_cpp = again.launch.launcher(*given, again.last_argument) if isinstance(again.launch, ByNeeds) else None
            FrontDoor.remember(self.remembered, *again, in_cpp)

    @cached_property
    def forward(self) -> Forward:
        """(x, weight, bias, mean, var, optional) -> Result."""
        return self._add_first(self._family.forward(self.problem, self._launches, statistics=True))

    @cached_property
    def forward_without_statistics(self) -> Forward:
        """As `forward`; statistics may be missing from the result."""
        return self._add_first(self._family.forward(self.problem, self._launches, statistics=False))

    def _add_first(self, launch: Forward) -> Forward:
        """`launch`, with x + residual computed first if the family does not add them itself."""
        problem = self.problem
        if problem.addends is None or self._family.adds_residual:
            return launch

        def add_first(x: Tensor, weight, bias, mean, var, optional: OptionalOperands, /) -> Result:
            assert optional.residual is not None
            total = torch.empty_strided(x.shape, problem.stride, dtype=problem.dtype, device=x.device)
            torch.add(x, optional.residual, out=total)
            return launch(total, weight, bias, mean, var, optional._replace(residual=None))._replace(sum=total)

        return add_first

    @cached_property
    def infer(self) -> Callable[..., Tensor]:
        """(x, weight, bias, mean, var) -> y, without optional operands and statistics."""
        with self._on_device():
            launch = self._family.infer(self.problem, self._launches)
        if launch and self._family.checks_memory:
            return launch

        def checked(*operands: Tensor | None) -> Tensor:
            if min([t.data_ptr() for t in operands if t is not None]) < LOWEST:
                require_memory(OPERAND_NAMES, operands)
            return launch(*operands) if launch else self.forward_without_statistics(*operands, NO_OPTIONAL).y  # pyright: ignore

        return checked

    @cached_property
    def infer_extras(self) -> Callable[..., tuple[Tensor, Tensor | None]]:
        """(x, weight, bias, residual, scale, shift) -> (y, x + residual), without statistics."""
        with self._on_device():
            launch = self._family.infer_extras(self.problem, self._launches)
        if launch:
            return launch

        def through_forward(x: Tensor, weight, bias, *extras: Tensor | None) -> tuple[Tensor, Tensor | None]:
            operands = x, weight, bias, None, None, *extras
            if min([t.data_ptr() for t in operands if t is not None]) < LOWEST:
                require_memory(OPERAND_NAMES, operands)
            result = self.forward_without_statistics(x, weight, bias, None, None, OptionalOperands(*extras))
            return result.y, result.sum

        return through_forward

    @cached_property
    def train_extras(self) -> Callable[..., tuple[Tensor, Tensor, Tensor | None]] | None:
        """(x, weight, bias, residual, scale, shift) -> (y, statistics, x + residual); None without a `train_extras_backward`."""
        with self._on_device():
            return self._family.train_extras(self.problem, self._launches) if self.train_extras_backward else None

    @cached_property
    def train_extras_backward(self) -> Callable[..., tuple[Tensor | None, ...]] | None:
        """The backward of `train_extras`, as backends/family.py describes it; None if the family has none."""
        return family_named(self.backward_plan.family).train_extras_backward(self.problem, self.backward_plan.launches)

    @cached_property
    def track(self) -> Tracking | None:
        """(x, weight, bias, running_mean, running_var, momentum) -> y, with running statistics updated; None if the family cannot."""
        with self._on_device():
            return self._family.track(self.problem, self._launches)

    @cached_property
    def train_track(self) -> Tracking | None:
        """As `track`, but -> (y, mean and rstd in one tensor); None without a `train_backward`."""
        with self._on_device():
            return self._family.train_track(self.problem, self._launches) if self.train_backward else None

    @cached_property
    def backward_plan(self) -> Plan:
        found, _ = plan_launchable(self.problem.for_direction(BACKWARD), self.device, self.options, BACKWARD, self._described)
        self._tell(found)
        return found

    @cached_property
    def backward(self) -> Backward:
        """(dy, dsum, saved, needs) -> Gradients."""
        return family_named(self.backward_plan.family).backward(self.problem.for_direction(BACKWARD), self.backward_plan.launches)

    @cached_property
    def train_forward(self) -> TrainingForward | None:
        """(x, weight, bias) -> (y, mean and rstd in one tensor), with less host time; None without a `train_backward`."""
        with self._on_device():
            return self._family.train_forward(self.problem, self._launches) if self.train_backward else None

    @cached_property
    def train_backward(self) -> TrainingBackward | None:
        """(dy, x, weight, bias, statistics, needs) -> dx, dweight, dbias; None if the family has none."""
        return family_named(self.backward_plan.family).train_backward(self.problem, self.backward_plan.launches)
