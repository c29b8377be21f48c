"""The matrix that `onepass verify` prints: every case, run by every kernel family in every dtype, and compared with two oracles.

A cell of the matrix is one case, one family and one dtype.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from onepass.planning.options import CannotForce, force
from onepass.planning.registry import FAMILIES

from . import cases, oracle, tensors
from .cases import Case

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Cell:
    """One case, run by one family in one dtype: errors as fractions of the error budget, or why the family cannot run it."""

    case: Case
    family: str
    dtype: torch.dtype
    forward: float | None = None
    backward: float | None = None
    reasons: tuple[str, ...] = ()
    fault: str = ""  # wrong strides of y, or oracles that differ

    @property
    def ok(self) -> bool:
        """True if there is no fault, and errors are within the budget or the family gave a reason not to run."""
        if self.fault or (self.forward is None and not self.reasons):
            return False
        return all(error is None or error <= 1 for error in (self.forward, self.backward))


def verify(
    which: Sequence[Case] = cases.CASES,
    dtypes: Sequence[torch.dtype] = DTYPES,
    device: str = "cpu",
    seed: int = 0,
    families: Sequence[str] = tuple(family.name for family in FAMILIES),
) -> Iterator[Cell]:
    """Run every case by every one of the `families` in every dtype, and yield one Cell for each combination.

    Example: `all(cell.ok for cell in verify(device="cpu"))`
    """
    for case in which:
        for dtype in dtypes:
            operands = tensors.make(case, dtype, device, seed)
            dy = tensors.make_dy(operands, seed)
            exact = oracle.exact(case, operands, dy)
            for family in families:
                yield _cell(case, family, operands, dy, exact)


def _cell(case: Case, family: str, operands: tensors.Operands, dy: torch.Tensor, exact: oracle.Exact) -> Cell:
    dtype = operands.x.dtype
    reasons: tuple[str, ...] = ()
    with force(family):
        try:
            outcome = oracle.evaluate(case, operands, dy)
        except CannotForce as error:
            reasons = (str(error),)
            try:
                outcome = oracle.evaluate(case, operands, None)  # some families have a forward only
            except CannotForce as error:
                return Cell(case, family, dtype, reasons=(str(error),))
    worst = oracle.worst(outcome, exact.value, exact.allowed)
    fault = ""
    if exact.disagreement > 1:
        fault = f"the oracles differ by {exact.disagreement:.2g} times the allowed difference"
    like = operands.x if outcome.sum is None else outcome.sum
    if outcome.y.stride() != torch.empty_like(like).stride():
        fault = f"y has strides {outcome.y.stride()}, x {operands.x.stride()}"
    return Cell(case, family, dtype, worst.forward, worst.backward, reasons, fault)
