"""The launch of the ring kernel, and the arguments of that kernel.

Memory is x[o, r, s, t], and a set is the elements of one o and s. A unit of work is one o and the columns (s, t) of some
whole sets. It is cut into tiles of block_j columns, and each tile into blocks of block_i rows r. In a folded walk (gpu/walk.py) a
set is one run, and its rows have block_j elements. Then a unit is some values of o, and each of them is a tile. A team of
programs, its members, shares a unit. A slot of the ring holds one block of x, which is copied there by a descriptor
(launch/descriptor.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, gcd
from typing import Any, ClassVar, NamedTuple

import torch

from onepass.backends.gpu.arguments import forward_norm, forward_pointers, maps_of
from onepass.backends.gpu.launch.descriptor import Descriptor
from onepass.backends.gpu.launch.fields import Count, Index, Length, Stride
from onepass.backends.gpu.launches import ForwardOptions, SharedSetLaunch, power_of_two
from onepass.backends.gpu.team.launch import Exchange
from onepass.backends.gpu.walk import AXIS_R, AXIS_T, axis_mask, by_channel
from onepass.core.problem import NormProblem

RESET = "reset"  # a counter protocol: the last member that leaves a unit sets the unit's counter to 0


class RingView(NamedTuple):
    """The sizes of x[o, r, s, t] along r, s and t, and the strides of y along o and r. The descriptor has the strides of x."""

    reps: Length
    sets: Index
    run: Stride
    y_o: Stride
    y_r: Stride
    length: Length  # folded: elements of a run


class RingSplit(NamedTuple):
    members: Count  # programs that share the rows of a unit
    teams: Count
    spans: Count  # units for each o
    span: Length  # columns from one unit to the next
    columns: Length  # columns (s, t) for each o
    channel_rows: Count  # folded: rows of a channel
    reach: Count  # phased: how many elements the descriptor reaches, from where the last run is read
    units_of_phase: Count  # folded: units whose runs have the same phase, for each of the first `longer` phases
    units_of_others: Count  # folded: the same, for each of the other phases
    longer: Count  # folded: how many phases have one run more than the others
    rounds: Count  # folded: units of a team


class RingMode(NamedTuple):
    block_i: int
    block_j: int
    tiles: int  # tiles of a unit
    sets: int  # sets of a unit, rounded up to a power of two
    sets_per_block: int  # sets that a tile overlaps at most, rounded up to a power of two
    parts: int  # members whose moments are combined at a time
    slots: int  # slots of the ring, without those of `back`
    keep: int  # blocks of a unit that stay in the ring, for each member
    back: int  # slots for blocks that do not stay, and are loaded again; 0 if all stay
    at_once: int  # blocks that are applied at a time: 1 or 2
    warps: int  # warps of the group `reduce`, and of the group `apply`: see ring/kernel.py
    messages: int  # how often `reduce` sends moments, for each unit: once for each tile, or once if the unit is one set
    lines: int  # for how many tiles `combine` sends gain and term: all, or one if they are the same for all columns
    single: bool  # each unit is one set of several columns
    by_column: bool  # each column is a set
    by_row: bool  # parameters differ from row to row, and are the same for all columns; only if the walk is not folded
    ragged: bool  # the last block of rows or of columns, or the last unit, is not full
    folded: bool  # the walk is folded: each tile is one set
    blocks: int  # blocks of a tile that each member has; 0 if some members have one less
    differ: str  # folded: what parameters differ by, "element", "row" or "block"
    phased: bool  # folded: a run may begin in the middle of a row of the descriptor, because rows do not divide runs
    vector: int  # how many elements 16 bytes hold
    phases: int  # folded: in how many places between two multiples of 16 bytes runs begin: see ring/runs.py
    kept: int  # folded: blocks of a run whose parameters a member keeps in shared memory; 0 if none
    stress: str | None  # what a stress test changes: see ring/stress.py


@dataclass(frozen=True, kw_only=True)
class RingLaunch(SharedSetLaunch):
    """A launch of the ring kernel. The members of a team take the blocks of rows of a unit in turn."""

    name: ClassVar[str] = "ring"
    spans: int  # units for each o
    tiles: int  # tiles of a unit
    sets: int  # sets of a unit
    sets_per_block: int  # sets that a tile overlaps at most, rounded up to a power of two
    slots: int  # slots of the ring, without those of `back`
    keep: int  # blocks of a unit that stay in the ring, for each member
    back: int  # slots for blocks that do not stay, and are loaded again; 0 if all stay
    channel_rows: int = 0  # folded: rows of a channel, all with the same parameters; 0 if each element has its own
    vector: int = 1  # how many elements 16 bytes hold
    kept: bool = False  # folded: members keep the parameters of their rows in shared memory

    @property
    def units(self) -> int:
        if not self.walk.folded:
            return self.walk.outer * self.spans
        return self.longer * self.units_of_phase + (self.phases - self.longer) * self.units_of_others

    @property
    def rounds(self) -> int:
        """How many units the busiest team takes."""
        return ceil(self.units / self.teams)

    @property
    def numbered_units(self) -> int:
        """The units, and those that do not exist, so that all teams have equally many: see ring/runs.py."""
        return self.rounds * self.teams if self.phases > 1 else self.units

    @property
    def phases(self) -> int:
        """In how many places between two multiples of 16 bytes the runs of a folded walk begin."""
        return self.vector // gcd(self.vector, self.walk.folded) if self.walk.folded else 1

    @property
    def units_of_phase(self) -> int:
        """How many units of a folded walk have runs of the same phase. Phases from `longer` have `units_of_others`."""
        return ceil(ceil(self.walk.outer / self.phases) / self.tiles)

    @property
    def units_of_others(self) -> int:
        return ceil(self.walk.outer // self.phases / self.tiles)

    @property
    def longer(self) -> int:
        return self.walk.outer % self.phases

    @property
    def blocks_of_tile(self) -> int:
        """How many blocks of a tile the busiest member has."""
        return ceil(ceil(self.walk.reps / self.block_i) / self.members)

    @property
    def resident(self) -> bool:
        """Whether all blocks stay in the ring, so that x is read once."""
        return not self.back

    @property
    def blocks(self) -> int:
        """How many blocks of a unit its busiest member has."""
        return self.tiles * self.blocks_of_tile

    @property
    def shape(self) -> str:
        again = "" if self.resident else f", {self.blocks - self.keep} of {self.blocks} blocks of a unit read again"
        return f"{super().shape}, teams of {self.members}{again}"

    @property
    def partial_moments(self) -> int:
        return 2 * self.numbered_units * self._sets * self.members if self.cooperative else 0

    @property
    def counters(self) -> int:
        return self.numbered_units if self.cooperative else 0  # each unit has its own, because several are under way at a time

    @property
    def counter_protocol(self) -> str:
        return RESET

    def needs_aligned_x(self, problem: NormProblem) -> bool:
        return True  # because x is copied by a descriptor

    @property
    def experimental(self) -> bool:
        return True

    @property
    def single(self) -> bool:
        """Whether each unit is one set, so that moments of columns need not be kept apart."""
        return not self.walk.folded and self.sets == 1 and self.walk.run > 1

    @property
    def span(self) -> int:
        """How many columns lie between the starts of two units. The last tile of a unit may overlap with the next unit."""
        return self.walk.run if self.single else self.tiles * self.block_j

    @property
    def lines(self) -> int:
        """For how many tiles `combine` sends gain and term to `apply`: all, or one if they are the same for all columns of a set."""
        w = self.walk
        same = self.single and not (axis_mask(w.param, w) | axis_mask(w.modulation, w)) & AXIS_T
        return 1 if same else self.tiles

    @property
    def by_column(self) -> bool:
        """Whether each column is a set, so that moments of columns need not be merged."""
        return self.walk.run == 1

    @property
    def by_row(self) -> bool:
        """Whether parameters differ from row to row."""
        return bool((axis_mask(self.walk.param, self.walk) | axis_mask(self.walk.modulation, self.walk)) & AXIS_R)

    @property
    def _sets(self) -> int:
        return self.block_j if self.by_column else power_of_two(max(self.sets, 2))

    @property
    def _parts(self) -> int:
        """How many members' moments are combined at a time: a thread has up to 16 of them, if each column is a set."""
        if self.by_column:
            return min(power_of_two(self.members), 1024 // self._sets)
        return max(min(power_of_two(self.members), 512 // self._sets), 32)

    @property
    def phased(self) -> bool:
        """Whether rows do not divide runs, so that a run may begin in the middle of a row."""
        return bool(self.walk.folded % self.walk.run)

    def _descriptor(self, dtype: torch.dtype) -> Descriptor:
        """Return the descriptor of x. If runs begin in the middle of rows, its rows overlap: each has block_j elements of the next one."""
        w, block = self.walk, (self.block_i, self.block_j)
        if not self.phased:
            return Descriptor(dtype, w.outer * w.reps, w.columns, w.x[1], block)
        return Descriptor(dtype, w.outer * w.folded // w.run - 1, 2 * w.run, w.run, block)

    @property
    def _reach(self) -> int:
        """How many elements the descriptor reaches, from where the last run is read. It takes one row for every `run` elements."""
        w = self.walk
        rows = w.outer * w.folded // w.run - 1 - (w.outer - 1) * w.folded // w.run
        return rows * w.run if self.phased else 0

    @property
    def differ(self) -> str:
        """What the parameters of a folded walk differ by."""
        if not self.channel_rows:
            return "element"
        return "row" if self.channel_rows % self.block_i else "block"

    @property
    def even(self) -> bool:
        """Whether all members have the same number of blocks of a tile."""
        return ceil(self.walk.reps / self.block_i) % self.members == 0

    @property
    def pairs(self) -> bool:
        """Whether two blocks can be applied at a time: each member has an even number, and all stay."""
        w, rows = self.walk, ceil(self.walk.reps / self.block_i)
        return not self.back and not self.by_row and (rows % (2 * self.members) == 0 or bool(w.folded and self.tiles % 2 == 0))

    def mode(self, stress: str | None) -> RingMode:
        w = self.walk
        rows = ceil(w.reps / self.block_i)
        last = w.outer % (self.tiles * self.phases) if w.folded else (self.span if self.single else w.columns) % (self.tiles * self.block_j)
        return RingMode(
            self.block_i,
            self.block_j,
            self.tiles,
            self._sets,
            self.sets_per_block,
            self._parts,
            self.slots,
            self.keep,
            self.back,
            2 if self.pairs else 1,
            self.warps,
            1 if self.single else self.tiles,
            self.lines,
            self.single,
            self.by_column,
            self.by_row,
            bool(w.reps % self.block_i or last or self.phased),
            bool(w.folded),
            rows // self.members if self.even else 0,
            self.differ,
            self.phased,
            self.vector,
            self.phases,
            self.blocks_of_tile if self.kept else 0,
            stress,
        )

    def arguments(self, problem: NormProblem, options: ForwardOptions) -> tuple[Any, ...]:
        w = self.walk
        _, affine, stats = forward_pointers(problem, options)
        return (
            self._descriptor(problem.dtype),
            problem.dtype,
            problem.dtype,
            affine,
            Exchange(torch.float32, torch.int32) if self.cooperative else Exchange(None, None),
            stats,
            float(problem.spec.eps),
            w.total,
            RingView(w.reps, w.sets, w.run, *w.y[:2], w.folded),
            maps_of(by_channel(w) if self.channel_rows else w),
            RingSplit(
                self.members,
                self.teams,
                self.spans,
                self.span,
                w.columns,
                self.channel_rows,
                self._reach,
                self.units_of_phase,
                self.units_of_others,
                self.longer,
                self.rounds,
            ),
            forward_norm(problem, w),
            self.mode(options.stress),
        )

    def kernel(self, problem: NormProblem, options: ForwardOptions) -> Any:
        from onepass.backends.gpu.launch.kernel import Kernel

        from .kernel import ring_forward  # imported here, because only this kernel needs Gluon, which is experimental

        return Kernel(ring_forward, self.arguments(problem, options), self.programs, self.warps, cooperative=self.cooperative)
