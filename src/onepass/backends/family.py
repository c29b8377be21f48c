"""What a kernel family must offer, and the launchers it returns.

A family is an object with a name, reasons why it cannot run a problem, a cost, and functions that return launchers. A launcher is
a function on tensors. It is prepared once for a problem and then runs every call of that kind. A new family subclasses `Family`
and has one line in `planning/registry.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from onepass.core.device import Device
from onepass.core.operands import Gradients, OptionalOperands, Result, SavedTensors
from onepass.core.problem import NormProblem

Direction = Literal["forward", "backward"]
FORWARD: Direction = "forward"
BACKWARD: Direction = "backward"

Launches = tuple[Any, ...]  # one object for each kernel launch; `str` of it is a line of `explain`


class Forward(Protocol):
    """Normalizes x. `mean` and `var` are given statistics, or None to compute them."""

    def __call__(
        self,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        mean: Tensor | None,
        var: Tensor | None,
        optional: OptionalOperands,
        /,
    ) -> Result: ...


class Backward(Protocol):
    """Takes the gradient of y, the gradient that arrives at x + residual (or None), and what the forward saved.

    `needs` says which gradients to compute, in the order of `Needs`.
    """

    def __call__(self, dy: Tensor, dsum: Tensor | None, saved: SavedTensors, needs: Sequence[bool], /) -> Gradients: ...


class Training(NamedTuple):
    """A forward and backward with little host time, for calls whose only operands are x, weight and bias."""

    forward: Callable[..., tuple[Tensor, Tensor]]  # (x, weight, bias) -> y, and mean and rstd in one tensor
    backward: Callable[..., tuple[Tensor | None, ...]]  # (dy, x, weight, bias, statistics, needs) -> dx, dweight, dbias
    statistics: Callable[[Tensor], tuple[Tensor | None, Tensor]]  # splits that tensor into mean and rstd
    stat_stride: tuple[int, ...]  # the strides of that tensor


class Family(Protocol):
    """One way to compute norms: every problem for which `unsupported` returns no reason."""

    name: str
    summary: str  # what it does, in a few words for `explain`
    adds_residual: bool = False  # the forward adds the residual; otherwise the dispatcher does, before it
    checks_memory: bool = False  # `infer`, `track` and `train` raise if a tensor has no memory; otherwise the dispatcher checks
    # The dispatcher stores a reason of `check_launchable` in this field of Device. The next plan sees it there.
    disabled_by: str = ""
    only_forced: bool = False  # the planner takes it only if `onepass.force` names it

    def unsupported(self, problem: NormProblem, device: Device, direction: Direction) -> list[str]:
        """Why this family cannot run the problem; empty if it can."""
        ...

    def cost(self, problem: NormProblem, device: Device, direction: Direction, batch_invariant: bool) -> float:
        """The expected time in microseconds. Only the order of the costs matters."""
        ...

    def variant(self, problem: NormProblem) -> str:
        """Which of its kernels the family uses, if it has several."""
        return ""

    def schedule(self, problem: NormProblem, device: Device, direction: Direction, batch_invariant: bool) -> Launches:
        """The kernel launches, as plain values. Tests can check and compile them without a GPU."""
        return ()

    def check_launchable(self, problem: NormProblem, launches: Launches, device: torch.device) -> str:
        """Why the launches cannot run here, or "". This may compile kernels to find out."""
        return ""

    def forward(self, problem: NormProblem, launches: Launches, statistics: bool) -> Forward:
        """The launcher of the forward. Without `statistics`, its result may lack mean, rstd and var."""
        ...

    def backward(self, problem: NormProblem, launches: Launches) -> Backward:
        """The launcher of the backward."""
        ...

    def infer(self, problem: NormProblem, launches: Launches) -> Callable[..., Tensor] | None:
        """A launcher (x, weight, bias, mean, var) -> y with less host time than `forward`, or None."""
        return None

    def track(self, problem: NormProblem, launches: Launches) -> Callable[..., Tensor] | None:
        """A launcher (x, weight, bias, running_mean, running_var, momentum) -> y that updates running statistics, or None."""
        return None

    def train(self, problem: NormProblem) -> Training | None:
        """A forward and backward with less host time, or None."""
        return None
