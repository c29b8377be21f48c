"""The problems of the stress test of `ring` (ring_stress.py), and their launches: with few slots, which are refilled at once."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from onepass.backends.gpu.ring.launch import RingLaunch
from onepass.backends.gpu.ring.schedule import candidates, modelled_time
from onepass.backends.gpu.walk import walk
from onepass.bench.suite import Row, problem_of
from onepass.core.device import Device
from onepass.core.problem import NormProblem
from onepass.verify.cases import Case


@dataclass(frozen=True)
class Shape:
    """A norm with SiLU (a GroupNorm if there are groups), and how `ring` schedules it.

    32 programs are so few that launches on four streams run at the same time.
    """

    shape: tuple[int, ...]
    groups: int
    members: int
    slots: int
    keep: int = 0  # blocks of a unit of work that stay in the ring until they are applied; 0: all
    back: int = 0  # slots for the blocks that do not stay, which are read again; 0: none
    statistics: bool = False
    programs: int = 32
    layout: str = "channels_last"
    tiles: int = 0  # tiles of a unit; 0: as the planner chooses
    block_i: int = 0  # rows of a block; 0: as the planner chooses
    op: str = "layer_norm"  # the norm, if there are no groups

    @property
    def case(self) -> Case:
        if self.groups:
            return Case("group_norm", self.shape, layout=self.layout, groups=self.groups, activation="silu")
        return Case(self.op, self.shape, layout="contiguous" if self.op == "layer_norm" else self.layout, activation="silu")


SHAPES = {
    "one block": Shape((256, 64, 16, 16), 8, members=2, slots=2, block_i=128),
    "two at once": Shape((64, 128, 32, 32), 32, members=2, slots=4, block_i=128),
    "tiles": Shape((48, 320, 16, 16), 32, members=8, slots=6, statistics=True),
    "ragged": Shape((64, 96, 13, 17), 32, members=2, slots=4, statistics=True),
    "again": Shape((32, 64, 64, 64), 8, members=2, slots=6, keep=2, back=3),
    # In these, each column is a set; the second has parameters for each row. In the third, each unit is a set.
    "columns": Shape((128, 64, 24, 24), 0, members=2, slots=6, op="instance_norm", statistics=True),
    "rows": Shape((32, 512, 20, 24), 0, members=2, slots=9, op="layer_norm2d", layout="contiguous"),
    "one set": Shape((256, 64, 20, 20), 0, members=2, slots=14, op="batch_norm", layout="contiguous", statistics=True),
    # In these, a set is one long run. In the last, runs begin between multiples of 16 bytes, and members keep parameters.
    "runs": Shape((64, 32, 64, 64), 2, members=4, slots=9, tiles=2, layout="contiguous", statistics=True),
    "runs again": Shape((48, 32, 64, 64), 2, members=2, slots=6, keep=2, back=3, tiles=1, layout="contiguous"),
    "odd runs": Shape((256, 40001), 0, members=4, slots=7, tiles=2, statistics=True),
}


def planned(shape: Shape, device: Device) -> tuple[NormProblem, tuple[RingLaunch, ...]]:
    problem = problem_of(Row(shape.case, torch.float16))
    launches = sorted(candidates(problem, walk(problem), device), key=lambda launch: modelled_time(problem, launch, device))
    launch = next(launch for launch in launches if shape.block_i in (0, launch.block_i))
    keep = shape.keep or shape.slots
    cut = replace(launch, members=shape.members, programs=shape.programs, slots=shape.slots, keep=keep, back=shape.back)
    cut = replace(cut, tiles=shape.tiles, sets=shape.tiles) if shape.tiles else cut
    assert cut.blocks <= keep or shape.back, f"{cut.blocks} blocks of a unit do not fit {shape.slots} slots"
    return problem, (cut,)
