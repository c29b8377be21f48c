"""The interface of kernel families, and of the launchers that they return.

A *family* is one way to compute norms. It says which problems it cannot run, estimates costs, and returns launchers.
A *launcher* is a function that runs the kernels on tensors. It is prepared once for a problem and used for all calls
with that problem. *Host time* is the time that the Python code of a launcher takes.
A new family subclasses `Family` and needs a line in planning/registry.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from onepass.core.device import Device
from onepass.core.operands import Gradients, OptionalOperands, Result, SavedTensors
from onepass.core.problem import NormProblem

Direction = Literal["forward", "backward"]
FORWARD: Direction = "forward"
BACKWARD: Direction = "backward"

Launches = tuple[Any, ...]  # one object for each kernel launch; `explain` prints its `str`


class PlannedLaunches(tuple[Any, ...]):
    """The launches of a plan for an x at a multiple of 16 bytes. They can run any x, but others may be faster at odd addresses.

    `for_odd_address` plans those. It returns the problem, which says that x is not aligned, and its launches. Few tensors begin at odd
    addresses, so a launcher calls it when the first one comes.
    """

    for_odd_address: Callable[[], tuple[NormProblem, Launches]]

    def __new__(cls, launches: Launches, for_odd_address: Callable[[], tuple[NormProblem, Launches]]) -> PlannedLaunches:
        made = super().__new__(cls, launches)
        made.for_odd_address = for_odd_address
        return made


class Forward(Protocol):
    """A launcher that normalizes x. `mean` and `var` are the statistics to use, or None to compute them."""

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
    """A launcher that computes gradients.

    `dy` is the gradient of y. `dsum` is the gradient of the second output x + residual, or None. `needs` says which gradients to
    compute, in the order of `Needs` in core/operands.py.
    """

    def __call__(self, dy: Tensor, dsum: Tensor | None, saved: SavedTensors, needs: Sequence[bool], /) -> Gradients: ...


class TrainingForward(Protocol):
    """Normalizes x, where weight and bias are the only other operands. If statistics are given, mean and var follow.

    Returns y, and mean and rstd in one tensor of `packed_shape` and `packed_stride` (core/statistics.py), called `statistics` below.
    """

    def __call__(self, x: Tensor, weight: Tensor | None, bias: Tensor | None, /) -> tuple[Tensor, Tensor]: ...


class Tracking(Protocol):
    """Normalizes x, and updates running statistics in place. If it raises, it has updated nothing."""

    def __call__(
        self, x: Tensor, weight: Tensor | None, bias: Tensor | None, running_mean: Tensor, running_var: Tensor, momentum: float, /
    ) -> Any: ...


class TrainingBackward(Protocol):
    """Returns dx, dweight and dbias; None where `needs` is False. dy has the strides of y."""

    def __call__(
        self, dy: Tensor, x: Tensor, weight: Tensor | None, bias: Tensor | None, statistics: Tensor, needs: tuple[bool, ...], /
    ) -> tuple[Tensor | None, ...]: ...


class Family(Protocol):
    """One way to compute norms. It can run every problem for which `unsupported` returns no reason."""

    name: str
    summary: str  # what the family does, in a few words for `explain`
    adds_residual: bool = False  # the forward launcher computes x + residual; else dispatch/ does so before
    checks_memory: bool = False  # launchers of `infer`, `track`, `train_*` raise if a tensor has no memory; else dispatch/ checks
    # A field of Device, such as "no_c". If `check_launchable` returns a reason, dispatch/ stores it there and plans again.
    disabled_by: str = ""
    only_forced: bool = False  # the planner chooses this family only if `onepass.force` names it

    def unsupported(self, problem: NormProblem, device: Device, direction: Direction) -> list[str]:
        """Return the reasons why this family cannot run the problem; an empty list if it can."""
        ...

    def cost(self, problem: NormProblem, device: Device, direction: Direction, batch_invariant: bool) -> float:
        """Return the expected time in microseconds. The planner only compares it with the times of other families."""
        ...

    def variant(self, problem: NormProblem) -> str:
        """Return the name of the kernel that the family uses for this problem, or "" if it does not name its kernels."""
        return ""

    def schedule(self, problem: NormProblem, device: Device, direction: Direction, batch_invariant: bool) -> Launches:
        """Return the kernel launches as plain values, which tests can check and compile without a GPU."""
        return ()

    def check_launchable(self, problem: NormProblem, launches: Launches, device: torch.device, direction: Direction) -> str:
        """Return why the launches cannot run on this device, or "" if they can. This may compile kernels to find out."""
        return ""

    def forward(self, problem: NormProblem, launches: Launches, statistics: bool) -> Forward:
        """Return the launcher of the forward. If `statistics` is False, its result may lack mean, rstd and var."""
        ...

    def backward(self, problem: NormProblem, launches: Launches) -> Backward:
        """Return the launcher of the backward."""
        ...

    def infer(self, problem: NormProblem, launches: Launches) -> Callable[..., Tensor] | None:
        """Return a launcher (x, weight, bias, mean, var) -> y with less host time than `forward`, or None if there is none."""
        return None

    def infer_extras(self, problem: NormProblem, launches: Launches) -> Callable[..., tuple[Tensor, Tensor | None]] | None:
        """Return a launcher for a residual or a modulation with less host time than `forward`, or None if there is none.

        The launcher is (x, weight, bias, residual, scale, shift) -> (y, x + residual). It raises if a tensor has no memory.
        """
        return None

    def track(self, problem: NormProblem, launches: Launches) -> Tracking | None:
        """Return a launcher of y that also updates running statistics in place, or None if there is none."""
        return None

    def train_extras(self, problem: NormProblem, launches: Launches) -> Callable[..., tuple[Tensor, Tensor, Tensor | None]] | None:
        """Return (x, weight, bias, residual, scale, shift) -> (y, statistics, x + residual), or None if there is none."""
        return None

    def train_extras_backward(self, problem: NormProblem, launches: Launches) -> Callable[..., tuple[Tensor | None, ...]] | None:
        """Return the backward for any family's `train_extras`, or None if there is none.

        It is (dy, x, weight, bias, statistics, scale, shift, dsum, needs) -> dx, dweight, dbias, dscale, dshift. x is x + residual.
        """
        return None

    def train_track(self, problem: NormProblem, launches: Launches) -> Tracking | None:
        """As `track`, but the launcher returns what that of `train_forward` does: (y, mean and rstd in one tensor)."""
        return None

    def train_forward(self, problem: NormProblem, launches: Launches) -> TrainingForward | None:
        """Return a forward for training with less host time than `forward`, or None if there is none."""
        return None

    def train_backward(self, problem: NormProblem, launches: Launches) -> TrainingBackward | None:
        """Return the backward for any family's `train_forward`, or None if there is none."""
        return None
