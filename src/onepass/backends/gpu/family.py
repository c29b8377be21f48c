"""What all GPU families share.

A family's launches are plain numbers; its launchers are functions that launch kernels on tensors. Triton is imported on
first use, so planning needs neither Triton nor a GPU.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from onepass.backends.family import BACKWARD, Backward, Direction, Family, Forward, Launches, Tracking, TrainingBackward, TrainingForward
from onepass.core.device import Device
from onepass.core.problem import NormProblem

from .cost import traffic_cost
from .support import why_no_single_read


class GpuFamily(Family):
    adds_residual = True
    checks_memory = True
    disabled_by = "no_team"

    def check_launchable(self, problem: NormProblem, launches: Launches, device: torch.device, direction: Direction) -> str:
        from . import backward, forward

        return (backward if direction == BACKWARD else forward).check_launchable(problem, launches, device)

    def forward(self, problem: NormProblem, launches: Launches, statistics: bool) -> Forward:
        from . import forward

        return forward.forward(problem, launches, statistics)

    def backward(self, problem: NormProblem, launches: Launches) -> Backward:
        from . import backward

        return backward.backward(problem, launches)

    def infer(self, problem: NormProblem, launches: Launches) -> Callable[..., Tensor] | None:
        from . import short_forward

        return short_forward.infer(problem, launches)

    def infer_extras(self, problem: NormProblem, launches: Launches) -> Callable[..., tuple[Tensor, Tensor | None]] | None:
        from . import short_forward

        return short_forward.infer_extras(problem, launches)

    def track(self, problem: NormProblem, launches: Launches) -> Tracking | None:
        from . import short_forward

        return short_forward.track(problem, launches)

    def train_track(self, problem: NormProblem, launches: Launches) -> Tracking | None:
        from . import short_forward

        return short_forward.train_track(problem, launches)

    def train_extras(self, problem: NormProblem, launches: Launches) -> Callable[..., tuple[Tensor, Tensor, Tensor | None]] | None:
        from . import short_forward

        return short_forward.train_extras(problem, launches)

    def train_extras_backward(self, problem: NormProblem, launches: Launches) -> Callable[..., tuple[Tensor | None, ...]] | None:
        from . import short_backward

        return short_backward.train_extras_backward(problem, launches)

    def train_forward(self, problem: NormProblem, launches: Launches) -> TrainingForward | None:
        from . import short_forward

        return short_forward.train_forward(problem, launches)

    def train_backward(self, problem: NormProblem, launches: Launches) -> TrainingBackward | None:
        from . import short_backward

        return short_backward.train_backward(problem, launches)


class TrafficFamily(GpuFamily):
    """A family whose cost follows from the bytes that it moves."""

    walks: tuple[str, ...]  # the ways in which it may read memory: ROW, TILE or both, of walk.py

    def cost(self, problem: NormProblem, device: Device, direction: Direction, batch_invariant: bool) -> float:
        launches = self.schedule(problem, device, direction, batch_invariant)
        return traffic_cost(self.name, problem, device, direction, batch_invariant, launches, self.walks)


class SharingFamily(GpuFamily):
    """A family whose programs may share a set, and exchange its moments or, in a backward, its sums."""

    def unsupported(self, problem: NormProblem, device: Device, direction: Direction) -> list[str]:
        cannot_share = self.cannot_share_backward if direction == BACKWARD else self.cannot_share
        return why_no_single_read(problem, device) or cannot_share(problem, device)

    def cannot_share(self, problem: NormProblem, device: Device) -> list[str]:
        """Return the reasons why programs cannot share the sets of this problem; an empty list if they can."""
        ...

    def cannot_share_backward(self, problem: NormProblem, device: Device) -> list[str]:
        """Return the same for the backward."""
        ...
