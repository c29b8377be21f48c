"""Which family runs a problem, and why: `plan`, `explain`, `force`.

`plan` is pure: it depends on the problem, the Device and the Options handed to it, and on nothing else.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, NamedTuple

from .device import Device
from .families import FAMILIES
from .problem import NormProblem


class Options(NamedTuple):
    """What the caller may ask of the planner. A tuple, since it is part of every call's key."""

    family: str | None = None
    explain: bool = False


@dataclass(frozen=True)
class Plan:
    family: str
    module: str
    variant: str  # which kernel of the family
    direction: str
    why_not: tuple[tuple[str, tuple[str, ...]], ...]  # each family passed over, with its reasons

    def __str__(self) -> str:
        return f"{self.family}.{self.variant}" if self.variant else self.family


class CannotForce(RuntimeError):
    """The family that `force` pins cannot run this problem."""


DEFAULT = Options()
current: ContextVar[Options] = ContextVar("onepass_options", default=DEFAULT)


def plan(problem: NormProblem, device: Device, direction: str = "forward", options: Options = DEFAULT) -> Plan:
    """The first family that supports the problem, or the pinned one.

    Example: `plan(bind(spec.layer_norm(1), torch.empty(4, 8)), Device("cpu")).family` is `"aten"`.
    """
    why_not: list[tuple[str, tuple[str, ...]]] = []
    for family in FAMILIES:
        if options.family not in (None, family.name):
            continue
        reasons = family.unsupported(problem, device, direction)
        if not reasons:
            return Plan(family.name, family.module, family.variant(problem), direction, tuple(why_not))
        why_not.append((family.name, tuple(reasons)))
    reasons = "; ".join(reason for _, reasons in why_not for reason in reasons)
    raise CannotForce(f"family {options.family!r} cannot run the {direction} of this problem: {reasons}")


@contextmanager
def force(family: str | None) -> Iterator[None]:
    """Pin one family for the calls inside; they raise `CannotForce` where it cannot run.

    Example: `with onepass.force(family="formula"): y = onepass.functional.layer_norm(x, (64,))`
    """
    names = [f.name for f in FAMILIES]
    if family is not None and family not in names:
        raise ValueError(f"family={family!r} is unknown; expected one of {', '.join(names)}, or None to let the planner choose")
    token = current.set(current.get()._replace(family=family))
    try:
        yield
    finally:
        current.reset(token)


class Asked(Exception):
    """Carries a problem from the call that would have run it to `explain`."""

    def __init__(self, problem: NormProblem, device: Device) -> None:
        super().__init__(problem, device)
        self.problem, self.device = problem, device


@dataclass(frozen=True)
class Explanation:
    problem: NormProblem
    forward: Plan
    backward: Plan

    def __str__(self) -> str:
        p = self.problem
        lines = [f"{list(p.shape)} {str(p.dtype).removeprefix('torch.')}, strides {list(p.stride)}", f"spec      {p.spec}"]
        if p.x is None:
            lines.append("view      none: this memory cannot be seen as four axes")
        else:
            lines.append(f"view      outer {p.x.outer}, reps {p.x.reps}, sets {p.x.sets}, run {p.x.run}; strides {p.x.strides}")
            lines.append(f"parameter {p.param}")
        if p.copied:
            lines.append(f"copy      x is copied first: {p.copied}")
        for chosen in (self.forward, self.backward):
            lines.append(f"{chosen.direction:9} {chosen} (at least {p.min_bytes(chosen.direction)} bytes)")
            lines += [f"          not {name}: {'; '.join(reasons)}" for name, reasons in chosen.why_not]
        return "\n".join(lines)


def explain(norm: Callable[..., Any], *args: Any, **kwargs: Any) -> Explanation:
    """How a call would run, without running it.

    Example: `print(onepass.explain(onepass.functional.group_norm, x, 32))`
    """
    options = current.get()
    token = current.set(options._replace(explain=True))
    try:
        (copy.deepcopy(norm) if hasattr(norm, "state_dict") else norm)(*args, **kwargs)  # a module may count its calls
    except Asked as asked:
        forward, backward = (plan(asked.problem, asked.device, d, options) for d in ("forward", "backward"))
        return Explanation(asked.problem, forward, backward)
    finally:
        current.reset(token)
    raise TypeError(
        f"{norm!r} did not reach a norm of onepass by the direct route, the only one that is planned here; pass a function of "
        "onepass.functional or a module of onepass.nn with plain tensors, outside of compile and of functorch's transforms"
    )
