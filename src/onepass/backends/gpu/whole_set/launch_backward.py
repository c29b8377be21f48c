"""The launch of the whole_set family's backward kernel, and the arguments of that kernel.

Memory is x[o, r, s, t]. A set is one o and s, and here it is one run: its elements are contiguous. A channel is the elements
of a set that share their parameters. A stretch is some neighbouring elements of a channel, as many for each. A team of
programs, its members, may share the stretches of a set. A cell is the sum over a stretch of what its elements add to the
gradient of a parameter.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from typing import Any, ClassVar, NamedTuple

import torch

from onepass.backends.gpu.arguments import maps_of, needs_wide_programs, norm_of, offsets_fit_int32
from onepass.backends.gpu.launch.fields import Count, Index, Stride
from onepass.backends.gpu.launches import power_of_two
from onepass.backends.gpu.partials.gradient import BackwardOptions, SharedSetBackwardLaunch
from onepass.backends.gpu.partials.parameters import varying_axes
from onepass.backends.gpu.team.launch import Exchange
from onepass.backends.gpu.walk import by_channel
from onepass.core.problem import NormProblem


class WholeSetBackwardView(NamedTuple):
    """The number of sets of each o, and the strides of o and s in x and in y."""

    sets: Index
    x_o: Stride
    x_s: Stride
    y_o: Stride
    y_s: Stride


class WholeSetBackwardSplit(NamedTuple):
    members: Count  # programs that share a set
    teams: Count
    stretches: Count  # of a set
    of_channel: Index  # stretches of a channel
    offset: Count  # elements from the first sum of a member to its second


class WholeSetBackwardMode(NamedTuple):
    block_i: int  # stretches that a program takes in one step
    block_j: int  # elements of a stretch
    steps: int  # steps in which a member takes its stretches
    members: int  # programs that share a set, rounded up to a power of two
    wide: bool  # programs are numbered in 64 bits
    int32_offsets: bool  # offsets into x and y fit in 32 bits
    full: bool  # members have no steps beyond the end of a set, so no masks are needed
    from_y: bool  # the forward saved y instead of x, and x_hat is computed from y
    pdl_trigger: bool


@dataclass(frozen=True, kw_only=True)
class WholeSetBackwardLaunch(SharedSetBackwardLaunch):
    """A launch of `whole_set_backward`. Each set belongs to one program, or to a team whose members share its stretches.

    Programs keep x and dy of their stretches in registers.

    block_i is the number of stretches that a program takes in one step, and block_j the number of elements of a stretch.
    """

    name: ClassVar[str] = "whole_set"
    channel: int  # elements of a channel
    max_registers: int = 0  # of a thread; 0 means no limit

    @property
    def units(self) -> int:
        return self.walk.total

    @property
    def stretches(self) -> int:
        """How many stretches a set has."""
        return self.walk.run // self.block_j

    @property
    def steps(self) -> int:
        """How many steps a member takes."""
        return ceil(self.stretches / self.block_i / self.members)

    @property
    def shape(self) -> str:
        return f"{self.steps} x {super().shape}"

    @property
    def elements(self) -> int:
        """How many elements of x a program has room for."""
        return self.steps * self.block_i * self.block_j

    @property
    def full(self) -> bool:
        """Whether all programs use all of that room, so that no masks are needed."""
        return self.members * self.steps * self.block_i == self.stretches

    def arguments(self, problem: NormProblem, options: BackwardOptions) -> tuple[Any, ...]:
        w = self.walk
        io, affine, values, cells = self.pointers(problem, options)
        return (
            io,
            affine,
            Exchange(torch.float32, torch.int32) if self.cooperative else Exchange(None, None),
            values,
            cells,
            float(w.run),
            w.total,
            WholeSetBackwardView(w.sets, w.x[0], w.x[2], w.y[0], w.y[2]),
            maps_of(by_channel(w)),
            WholeSetBackwardSplit(self.members, self.teams, self.stretches, self.channel // self.block_j, w.total * self.members),
            norm_of(problem, varying_axes(problem, w)),
            WholeSetBackwardMode(
                *(self.block_i, self.block_j, self.steps, power_of_two(self.members)),
                *(needs_wide_programs(w, self.programs, self.block_i), offsets_fit_int32(w)),
                *(self.full, problem.from_y, self.pdl_trigger),
            ),
        )

    def kernel(self, problem: NormProblem, options: BackwardOptions) -> Any:
        from onepass.backends.gpu.launch.kernel import Kernel

        from .kernel_backward import whole_set_backward

        return Kernel(
            *(whole_set_backward, self.arguments(problem, options), self.programs, self.warps),
            cooperative=self.cooperative,
            max_registers=self.max_registers,
        )
