"""Two oracles, which compute correct results in float64, and the error budget of every result.

The first oracle is core/reference.py, the definition of the norms. The second is torch_norms.py, which uses torch's
operations. The error budget is the error that an element may have: half a unit in the last place (ulp) of its dtype plus
`8·eps_acc·(1 + |mean|·rstd)·scale`. `eps_acc` is the machine epsilon of the accumulator, and `scale` is the size of the
terms that the element is computed from: equations (16)-(19) of docs/theory.md. With `save="y"`, (36)-(38) are added.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from onepass.core import arithmetic, operands, reference
from onepass.core.moments import average
from onepass.core.operands import OptionalOperands
from onepass.core.problem import accumulator

from . import calls
from .calls import Output
from .cases import Case
from .tensors import Operands

Run = Callable[[Case, Operands], Output]
AGREEMENT = 64  # the oracles may differ by 64 times the float64 budget: torch sums batch statistics element by element
DSUM = -2  # the incoming gradient of x + residual is DSUM·dy: a power of two makes the product exact


class Outcome(NamedTuple):
    """The results of a call and of its backward. A result that was not asked for is None."""

    y: Tensor
    sum: Tensor | None = None
    running_mean: Tensor | None = None
    running_var: Tensor | None = None
    dx: Tensor | None = None
    dweight: Tensor | None = None
    dbias: Tensor | None = None
    dresidual: Tensor | None = None
    dscale: Tensor | None = None
    dshift: Tensor | None = None
    dmean_weight: Tensor | None = None
    dvar_weight: Tensor | None = None


def evaluate(case: Case, operands: Operands, dy: Tensor | None, run: Run = calls.by_onepass) -> Outcome:
    """Run a case, and its backward if dy is given, and return the results. The operands are not changed."""
    running = {name: None if t is None else t.clone() for name, t in zip(("running_mean", "running_var"), operands[3:5])}
    if dy is None:
        with torch.no_grad():
            return Outcome(*_y_and_sum(run(case, operands._replace(**running))), **running)
    inputs = leaves(operands)
    output = run(case, operands._replace(**running, **inputs))
    grads = torch.autograd.grad(*grad_arguments(output, inputs, dy))
    y, total = _y_and_sum(output)
    return Outcome(y.detach(), None if total is None else total.detach(), **running, **gradients_by_name(inputs, grads))


def leaves(operands: Operands) -> dict[str, Tensor]:
    """Return the operands that can have gradients (all but running statistics), by name, as new leaf tensors."""
    return {name: t.detach().requires_grad_() for name, t in operands._asdict().items() if t is not None and not name.startswith("running")}


def grad_arguments(output: Output, inputs: dict[str, Tensor], dy: Tensor) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """Return the arguments of `torch.autograd.grad`: outputs, inputs, and the incoming gradient of each output.

    The outputs are y and, with a residual, x + residual.
    """
    y, total = _y_and_sum(output)
    outputs, gradients = ([y], [dy]) if total is None else ([y, total], [dy, dy * DSUM])
    return outputs, list(inputs.values()), gradients


def gradients_by_name(inputs: dict[str, Tensor], grads: Sequence[Tensor]) -> dict[str, Tensor]:
    """Return the gradients by their names in an Outcome: "dx" for the input "x"."""
    return {f"d{name}": grad for name, grad in zip(inputs, grads)}


def _y_and_sum(output: Output) -> tuple[Tensor, Tensor | None]:
    return output if isinstance(output, tuple) else (output, None)


def _statistics(case: Case, t: Operands) -> tuple[tuple[Tensor | None, Tensor | None], OptionalOperands]:
    """Return ((mean, var), mix): statistics to normalize by, and the operands of a SwitchableNorm.

    Mean and var are None if the norm computes them from x.
    """
    given = (t.running_mean, t.running_var) if case.evaluate else (None, None)
    if t.mean_weight is None or t.var_weight is None:
        return given, OptionalOperands()
    norms = len(calls.spec_of(case).mix.split(","))
    mean_share, var_share = (logits[-norms:].softmax(0) for logits in (t.mean_weight, t.var_weight))
    return (None, None), OptionalOperands(mean_weight=mean_share, var_weight=var_share, running_mean=given[0], running_var=given[1])


def by_reference(case: Case, t: Operands) -> Output:
    """Run a case by the definition of its norm: the first oracle. Update running statistics in place."""
    given, mix = _statistics(case, t)
    extras = mix._replace(residual=t.residual, scale=t.scale, shift=t.shift)
    result = reference.forward(calls.spec_of(case), t.x, t.weight, t.bias, *given, extras)
    if t.running_mean is not None and t.running_var is not None and not case.evaluate and t.x.numel():
        if t.mean_weight is not None:  # a SwitchableNorm tracks the statistics of its BatchNorm, not the mixed ones
            var, mean = torch.var_mean(t.x.detach().movedim(case.channel_dim, 0).flatten(1), 1)
        else:
            count = t.x.numel() // result.rstd.numel()
            assert result.mean is not None and result.var is not None
            mean, var = result.mean, result.var * count / (count - 1)
        for running, batch in ((t.running_mean, mean), (t.running_var, var)):
            running.mul_(1 - case.momentum).add_(case.momentum * batch.detach().reshape(-1, running.numel()).mean(0))
    return result.y if result.sum is None else (result.y, result.sum)


class Exact(NamedTuple):
    """The exact results, the error that each may have, and how far the two oracles differ.

    The oracles agree if `disagreement` is at most 1.
    """

    value: Outcome
    allowed: Outcome
    disagreement: float


def exact(case: Case, operands: Operands, dy: Tensor) -> Exact:
    """Run both oracles on operands converted to float64. The second confirms the results of the first."""
    dtypes, wide, dy = dtypes_of(operands), in_float64(operands), dy.to(torch.float64)
    value = evaluate(case, wide, dy, by_reference)
    # torch's channels-last kernels lose digits even in float64, so give torch contiguous memory.
    other = evaluate(case, wide._replace(x=wide.x.contiguous()), dy, calls.by_torch)
    tight = _allowed(case, wide, dy, value, [torch.float64 if d else None for d in dtypes])
    disagreement = max(error for error in worst(other, value, tight).parts if error is not None)
    return Exact(value, _allowed(case, wide, dy, value, dtypes), disagreement / AGREEMENT)


def in_float64(operands: Operands) -> Operands:
    """Return the operands in float64.

    With a residual, x becomes the rounded sum x + residual, which is what the norm normalizes, and the residual becomes 0.
    """
    if operands.residual is not None:
        total = operands.x + operands.residual
        operands = operands._replace(x=total, residual=torch.zeros_like(total))
    return operands.to(torch.float64)


def dtypes_of(t: Operands) -> list[torch.dtype | None]:
    """Return the dtype of each field of the Outcome of a call with these operands, or None for a field that is None."""
    total = None if t.residual is None else t.x
    gradients = t.x, t.weight, t.bias, t.residual, t.scale, t.shift, t.mean_weight, t.var_weight
    return [None if part is None else part.dtype for part in (t.x, total, t.running_mean, t.running_var, *gradients)]


# An upper bound of |act'(z)| for every activation, and of |act''(z)| for all but relu. The rounding inside an activation needs no
# budget of its own: |act(z)| ≤ |z|, so the budget of z covers it.
SLOPE = 1.13


def _allowed(case: Case, t: Operands, dy: Tensor, value: Outcome, dtypes: list[torch.dtype | None]) -> Outcome:
    """Return the error that each field of `value` may have: the error of computing it, plus half an ulp for rounding it."""
    assert dtypes[0] is not None
    scale = computing_error(case, t, dy, value, dtypes[0])
    return Outcome(
        *(None if s is None or v is None or d is None else s + half_ulp(v, d) for s, v, d in zip(scale, value, dtypes))  # pyright: ignore
    )


def computing_error(case: Case, t: Operands, dy: Tensor, value: Outcome, dtype: torch.dtype) -> Outcome:
    """Return the error that each field of `value` may have before it is rounded: the error budget without the half ulp.

    `dtype` is that of x in the call to check; the tensors here are float64. The error of a sum is the sum of its terms' errors.
    """
    spec = calls.spec_of(case)
    axes, (given, mix) = reference.Axes(spec, t.x), _statistics(case, t)
    result = reference.forward(replace(spec, activation=""), t.x, None, None, *given, mix)
    x_hat, dy_, x_ = axes.x(result.y), axes.x(dy), axes.x(t.x)
    mean, rstd = axes.stat(result.mean), axes.stat(result.rstd)
    assert rstd is not None
    if spec.mix and mean is not None:  # use the largest of all means that are mixed
        largest = [m.abs().max().item() for m in (mean, mix.running_mean) if m is not None and m.numel()]
        mean = torch.full_like(mean, max(largest, default=0.0))
    plain = 8 * torch.finfo(accumulator(dtype)).eps
    eps = plain * (torch.ones_like(rstd) if mean is None else 1 + mean.abs() * rstd)
    post = axes.post_affine(t.scale, t.shift)
    u = arithmetic.affine(x_hat, axes.weight(t.weight), axes.bias(t.bias))
    z = arithmetic.affine(u, post.gain, post.shift)
    weight, bias, gain, shift = (None if p is None else p.abs() for p in (axes.weight(t.weight), axes.bias(t.bias), post.gain, post.shift))
    size = 1 + x_hat.abs()
    u_off = eps * arithmetic.affine(size, weight, bias)
    z_off = eps * arithmetic.affine(arithmetic.affine(size, weight, bias), gain, shift)
    slope, bend = (SLOPE, plain + SLOPE * z_off) if case.activation else (1, torch.zeros_like(z))
    if case.activation == "relu":
        bend = (z.abs() <= z_off).double()  # near 0, rounding decides the sign of z, and so the slope of relu
    dz, dz_off = slope * dy_.abs(), dy_.abs() * bend
    du, du_off = (arithmetic.affine(d, gain, None) for d in (dz, dz_off))
    wdy = arithmetic.affine(eps * du + du_off, weight, None)
    spread = 0 if given[1] is not None else average(wdy * size, axes.dims)
    dx = rstd * (wdy + spread * size)  # (17)
    dmean_weight = dvar_weight = None
    x_hat_off = u_back_off = torch.zeros_like(z)  # further errors of x_hat and u, if the backward computes them from y
    if spec.from_y:
        y_off = z_off + half_ulp(z, dtype)
        u_back_off, x_hat_off = (_divided(y_off, *factors) for factors in ((gain,), (gain, weight)))  # (36)
        if given[1] is None:
            exact_wdy = arithmetic.affine(arithmetic.affine(dy_, post.gain, None), axes.weight(t.weight), None)
            c2 = average(exact_wdy * x_hat, axes.dims).abs()
            dx = dx + rstd * (x_hat_off * c2 + (x_hat.abs() + x_hat_off) * average(exact_wdy.abs() * x_hat_off, axes.dims))  # (37)
    if t.mean_weight is not None and t.var_weight is not None:
        dx, mean_off, var_off = _mixed(axes, x_, result, mix, wdy, size)
        dmean_weight, dvar_weight = mean_off.expand_as(t.mean_weight), var_off.expand_as(t.var_weight)
    if t.residual is not None:
        dx = dx + plain * (DSUM * dy_).abs()

    def running(stat: Tensor | None, now: Tensor | None, moment: Tensor) -> Tensor | None:
        """Return the error that a running statistic may have. It was `stat` before the call, and is `now`.

        `moment` holds the error that each element of x adds to the batch's statistic.
        """
        if stat is None or now is None or not t.x.numel():
            return None if stat is None else torch.zeros_like(stat)
        over = average(moment, axes.dims).reshape(axes.kept_shape).expand(axes.kept_shape)
        return plain * (now.abs() + stat.abs()) + over.reshape(-1, stat.numel()).mean(0)

    def total(sums: Any, terms: Tensor, param: Tensor | None) -> Tensor | None:
        return None if param is None else sums.sum(terms, param)

    return Outcome(
        y=(slope * z_off).reshape(t.x.shape),  # (16)
        sum=torch.zeros_like(t.x),
        running_mean=running(t.running_mean, value.running_mean, plain * x_.abs()),
        running_var=running(t.running_var, value.running_var, eps * (x_ if mean is None else x_ - mean).square()),
        dx=dx.reshape(t.x.shape),
        dweight=total(axes.params, (eps * du + du_off) * size + du * x_hat_off, t.weight),  # (18), (38)
        dbias=total(axes.params, plain * du + du_off, t.bias),  # (19)
        dresidual=dx.reshape(t.x.shape),
        dscale=total(axes.modulation, dz * (u_off + u_back_off) + (dz_off + plain * dz) * u.abs(), t.scale),
        dshift=total(axes.modulation, plain * dz + dz_off, t.shift),
        dmean_weight=dmean_weight,
        dvar_weight=dvar_weight,
    )


def _mixed(axes: reference.Axes, x: Tensor, result: operands.Result, mix: OptionalOperands, wdy: Tensor, size: Tensor):
    """Return the errors that dx, dmean_weight and dvar_weight of a SwitchableNorm may have.

    The errors use the largest values of all sets (elements that share one mean and variance), because sets depend on each other.
    """
    means, variances, rstd = axes.stat(result.mean), axes.stat(result.var), result.rstd
    assert means is not None and variances is not None
    if not x.numel():
        return torch.zeros_like(x), x.new_zeros(()), x.new_zeros(())
    reach = means.max() - means.min()
    shared = (average(wdy * size, axes.dims) * rstd.max()).max()
    dx = rstd.max() * wdy + shared * (1 + ((x - means).abs() + reach) * rstd.max())
    mean, var = means.abs().max(), variances.max() + reach.square()
    if mix.running_mean is not None and mix.running_var is not None:
        mean, var = torch.maximum(mean, mix.running_mean.abs().max()), torch.maximum(var, mix.running_var.max())
    terms = (wdy * size).sum()
    return dx, 2 * terms * rstd.max() * (1 + mean), 2 * terms * rstd.max().square() * var


def _divided(off: Tensor, *factors: Tensor | None) -> Tensor:
    """Return the error of a quotient: `off`, that of the numerator, divided by all factors that are not None."""
    for factor in factors:
        off = off if factor is None else off / factor
    return off


def half_ulp(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return half an ulp: half the distance from |x| to the next larger number of `dtype`."""
    info = torch.finfo(dtype)
    _, exponent = torch.frexp(x)
    return torch.ldexp(torch.full_like(x, info.eps / 2), exponent - 1).clamp_min(info.smallest_normal * info.eps / 2)


class Worst(NamedTuple):
    """The largest error of each field of an Outcome, as a fraction of the allowed error. None if the field is None."""

    parts: tuple[float | None, ...]

    @property
    def forward(self) -> float:
        return max(r for r in self.parts[:4] if r is not None)

    @property
    def backward(self) -> float | None:
        return max((r for r in self.parts[4:] if r is not None), default=None)


def worst(actual: Outcome, value: Outcome, allowed: Outcome) -> Worst:
    """Return the largest error of each field of `actual`, as a fraction of the allowed error.

    NaN and infinity must be in the same places as in `value`; otherwise the fraction is huge.
    """
    return Worst(tuple(None if a is None else error_ratio(a, v, b) for a, v, b in zip(actual, value, allowed)))


def error_ratio(actual: Tensor, value: Tensor | None, allowed: Tensor | None) -> float:
    assert value is not None and allowed is not None
    if actual.shape != value.shape:
        return float("inf")
    if not actual.numel():
        return 0.0
    value = value.cpu()
    rounded = value.to(actual.dtype).double()
    value = torch.where(rounded.isinf(), rounded, value)  # expect infinity where the exact value is too large for the dtype
    actual = actual.to("cpu", torch.float64)
    same = (actual == value) | (actual.isnan() & value.isnan())
    return torch.where(same, 0.0, (actual - value).abs() / allowed.cpu()).nan_to_num(nan=torch.inf).max().item()
