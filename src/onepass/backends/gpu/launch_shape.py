from __future__ import annotations

from typing import NamedTuple

from onepass.core.device import Device
from onepass.core.problem import NormProblem

from .launches import warps_for


class LaunchShape(NamedTuple):
    """How a launch is cut: blocks, threads in warps of 32, programs for each multiprocessor, blocks in flight at a time."""

    block_i: int
    block_j: int
    warps: int
    programs: int
    stages: int

    def on(self, device: Device, nbytes: int) -> LaunchShape:
        """As many stages of `nbytes` as fit in shared memory for four programs; without any, more threads, each of which keeps less."""
        if not device.prefetches:
            return self._replace(warps=warps_for(4 * 32 * self.warps, device), stages=1)
        return self._replace(stages=max(min(self.stages, 1 + device.shared // (nbytes * min(max(self.programs, 1), 4))), 1))


def block_bytes(problem: NormProblem, elements: int, params: int = 0) -> int:
    """Of x and dy, and of parameters where those are read with them."""
    operands = problem.weight, problem.bias, problem.scale, problem.shift
    return elements * 2 * problem.dtype.itemsize + params * sum(dtype.itemsize for dtype in operands if dtype)
