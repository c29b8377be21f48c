"""The families `tile` and `tile_reread`, whose kernels read memory across sets (the tile walk).

A set is the elements that share one mean and variance. `tile` keeps whole sets in registers, so that x is read once.
`tile_reread` reads sets of any size twice.
"""

from __future__ import annotations

from onepass.backends.family import BACKWARD, Direction, Launches
from onepass.backends.gpu.family import TrafficFamily
from onepass.backends.gpu.mix.launch import why_no_mix, with_mix
from onepass.backends.gpu.support import why_no_single_read, why_no_statistics
from onepass.backends.gpu.walk import TILE
from onepass.core.device import Device
from onepass.core.problem import NormProblem

from . import schedule, schedule_backward


class Tile(TrafficFamily):
    name = "tile"
    summary = "programs keep whole sets and read across them: x is read once"
    walks = (TILE,)

    def unsupported(self, problem: NormProblem, device: Device, direction: Direction) -> list[str]:
        reasons, x = why_no_single_read(problem, device), problem.x
        if reasons or x is None:
            return reasons
        if x.reps == 1:
            return ["a set is one run: there is nothing to read across"]
        module = schedule_backward if direction == BACKWARD else schedule
        if module.tile_size(problem) > module.LARGEST_TILE:
            return [f"a set of {x.reps} x {x.run} is larger than the {module.LARGEST_TILE} elements that fit in one program"]
        return schedule_backward.tile_unsupported(problem, device) if direction == BACKWARD else []

    def schedule(self, problem: NormProblem, device: Device, direction: Direction, batch_invariant: bool) -> Launches:
        launches = schedule_backward.tile_launches if direction == BACKWARD else schedule.tile_launches
        return launches(problem, device, batch_invariant)


class TileReread(TrafficFamily):
    name = "tile_reread"
    summary = "programs read across sets, once to reduce and once to apply"
    walks = (TILE,)

    def unsupported(self, problem: NormProblem, device: Device, direction: Direction) -> list[str]:
        reasons, x = why_no_statistics(problem, device) or why_no_mix(problem), problem.x
        if not reasons and x is not None and x.reps == 1:
            return ["a set is one run: there is nothing to reduce across"]
        return reasons or (schedule_backward.tile_reread_unsupported(problem, device) if direction == BACKWARD else [])

    def schedule(self, problem: NormProblem, device: Device, direction: Direction, batch_invariant: bool) -> Launches:
        launches = schedule_backward.tile_reread_launches if direction == BACKWARD else schedule.tile_reread_launches
        return with_mix(problem, device, direction, launches(problem, device, batch_invariant))
