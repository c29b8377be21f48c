"""The launch of the tile walk backward, and the arguments of its kernel."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from onepass.backends.gpu.arguments import maps_of, needs_wide_programs, norm_of, view_of
from onepass.backends.gpu.launch.fields import Count, Length
from onepass.backends.gpu.partials.gradient import BackwardLaunch, BackwardOptions
from onepass.backends.gpu.partials.parameters import varying_axes
from onepass.core.problem import NormProblem


class TileBackwardSplit(NamedTuple):
    parts_r: Count  # parts of the rows of a set; with segments, programs that share a segment
    parts_t: Count  # with segments: blocks of rows; times blocks of columns, if parameters vary along both
    chunk_r: Count  # rows of a part
    blocks: Count  # blocks of columns for each o
    columns: Length  # for each o


class TileBackwardBlock(NamedTuple):
    i: int
    j: int
    run: int  # resident: columns of a block for each set
    stages: int  # blocks in flight at a time


class TileBackwardMode(NamedTuple):
    across: bool  # programs take blocks of columns of a segment in turn, and sum the gradients of its parameters over them
    resident: bool  # x and dy are read once
    reduce: bool  # compute the sums of sets
    given: bool  # the statistics were given
    from_y: bool  # x holds y, from which x_hat is computed
    wide: bool  # programs are numbered in 64 bits
    dense: bool  # columns are contiguous in x and in y
    pdl_trigger: bool
    pdl_wait: bool


@dataclass(frozen=True, kw_only=True)
class TileBackwardLaunch(BackwardLaunch):
    """Along I lie rows, one for each r. Along J lie columns, one for each (s, t)."""

    name: ClassVar[str] = "tile"
    blocks: int  # blocks of columns for each o
    parts_r: int  # parts of the rows of a set; with segments, programs that share a segment
    parts_t: int = 1  # with segments: blocks of rows; times blocks of columns, if parameters vary along both
    chunk_r: int = 1  # rows of a part
    block_run: int = 1  # columns of a block for each set, if resident

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
        from onepass.backends.gpu.launch.launcher import Kernel

        from .kernel_backward import tile_backward

        return Kernel(tile_backward, self.arguments(problem, options), self.programs, self.warps, pdl=self.pdl_wait)
