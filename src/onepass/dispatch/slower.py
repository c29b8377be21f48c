"""Tells the logger "onepass", at level INFO, when a norm takes a slower path, and why. Each reason is told once."""

from __future__ import annotations

from math import prod

from onepass.backends.compilation import LOGGER
from onepass.core.problem import NormProblem
from onepass.planning.choose import Plan

# Families that compute with torch's functions. On a CPU, `aten` is slower only where the C kernels cannot run.
_BY_TORCH = {"aten": "torch's kernels run", "blockwise": "torch operations run", "reference": "torch operations run"}
_told: set[str] = set()


def tell_once(what: str, reason: str) -> None:
    message = f"{what}, since {reason}"
    if message not in _told:
        _told.add(message)
        LOGGER.info("a slower path is taken: %s", message)


def tell_plan(problem: NormProblem, plan: Plan, device: str) -> None:
    """Tell if the kernels for this device cannot run a problem."""
    reasons = dict(plan.why_not)
    fast = [name for name in reasons if (name == "c") == (device == "cpu") and name not in _BY_TORCH]
    if plan.family in _BY_TORCH and fast and prod(problem.shape):
        tell_once(f"{_BY_TORCH[plan.family]} in the {plan.direction} ({plan.family})", reasons[fast[0]][0])
