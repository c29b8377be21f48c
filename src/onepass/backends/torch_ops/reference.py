"""The reference family: `reference.py` behind the interface of a family. Supports everything, empty tensors and odd memory included."""

from __future__ import annotations

import torch
from torch import Tensor

from onepass.core import reference
from onepass.core.operands import NO_OPTIONAL, Gradients, OptionalOperands, Result
from onepass.core.problem import NormProblem
from onepass.planning.choose import Plan


def forward(plan: Plan, problem: NormProblem):
    def launch(
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        mean: Tensor | None,
        var: Tensor | None,
        extras: OptionalOperands = NO_OPTIONAL,
    ) -> Result:
        result = reference.forward(problem.spec, x, weight, bias, mean, var, extras)
        return result._replace(y=torch.empty_like(x).copy_(result.y))

    return launch


def backward(plan: Plan, problem: NormProblem):
    def launch(
        dy: Tensor,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        mean,
        rstd,
        needs,
        extras: OptionalOperands = NO_OPTIONAL,
        var=None,
    ) -> Gradients:
        given, saved = (mean, rstd) if problem.given else None, rstd if problem.from_y else None
        grads = reference.backward(problem.spec, dy, x, weight, bias, given, needs, extras, saved)
        return grads if grads.dx is None else grads._replace(dx=torch.empty_like(x).copy_(grads.dx))

    return launch
