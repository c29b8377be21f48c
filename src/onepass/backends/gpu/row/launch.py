"""Launches of the row walk, and the arguments of its kernels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch

from onepass.backends.gpu.arguments import forward_norm, forward_pointers, maps_of, needs_wide_programs, view_of
from onepass.backends.gpu.launches import ChainedLaunch, ForwardLaunch, ForwardOptions
from onepass.backends.gpu.partials.combine import WHOLE, PartArguments, Split
from onepass.core.problem import NormProblem


class RowBlock(NamedTuple):
    i: int
    j: int
    remainder: int  # resident: the size of a second block, for the rest of a run; 0 if there is none
    stages: int  # blocks in flight at a time
    run_fits: bool  # a run fits into a block


class RowMode(NamedTuple):
    resident: bool  # whole sets of one run stay in registers; else programs go through parts of sets block by block
    reduce: bool  # compute moments
    apply: bool  # compute y
    wide: bool  # programs are numbered in 64 bits
    flat: bool  # a set is one run, and along I lie several sets; else along I lie the runs of one set
    pdl_trigger: bool
    pdl_wait: bool


@dataclass(frozen=True, kw_only=True)
class RowLaunch(ChainedLaunch, ForwardLaunch):
    """Along J lies a run. Along I lie sets of one run each, or the runs of one set."""

    name: ClassVar[str] = "row"
    split: Split = WHOLE  # counted in runs, and in blocks of block_j elements
    remainder: int = 0  # elements of a second block for each run, if resident
    stages: int = 1  # blocks in flight at a time
    resident: bool = False  # whole sets stay in registers
    reduce: bool = False
    apply: bool = False

    @property
    def reads(self) -> int:
        return self.reduce + self.apply - self.resident

    @property
    def used_lanes(self) -> float:
        """1.0, because lanes without an element cost little when memory is read along a run."""
        return 1.0

    @property
    def what(self) -> str:
        return " and ".join(word for word, does in (("reduce", self.reduce), ("apply", self.apply)) if does)

    @property
    def reads_statistics(self) -> bool:
        return not self.reduce

    @property
    def parts(self) -> Split:
        """The split, counted in runs and elements."""
        return self.split._replace(chunk_t=self.split.chunk_t * self.block_j)

    @property
    def partial_moments(self) -> int:
        return 0 if self.apply else 2 * self._means

    @property
    def _means(self) -> int:
        return self.walk.total * self.split.parts_r * self.split.parts_t

    def arguments(self, problem: NormProblem, options: ForwardOptions) -> tuple[Any, ...]:
        w = self.walk
        return (
            *forward_pointers(problem, options, self.reduce, self.apply),
            None if self.apply else torch.float32,
            float(problem.spec.eps),
            w.total,
            view_of(w),
            maps_of(w),
            PartArguments(*self.split, m2_offset=self._means),
            forward_norm(problem, w),
            RowBlock(self.block_i, self.block_j, self.remainder, self.stages, self.block_j >= w.run),
            RowMode(
                *(self.resident, self.reduce, self.apply, needs_wide_programs(w, self.programs, self.block_i), w.reps == 1),
                *(self.pdl_trigger, self.pdl_wait),
            ),
        )

    def kernel(self, problem: NormProblem, options: ForwardOptions) -> Any:
        from onepass.backends.gpu.launch.launcher import Kernel

        from .kernel import row_forward

        return Kernel(row_forward, self.arguments(problem, options), self.programs, self.warps, pdl=self.pdl_wait)
