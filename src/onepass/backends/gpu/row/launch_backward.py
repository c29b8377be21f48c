"""The launch of the row walk backward, and the arguments of its kernel."""

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
    across: bool  # programs take the sets of a segment in turn, and sum the gradients of its parameters over them
    by_set: bool  # each s has its own segments
    split_row: bool  # resident: a run is two blocks, one for each of two programs
    resident: bool  # x and dy are read once
    reduce: bool  # compute the sums of sets
    apply: bool  # compute dx
    given: bool  # the statistics were given
    from_y: bool  # x holds y, from which x_hat is computed
    wide: bool  # programs are numbered in 64 bits
    pdl_trigger: bool
    pdl_wait: bool


@dataclass(frozen=True, kw_only=True)
class RowBackwardLaunch(BackwardLaunch):
    """Along J lies a run. Along I lie sets of one run each, or the runs of one set.

    With segments, parts_r programs share the sets of a segment, and each run is cut into parts_t blocks.
    """

    name: ClassVar[str] = "row"
    split: Split = WHOLE  # counted in runs, and in blocks of block_j elements
    remainder: int = 0  # elements of a second block for each run, with segments

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
                *(problem.given, problem.from_y, needs_wide_programs(w, self.programs, self.block_i), self.pdl_trigger, self.pdl_wait),
            ),
        )

    def kernel(self, problem: NormProblem, options: BackwardOptions) -> Any:
        from onepass.backends.gpu.launch.launcher import Kernel

        from .kernel_backward import row_backward

        return Kernel(row_backward, self.arguments(problem, options), self.programs, self.warps, pdl=self.pdl_wait)
