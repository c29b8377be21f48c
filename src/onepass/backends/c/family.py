"""The C family: what the C kernels support and cost. The modules that compile and call the kernels are imported on first use."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable

import torch
from torch import Tensor

from onepass.backends.compilation import need
from onepass.backends.cost import torch_cost
from onepass.backends.family import Backward, Direction, Family, Forward, Launches, Tracking, TrainingBackward, TrainingForward
from onepass.core.device import Device
from onepass.core.problem import NormProblem

LIBRARY = "the CPU kernels"
DTYPES = (None, torch.float32, torch.bfloat16, torch.float16)


class C(Family):
    name = "c"
    summary = "C kernels that work set by set or row by row"
    adds_residual = True
    checks_memory = True
    disabled_by = "no_c"

    def unsupported(self, problem: NormProblem, device: Device, direction: Direction) -> list[str]:
        if device.no_c:
            return [device.no_c]
        if problem.x is None:
            return [problem.why_no_view]
        if problem.acc == torch.float64:
            return ["C kernels compute in float32, which is not enough for float64"]
        dtypes = (problem.dtype, problem.weight, problem.bias, problem.scale, problem.shift, *(problem.addends or ()))
        return [f"C kernels do not support {dtype}" for dtype in dict.fromkeys(dtypes) if dtype not in DTYPES]

    def cost(self, problem: NormProblem, device: Device, direction: Direction, batch_invariant: bool) -> float:
        return torch_cost(0.5, problem, device, direction)

    def check_launchable(self, problem: NormProblem, launches: Launches, device: torch.device, direction: Direction) -> str:
        """Compile and load the C library. Return "", or the reason if that fails.

        With ONEPASS_CPU=c, raise the reason instead.
        """
        from .cache import Unavailable
        from .library import load

        try:
            load()
        except Unavailable as reason:
            if os.environ.get("ONEPASS_CPU") in ("c", "native"):
                raise RuntimeError(f"ONEPASS_CPU=c, but {reason}") from None
            if reason.first:
                warnings.warn(f"onepass works without its C kernels in this process: {reason} (ONEPASS_CPU=off hides this)", stacklevel=2)
            return str(reason)
        need(LIBRARY)
        return ""

    def forward(self, problem: NormProblem, launches: Launches, statistics: bool) -> Forward:
        from . import launch

        return launch.forward(problem)

    def backward(self, problem: NormProblem, launches: Launches) -> Backward:
        from . import launch

        return launch.backward(problem)

    def infer(self, problem: NormProblem, launches: Launches) -> Callable[..., Tensor] | None:
        from . import minimal

        return minimal.infer(problem)

    def infer_extras(self, problem: NormProblem, launches: Launches) -> Callable[..., tuple[Tensor, Tensor | None]] | None:
        from . import extras

        return extras.infer_extras(problem)

    def train_extras(self, problem: NormProblem, launches: Launches) -> Callable[..., tuple[Tensor, Tensor, Tensor | None]] | None:
        from . import extras

        return extras.train_extras(problem)

    def train_extras_backward(self, problem: NormProblem, launches: Launches) -> Callable[..., tuple[Tensor | None, ...]] | None:
        from . import extras

        return extras.train_extras_backward(problem)

    def track(self, problem: NormProblem, launches: Launches) -> Tracking | None:
        from . import minimal

        return minimal.track(problem)

    def train_track(self, problem: NormProblem, launches: Launches) -> Tracking | None:
        from . import minimal

        return minimal.train_track(problem)

    def train_forward(self, problem: NormProblem, launches: Launches) -> TrainingForward | None:
        from . import minimal

        return minimal.train_forward(problem)

    def train_backward(self, problem: NormProblem, launches: Launches) -> TrainingBackward | None:
        from . import minimal

        return minimal.train_backward(problem)
