"""The team family as the planner sees it: why it cannot run a problem, its cost and its launches."""

from __future__ import annotations

from onepass.backends.family import BACKWARD, Direction, Launches
from onepass.backends.gpu.family import SharingFamily
from onepass.core.device import Device
from onepass.core.problem import NormProblem

from . import schedule


class Team(SharingFamily):
    name = "team"
    summary = "programs that run at the same time share sets and read across them; x comes from memory once"

    def cannot_share(self, problem: NormProblem, device: Device) -> list[str]:
        return schedule.team_unsupported(problem, device)

    def cannot_share_backward(self, problem: NormProblem, device: Device) -> list[str]:
        return ["it has no backward"]

    def cost(self, problem: NormProblem, device: Device, direction: Direction, batch_invariant: bool) -> float:
        return schedule.team_cost(problem, device, batch_invariant)

    def schedule(self, problem: NormProblem, device: Device, direction: Direction, batch_invariant: bool) -> Launches:
        return () if direction == BACKWARD else schedule.team_launches(problem, device, batch_invariant)
