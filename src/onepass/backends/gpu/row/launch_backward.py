"""The launch of the row walk's backward kernel, and the arguments of that kernel.

The row walk reads each set along its runs. A set is the elements that share one mean and variance, one (o, s) of
`x[o, r, s, t]`. A run is a stretch of a set that is contiguous in memory. A segment is a group of sets that use the same
parameters. A block is the [I, J] elements that a program loads at a time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from onepass.backends.gpu.arguments import maps_of, needs_wide_programs, norm_of, view_of
from onepass.backends.gpu.partials.combine import WHOLE, Split
from onepass.backends.gpu.partials.gradient import BackwardLaunch, BackwardOptions, SplitArguments
from onepass.backends.gpu.partials.parameters import varying_axes
from onepass.core.problem import NormProblem

from .launch import RowBlock


class RowBackwardMode(NamedTuple):
    across: bool  # a program takes sets of one segment in turn, and sums the gradients of the segment's parameters
    by_set: bool  # sets with different s are in different segments
    split_row: bool  # if resident: a run is two blocks, and each of two programs works on one
    resident: bool  # x and dy are read once
    reduce: bool  # compute the sums over sets, c1 and c2
    apply: bool  # compute dx
    given: bool  # the mean and variance were given, not computed from x
    from_y: bool  # the forward saved y instead of x, and x_hat is computed from y
    wide: bool  # the program id is a 64-bit integer
    peel: int  # elements of a vector, if whole vectors are loaded apart from the ends of a run; otherwise 0
    phases: int  # with peel: a program takes every phases-th set, and these begin equally far from a multiple of `peel`; otherwise 1
    pdl_trigger: bool
    pdl_wait: bool


@dataclass(frozen=True, kw_only=True)
class RowBackwardLaunch(BackwardLaunch):
    """A launch of `row_backward`. J goes along a run. I indexes sets of one run each, or the runs of one set.

    If there are segments, groups of sets that use the same parameters, the sets of each are divided into split.parts_r
    shares, and their runs into split.parts_t blocks. A program works on one block of the runs of one share.
    """

    name: ClassVar[str] = "row"
    split: Split = WHOLE  # how sets are cut into parts: chunk_r counts runs, chunk_t counts blocks of block_j elements
    # With segments: elements of a second block, which holds the rest of a run, or with `peel` its ends. 0 if there is none.
    remainder: int = 0
    peel: int = 0  # the elements of a vector, if whole vectors are loaded apart from the ends of a run; otherwise 0
    phases: int = 1  # with `peel`: a program takes every phases-th set, and these begin equally far from a multiple of `peel`

    @property
    def shape(self) -> str:
        return super().shape + (", the ends of runs peeled off" if self.peel else "")

    def arguments(self, problem: NormProblem, options: BackwardOptions) -> tuple[Any, ...]:
        w, found = self.walk, self.segments
        return (
            *self.pointers(problem, options),
            float(w.reps * w.run),
            w.total,
            view_of(w),
            maps_of(w),
            self.segment_arguments,
            SplitArguments(*self.split),
            norm_of(problem, varying_axes(problem, w)),
            RowBlock(self.block_i, self.block_j, self.remainder, self.stages, self.block_j >= w.run),
            RowBackwardMode(
                *(found is not None, found is not None and found.by_set),
                *(found is not None and self.resident and self.split.parts_t == 2, self.resident, self.reduce, self.apply),
                *(problem.given, problem.from_y, needs_wide_programs(w, self.programs, self.block_i * self.phases)),
                *(self.peel, self.phases, self.pdl_trigger, self.pdl_wait),
            ),
        )

    def kernel(self, problem: NormProblem, options: BackwardOptions) -> Any:
        from onepass.backends.gpu.launch.kernel import Kernel

        from .kernel_backward import row_backward

        return Kernel(row_backward, self.arguments(problem, options), self.programs, self.warps, pdl=self.pdl_wait)
