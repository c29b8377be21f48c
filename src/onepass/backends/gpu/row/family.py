"""The families `row` and `row_reread`, whose kernels read each set along its contiguous runs (the row walk).

A set is the elements that share one mean and variance. `row` keeps whole sets in registers, so that x is
read once. `row_reread` reads sets of any size twice.
"""

from __future__ import annotations

from onepass.backends.family import BACKWARD, Direction, Launches
from onepass.backends.gpu.family import TrafficFamily
from onepass.backends.gpu.mix.launch import why_no_mix, with_mix
from onepass.backends.gpu.support import why_no_single_read, why_no_statistics
from onepass.backends.gpu.walk import ROW
from onepass.core.device import Device
from onepass.core.problem import NormProblem

from . import schedule, schedule_backward


class Row(TrafficFamily):
    name = "row"
    summary = "programs keep whole sets, which they read along their runs: x is read once"
    walks = (ROW,)

    def unsupported(self, problem: NormProblem, device: Device, direction: Direction) -> list[str]:
        reasons, x = why_no_single_read(problem, device), problem.x
        if reasons or x is None:
            return reasons
        if x.reps > 1:
            return ["a set has several runs"] if direction == BACKWARD else schedule.why_not_gathered(problem)
        longest = schedule_backward.LONGEST_ROW if direction == BACKWARD else schedule.LONGEST_ROW
        if x.run > longest:
            return [f"a row of {x.run} elements is longer than the {longest} that fit in one program"]
        return schedule_backward.row_unsupported(problem, device) if direction == BACKWARD else []

    def schedule(self, problem: NormProblem, device: Device, direction: Direction, batch_invariant: bool) -> Launches:
        launches = schedule_backward.row_launches if direction == BACKWARD else schedule.row_launches
        return launches(problem, device, batch_invariant)


class RowReread(TrafficFamily):
    name = "row_reread"
    summary = "programs read sets along their runs, twice; several share a large set"
    walks = (ROW,)

    def unsupported(self, problem: NormProblem, device: Device, direction: Direction) -> list[str]:
        reasons = why_no_statistics(problem, device) or why_no_mix(problem)
        return reasons or (schedule_backward.row_reread_unsupported(problem, device) if direction == BACKWARD else [])

    def schedule(self, problem: NormProblem, device: Device, direction: Direction, batch_invariant: bool) -> Launches:
        launches = schedule_backward.row_reread_launches if direction == BACKWARD else schedule.row_reread_launches
        return with_mix(problem, device, direction, launches(problem, device, batch_invariant))
