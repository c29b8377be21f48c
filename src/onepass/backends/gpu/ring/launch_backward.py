"""The launch of the backward kernel of ring, and the arguments of that kernel.

Memory is x[o, r, s, t], and a set is the elements of one o and s. Units of work, tiles and blocks are those of ring/launch.py. A slot
of the ring holds a block of x and the block of dy at the same place.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch

from onepass.backends.gpu.arguments import maps_of, norm_of
from onepass.backends.gpu.launch.descriptor import Descriptor
from onepass.backends.gpu.launch.fields import Count, Length
from onepass.backends.gpu.launches import power_of_two
from onepass.backends.gpu.partials.gradient import BackwardLaunch, BackwardOptions
from onepass.backends.gpu.partials.parameters import varying_axes
from onepass.backends.gpu.team.launch import Exchange
from onepass.core.problem import NormProblem

from .launch import RESET, RingView

LINES_OF_COLUMN = 10  # float32 numbers in shared memory for each column of a unit: what `reduce` and `apply` must know of it


class RingBackwardSplit(NamedTuple):
    members: Count  # programs that share the rows of a unit
    teams: Count
    units: Count
    spans: Count  # units for each o
    span: Length  # columns from one unit to the next
    columns: Length  # columns (s, t) for each o


class RingBackwardMode(NamedTuple):
    block_i: int
    block_j: int
    tiles: int  # tiles of a unit
    sets: int  # sets of a unit, rounded up to a power of two
    sets_per_block: int  # sets that a tile overlaps at most, rounded up to a power of two
    parts: int  # members whose sums are added up at a time
    slots: int  # slots of the ring, each for a block of x and one of dy
    warps: int  # warps of the group `reduce`, and of the group `apply`
    halves: int  # 2: a thread of `apply` stores 8 bytes at a time, not 16
    by_column: bool  # each column is a set
    ragged: bool  # the last block of rows or of columns is not full
    blocks: int  # blocks of a tile that each member has; 0 if some members have one less
    from_y: bool  # the forward saved y instead of x, and x_hat is computed from y
    stress: str | None  # what a stress test changes: see ring/stress.py


@dataclass(frozen=True, kw_only=True)
class RingBackwardLaunch(BackwardLaunch):
    """A launch of `ring_backward`. The members of a team take the blocks of rows of a unit in turn. x and dy are read once."""

    name: ClassVar[str] = "ring"
    members: int
    spans: int  # units for each o
    tiles: int  # tiles of a unit
    sets: int  # sets of a unit
    sets_per_block: int  # sets that a tile overlaps at most, rounded up to a power of two
    slots: int  # slots of the ring

    @property
    def teams(self) -> int:
        return self.programs // self.members

    @property
    def units(self) -> int:
        """How many units of work there are. The teams take them in turn."""
        return self.walk.outer * self.spans

    @property
    def shape(self) -> str:
        return f"{super().shape}, teams of {self.members}"

    @property
    def cooperative(self) -> bool:
        return self.members > 1

    @property
    def experimental(self) -> bool:
        return True

    @property
    def partial_sums(self) -> int:
        """How many float32 numbers the members of teams store for each other."""
        return 2 * self.units * self._sets * self.members if self.cooperative else 0

    @property
    def counters(self) -> int:
        return self.units if self.cooperative else 0

    @property
    def counter_protocol(self) -> str:
        return RESET

    @property
    def by_column(self) -> bool:
        return self.walk.run == 1

    @property
    def _sets(self) -> int:
        return self.block_j if self.by_column else power_of_two(max(self.sets, 2))

    @property
    def _parts(self) -> int:
        """How many members' sums are added up at a time: a thread has up to 16 of them, if each column is a set."""
        if self.by_column:
            return min(power_of_two(self.members), 1024 // self._sets)
        return max(min(power_of_two(self.members), 512 // self._sets), 32)

    def mode(self, problem: NormProblem, stress: str | None) -> RingBackwardMode:
        w = self.walk
        rows = -(-w.reps // self.block_i)
        return RingBackwardMode(
            self.block_i,
            self.block_j,
            self.tiles,
            self._sets,
            self.sets_per_block,
            self._parts,
            self.slots,
            self.warps,
            2 if problem.dtype.itemsize == 2 else 1,
            self.by_column,
            bool(w.reps % self.block_i or w.columns % (self.tiles * self.block_j)),
            rows // self.members if rows % self.members == 0 else 0,
            problem.from_y,
            stress,
        )

    def arguments(self, problem: NormProblem, options: BackwardOptions) -> tuple[Any, ...]:
        w, dtype, block = self.walk, problem.dtype, (self.block_i, self.block_j)
        io, affine, values, cells = self.pointers(problem, options)
        return (
            *(Descriptor(dtype, w.outer * w.reps, w.columns, steps[1], block) for steps in (w.x, w.y)),
            io.dx_ptr,
            affine,
            Exchange(torch.float32, torch.int32) if self.cooperative else Exchange(None, None),
            values,
            cells,
            RingView(w.reps, w.sets, w.run, *w.y[:2], 0),
            maps_of(w),
            RingBackwardSplit(self.members, self.teams, self.units, self.spans, self.tiles * self.block_j, w.columns),
            norm_of(problem, varying_axes(problem, w)),
            self.mode(problem, None),
        )

    def kernel(self, problem: NormProblem, options: BackwardOptions) -> Any:
        from onepass.backends.gpu.launch.kernel import Kernel

        from .kernel_backward import ring_backward  # imported here, because only ring needs Gluon, which is experimental

        return Kernel(ring_backward, self.arguments(problem, options), self.programs, self.warps, cooperative=self.cooperative)
