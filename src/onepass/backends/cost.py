"""What the families on the CPU and those of torch operations cost."""

from __future__ import annotations

from onepass.backends.family import Direction
from onepass.core.device import Device
from onepass.core.problem import NormProblem


def torch_cost(passes: float, problem: NormProblem, device: Device, direction: Direction) -> float:
    """Microseconds of torch operations that move the least possible bytes `passes` times: 10 GB/s on a CPU, 3 TB/s on a GPU."""
    return 10 * passes + passes * problem.min_bytes(direction) / (1e4 if device.kind == "cpu" else 3e6)
