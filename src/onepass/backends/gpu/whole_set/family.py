"""The whole_set family as the planner sees it: why it cannot run a problem, its cost and its launches."""

from __future__ import annotations

from onepass.backends.family import BACKWARD, Direction, Launches
from onepass.backends.gpu.family import SharingFamily
from onepass.core.device import Device
from onepass.core.problem import NormProblem

from . import schedule, schedule_backward


class WholeSet(SharingFamily):
    name = "whole_set"
    summary = "programs take one set at a time, and share a large one with others that run at the same time: x is read once"

    def cannot_share(self, problem: NormProblem, device: Device) -> list[str]:
        return schedule.whole_set_unsupported(problem, device)

    def cannot_share_backward(self, problem: NormProblem, device: Device) -> list[str]:
        return schedule_backward.whole_set_backward_unsupported(problem, device)

    def cost(self, problem: NormProblem, device: Device, direction: Direction, batch_invariant: bool) -> float:
        cost = schedule_backward.whole_set_backward_cost if direction == BACKWARD else schedule.whole_set_cost
        return cost(problem, device, batch_invariant)

    def schedule(self, problem: NormProblem, device: Device, direction: Direction, batch_invariant: bool) -> Launches:
        launches = schedule_backward.whole_set_backward_launches if direction == BACKWARD else schedule.whole_set_launches
        return launches(problem, device, batch_invariant)
