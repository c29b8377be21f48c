"""Checks the results that `onepass bench` times against the definition of the norms in float64.

The check runs on the device of the tensors. It takes x in slices, so that 10⁹ elements fit into memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import EllipsisType

import torch
from torch import Tensor

from onepass.verify import calls, oracle
from onepass.verify.calls import Output
from onepass.verify.cases import Case
from onepass.verify.oracle import Outcome
from onepass.verify.tensors import Operands

SLICE = 2**24  # elements of x in a slice; the check needs about 200 bytes of memory per element, 350 with gradients
PER_SAMPLE = ("x", "residual", "scale", "shift")
# The fields of an Outcome with one entry per sample. The other fields are sums over samples.
SLICED = ("y", "sum", *(f"d{name}" for name in PER_SAMPLE))


def outcome(output: Output, operands: Operands) -> Outcome:
    """Return the Outcome of a call: its output, and copies of the running statistics that the call updated."""
    y, total = output if isinstance(output, tuple) else (output, None)
    return Outcome(y, total, *(None if t is None else t.clone() for t in (operands.running_mean, operands.running_var)))


def largest_errors(
    case: Case, operands: Operands, outcomes: Mapping[str, Outcome], dy: Tensor | None = None, all_results: bool = False
) -> dict[str, float]:
    """Return the largest error of each outcome, as a fraction of the error budget (verify/oracle.py).

    Without dy, compare y, the sum x + residual and the running statistics. With dy, compare the gradients.
    With `all_results`, compare both.
    """
    errors = dict.fromkeys(outcomes, 0.0)
    dtypes = dict(zip(Outcome._fields, oracle.dtypes_of(operands)))
    parts = Outcome._fields[:4] if dy is None else Outcome._fields if all_results else Outcome._fields[4:]
    sums: dict[str, tuple[Tensor, Tensor]] = {}

    def compare(part: str, at: slice | EllipsisType, value: Tensor, error: Tensor) -> None:
        dtype = dtypes[part]
        assert dtype is not None
        allowed = error + oracle.half_ulp(value, dtype)
        for name, whole in outcomes.items():
            errors[name] = max(errors[name], _ratio(_at(getattr(whole, part), at), value, allowed))

    for at in _slices(case, operands.x):
        some = operands._replace(**{name: _at(getattr(operands, name), at) for name in PER_SAMPLE})
        exact = _exact(case, some, _at(dy, at))
        for part in parts:
            value, error = (getattr(outcome, part) for outcome in exact)
            if value is None or error is None:
                continue
            if part in SLICED:
                compare(part, at, value, error)
            else:
                before = sums.get(part)
                sums[part] = (value, error) if before is None else (before[0] + value, before[1] + error)
    for part, exact in sums.items():
        compare(part, ..., *exact)
    return errors


def _at(t: Tensor | None, at: slice | EllipsisType) -> Tensor | None:
    return None if t is None else t[at]


def _slices(case: Case, x: Tensor) -> Iterator[slice]:
    """Return slices of the first dimension with about SLICE elements of x each, or one slice if samples share statistics."""
    spec = calls.spec_of(case)
    whole = spec.mix or case.running or not x.numel() or spec.factor(x.shape)[0].reduced
    step = len(x) if whole else max(1, SLICE * len(x) // x.numel())
    return (slice(start, start + step) for start in range(0, len(x), max(step, 1)))


def _exact(case: Case, operands: Operands, dy: Tensor | None) -> tuple[Outcome, Outcome]:
    """Return the results by the definition in float64, and the error that each may have before it is rounded."""
    wide = oracle.in_float64(operands)
    dy = None if dy is None else dy.to(torch.float64)
    with torch.enable_grad():
        value = oracle.evaluate(case, wide, dy, oracle.by_reference)
    no_dy = wide.x.new_zeros(()).expand(wide.x.shape)
    return value, oracle.computing_error(case, wide, no_dy if dy is None else dy, value, operands.x.dtype)


def _ratio(actual: Tensor | None, value: Tensor, allowed: Tensor) -> float:
    """Return the largest error as a fraction of `allowed`, as `oracle.error_ratio` does, but only for data without infinities."""
    if actual is None or actual.shape != value.shape:
        return float("inf")
    return ((actual - value).abs() / allowed).nan_to_num(nan=torch.inf).max().item()
