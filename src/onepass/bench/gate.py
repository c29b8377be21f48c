"""The gate before a benchmark: forward results against the definition in fp64, on the device and in slices, so that 10⁹ elements fit."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from . import cases, oracle
from .cases import Case, Operands, Output
from .oracle import Outcome

SLICE = 2**24  # elements at a time; the oracle and its budget need about 200 bytes for each
PER_SAMPLE = ("x", "residual", "scale", "shift")


def outcome(output: Output, operands: Operands) -> Outcome:
    """What a call returned and what it left in the running statistics."""
    y, total = output if isinstance(output, tuple) else (output, None)
    return Outcome(y, total, *(None if t is None else t.clone() for t in (operands.running_mean, operands.running_var)))


def worst(case: Case, operands: Operands, outcomes: Mapping[str, Outcome]) -> dict[str, float]:
    """Each outcome's largest error, as a fraction of the error budget."""
    errors = dict.fromkeys(outcomes, 0.0)
    for at in _slices(case, operands.x):
        value, allowed = _exact(case, operands._replace(**{name: _at(getattr(operands, name), at) for name in PER_SAMPLE}))
        for name, whole in outcomes.items():
            actual = whole._replace(y=whole.y[at], sum=_at(whole.sum, at))
            errors[name] = max(errors[name], *(_ratio(a, v, b) for a, v, b in zip(actual, value, allowed)))
    return errors


def _at(t: Tensor | None, at: slice) -> Tensor | None:
    return None if t is None else t[at]


def _slices(case: Case, x: Tensor) -> Iterator[slice]:
    """Along the first dimension, where nothing is shared along it."""
    spec = cases.spec_of(case)
    whole = spec.mix or case.running or not x.numel() or spec.factor(x.shape)[0].reduced
    step = len(x) if whole else max(1, SLICE * len(x) // x.numel())
    return (slice(start, start + step) for start in range(0, len(x), max(step, 1)))


def _exact(case: Case, operands: Operands) -> tuple[Outcome, Outcome]:
    """The forward half of `oracle.exact`, by the definition alone."""
    dtypes = [None if t is None else t.dtype for t in oracle._parts_of(operands)]
    if operands.residual is not None:
        total = operands.x + operands.residual
        operands = operands._replace(x=total, residual=torch.zeros_like(total))
    wide = operands.to(torch.float64)
    value = oracle.evaluate(case, wide, None, oracle._by_reference)
    no_dy = wide.x.new_zeros(()).expand(wide.x.shape)
    return value, oracle._allowed(case, wide, no_dy, value, dtypes)


def _ratio(actual: Tensor | None, value: Tensor | None, allowed: Tensor | None) -> float:
    """As in `oracle.worst`, but where the tensors are, and for data without infinities."""
    if value is None or allowed is None:
        return 0.0
    if actual is None or actual.shape != value.shape:
        return float("inf")
    return ((actual - value).abs() / allowed).nan_to_num(nan=torch.inf).max().item()
