"""How a launch of a backward is cut into blocks, warps, programs and stages."""

from __future__ import annotations

from typing import NamedTuple

from onepass.core.device import Device
from onepass.core.problem import NormProblem

from .launches import warps_for


class LaunchShape(NamedTuple):
    """The shape of a launch: its programs work on blocks of block_i x block_j elements."""

    block_i: int
    block_j: int
    warps: int  # warps of a program, of 32 threads each
    programs: int  # programs for each multiprocessor
    stages: int  # blocks that are loaded or worked on at the same time

    def at(self, problem: NormProblem) -> LaunchShape:
        """Return the shape for the address of x: with one stage, if prefetching would copy an unaligned x four bytes at a time.

        3x64x755x760 float32, channels-last, ran at 0.09 of copy speed with three stages (H200, 2026-11-20).
        """
        return self if problem.aligned or problem.dtype.itemsize < 4 else self._replace(stages=1)

    def on(self, device: Device, nbytes: int) -> LaunchShape:
        """Return the shape for a device: with fewer stages, if its shared memory is too small for all.

        A stage takes `nbytes` bytes. Shared memory must hold the stages of `programs` programs, or of four if there are more.
        A device that does not prefetch gets one stage and four times the threads, so that each thread keeps less.
        """
        if not device.prefetches:
            return self._replace(warps=warps_for(4 * 32 * self.warps, device), stages=1)
        return self._replace(stages=max(min(self.stages, 1 + device.shared // (nbytes * min(max(self.programs, 1), 4))), 1))


def block_bytes(problem: NormProblem, elements: int, params: int = 0) -> int:
    """Return the bytes of `elements` elements of x, of dy and of the gradient of a sum, and of `params` elements of every parameter."""
    operands = problem.weight, problem.bias, problem.scale, problem.shift
    tensors = 3 if problem.addends else 2
    return elements * tensors * problem.dtype.itemsize + params * sum(dtype.itemsize for dtype in operands if dtype)
