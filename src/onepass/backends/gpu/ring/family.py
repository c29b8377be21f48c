"""The ring family as the planner sees it: why it cannot run a problem, its cost and its launches."""

from __future__ import annotations

from onepass.backends.family import BACKWARD, Direction, Launches
from onepass.backends.gpu.family import SharingFamily
from onepass.core.device import Device
from onepass.core.problem import NormProblem

from . import schedule, schedule_backward


class Ring(SharingFamily):
    name = "ring"
    summary = "programs that run at the same time share sets in shared memory: x is read once, or again where the ring is full"
    disabled_by = "no_ring"

    def cannot_share(self, problem: NormProblem, device: Device) -> list[str]:
        return schedule.ring_unsupported(problem, device)

    def cannot_share_backward(self, problem: NormProblem, device: Device) -> list[str]:
        return schedule_backward.ring_backward_unsupported(problem, device)

    def cost(self, problem: NormProblem, device: Device, direction: Direction, batch_invariant: bool) -> float:
        cost = schedule_backward.ring_backward_cost if direction == BACKWARD else schedule.ring_cost
        return cost(problem, device, batch_invariant)

    def schedule(self, problem: NormProblem, device: Device, direction: Direction, batch_invariant: bool) -> Launches:
        launches = schedule_backward.ring_backward_launches if direction == BACKWARD else schedule.ring_launches
        return launches(problem, device, batch_invariant)
