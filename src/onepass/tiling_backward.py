"""How the GPU families cut a backward into programs: pure numbers, as `tiling.py` for the forward.

A backward takes sums over sets, c1 and c2, and sums over parameters. Programs leave cells of both, [o or segment, parts, r, s, t, parts], and
`Sums` adds those up that belong together: a parameter's cells are found by the map that finds an element's parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import wraps
from math import ceil, prod
from typing import Literal

from .device import Device
from .problem import NormProblem, ParamMap
from .tiling import NARROWEST, ROW, TILE, Pass, Segments, Walk, head_and_tail, power_of_two, uses, walk, warps_for

LONGEST_ROW, LARGEST_TILE = 16384, 8192  # elements of x that one program can keep, beside those of dy and two sums

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

    def __str__(self) -> str:
        kept = self.sizes[1] * self.sizes[3]
        return f"sums of {self.what} {self.programs}x[{self.block_i}, {self.block_j}]: {kept}, each of {self.cells // kept} cells"


Step = Pass | Sums


def bits(problem: NormProblem, w: Walk) -> tuple[int, int]:
    """On which of o, r, s, t the parameters and the modulation depend that there are."""
    modulated = problem.scale is not None or problem.shift is not None
    return uses(w.param, w) if problem.affine else 0, uses(w.modulation, w) if modulated else 0


def _maps(problem: NormProblem, w: Walk) -> Iterator[tuple[What, ParamMap]]:
    """Of the parameters that there are."""
    if problem.affine:
        yield "param", w.param
    if problem.scale is not None or problem.shift is not None:
        yield "modulation", w.modulation


def segments(problem: NormProblem, w: Walk) -> Segments:
    """The coarsest that fit both maps: cut as often as the finer one, over the longer of their periods."""
    maps = [p for _, p in _maps(problem, w) if p.a and p.period > 1]
    every = min((p.every for p in maps), default=1)
    period = max((p.every * p.period for p in maps), default=1) // every
    by_set = w.sets > 1 and any(p.c for _, p in _maps(problem, w))
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
    block_j = min(32, power_of_two(kept))
    block_i = max(min(power_of_two(reduced), 4096 // block_j), 1)
    return Sums(what, sizes, (slots[1][1], slots[3][1]), ceil(kept / block_j), block_i, block_j, warps_for(block_i * block_j // 8, device))  # pyright: ignore[reportArgumentType]


def _summed(problem: NormProblem, axes: Sequence[Axis], w: Walk, unit: int, device: Device) -> list[Sums]:
    """The sums over parameters."""
    found = [_sums(what, axes, p, w, unit, device) for what, p in _maps(problem, w)]
    return [sums for sums in found if sums is not None]


Passes = Callable[[NormProblem, Device, bool], tuple[Step, ...]]


def _chained(passes: Passes) -> Passes:
    """Each launch starts while the one before ends, where the device can."""

    @wraps(passes)
    def chained(problem: NormProblem, device: Device, invariant: bool) -> tuple[Step, ...]:
        steps = passes(problem, device, invariant)
        if not device.chains:
            return steps
        last = len(steps) - 1
        return tuple(replace(step, leads=i < last, follows=i > 0) for i, step in enumerate(steps))

    return chained


@_chained
def row(problem: NormProblem, device: Device, invariant: bool) -> tuple[Step, ...]:
    """Whole rows of x and dy in registers, beside what a program has summed up so far of the parameters."""
    w = walk(problem)
    block_j, tail = head_and_tail(w.run) if 8 & _or(bits(problem, w)) else (power_of_two(w.run), 0)
    length = block_j + tail
    block_i = max(2048 // power_of_two(length), 1)
    programs, warps = (4, 4) if length <= 2048 else (2, length // 512) if length <= 4096 else (1, min(length // 512, 16))
    return across_rows(problem, w, device, block_i, block_j, tail, warps, programs, 1)


def across_rows(
    problem: NormProblem,
    w: Walk,
    device: Device,
    block_i: int,
    block_j: int,
    tail: int,
    warps: int,
    programs: int,
    stages: int,
    resident: bool = True,
    chunked: bool = False,
) -> tuple[Step, ...]:
    """About so many programs for each multiprocessor, which take members of segments, block_i at a time."""
    found = segments(problem, w)
    count = w.total // found.members
    blocks = 1 if tail else ceil(w.run / block_j)
    parts = min(ceil(programs * device.sms / (count * blocks)), ceil(found.members / block_i))
    chunk = ceil(ceil(found.members / block_i) / parts) * block_i if chunked else 1
    parts = ceil(found.members / chunk) if chunked else parts
    main = Pass(
        *(ROW, w, count * parts * blocks, warps, block_i, block_j, 1, tail, resident, resident, True, parts, blocks, chunk, 1, stages),
        across=found,
    )
    axes = [("o", found.period), ("s", w.sets if found.by_set else 1), ("part", parts)]
    axes += [("t", w.run)] if 8 & _or(bits(problem, w)) else []
    return main, *_summed(problem, axes, w, found.every, device)


def _or(both: tuple[int, int]) -> int:
    return both[0] | both[1]


@_chained
def row_reread(problem: NormProblem, device: Device, invariant: bool) -> tuple[Step, ...]:
    w = walk(problem, cut=True)
    if not 8 & _or(bits(problem, w)):
        return rows_of_sets(problem, w, device)
    w = walk(problem)
    block = 2048
    taken = _sets(w, device, block, 4, 1, 1 if w.total >= device.sms else ceil(2 * device.sms / w.total))
    applied, *sums = across_rows(problem, w, device, 1, block, 0, 4, 4, 1, resident=False)
    return (taken, *_of_sets([("o", w.outer), ("s", w.sets), ("part", taken.parts_t)], w, device), applied, *sums)


def _sets(w: Walk, device: Device, block_j: int, warps: int, stages: int, parts: int) -> Pass:
    """The sums of rows."""
    block_j = min(block_j, power_of_two(w.run))
    steps = ceil(w.run / block_j)
    chunk_t = ceil(steps / parts)
    parts_t = ceil(steps / chunk_t)
    return Pass(ROW, w, w.total * parts_t, warps, 1, block_j, reduce=True, parts_t=parts_t, chunk_t=chunk_t, stages=stages)


def _of_sets(axes: Sequence[Axis], w: Walk, device: Device) -> list[Sums]:
    """The sums over sets of their parts, where they have more than one."""
    sums = _sums("sets", axes, None, w, 1, device)
    assert sums is not None
    return [sums] if sums.cells > w.total else []


def rows_of_sets(problem: NormProblem, w: Walk, device: Device, size: int = 4096, warps: int = 8, programs: int = 4) -> tuple[Step, ...]:
    """Sets whose runs do not vary in their parameters: by one kernel where there are many, or by two and what lies between."""
    block_j = min(power_of_two(w.run), size)
    block_i = min(size // block_j, power_of_two(w.reps))
    each = bool(2 & _or(bits(problem, w)))

    def launch(parts: int, **flags: bool) -> Pass:
        chunk_r = ceil(ceil(w.reps / block_i) / parts) * block_i
        parts_r = ceil(w.reps / chunk_r)
        steps = ceil(w.run / block_j)
        chunk_t = ceil(steps / ceil(parts / parts_r))
        parts_t = ceil(steps / chunk_t)
        threads = max(warps * block_i * block_j // size, 1)
        return Pass(
            *(ROW, w, w.total * parts_r * parts_t, threads, block_i, block_j),
            parts_r=parts_r,
            parts_t=parts_t,
            chunk_r=chunk_r,
            chunk_t=chunk_t,
            **flags,
        )

    if problem.given:
        taken = launch(ceil(programs * device.sms / w.total), reduce=True, apply=True, resident=True)
    elif (w.total >= 2 * device.sms or w.reps * w.run <= 2**14) and w.reps * w.run <= 2**16 and not problem.spec.mix:
        taken = launch(1, reduce=True, apply=True)
    else:
        taken = launch(ceil(programs * device.sms / w.total), reduce=True)
    middle = ("r", w.reps) if each else ("part", taken.parts_r)
    sums = _summed(problem, [("o", w.outer), middle, ("s", w.sets), ("part", taken.parts_t)], w, 1, device)
    if taken.apply:
        return taken, *sums
    between = _of_sets([("o", w.outer), ("part", taken.parts_r), ("s", w.sets), ("part", taken.parts_t)], w, device)
    return (taken, *between, launch(ceil(2 * programs * device.sms / w.total), apply=True), *sums)


@_chained
def tile(problem: NormProblem, device: Device, invariant: bool) -> tuple[Step, ...]:
    w = walk(problem)
    block_run = power_of_two(w.run)
    block_i = power_of_two(w.reps)
    block_j = max(min(power_of_two(w.sets) * block_run, 32 if block_i <= 256 else 16), block_run)
    return across_tiles(problem, w, device, block_i, block_j, block_run, warps_for(block_i * block_j // 32, device), 4, 1)


def across_tiles(
    problem: NormProblem,
    w: Walk,
    device: Device,
    block_i: int,
    block_j: int,
    block_run: int,
    warps: int,
    programs: int,
    stages: int,
    resident: bool = True,
) -> tuple[Step, ...]:
    """About so many programs for each multiprocessor. Where each row has parameters of its own, they take blocks of columns of a segment."""
    own = _or(bits(problem, w))
    found = replace(segments(problem, w), by_set=False) if own & 2 else Segments(1, 1, w.outer, False)
    found = replace(found, members=w.outer // found.period)
    blocks = ceil(w.sets * block_run / block_j) if resident else ceil(w.columns / block_j)
    parts_t = 1 if resident else ceil(w.reps / block_i)
    members = found.members
    if own & 2 and own & 12:
        parts_t *= blocks
    else:
        members *= blocks
    parts = min(ceil(programs * device.sms / (found.period * parts_t)), members)
    chunk = ceil(members / parts)
    parts = ceil(members / chunk)
    main = Pass(
        *(
            TILE,
            w,
            found.period * parts * parts_t,
            warps,
            block_i,
            block_j,
            block_run,
            0,
            resident,
            resident,
            True,
            parts,
            parts_t,
            chunk,
            blocks,
            stages,
        ),
        across=found,
    )
    if own & 2:
        axes = [("o", found.period), ("part", parts), ("r", w.reps), *([("s", w.sets), ("t", w.run)] if own & 12 else [])]
        return main, *_summed(problem, axes, w, found.every, device)
    return main, *_summed(problem, [("o", w.outer), ("s", w.sets), ("t", w.run)], w, 1, device)


@_chained
def tile_reread(problem: NormProblem, device: Device, invariant: bool) -> tuple[Step, ...]:
    w = walk(problem)
    taken = columns(w, device, 32, 64, 4, 3, 1, reduce=True, apply=problem.given, resident=problem.given)
    axes = [("o", w.outer), ("part", taken.parts_r), ("s", w.sets), ("t", w.run)]
    if problem.given:
        return taken, *_summed(problem, axes, w, 1, device)
    between = _of_sets(axes, w, device)
    if 2 & _or(bits(problem, w)):
        return (taken, *between, *across_tiles(problem, w, device, 32, 64, 1, 4, 4, 1, resident=False))
    return (taken, *between, columns(w, device, 32, 64, 4, 8, 1, apply=True), *_summed(problem, axes, w, 1, device))


def columns(w: Walk, device: Device, block_i: int, block_j: int, warps: int, programs: int, stages: int, **flags: bool) -> Pass:
    """About so many programs for each multiprocessor, each with some rows of a block of columns."""
    narrow = min(block_j, power_of_two(w.columns))
    block_i, block_j = block_i * block_j // narrow, narrow
    blocks = ceil(w.columns / block_j)
    parts = ceil(programs * device.sms / (w.outer * blocks))
    chunk_r = ceil(ceil(w.reps / block_i) / parts) * block_i
    parts_r = ceil(w.reps / chunk_r)
    return Pass(
        TILE,
        w,
        w.outer * parts_r * blocks,
        warps,
        block_i,
        block_j,
        parts_r=parts_r,
        chunk_r=chunk_r,
        chunk_t=blocks,
        stages=stages,
        **flags,
    )


@_chained
def apply(problem: NormProblem, device: Device, invariant: bool) -> tuple[Step, ...]:
    w = walk(problem, cut=True)
    if not 8 & _or(bits(problem, w)) and w.run > 1:
        return rows_of_sets(problem, w, device)
    return tile_reread(problem, device, invariant)


_TOO_MANY = "its parameters lie along more axes than one launch sums over"
_ALONG_RUNS = "its parameters vary along runs of which a set has several: sums over them go across"


def _cannot(problem: NormProblem, passes: Passes) -> list[str]:
    """Whether all sums over parameters are there."""
    sums = [step for step in passes(problem, Device("cuda", sms=1), False) if isinstance(step, Sums) and step.what != "sets"]
    return [] if len(sums) == len(list(_maps(problem, walk(problem)))) else [_TOO_MANY]


def row_cannot(problem: NormProblem) -> list[str]:
    w = walk(problem, cut=True)
    if w.reps > 1 and not 8 & _or(bits(problem, w)):
        return [f"a row has {w.reps} parts with parameters of their own, each summed over: too many sums for one program"]
    return _cannot(problem, row)


def row_reread_cannot(problem: NormProblem) -> list[str]:
    w = walk(problem, cut=True)
    if 8 & _or(bits(problem, w)) and walk(problem).reps > 1:
        return [_ALONG_RUNS]
    return _cannot(problem, row_reread)


def tile_cannot(problem: NormProblem) -> list[str]:
    own = _or(bits(problem, walk(problem)))
    if own & 2 and own & 12:
        return ["each element of a set has a parameter of its own: too many sums for one program"]
    return _cannot(problem, tile)


def tile_size(problem: NormProblem) -> int:
    """The elements of the smallest block that holds whole sets."""
    w = walk(problem)
    block_run = power_of_two(w.run)
    return power_of_two(w.reps) * max(block_run, min(NARROWEST, power_of_two(w.sets) * block_run))


def tile_reread_cannot(problem: NormProblem) -> list[str]:
    return _cannot(problem, tile_reread)


def apply_cannot(problem: NormProblem) -> list[str]:
    w = walk(problem)
    own = _or(bits(problem, w))
    if own & 2 and (own & 8 or w.run == 1):
        return ["each element of a set has a parameter of its own, and the sums over those go across"]
    return _cannot(problem, apply)
