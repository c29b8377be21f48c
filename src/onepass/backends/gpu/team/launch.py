"""The launch of the team kernel, and the arguments of that kernel.

Memory is x[o, r, s, t]. A set is the elements of one o and s: `reps` runs of `run` contiguous elements. A unit of work is
one o and a block of columns (s, t), which holds whole sets. A team of programs, its members, shares the rows r of a unit.
A part is the moments (mean and M2) of one set in the rows of one member.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch

from onepass.backends.gpu.arguments import (
    forward_norm,
    forward_pointers,
    maps_of,
    needs_wide_programs,
    offsets_fit_int32,
    view_of,
)
from onepass.backends.gpu.launch.fields import Count, Length, Pointer
from onepass.backends.gpu.launches import ForwardOptions, SharedSetLaunch, power_of_two
from onepass.core.problem import NormProblem


class Exchange(NamedTuple):
    """The memory through which the members of a team share moments. Both pointers are None for a team of one."""

    parts_ptr: Pointer
    counters_ptr: Pointer


class TeamSplit(NamedTuple):
    members: Count  # programs that share the rows of a set
    rows: Count  # rows of a member
    blocks: Count  # blocks of columns for each o
    m2_offset: Count  # elements from the mean of a part to its M2
    columns: Length  # columns (s, t) for each o
    teams: Count
    units: Count  # units of work: one o and one block of columns each
    sets: Count  # sets of a block
    width: Length  # columns of a block that hold its sets; the others are padding


class TeamBlock(NamedTuple):
    i: int
    j: int
    run: int  # the length of a run, if it and the number of sets of a block are powers of two; else 0
    sets: int  # the sets of a block, rounded up to a power of two
    stages: int  # blocks whose loads are in flight at a time


class TeamMode(NamedTuple):
    members: int  # members of a team, rounded up to a power of two
    resident: bool  # rows stay in registers; else they are read again
    wide: bool  # programs are numbered in 64 bits
    dense: bool  # columns are contiguous in x and in y
    same_strides: bool  # x and y have the same strides
    int32_offsets: bool  # offsets into x and y fit in 32 bits
    even: bool  # rows stay in registers and all blocks are full, so no masks are needed


@dataclass(frozen=True, kw_only=True)
class TeamLaunch(SharedSetLaunch):
    """A launch of the team kernel. The members of a team share the rows of a unit of work."""

    name: ClassVar[str] = "team"
    rows: int  # rows of a member
    blocks: int  # blocks of columns for each o
    sets: int  # sets of a block
    block_run: int  # the length of a run, if it and `sets` are powers of two; else 0
    stages: int  # blocks whose loads are in flight at a time
    resident: bool  # rows stay in registers; else they are read again

    @property
    def units(self) -> int:
        return self.walk.outer * self.blocks

    def arguments(self, problem: NormProblem, options: ForwardOptions) -> tuple[Any, ...]:
        w = self.walk
        io, affine, stats = forward_pointers(problem, options)
        even = self.resident and self.members * self.block_i == w.reps and self.blocks * self.block_j == w.columns
        return (
            io,
            affine,
            Exchange(torch.float32, torch.int32) if self.cooperative else Exchange(None, None),
            stats,
            float(problem.spec.eps),
            view_of(w, w.dense),
            maps_of(w),
            TeamSplit(
                *(self.members, self.rows, self.blocks, w.total * self.members, w.columns),
                *(self.teams, self.units, self.sets, self.sets * w.run),
            ),
            forward_norm(problem, w),
            TeamBlock(self.block_i, self.block_j, self.block_run, power_of_two(self.sets), self.stages),
            TeamMode(
                *(power_of_two(self.members), self.resident, needs_wide_programs(w, self.programs, self.block_i), w.dense),
                *(w.x == w.y, offsets_fit_int32(w), even),
            ),
        )

    def kernel(self, problem: NormProblem, options: ForwardOptions) -> Any:
        from onepass.backends.gpu.launch.kernel import Kernel

        from .kernel import team_forward

        return Kernel(team_forward, self.arguments(problem, options), self.programs, self.warps, cooperative=self.cooperative)
