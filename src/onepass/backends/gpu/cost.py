"""What the families that keep or reread a set cost, by the bytes they move. Teams have models of their own, in their schedules."""

from __future__ import annotations

from onepass.backends.family import BACKWARD, Direction, Launches
from onepass.core.device import Device
from onepass.core.problem import NormProblem

from .launches import Pass, filled_fraction
from .walk import needs_division, used_fraction

LAUNCH = 3.0  # microseconds
BANDWIDTH = 3e6  # bytes in a microsecond


def traffic_cost(
    problem: NormProblem, device: Device, direction: Direction, batch_invariant: bool, launches: Launches, walks: tuple[str, ...]
) -> float:
    """Microseconds: each kernel that reduces or applies reads x (and dy) once, through the cache lines its walk touches.

    One tensor is written once.
    """
    if device.kind == "cpu":  # Triton's interpreter runs only where `force` asks for it
        return float("inf")
    tensors = 2 if direction == BACKWARD else 1
    reads = sum(step.reduce + step.apply - step.resident for step in launches if isinstance(step, Pass))
    used = max(used_fraction(problem, walk) for walk in walks)
    first = launches[0]
    if direction != BACKWARD and isinstance(first, Pass) and first.resident:
        used *= filled_fraction(first) * (0.5 if needs_division(problem) else 1.0)
    traffic = (tensors * reads + 1) / (tensors + 1) / used
    if batch_invariant:  # the choice must not depend on the size of the batch
        return traffic / 1e3
    count = sum(isinstance(step, Pass) or not step.none for step in launches)
    return LAUNCH * count + problem.min_bytes(direction) * traffic / BANDWIDTH
