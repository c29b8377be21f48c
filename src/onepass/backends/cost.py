"""Estimate the cost of the C family and of the families made of torch operations."""

from __future__ import annotations

from onepass.backends.family import Direction
from onepass.core.device import Device
from onepass.core.problem import NormProblem


def torch_cost(passes: float, problem: NormProblem, device: Device, direction: Direction) -> float:
    """Return the estimated time, in microseconds, of `passes` passes over the tensors of a problem.

    A pass takes 10 µs, plus the time to move `problem.min_bytes` at 10 GB/s on a CPU or 3 TB/s on a GPU.
    """
    return 10 * passes + passes * problem.min_bytes(direction) / (1e4 if device.kind == "cpu" else 3e6)
