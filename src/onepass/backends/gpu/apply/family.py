"""The family `apply`: the mean and variance are given, so that one pass over x computes y.

The pass reads memory along sets (the row walk) or across sets (the tile walk). A set is the elements that share one mean
and variance.
"""

from __future__ import annotations

from onepass.backends.family import BACKWARD, Direction, Launches
from onepass.backends.gpu.family import TrafficFamily
from onepass.backends.gpu.support import no_gpu_kernel
from onepass.backends.gpu.walk import ROW, TILE
from onepass.core.device import Device
from onepass.core.problem import NormProblem

from . import schedule, schedule_backward


class Apply(TrafficFamily):
    name = "apply"
    summary = "the statistics are given: x is read once"
    walks = (ROW, TILE)

    def unsupported(self, problem: NormProblem, device: Device, direction: Direction) -> list[str]:
        reasons = no_gpu_kernel(problem, device)
        if not reasons and not problem.given:
            return ["the statistics are not given"]
        return reasons or (schedule_backward.apply_unsupported(problem, device) if direction == BACKWARD else [])

    def schedule(self, problem: NormProblem, device: Device, direction: Direction, batch_invariant: bool) -> Launches:
        launches = schedule_backward.apply_launches if direction == BACKWARD else schedule.apply_launches
        return launches(problem, device, batch_invariant)
