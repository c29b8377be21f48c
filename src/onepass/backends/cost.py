"""The cost of the CPU families and of the families made of torch operations."""

from __future__ import annotations

from onepass.backends.family import Direction
from onepass.core.device import Device
from onepass.core.problem import NormProblem


def torch_cost(passes: float, problem: NormProblem, device: Device, direction: Direction) -> float:
    """Microseconds to move `min_bytes` `passes` times, at 10 GB/s on a CPU and 3 TB/s on a GPU, plus 10 for each pass."""
    return 10 * passes + passes * problem.min_bytes(direction) / (1e4 if device.kind == "cpu" else 3e6)
