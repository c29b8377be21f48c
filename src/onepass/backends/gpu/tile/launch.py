"""Launches of the tile walk, and the arguments of its kernel."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch

from onepass.backends.gpu.arguments import forward_norm, forward_pointers, maps_of, needs_wide_programs, view_of
from onepass.backends.gpu.launch.fields import Count, Length
from onepass.backends.gpu.launches import ChainedLaunch, ForwardLaunch, ForwardOptions
from onepass.backends.gpu.partials.combine import Split
from onepass.core.problem import NormProblem


class TileSplit(NamedTuple):
    parts_r: Count  # parts of the rows of a set
    chunk_r: Count  # rows of a part
    blocks: Count  # blocks of columns for each o
    m2_offset: Count  # elements from the means of the parts to their M2
    columns: Length  # for each o


class TileBlock(NamedTuple):
    i: int
    j: int
    run: int  # resident: columns of a block for each set
    remainder: int  # resident: the rows of a second block, for the rest of a set; 0 if there is none
    stages: int  # blocks in flight at a time


class TileMode(NamedTuple):
    resident: bool  # whole sets stay in registers; else programs go through some rows of some columns block by block
    reduce: bool  # compute moments. A launch that is not resident computes either moments or y
    wide: bool  # programs are numbered in 64 bits
    dense: bool  # columns are contiguous in x and in y
    pdl_trigger: bool
    pdl_wait: bool


@dataclass(frozen=True, kw_only=True)
class TileLaunch(ChainedLaunch, ForwardLaunch):
    """Along I lie rows, one for each r. Along J lie columns, one for each (s, t)."""

    name: ClassVar[str] = "tile"
    blocks: int  # blocks of columns for each o
    parts_r: int = 1  # parts of the rows of a set
    chunk_r: int = 1  # rows of a part
    block_run: int = 1  # columns of a block for each set, if resident
    remainder: int = 0  # rows of a second block for each set, if resident
    stages: int = 1  # blocks in flight at a time
    resident: bool = False  # whole sets stay in registers
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
    def used_lanes(self) -> float:
        """The fraction of the lanes of a resident block that have an element. All lanes cost instructions."""
        return self.walk.reps * self.walk.run / ((self.block_i + self.remainder) * self.block_run)

    @property
    def parts(self) -> Split:
        """The parts of a set: each column is one part, or several along r."""
        return Split(self.parts_r, self.walk.run, self.chunk_r, 1)

    @property
    def partial_moments(self) -> int:
        return 0 if self.apply else 2 * self._means

    @property
    def _means(self) -> int:
        return self.walk.total * self.parts_r * (1 if self.resident else self.walk.run)

    def arguments(self, problem: NormProblem, options: ForwardOptions) -> tuple[Any, ...]:
        w = self.walk
        dense = w.dense and (not self.resident or self.block_run == w.run)
        return (
            *forward_pointers(problem, options, self.reduce, self.apply),
            None if self.apply else torch.float32,
            float(problem.spec.eps),
            w.total,
            view_of(w, dense),
            maps_of(w),
            TileSplit(self.parts_r, self.chunk_r, self.blocks, self._means, w.columns),
            forward_norm(problem, w),
            TileBlock(self.block_i, self.block_j, self.block_run, self.remainder, self.stages),
            TileMode(
                *(self.resident, self.reduce, needs_wide_programs(w, self.programs, self.block_i), dense),
                *(self.pdl_trigger, self.pdl_wait),
            ),
        )

    def kernel(self, problem: NormProblem, options: ForwardOptions) -> Any:
        from onepass.backends.gpu.launch.launcher import Kernel

        from .kernel import tile_forward

        return Kernel(tile_forward, self.arguments(problem, options), self.programs, self.warps, pdl=self.pdl_wait)
