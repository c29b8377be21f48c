"""The launch of the team family's backward kernel, and the arguments of that kernel.

Memory is x[o, r, s, t]. A set is the elements of one o and s: `reps` runs of `run` contiguous elements. A unit of work is
one o and a block of columns (s, t), which holds whole sets. A team of programs, its members, shares the rows r of a unit.
A cell is the sum over one member's rows of what a column adds to the gradient of a parameter.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, lcm
from typing import Any, ClassVar, NamedTuple

import torch

from onepass.backends.gpu.arguments import maps_of, needs_wide_programs, norm_of, offsets_fit_int32, view_of
from onepass.backends.gpu.launches import power_of_two
from onepass.backends.gpu.partials.gradient import BackwardOptions
from onepass.backends.gpu.partials.parameters import varying_axes
from onepass.backends.gpu.resident_backward import ResidentBackwardLaunch
from onepass.core.problem import NormProblem

from .launch import Exchange, TeamSplit


class TeamBackwardBlock(NamedTuple):
    i: int  # rows that are loaded in one step
    j: int
    steps: int  # steps in which a member takes its rows
    i_more: int  # the same three numbers of a second block, which holds the other columns of a unit of one set; 0 if there is none
    remainder: int
    steps_more: int
    run: int  # the length of a run, if it and the number of sets of a unit are powers of two; else 0
    sets: int  # the sets of a unit, rounded up to a power of two


class TeamBackwardMode(NamedTuple):
    members: int  # members of a team, rounded up to a power of two
    wide: bool  # programs are numbered in 64 bits
    dense: bool  # columns are contiguous in x and in y
    int32_offsets: bool  # offsets into x and y fit in 32 bits
    full_rows: bool  # steps have no rows beyond those of a member, so no masks are needed
    full_columns: bool  # the same for columns
    from_y: bool  # the forward saved y instead of x, and x_hat is computed from y
    pdl_trigger: bool


@dataclass(frozen=True, kw_only=True)
class TeamBackwardLaunch(ResidentBackwardLaunch):
    """A launch of `team_backward`. The members of a team keep x and dy of their rows of a unit in registers."""

    name: ClassVar[str] = "team"
    rows: int  # rows of a member
    blocks: int  # units for each o
    sets: int  # sets of a unit
    remainder: int = 0  # columns of a second block, if a unit is one set whose columns do not fill one

    @property
    def units(self) -> int:
        return self.walk.outer * self.blocks

    @property
    def shape(self) -> str:
        return f"{self.steps} x {super().shape}" + (f", {self.remainder} more columns" if self.remainder else "")

    @property
    def steps(self) -> int:
        """How many blocks a member takes of the rows of a unit."""
        return ceil(self.rows / self.block_i)

    @property
    def rows_of_remainder(self) -> int:
        """The rows of a second block, which has as many elements as the first."""
        return self.block_i * self.block_j // self.remainder if self.remainder else 0

    @property
    def elements(self) -> int:
        more = self.rows_of_remainder
        return self.steps * self.block_i * self.block_j + (ceil(self.rows / more) * more * self.remainder if more else 0)

    @property
    def full_rows(self) -> bool:
        """Whether the steps of each member have no rows beyond its own."""
        return self.members * self.rows == self.walk.reps and self.rows % lcm(self.block_i, self.rows_of_remainder or 1) == 0

    @property
    def full_columns(self) -> bool:
        """Whether the blocks of each unit have no columns beyond its own."""
        return self.blocks * (self.block_j + self.remainder) == self.walk.columns

    @property
    def full(self) -> bool:
        return self.full_rows and self.full_columns

    @property
    def sets_of_unit(self) -> int:
        return self.sets

    def arguments(self, problem: NormProblem, options: BackwardOptions) -> tuple[Any, ...]:
        w = self.walk
        io, affine, values, cells = self.pointers(problem, options)
        run = w.run if power_of_two(w.run) == w.run and power_of_two(self.sets) == self.sets else 0
        i_more = self.rows_of_remainder
        return (
            io,
            affine,
            Exchange(torch.float32, torch.int32) if self.cooperative else Exchange(None, None),
            values,
            cells,
            float(w.reps * w.run),
            view_of(w, w.dense),
            maps_of(w),
            TeamSplit(
                *(self.members, self.rows, self.blocks, w.total * self.members, w.columns),
                *(self.teams, self.units, self.sets, self.sets * w.run),
            ),
            norm_of(problem, varying_axes(problem, w)),
            TeamBackwardBlock(
                *(self.block_i, self.block_j, self.steps),
                *(i_more, self.remainder, ceil(self.rows / i_more) if i_more else 0),
                *(run, power_of_two(self.sets)),
            ),
            TeamBackwardMode(
                *(power_of_two(self.members), needs_wide_programs(w, self.programs, self.block_i), w.dense, offsets_fit_int32(w)),
                *(self.full_rows, self.full_columns, problem.from_y, self.pdl_trigger),
            ),
        )

    def kernel(self, problem: NormProblem, options: BackwardOptions) -> Any:
        from onepass.backends.gpu.launch.kernel import Kernel

        from .kernel_backward import team_backward

        return Kernel(
            *(team_backward, self.arguments(problem, options), self.programs, self.warps),
            cooperative=self.cooperative,
            max_registers=self.max_registers,
        )
