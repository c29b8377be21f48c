"""How the GPU families cut a backward into programs: pure numbers, as `tiling.py` for the forward.

A backward takes sums over sets, c1 and c2, and sums over parameters. Programs leave cells of both, and `Sums` adds those up that belong
together: a parameter's cells are found by the map that finds an element's parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import wraps
from math import ceil, prod
from typing import Literal, NamedTuple

from onepass.core.device import Device
from onepass.core.problem import NormProblem
from onepass.core.view import ParamMap

from .tiling import NARROWEST, ROW, TILE, Pass, Segments, Walk, axis_mask, chained, head_and_tail, power_of_two, walk, warps_for

BLOCK = 8192  # elements of x that one program can keep, beside those of dy and two sums


LONGEST_ROW, LARGEST_TILE = 2 * BLOCK, BLOCK


TINY = 8192  # elements of x for which a second launch costs more than it brings


What = Literal["sets", "param", "modulation"]


Axis = tuple[str, int]  # of cells: what it runs along, and its size


Factor = tuple[int, int]  # size, and the step of what is summed for along it; 0: summed over


@dataclass(frozen=True)
class Sums:
    """One launch: cells [across, kept1, between, kept2, within], summed over all but kept1 and kept2, which step by `to`."""

    what: What
    sizes: tuple[int, int, int, int, int]
    to: tuple[int, int]
    programs: int
    block_i: int
    block_j: int
    warps: int
    leads: bool = False
    follows: bool = False

    @property
    def cells(self) -> int:
        return prod(self.sizes)

    @property
    def none(self) -> bool:
        """Whether every cell is a sum already, in its place."""
        return self.sizes[1] == self.cells and self.to[0] in (0, 1)

    def __str__(self) -> str:
        kept = self.sizes[1] * self.sizes[3]
        if self.none:
            return f"no sums of {self.what}: {kept}, each of one cell"
        return f"sums of {self.what} {self.programs}x[{self.block_i}, {self.block_j}]: {kept}, each of {self.cells // kept} cells"


Step = Pass | Sums


def varying_axes(problem: NormProblem, w: Walk) -> tuple[int, int]:
    """On which of o, r, s, t the parameters and the modulation depend that there are."""
    modulated = problem.scale is not None or problem.shift is not None
    return axis_mask(w.param, w) if problem.affine else 0, axis_mask(w.modulation, w) if modulated else 0


def _or(both: tuple[int, int]) -> int:
    return both[0] | both[1]


def maps(problem: NormProblem, w: Walk) -> Iterator[tuple[What, ParamMap]]:
    """Of the parameters that there are."""
    if problem.affine:
        yield "param", w.param
    if problem.scale is not None or problem.shift is not None:
        yield "modulation", w.modulation


def segments(problem: NormProblem, w: Walk) -> Segments:
    """The coarsest that fit both maps: cut as often as the finer one, over the longer of their periods."""
    cuts = [p for _, p in maps(problem, w) if p.a and p.period > 1]
    every = min((p.every for p in cuts), default=1)
    period = max((p.every * p.period for p in cuts), default=1) // every
    by_set = w.sets > 1 and any(p.c for _, p in maps(problem, w))
    return Segments(every, period, w.outer // period * (1 if by_set else w.sets), by_set)


def _factors(axis: Axis, p: ParamMap | None, w: Walk, unit: int) -> list[Factor]:
    """An axis of cells, for the sums over parameters, or over sets (None). `unit`: how many o's a step along segments is."""
    kind, size = axis
    if p is None:
        return [(size, {"o": w.sets, "s": 1}.get(kind, 0))]
    if kind == "o" and p.a:
        return [(size * unit // (p.every * p.period), 0), (p.period, p.a), (p.every // unit, 0)]
    if kind == "t" and p.d:
        return [(size // p.channel_run, p.d), (p.channel_run, 0)]
    return [(size, {"r": p.b, "s": p.c}.get(kind, 0))]


def _slots(factors: Sequence[Factor]) -> list[Factor] | None:
    """Factors as [summed, kept, summed, kept, summed], neighbours taken together where they can be; None if there are more."""
    merged: list[Factor] = []
    for size, to in factors:
        if size == 1:
            continue
        if merged and bool(merged[-1][1]) == bool(to) and (not to or merged[-1][1] == size * to):
            merged[-1] = merged[-1][0] * size, to
        else:
            merged.append((size, to))
    slots: list[Factor] = []
    for size, to in merged:
        if len(slots) % 2 != bool(to):
            slots.append((1, 0))
        slots.append((size, to))
    return slots + [(1, 0)] * (5 - len(slots)) if len(slots) <= 5 else None


def _sums(what: What, axes: Sequence[Axis], p: ParamMap | None, w: Walk, unit: int, device: Device) -> Sums | None:
    """None where cells are no sum of five axes."""
    slots = _slots([factor for axis in axes for factor in _factors(axis, p, w, unit)])
    if slots is None:
        return None
    sizes = tuple(size for size, _ in slots)
    kept = sizes[1] * sizes[3]
    reduced = prod(sizes) // kept
    block_i, block_j = min(power_of_two(reduced), 256), min(8 if kept <= 16384 else 32, power_of_two(kept))
    warps = warps_for(block_i * block_j // 4, device)
    return Sums(what, sizes, (slots[1][1], slots[3][1]), ceil(kept / block_j), block_i, block_j, warps)  # pyright: ignore[reportArgumentType]


def _summed(problem: NormProblem, axes: Sequence[Axis], w: Walk, unit: int, device: Device) -> list[Sums]:
    """The sums over parameters."""
    found = [_sums(what, axes, p, w, unit, device) for what, p in maps(problem, w)]
    return [sums for sums in found if sums is not None]


Passes = Callable[[NormProblem, Device, bool], tuple[Step, ...]]


def _chained(passes: Passes) -> Passes:
    """With its launches chained."""
    return wraps(passes)(lambda problem, device, invariant: chained(device, passes(problem, device, invariant)))


class Cut(NamedTuple):
    """How a launch is cut: blocks, threads in warps of 32, programs for each multiprocessor, blocks in flight at a time."""

    block_i: int
    block_j: int
    warps: int
    programs: int
    stages: int

    def on(self, device: Device, nbytes: int) -> Cut:
        """As many stages of `nbytes` as fit in shared memory for four programs; without any, more threads, each of which keeps less."""
        if not device.prefetches:
            return self._replace(warps=warps_for(4 * 32 * self.warps, device), stages=1)
        return self._replace(stages=max(min(self.stages, 1 + device.shared // (nbytes * min(max(self.programs, 1), 4))), 1))


def _nbytes(problem: NormProblem, elements: int, params: int = 0) -> int:
    """Of x and dy, and of parameters where those are read with them."""
    operands = problem.weight, problem.bias, problem.scale, problem.shift
    return elements * 2 * problem.dtype.itemsize + params * sum(dtype.itemsize for dtype in operands if dtype)


@_chained
def row(problem: NormProblem, device: Device, invariant: bool) -> tuple[Step, ...]:
    """Rows of x and dy in registers, beside what a program has summed up so far of the parameters.

    Rows too long for that are cut in blocks: each program takes the sums of a whole row, but works on its block alone. The others read what
    it reads at the same time, so that it comes from memory once.
    """
    w = walk(problem)
    along = bool(8 & _or(varying_axes(problem, w)))
    length, tail = head_and_tail(w.run) if along and 512 < w.run <= BLOCK else (power_of_two(w.run), 0)
    if tail:
        block_i = 2 if length == 1024 and tail <= 256 else 1
        warps = power_of_two(ceil((length + tail) * block_i / 1280))
        cut = Cut(block_i, length, warps, 8 // warps, 3)
    elif not along:
        block_i = max(1024 // length, 1)
        warps = min(max(length * block_i // 512, 1), 16)
        cut = Cut(block_i, min(length, BLOCK), warps, max(16 // warps, 1), 3)
    elif length <= 64:
        cut = Cut(2048 // length, length, 4, 4, 3)
    elif length <= 256:
        cut = Cut(1024 // length, length, 1, 8, 3)
    elif length <= 512:
        cut = Cut(2048 // length, length, 2, 4, 3)
    elif length <= 1024:
        cut = Cut(4096 // length, length, 4, 2, 3)
    else:
        cut = Cut(max(BLOCK // length, 1), min(length, BLOCK), 8, 1, 3)
    if w.total * w.run > TINY:
        few = power_of_two(max(w.total // (cut.programs * device.sms), 1))  # few rows: some for each multiprocessor
        cut = cut._replace(block_i=min(cut.block_i, few))
    cut = cut.on(device, _nbytes(problem, cut.block_i * (min(length, w.run) + tail)))
    return across_rows(problem, w, device, cut, tail)


def across_rows(problem: NormProblem, w: Walk, device: Device, cut: Cut, tail: int = 0, resident: bool = True) -> tuple[Step, ...]:
    """Programs take members of a segment, and leave cells of its parameters."""
    found = segments(problem, w)
    count = w.total // found.members
    blocks = 1 if tail else ceil(w.run / cut.block_j)
    parts = min(max(round(cut.programs * device.sms / (count * blocks)), 1), ceil(found.members / cut.block_i))
    parts = 1 if w.total * w.run <= TINY else parts
    main = Pass(
        *(ROW, w, count * parts * blocks, cut.warps, cut.block_i, cut.block_j, 1, tail, resident, resident, True, parts, blocks),
        stages=cut.stages,
        across=found,
    )
    axes = [("o", found.period), ("s", w.sets if found.by_set else 1), ("part", parts)]
    axes.append(("t", w.run) if 8 & _or(varying_axes(problem, w)) else ("part", blocks))
    return main, *_summed(problem, axes, w, found.every, device)


@_chained
def row_reread(problem: NormProblem, device: Device, invariant: bool) -> tuple[Step, ...]:
    """Where parameters vary along runs, first the sums over sets, and those over parameters with dx; else both sums first."""
    w = walk(problem, cut=True)
    if not 8 & _or(varying_axes(problem, w)):
        return rows_of_sets(problem, w, device)
    w = walk(problem)
    rows = 2 if w.run > 2**16 else 1  # which share the parameters they read
    reduce = Cut(rows, min(4096 // rows, power_of_two(w.run)), 8, 2, 3)
    apply = Cut(2, min(2048, power_of_two(w.run)), 4, 2, 3)
    taken = _sets(w, device, reduce.on(device, _nbytes(problem, 4096, 4096)))
    between = _of_sets([("o", w.outer), ("s", w.sets), ("part", taken.parts_t)], w, device)
    return (taken, *between, *across_rows(problem, w, device, apply.on(device, _nbytes(problem, 4096)), resident=False))


def _sets(w: Walk, device: Device, cut: Cut) -> Pass:
    """The sums of rows, of parts of them where there are few."""
    steps = ceil(w.run / cut.block_j)
    chunk_t = ceil(steps / (1 if w.total >= device.sms else ceil(2 * device.sms / w.total)))
    parts_t = ceil(steps / chunk_t)
    programs = ceil(w.total / cut.block_i) * parts_t
    return Pass(ROW, w, programs, cut.warps, cut.block_i, cut.block_j, reduce=True, parts_t=parts_t, chunk_t=chunk_t, stages=cut.stages)


def _of_sets(axes: Sequence[Axis], w: Walk, device: Device) -> list[Sums]:
    """The sums over sets of their parts, where they have more than one."""
    sums = _sums("sets", axes, None, w, 1, device)
    assert sums is not None
    return [sums] if sums.cells > w.total else []


def rows_of_sets(problem: NormProblem, w: Walk, device: Device) -> tuple[Step, ...]:
    """Sets whose parameters do not vary along a run: by one kernel where there are many, or by two and what lies between."""
    nbytes = _nbytes(problem, 2048)
    if problem.given:
        taken = _part(w, device, Cut(0, 2048, 4, 8, 3).on(device, nbytes), reduce=True, apply=True, resident=True)
    elif (w.total >= 2 * device.sms or w.reps * w.run <= 2**14) and w.reps * w.run <= 2**16 and not problem.spec.mix:
        taken = _part(w, device, Cut(0, 4096, 8, 0, 1).on(device, nbytes), reduce=True, apply=True)
    else:
        taken = _part(w, device, Cut(0, 2048, 4, 2, 3).on(device, nbytes), reduce=True)
    runs = ("r", w.reps) if 2 & _or(varying_axes(problem, w)) else ("part", taken.parts_r)
    sums = _summed(problem, [("o", w.outer), runs, ("s", w.sets), ("part", taken.parts_t)], w, 1, device)
    if taken.apply:
        return taken, *sums
    between = _of_sets([("o", w.outer), ("part", taken.parts_r), ("s", w.sets), ("part", taken.parts_t)], w, device)
    return (taken, *between, _part(w, device, Cut(0, 2048, 8, 8, 1).on(device, nbytes), apply=True), *sums)


def _part(w: Walk, device: Device, cut: Cut, reduce: bool = False, apply: bool = False, resident: bool = False) -> Pass:
    """Parts of sets, in blocks of block_j elements of one run or several; whole sets where no programs are asked for."""
    size, block_j = cut.block_j, min(power_of_two(w.run), cut.block_j)
    block_i = min(size // block_j, power_of_two(w.reps))
    parts = max(min(ceil(cut.programs * device.sms / w.total), ceil(w.reps * w.run / size)), 1)
    chunk_r = ceil(ceil(w.reps / block_i) / parts) * block_i
    parts_r = ceil(w.reps / chunk_r)
    steps = ceil(w.run / block_j)
    chunk_t = ceil(steps / ceil(parts / parts_r))
    parts_t = ceil(steps / chunk_t)
    warps = max(cut.warps * block_i * block_j // size, 1)
    return Pass(
        *(ROW, w, w.total * parts_r * parts_t, warps, block_i, block_j, 1, 0, resident, reduce, apply),
        *(parts_r, parts_t, chunk_r, chunk_t, cut.stages),
    )


@_chained
def tile(problem: NormProblem, device: Device, invariant: bool) -> tuple[Step, ...]:
    """Whole sets of x and dy in registers, beside what a program has summed up so far of the parameters of rows."""
    w = walk(problem)
    block_run, block_i = power_of_two(w.run), power_of_two(w.reps)
    block_j = max(min(power_of_two(w.sets) * block_run, NARROWEST), block_run)
    warps = min(max(block_i * block_j // 1024, 1), 16)
    cut = Cut(block_i, block_j, warps, max(8 // warps, 1), 1).on(device, 1)
    return across_tiles(problem, w, device, cut, block_run)


def across_tiles(problem: NormProblem, w: Walk, device: Device, cut: Cut, block_run: int = 0) -> tuple[Step, ...]:
    """Programs take blocks of columns: of a segment, where each row has parameters of its own. With a `block_run`, of whole sets."""
    own = _or(varying_axes(problem, w))
    each, resident = bool(own & 2), block_run > 0
    found = segments(problem, w) if each else Segments(1, 1, w.outer, False)
    found = replace(found, members=w.outer // found.period, by_set=False)
    blocks = ceil(w.sets * block_run / cut.block_j) if resident else ceil(w.columns / cut.block_j)
    parts_t = 1 if resident else ceil(w.reps / cut.block_i)
    members = found.members
    if each and own & 12:  # and each column
        parts_t *= blocks
    else:
        members *= blocks
    parts = min(max(cut.programs * device.sms // (found.period * parts_t), 1), members)
    main = Pass(
        *(TILE, w, found.period * parts * parts_t, cut.warps, cut.block_i, cut.block_j, block_run, 0, resident, resident, True),
        *(parts, parts_t, 1, blocks, cut.stages),
        across=found,
    )
    columns = [("s", w.sets), ("t", w.run)]
    if not each:
        return main, *_summed(problem, [("o", w.outer), *columns], w, 1, device)
    axes = [("o", found.period), ("part", parts), ("r", w.reps), *(columns if own & 12 else [])]
    return main, *_summed(problem, axes, w, found.every, device)


@_chained
def tile_reread(problem: NormProblem, device: Device, invariant: bool) -> tuple[Step, ...]:
    w, nbytes = walk(problem), _nbytes(problem, 4096)
    size = w.total * w.reps * w.run
    if size < 2**25:
        reduce, apply = Cut(16, 128, 4, 2, 3), Cut(32, 64, 4, 4, 3)
    else:
        reduce, apply = Cut(32, 128, 4, 8 if size >= 2**27 else 2, 3), Cut(32, 128, 8, 8, 3)
    taken = columns(w, device, reduce.on(device, nbytes), reduce=True, given=problem.given)
    axes = [("o", w.outer), ("part", taken.parts_r), ("s", w.sets), ("t", w.run)]
    if problem.given:
        return taken, *_summed(problem, axes, w, 1, device)
    between = _of_sets(axes, w, device)
    if 2 & _or(varying_axes(problem, w)):
        return (taken, *between, *across_tiles(problem, w, device, Cut(32, 64, 4, 4, 1).on(device, nbytes)))
    applied = columns(w, device, apply.on(device, nbytes))
    return (taken, *between, applied, *_summed(problem, axes, w, 1, device))


def columns(w: Walk, device: Device, cut: Cut, reduce: bool = False, given: bool = False) -> Pass:
    """Some rows of a block of columns for each program. Blocks are narrower where that leaves fewer columns empty, and higher."""
    width = min((cut.block_j, cut.block_j // 2), key=lambda width: ceil(w.columns / width) * width)
    block_j = min(width, power_of_two(w.columns))
    block_i = cut.block_i * cut.block_j // block_j
    blocks = ceil(w.columns / block_j)
    parts = ceil(cut.programs * device.sms / (w.outer * blocks))
    chunk_r = ceil(ceil(w.reps / block_i) / parts) * block_i
    parts_r = ceil(w.reps / chunk_r)
    return Pass(
        *(TILE, w, w.outer * parts_r * blocks, cut.warps, block_i, block_j, 1, 0, given, reduce, given or not reduce),
        *(parts_r, 1, chunk_r, blocks, cut.stages),
    )


@_chained
def apply(problem: NormProblem, device: Device, invariant: bool) -> tuple[Step, ...]:
    """Given statistics: dx and the sums over parameters at once."""
    w = walk(problem, cut=True)
    if not 8 & _or(varying_axes(problem, w)) and w.run > 1:
        return rows_of_sets(problem, w, device)
    return tile_reread(problem, device, invariant)


_TOO_MANY = "its parameters lie along more axes than one launch sums over"


_ALONG_RUNS = "its parameters vary along runs of which a set has several: sums over them go across"


def _cannot(problem: NormProblem, device: Device, passes: Passes) -> list[str]:
    """Whether all sums over parameters are there."""
    sums = [step for step in passes(problem, device, False) if isinstance(step, Sums) and step.what != "sets"]
    return [] if len(sums) == len(list(maps(problem, walk(problem)))) else [_TOO_MANY]


def row_cannot(problem: NormProblem, device: Device) -> list[str]:
    w, run = walk(problem, cut=True), walk(problem).run
    if BLOCK < run < 1.75 * BLOCK:
        return [f"a row of {run} would leave much of two blocks of {BLOCK} empty"]
    if w.reps > 1 and not 8 & _or(varying_axes(problem, w)):
        return [f"a row has {w.reps} parts with parameters of their own, each summed over: too many sums for one program"]
    return _cannot(problem, device, row)


def row_reread_cannot(problem: NormProblem, device: Device) -> list[str]:
    w = walk(problem, cut=True)
    if 8 & _or(varying_axes(problem, w)) and walk(problem).reps > 1:
        return [_ALONG_RUNS]
    return _cannot(problem, device, row_reread)


def tile_cannot(problem: NormProblem, device: Device) -> list[str]:
    own = _or(varying_axes(problem, walk(problem)))
    if own & 2 and own & 12:
        return ["each element of a set has a parameter of its own: too many sums for one program"]
    return _cannot(problem, device, tile)


def tile_size(problem: NormProblem) -> int:
    """The elements of the smallest block that holds whole sets."""
    w = walk(problem)
    block_run = power_of_two(w.run)
    return power_of_two(w.reps) * max(block_run, min(NARROWEST, power_of_two(w.sets) * block_run))


def tile_reread_cannot(problem: NormProblem, device: Device) -> list[str]:
    return _cannot(problem, device, tile_reread)


def apply_cannot(problem: NormProblem, device: Device) -> list[str]:
    w = walk(problem)
    own = _or(varying_axes(problem, w))
    if own & 2 and (own & 8 or w.run == 1):
        return ["each element of a set has a parameter of its own, and the sums over those go across"]
    return _cannot(problem, device, apply)
