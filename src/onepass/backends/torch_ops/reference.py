"""The reference family: core/reference.py with the interface of a kernel family.

It supports every problem, even empty tensors and memory without a four-axis view (core/view.py).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from onepass.backends.cost import torch_cost
from onepass.backends.family import Backward, Direction, Family, Forward, Launches
from onepass.core import reference
from onepass.core.device import Device
from onepass.core.operands import Gradients, OptionalOperands, Result, SavedTensors
from onepass.core.problem import NormProblem


class Reference(Family):
    name = "reference"
    summary = "the definition on logical axes"

    def unsupported(self, problem: NormProblem, device: Device, direction: Direction) -> list[str]:
        return []

    def cost(self, problem: NormProblem, device: Device, direction: Direction, batch_invariant: bool) -> float:
        return torch_cost(20, problem, device, direction)

    def forward(self, problem: NormProblem, launches: Launches, statistics: bool) -> Forward:
        def launch(
            x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor | None, var: Tensor | None, optional: OptionalOperands, /
        ) -> Result:
            result = reference.forward(problem.spec, x, weight, bias, mean, var, optional)
            return result._replace(y=torch.empty_like(x).copy_(result.y))

        return launch

    def backward(self, problem: NormProblem, launches: Launches) -> Backward:
        def launch(dy: Tensor, dsum: Tensor | None, saved: SavedTensors, needs: Sequence[bool], /) -> Gradients:
            grads = reference.backward(problem.spec, dy, dsum, saved, needs, problem.given)
            return grads if grads.dx is None else grads._replace(dx=torch.empty_like(saved.x).copy_(grads.dx))

        return launch
