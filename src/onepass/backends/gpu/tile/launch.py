"""The launch of the tile walk's forward kernel, and the arguments of that kernel.

The tile walk reads memory across sets. A set is the elements that share one mean and variance, one (o, s) of
`x[o, r, s, t]`. A row is one r, and a column is one (s, t). A block is [I, J]: I indexes rows, J indexes columns. A part is
the rows that one program works on.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from typing import Any, ClassVar, NamedTuple

import torch

from onepass.backends.gpu.arguments import forward_norm, forward_pointers, maps_of, needs_wide_programs, view_of
from onepass.backends.gpu.launch.fields import Count, Length
from onepass.backends.gpu.launches import ForwardLaunch, ForwardOptions, WalkLaunch, loads_ahead_one_by_one
from onepass.backends.gpu.partials.combine import Split
from onepass.core.problem import NormProblem


class TileSplit(NamedTuple):
    parts_r: Count  # parts into which the rows are cut
    chunk_r: Count  # rows of a part
    blocks: Count  # blocks of columns for each value of o
    m2_offset: Count  # the M2 values of the parts are stored this many elements after their means
    columns: Length  # columns for each value of o
    columns_of_x: Count  # columns of a row of x: several such rows may lie abreast
    rows_of_x: Count


class TileBlock(NamedTuple):
    i: int
    j: int
    run: int  # if resident: how many columns of a block belong to one set
    remainder: int  # if resident: rows of a second block, which holds the rest of a set; 0 if there is none
    stages: int  # blocks that are loaded or worked on at the same time


class TileMode(NamedTuple):
    resident: bool  # a program keeps whole sets in registers; otherwise it goes through one part of some columns block by block
    reduce: bool  # compute moments; if not resident, the launch then computes no y
    wide: bool  # the program id is a 64-bit integer
    dense: bool  # the columns of each o are contiguous, in x and in y
    abreast: bool  # several rows of x lie abreast
    pdl_trigger: bool
    pdl_wait: bool


@dataclass(frozen=True, kw_only=True)
class TileLaunch(WalkLaunch, ForwardLaunch):
    """A launch of `tile_forward`. I indexes rows, one for each r. J indexes columns, one for each (s, t)."""

    name: ClassVar[str] = "tile"
    blocks: int  # blocks of columns for each value of o
    parts_r: int = 1  # parts into which the rows are cut
    chunk_r: int = 1  # rows of a part
    abreast: int = 1  # how many rows of x are read as one row
    block_run: int = 1  # if resident: how many columns of a block belong to one set
    remainder: int = 0  # if resident: rows of a second block, which holds the rest of a set; 0 if there is none
    stages: int = 1  # blocks that are loaded or worked on at the same time
    resident: bool = False  # a program keeps whole sets in registers
    reduce: bool = False

    @property
    def apply(self) -> bool:
        return self.resident or not self.reduce

    @property
    def reads(self) -> int:
        return self.reduce + self.apply - self.resident

    @property
    def what(self) -> str:
        return " and ".join(word for word, does in (("reduce", self.reduce), ("apply", self.apply)) if does)

    @property
    def reads_statistics(self) -> bool:
        return not self.reduce

    @property
    def shape(self) -> str:
        return super().shape + (f", {self.abreast} rows of x abreast" if self.abreast > 1 else "")

    @property
    def used_lanes(self) -> float:
        """The fraction of a resident block's positions that hold an element. Empty positions cost instructions, too."""
        return self.walk.reps * self.walk.run / ((self.block_i + self.remainder) * self.block_run)

    @property
    def parts(self) -> Split:
        """The Split of a set for `combine` (partials/combine_kernel.py): a part is chunk_r rows of one column."""
        return Split(self.parts_r * self.abreast, self.walk.run, self.chunk_r, 1)

    @property
    def rows(self) -> int:
        """How many rows the blocks cover. The last one may be shorter, if rows of x lie abreast."""
        return ceil(self.walk.reps / self.abreast)

    @property
    def columns(self) -> int:
        return self.walk.columns * self.abreast

    @property
    def partial_moments(self) -> int:
        return 0 if self.apply else 2 * self._means

    @property
    def _means(self) -> int:
        return self.walk.total * self.parts_r * self.abreast * (1 if self.resident else self.walk.run)

    def needs_aligned_x(self, problem: NormProblem) -> bool:
        return not self.resident and loads_ahead_one_by_one(problem, self.walk.x[1] * self.abreast, self.stages)

    def arguments(self, problem: NormProblem, options: ForwardOptions) -> tuple[Any, ...]:
        w = self.walk
        dense = w.dense and (not self.resident or self.block_run == w.run)
        return (
            *forward_pointers(problem, options, self.reduce, self.apply),
            None if self.apply else torch.float32,
            float(problem.spec.eps),
            w.total,
            view_of(w, dense)._replace(reps=self.rows, x_r=w.x[1] * self.abreast, y_r=w.y[1] * self.abreast),
            maps_of(w),
            TileSplit(self.parts_r, self.chunk_r, self.blocks, self._means, self.columns, w.columns, w.reps),
            forward_norm(problem, w),
            TileBlock(self.block_i, self.block_j, self.block_run, self.remainder, self.stages),
            TileMode(
                *(self.resident, self.reduce, needs_wide_programs(w, self.programs, self.block_i), dense, self.abreast > 1),
                *(self.pdl_trigger, self.pdl_wait),
            ),
        )

    def kernel(self, problem: NormProblem, options: ForwardOptions) -> Any:
        from onepass.backends.gpu.launch.kernel import Kernel

        from .kernel import tile_forward

        arguments, unaligned = self.arguments(problem, options), self.unaligned_warps
        return Kernel(tile_forward, arguments, self.programs, self.warps, pdl=self.pdl_wait, unaligned_warps=unaligned)
