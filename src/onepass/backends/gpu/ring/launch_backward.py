"""The launch of the backward kernel of ring, and the arguments of that kernel.

Memory is x[o, r, s, t], and a set is the elements of one o and s. Units of work, tiles and blocks are those of ring/launch.py. A slot
of the ring holds a block of x and the block of dy at the same place.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from typing import Any, ClassVar, NamedTuple

import torch

from onepass.backends.gpu.arguments import maps_of, norm_of
from onepass.backends.gpu.launch.descriptor import Descriptor
from onepass.backends.gpu.launch.fields import Count, Length
from onepass.backends.gpu.launches import power_of_two
from onepass.backends.gpu.partials.gradient import BackwardOptions, SharedSetBackwardLaunch
from onepass.backends.gpu.partials.parameters import varying_axes
from onepass.backends.gpu.team.launch import Exchange
from onepass.backends.gpu.walk import by_channel
from onepass.core.problem import NormProblem

from .launch import RESET, RingView

# Kinds of launches: which elements share their parameters, and so the sums a = Σ dz·x_hat and b = Σ dz.
COLUMNS = "columns"  # those of a column. `reduce` sends the sums of each tile
# Those of a block; a tile is one long run, in a folded walk (gpu/walk.py). `reduce` sends the sums of all blocks of a unit at once.
BLOCKS = "blocks"
# Those of a unit, which is one set and one tile. Blocks cut the tile both ways, since there may be few rows and many columns. The members
# take all of them in turn, row by row. `reduce` sends the sums of each unit.
SET = "set"
# A tile is one long run, and each of its elements has its own parameters. A member has the same elements of every run. So `reduce` keeps
# their sums in registers until the end, and sends the sums of wdy·x_hat and wdy for each tile.
ELEMENTS = "elements"
KINDS = COLUMNS, BLOCKS, SET, ELEMENTS

BLOCKS_OF_UNIT = 32  # BLOCKS: a member has at most as many blocks of a unit, since the lanes of a warp keep their sums

LINES_OF_COLUMN = 10  # float32 numbers in shared memory for each column of a unit: what `reduce` and `apply` must know of it


class RingBackwardSplit(NamedTuple):
    members: Count  # programs that share a unit
    teams: Count
    units: Count
    spans: Count  # units for each o
    span: Length  # columns from one unit to the next
    columns: Length  # columns (s, t) for each o
    channel_rows: Count  # BLOCKS: rows of a channel
    blocks_of_run: Count  # BLOCKS: blocks of a run


class RingBackwardMode(NamedTuple):
    kind: str
    block_i: int
    block_j: int
    tiles: int  # tiles of a unit
    across: int  # SET: blocks side by side in a tile; otherwise 1
    sets: int  # sets of a unit, rounded up to a power of two
    sets_per_block: int  # sets that a tile overlaps at most, rounded up to a power of two
    parts: int  # members whose sums are added up at a time
    slots: int  # slots of the ring, each for a block of x and one of dy
    warps: int  # warps of the group `reduce`, and of the group `apply`
    halves: int  # COLUMNS: 2 if a thread of `apply` stores 8 bytes at a time, not 16
    by_column: bool  # each column is a set
    ragged: bool  # the last block of rows or of columns, or the last unit, is not full
    vector: int  # how many elements 16 bytes hold
    blocks: int  # blocks of a tile that each member has; 0 if some members have one less
    rows: int  # ELEMENTS: blocks of a run of which a member keeps the sums
    kept: int  # ELEMENTS: blocks of a run whose parameters a member keeps; 0 if there are none
    differ: str  # these three are for ring/parameters.py
    phases: int
    phased: bool
    from_y: bool  # the forward saved y instead of x, and x_hat is computed from y
    stress: None  # no stress test changes this kernel yet: see ring/stress.py


@dataclass(frozen=True, kw_only=True)
class RingBackwardLaunch(SharedSetBackwardLaunch):
    """A launch of `ring_backward`. The members of a team take the blocks of a tile in turn. x and dy are read once."""

    name: ClassVar[str] = "ring"
    resident: bool = True
    reduce: bool = True
    apply: bool = True
    kind: str
    spans: int  # units for each o
    tiles: int  # tiles of a unit
    sets: int  # sets of a unit
    sets_per_block: int  # sets that a tile overlaps at most, rounded up to a power of two
    slots: int  # slots of the ring
    across: int = 1  # SET: blocks side by side in a tile
    channel_rows: int = 0  # BLOCKS: rows of a channel

    @property
    def units(self) -> int:
        return ceil(self.walk.outer / self.tiles) if self.walk.folded else self.walk.outer * self.spans

    @property
    def span(self) -> int:
        """The columns from one unit to the next. The last tile of a unit may also have columns of the next unit, which it ignores."""
        return min(self.sets * self.walk.run, self.tiles * self.across * self.block_j)

    @property
    def blocks_of_tile(self) -> int:
        """How many blocks of a tile the busiest member has."""
        return ceil(ceil(self.walk.reps / self.block_i) * self.across / self.members)

    @property
    def experimental(self) -> bool:
        return True

    @property
    def partial_sums(self) -> int:
        return 2 * self.units * self._sets * self.members if self.cooperative else 0

    @property
    def counters(self) -> int:
        return self.units if self.cooperative else 0

    @property
    def counter_protocol(self) -> str:
        return RESET

    @property
    def by_column(self) -> bool:
        return self.kind == COLUMNS and self.walk.run == 1

    @property
    def _sets(self) -> int:
        return self.block_j if self.by_column else power_of_two(max(self.sets, 2))

    @property
    def _parts(self) -> int:
        """How many members' sums are added up at a time: a thread has up to 16 of them, if each column is a set."""
        if self.by_column:
            return min(power_of_two(self.members), 1024 // self._sets)
        return max(min(power_of_two(self.members), 512 // self._sets), 32)

    def mode(self, problem: NormProblem) -> RingBackwardMode:
        w, size, blocks = self.walk, problem.dtype.itemsize, ceil(self.walk.reps / self.block_i) * self.across
        empty = self.span % (self.tiles * self.across * self.block_j) or (self.kind != SET and w.columns % self.span)
        last = w.outer % self.tiles if w.folded else empty
        shared = self.kind == ELEMENTS
        return RingBackwardMode(
            self.kind,
            self.block_i,
            self.block_j,
            self.tiles,
            self.across,
            self._sets,
            self.sets_per_block,
            self._parts,
            self.slots,
            self.warps,
            2 if size == 2 else 1,
            self.by_column,
            bool(w.reps % self.block_i or last),
            16 // size,
            blocks // self.members if blocks % self.members == 0 else 0,
            self.blocks_of_tile if shared else 0,
            self.blocks_of_tile if shared and problem.affine else 0,
            "element" if shared else "block",
            1,
            False,
            problem.from_y,
            None,
        )

    def arguments(self, problem: NormProblem, options: BackwardOptions) -> tuple[Any, ...]:
        w, dtype, block = self.walk, problem.dtype, (self.block_i, self.block_j)
        io, affine, values, cells = self.pointers(problem, options)
        columns = w.run if w.folded else w.columns
        return (
            *(Descriptor(dtype, w.outer * w.reps, columns, steps[1], block) for steps in (w.x, w.y)),
            io.dx_ptr,
            affine,
            Exchange(torch.float32, torch.int32) if self.cooperative else Exchange(None, None),
            values,
            cells,
            w.total,
            RingView(w.reps, w.sets, w.run, *w.y[:2], w.folded),
            maps_of(by_channel(w) if self.channel_rows else w),
            RingBackwardSplit(
                *(self.members, self.teams, self.units, self.spans, self.span, columns),
                *(self.channel_rows, ceil(w.reps / self.block_i)),
            ),
            norm_of(problem, varying_axes(problem, w)),
            self.mode(problem),
        )

    def kernel(self, problem: NormProblem, options: BackwardOptions) -> Any:
        from onepass.backends.gpu.launch.kernel import Kernel

        from .kernel_backward import ring_backward  # imported here, because only ring needs Gluon, which is experimental

        return Kernel(ring_backward, self.arguments(problem, options), self.programs, self.warps, cooperative=self.cooperative)
