"""The launch of the row walk's forward kernel, and the arguments of that kernel.

The row walk reads each set along its runs. A set is the elements that share one mean and variance. A run is a stretch of
a set that is contiguous in memory. A part is the share of a set that one program works on. A block is the
[I, J] elements that a program loads at a time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch

from onepass.backends.gpu.arguments import forward_norm, forward_pointers, maps_of, needs_wide_programs, offsets_fit_int32, view_of
from onepass.backends.gpu.launches import ForwardLaunch, ForwardOptions, WalkLaunch
from onepass.backends.gpu.partials.combine import WHOLE, PartArguments, Split
from onepass.core.problem import NormProblem

SMALLEST_NORMAL = 2.0**-126  # of float32
MOST_EARLY = 32  # elements of a thread, up to which it loads parameters early


class RowBlock(NamedTuple):
    i: int
    j: int
    remainder: int  # if resident: elements of a second block, which holds the rest of a set (with peel, its ends); 0 if there is none
    stages: int  # blocks that are loaded or worked on at the same time
    run_fits: bool  # a whole run fits into one block


class RowMode(NamedTuple):
    resident: bool  # a program keeps whole sets in registers; otherwise it goes through a part of a set block by block
    reduce: bool  # compute moments
    apply: bool  # compute y
    wide: bool  # the program id is a 64-bit integer
    flat: bool  # a set is one run. If not resident, I then indexes sets, and otherwise the runs of one set
    exact: bool  # if resident: no lane of a set's blocks is empty (with peel, of its first block)
    early: bool  # if resident: load parameters before the statistics are known
    by_s: bool  # sets with the same s share their statistics, which are given
    int32_offsets: bool  # offsets into x and y fit in 32 bits
    tiny_eps: bool  # eps is so small that var + eps may be subnormal
    stripe: int  # if resident: the elements of a stripe of a set; 0 if there are no stripes
    peel: int  # elements of a vector, if whole vectors are loaded apart from the ends of a run; otherwise 0
    pdl_trigger: bool
    pdl_wait: bool


def in_vectors(n: int, peel: int) -> int:
    """Return how many of n elements are in whole vectors of `peel` elements, wherever the n begin."""
    return max(n - (peel - 1), 0) // peel * peel


@dataclass(frozen=True, kw_only=True)
class RowLaunch(WalkLaunch, ForwardLaunch):
    """A launch of `row_forward`. J goes along a run, or along all runs of a set if the launch is resident. I indexes sets or runs."""

    name: ClassVar[str] = "row"
    split: Split = WHOLE  # how sets are cut into parts: chunk_r counts runs, chunk_t counts blocks of block_j elements
    remainder: int = 0  # if resident: elements of a second block, which holds the rest of a set (with peel, its ends); 0 if there is none
    stages: int = 1  # blocks that are loaded or worked on at the same time
    stripe: int = 0  # if resident: a thread has an element, or a vector, of each stripe of this many elements; 0 if there are no stripes
    peel: int = 0  # the elements of a vector, if whole vectors are loaded apart from the ends of a run, wherever it begins; otherwise 0
    max_registers: int = 0  # of a thread; 0 means no limit
    resident: bool = False  # a program keeps whole sets in registers
    reduce: bool = False
    apply: bool = False
    by_s: bool = False  # sets with the same s share their statistics, which are given

    @property
    def flat(self) -> bool:
        """Whether a set is one run, and a block may have several sets."""
        return self.walk.reps == 1 and not (self.by_s and self.block_i == 1)

    @property
    def early(self) -> bool:
        """Whether parameters are loaded before the statistics are known: if threads have few elements."""
        elements = self.block_i * (self.block_j + self.remainder)
        return self.resident and self.stages == 1 and elements <= MOST_EARLY * 32 * self.warps

    @property
    def exact(self) -> bool:
        """Whether no lane of a set's blocks is empty (with `peel`, of its first block), so that masks along J are not needed."""
        if self.peel:
            return self.resident and self.block_j <= in_vectors(self.walk.run, self.peel)
        return self.resident and self.block_j + self.remainder == self.walk.reps * self.walk.run

    @property
    def reads(self) -> int:
        return self.reduce + self.apply - self.resident

    @property
    def used_lanes(self) -> float:
        """The fraction of a block that counts as used: 1.0, because positions without an element cost little along a run."""
        return 1.0

    @property
    def what(self) -> str:
        return " and ".join(word for word, does in (("reduce", self.reduce), ("apply", self.apply)) if does)

    @property
    def shape(self) -> str:
        return super().shape + (", the ends of runs peeled off" if self.peel else "")

    @property
    def reads_statistics(self) -> bool:
        return not self.reduce

    @property
    def parts(self) -> Split:
        """The split of a set into parts, where chunk_r counts runs and chunk_t counts elements instead of blocks."""
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
            1.0 / (w.reps * w.run),
            w.total,
            view_of(w),
            maps_of(w),
            PartArguments(*self.split, m2_offset=self._means),
            forward_norm(problem, w),
            RowBlock(self.block_i, self.block_j, self.remainder, self.stages, self.block_j >= w.run),
            RowMode(
                *(self.resident, self.reduce, self.apply, needs_wide_programs(w, self.programs, self.block_i), self.flat),
                *(self.exact, self.early, self.by_s, offsets_fit_int32(w), problem.spec.eps < SMALLEST_NORMAL, self.stripe, self.peel),
                *(self.pdl_trigger, self.pdl_wait),
            ),
        )

    def kernel(self, problem: NormProblem, options: ForwardOptions) -> Any:
        from onepass.backends.gpu.launch.kernel import Kernel

        from .kernel import row_forward

        return Kernel(
            row_forward,
            self.arguments(problem, options),
            self.programs,
            self.warps,
            max_registers=self.max_registers,
            pdl=self.pdl_wait,
            unaligned_warps=self.unaligned_warps,
        )
