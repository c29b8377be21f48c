"""Two oracles in fp64 and the error budget against which every result is held.

`reference` is the definition as we read it, `torch.nn.functional` as torch reads it. The budget of an element is half an ulp of its dtype
plus `8·eps_acc·(1 + |mean|·rstd)·scale`, where `scale` is the size of the terms it is computed from: (16)-(19) in docs/theory.md.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from .. import reference
from ..moments import average
from ..problem import accumulator
from . import cases
from .cases import Case, Operands

Run = Callable[[Case, Operands], Tensor]

AGREEMENT = 64  # fp64 budgets within which the oracles must agree: torch sums batch statistics one by one


class Outcome(NamedTuple):
    """What a call computes; None where it was not asked for."""

    y: Tensor
    running_mean: Tensor | None
    running_var: Tensor | None
    dx: Tensor | None = None
    dweight: Tensor | None = None
    dbias: Tensor | None = None


def evaluate(case: Case, operands: Operands, dy: Tensor | None, run: Run = cases.by_onepass) -> Outcome:
    """Run a case, with its backward if dy is given. The operands are not touched."""
    x, weight, bias, mean, var = operands
    mean, var = (None if t is None else t.clone() for t in (mean, var))
    if dy is None:
        with torch.no_grad():
            return Outcome(run(case, Operands(x, weight, bias, mean, var)), mean, var)
    x = x.detach().requires_grad_()
    weight, bias = (None if t is None else t.detach().requires_grad_() for t in (weight, bias))
    y = run(case, Operands(x, weight, bias, mean, var))
    grads = iter(torch.autograd.grad(y, [t for t in (x, weight, bias) if t is not None], dy))
    return Outcome(y.detach(), mean, var, *(None if t is None else next(grads) for t in (x, weight, bias)))


def _by_reference(case: Case, t: Operands) -> Tensor:
    """The first oracle: the definition, and running statistics by (12) and (13)."""
    if case.evaluate:
        return reference.forward(cases.spec_of(case), t.x, t.weight, t.bias, t.running_mean, t.running_var).y
    result = reference.forward(cases.spec_of(case), t.x, t.weight, t.bias)
    if t.running_mean is not None and t.running_var is not None and t.x.numel():
        count = t.x.numel() // result.rstd.numel()
        assert result.mean is not None and result.var is not None
        for running, batch in ((t.running_mean, result.mean), (t.running_var, result.var * count / (count - 1))):
            running.mul_(1 - case.momentum).add_(case.momentum * batch.detach().reshape(-1, running.numel()).mean(0))
    return result.y


class Exact(NamedTuple):
    """The truth in fp64, how far each part of an outcome may be from it, and whether the oracles agree: `disagreement` at most 1."""

    value: Outcome
    allowed: Outcome
    disagreement: float


def exact(case: Case, operands: Operands, dy: Tensor) -> Exact:
    """Both oracles on the operands' own values in fp64."""
    wide, dy = operands.to(torch.float64), dy.to(torch.float64)
    value = evaluate(case, wide, dy, _by_reference)
    # torch's channels-last kernels lose digits even in fp64, so its oracle sees contiguous memory.
    other = evaluate(case, wide._replace(x=wide.x.contiguous()), dy, cases.by_torch)
    dtypes = [None if t is None else t.dtype for t in _parts_of(operands)]
    tight = _allowed(case, wide, dy, value, [torch.float64 if d else None for d in dtypes])
    disagreement = max(error for error in worst(other, value, tight) if error is not None)
    return Exact(value, _allowed(case, wide, dy, value, dtypes), disagreement / AGREEMENT)


def _parts_of(t: Operands) -> tuple[Tensor | None, ...]:
    """The operand that gives each part of an Outcome its dtype."""
    return t.x, t.running_mean, t.running_var, t.x, t.weight, t.bias


def _allowed(case: Case, t: Operands, dy: Tensor, value: Outcome, dtypes: list[torch.dtype | None]) -> Outcome:
    spec = cases.spec_of(case)
    axes = reference.Axes(spec, t.x)
    result = reference.forward(spec, t.x, None, None, *((t.running_mean, t.running_var) if case.evaluate else ()))
    x_hat, dy_, x_ = axes.x(result.y), axes.x(dy), axes.x(t.x)
    mean, rstd = axes.stat(result.mean), axes.stat(result.rstd)
    assert rstd is not None and dtypes[0] is not None
    plain = 8 * torch.finfo(accumulator(dtypes[0])).eps
    eps = plain * (torch.ones_like(rstd) if mean is None else 1 + mean.abs() * rstd)
    weight, bias = (None if p is None else axes.param(p.abs()) for p in (t.weight, t.bias))
    size = 1 + x_hat.abs()
    wdy = reference.affine(dy_.abs(), weight, None)
    y = eps * reference.affine(size, weight, bias)  # (16)
    spread = 0 if case.evaluate else average(wdy * size, axes.dims)
    dx = eps * rstd * (wdy + spread * size)  # (17)

    def running(stat: Tensor | None, now: Tensor | None, moment: Tensor) -> Tensor | None:
        """What is allowed to a running statistic that a batch's moment was mixed into."""
        if stat is None or now is None or not t.x.numel():
            return None if stat is None else torch.zeros_like(stat)
        return plain * (now.abs() + stat.abs()) + average(moment, axes.dims).reshape(-1, stat.numel()).mean(0)

    scale = (
        y.reshape(t.x.shape),
        running(t.running_mean, value.running_mean, plain * x_.abs()),
        running(t.running_var, value.running_var, eps * (x_ if mean is None else x_ - mean).square()),
        dx.reshape(t.x.shape),
        None if t.weight is None else axes.param_sum(eps * dy_.abs() * size, t.weight),  # (18)
        None if t.bias is None else axes.param_sum(plain * dy_.abs(), t.bias),  # (19)
    )
    return Outcome(
        *(None if s is None or v is None or d is None else s + half_ulp(v, d) for s, v, d in zip(scale, value, dtypes))  # pyright: ignore
    )


def half_ulp(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Half the distance between neighbours of x in `dtype`."""
    info = torch.finfo(dtype)
    _, exponent = torch.frexp(x)
    return torch.ldexp(torch.full_like(x, info.eps / 2), exponent - 1).clamp_min(info.smallest_normal * info.eps / 2)


class Worst(NamedTuple):
    """Each part's largest error as a fraction of what is allowed; None where it was not computed."""

    y: float | None = None
    running_mean: float | None = None
    running_var: float | None = None
    dx: float | None = None
    dweight: float | None = None
    dbias: float | None = None

    @property
    def forward(self) -> float:
        return max(r for r in self[:3] if r is not None)

    @property
    def backward(self) -> float | None:
        return max((r for r in self[3:] if r is not None), default=None)


def worst(actual: Outcome, value: Outcome, allowed: Outcome) -> Worst:
    """Errors as fractions of the allowed ones. NaN and infinity must stand where the oracle has them."""
    return Worst(*(None if a is None else _ratio(a, v, b) for a, v, b in zip(actual, value, allowed)))


def _ratio(actual: Tensor, value: Tensor | None, allowed: Tensor | None) -> float:
    assert value is not None and allowed is not None
    if actual.shape != value.shape:
        return float("inf")
    if not actual.numel():
        return 0.0
    value = value.cpu()
    rounded = value.to(actual.dtype).double()
    value = torch.where(rounded.isinf(), rounded, value)  # beyond the dtype's range, infinity is right
    actual = actual.to("cpu", torch.float64)
    same = (actual == value) | (actual.isnan() & value.isnan())
    return torch.where(same, 0.0, (actual - value).abs() / allowed.cpu()).nan_to_num(nan=torch.inf).max().item()
