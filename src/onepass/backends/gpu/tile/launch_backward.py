"""The launch of the tile walk's backward kernel, and the arguments of that kernel.

The tile walk reads memory across sets. A set is the elements that share one mean and variance, one (o, s) of
`x[o, r, s, t]`. A row is one r, and a column is one (s, t). A block is [I, J]: I indexes rows, J indexes columns. A part is
the rows that one program works on. A segment is a group of values of o whose sets use the same parameters.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from onepass.backends.gpu.arguments import maps_of, needs_wide_programs, norm_of, view_of
from onepass.backends.gpu.launch.fields import Count, Length
from onepass.backends.gpu.partials.gradient import BackwardLaunch, BackwardOptions
from onepass.backends.gpu.partials.parameters import varying_axes
from onepass.core.problem import NormProblem


class TileBackwardSplit(NamedTuple):
    parts_r: Count  # parts into which the rows are cut; with segments, shares into which a segment is cut
    parts_t: Count  # with segments: blocks of rows, times blocks of columns if a program keeps to one of these
    chunk_r: Count  # rows of a part
    blocks: Count  # blocks of columns for each value of o
    columns: Length  # columns for each value of o


class TileBackwardBlock(NamedTuple):
    i: int
    j: int
    run: int  # if blocks hold whole sets: how many columns of a block belong to one set
    stages: int  # blocks that are loaded or worked on at the same time


class TileBackwardMode(NamedTuple):
    across: bool  # a program takes blocks of columns of one segment in turn, and sums the gradients of parameters
    resident: bool  # x and dy are read once
    reduce: bool  # compute the sums over sets, c1 and c2
    given: bool  # the mean and variance were given, not computed from x
    from_y: bool  # the forward saved y instead of x, and x_hat is computed from y
    wide: bool  # the program id is a 64-bit integer
    dense: bool  # the columns of each o are contiguous, in x and in y
    pdl_trigger: bool
    pdl_wait: bool


@dataclass(frozen=True, kw_only=True)
class TileBackwardLaunch(BackwardLaunch):
    """A launch of `tile_backward`. I indexes rows, one for each r. J indexes columns, one for each (s, t)."""

    name: ClassVar[str] = "tile"
    blocks: int  # blocks of columns for each value of o
    parts_r: int  # parts into which the rows are cut; with segments, shares into which a segment is cut
    parts_t: int = 1  # with segments: blocks of rows, times blocks of columns if a program keeps to one of these
    chunk_r: int = 1  # rows of a part
    block_run: int = 1  # if blocks hold whole sets: how many columns of a block belong to one set

    def arguments(self, problem: NormProblem, options: BackwardOptions) -> tuple[Any, ...]:
        w = self.walk
        dense = w.dense and (not self.resident or self.block_run == w.run)
        return (
            *self.pointers(problem, options),
            float(w.reps * w.run),
            view_of(w, dense),
            maps_of(w),
            self.segment_arguments,
            TileBackwardSplit(self.parts_r, self.parts_t, self.chunk_r, self.blocks, w.columns),
            norm_of(problem, varying_axes(problem, w)),
            TileBackwardBlock(self.block_i, self.block_j, self.block_run, self.stages),
            TileBackwardMode(
                *(self.segments is not None, self.resident, self.reduce, problem.given, problem.from_y),
                *(needs_wide_programs(w, self.programs, self.block_i), dense, self.pdl_trigger, self.pdl_wait),
            ),
        )

    def kernel(self, problem: NormProblem, options: BackwardOptions) -> Any:
        from onepass.backends.gpu.launch.kernel import Kernel

        from .kernel_backward import tile_backward

        return Kernel(tile_backward, self.arguments(problem, options), self.programs, self.warps, pdl=self.pdl_wait)
