"""The launch of the whole_set kernel, and the arguments of that kernel.

Memory is x[o, r, s, t]. A set is the elements of one o and s: rows r of `run` contiguous elements each. A team of
programs, its members, may share the rows of a set. A part is the moments (mean and M2) of a set in one member's rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch

from onepass.backends.gpu.arguments import forward_norm, forward_pointers, maps_of, offsets_fit_int32, view_of
from onepass.backends.gpu.launch.fields import Count
from onepass.backends.gpu.launches import ForwardOptions, SharedSetLaunch, power_of_two
from onepass.backends.gpu.partials.parameters import maps as parameter_maps
from onepass.backends.gpu.team.launch import Exchange
from onepass.core.problem import NormProblem

MAX_REGISTERS = 128  # registers per thread, if programs must run at the same time: a multiprocessor has enough for 512 threads


class WholeSetSplit(NamedTuple):
    members: Count  # programs that share a set
    rows: Count  # rows of a member
    m2_offset: Count  # elements from the mean of a part to its M2
    teams: Count


class WholeSetMode(NamedTuple):
    threads: int
    vector: int  # elements that a thread loads at a time
    vectors: int  # vectors of each thread
    run: int
    members: int  # programs that share a set, rounded up to a power of two
    dense: bool  # columns are contiguous in x and in y
    same_strides: bool  # x and y have the same strides
    int32_offsets: bool  # offsets into x and y fit in 32 bits
    even: bool  # all threads of all members have the same number of vectors
    folded: bool  # the walk is folded
    per_vector: bool  # folded: all elements of a vector have the same parameters


@dataclass(frozen=True, kw_only=True)
class WholeSetLaunch(SharedSetLaunch):
    """A launch of the whole_set kernel. Each set belongs to one program, or to a team whose members share its rows.

    block_i is the number of threads of a program. block_j is the number of elements that a thread loads at a time.
    """

    name: ClassVar[str] = "whole_set"
    rows: int  # rows of a member
    vectors: int  # vectors of each thread

    @property
    def units(self) -> int:
        return self.walk.total

    def own_parameters(self, problem: NormProblem) -> bool:
        """Whether the walk is folded, and elements of a vector have parameters of their own."""
        return bool(self.walk.folded) and any(p.channel_run % self.block_j for _, p in parameter_maps(problem, self.walk) if p.d)

    @property
    def even(self) -> bool:
        """Whether all threads of all members have the same number of vectors."""
        return self.members * self.rows == self.walk.reps and self.rows * self.walk.run == self.vectors * self.block_i * self.block_j

    @property
    def shape(self) -> str:
        return f"{self.vectors} vectors of {self.block_j} for each of {self.block_i} threads"

    def arguments(self, problem: NormProblem, options: ForwardOptions) -> tuple[Any, ...]:
        w = self.walk
        io, affine, stats = forward_pointers(problem, options)
        return (
            io,
            affine,
            Exchange(torch.float32, torch.int32) if self.cooperative else Exchange(None, None),
            stats,
            float(problem.spec.eps),
            w.total,
            view_of(w, w.dense),
            maps_of(w),
            WholeSetSplit(self.members, self.rows, w.total * self.members, self.teams),
            forward_norm(problem, w),
            WholeSetMode(
                *(self.block_i, self.block_j, self.vectors, w.run, power_of_two(self.members)),
                *(w.dense, w.x == w.y, offsets_fit_int32(w), self.even),
                *(bool(w.folded), bool(w.folded) and not self.own_parameters(problem)),
            ),
        )

    def kernel(self, problem: NormProblem, options: ForwardOptions) -> Any:
        from onepass.backends.gpu.launch.kernel import Kernel

        from .kernel import whole_set_forward

        return Kernel(
            *(whole_set_forward, self.arguments(problem, options), self.programs, self.warps),
            cooperative=self.cooperative,
            max_registers=MAX_REGISTERS if self.cooperative else 0,
        )
