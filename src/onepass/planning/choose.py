"""Choose the kernel family that runs a problem.

`plan` is pure: its result depends only on the problem, the Device, the direction and the Options that are passed to it.
"""

from __future__ import annotations

from dataclasses import dataclass

from onepass.backends.family import FORWARD, Direction, Family, Launches
from onepass.core.device import Device
from onepass.core.problem import NormProblem

from .options import DEFAULT, CannotForce, Options
from .registry import FAMILIES


@dataclass(frozen=True)
class Plan:
    family: str
    variant: str  # which kernel of the family; "" for most families
    direction: Direction
    why_not: tuple[tuple[str, tuple[str, ...]], ...]  # each family that cannot run the problem, with its reasons
    launches: Launches = ()  # the kernel launches; empty unless the family is for GPUs

    def __str__(self) -> str:
        return f"{self.family}.{self.variant}" if self.variant else self.family


def plan(problem: NormProblem, device: Device, direction: Direction = FORWARD, options: Options = DEFAULT) -> Plan:
    """Return the plan for the cheapest family that supports the problem, or for the family that `force` has set.

    Example: `plan(bind(norms.layer_norm(1), torch.empty(4, 8)), Device("cpu")).family` is `"aten"`.
    """
    why_not: list[tuple[str, tuple[str, ...]]] = []
    able: list[Family] = []
    for family in FAMILIES:
        if family.name == options.family or (options.family is None and not family.only_forced):
            reasons = family.unsupported(problem, device, direction)
            able += [] if reasons else [family]
            why_not += [(family.name, tuple(reasons))] if reasons else []
    if not able:
        reasons = "; ".join(reason for _, reasons in why_not for reason in reasons)
        raise CannotForce(f"family {options.family!r} cannot run the {direction} of this problem: {reasons}")
    best = min(able, key=lambda family: family.cost(problem, device, direction, options.invariant))
    launches = best.schedule(problem, device, direction, options.invariant)
    return Plan(best.name, best.variant(problem), direction, tuple(why_not), launches)
