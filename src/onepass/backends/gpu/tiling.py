"""How the GPU families cut a problem into programs: pure numbers, from the problem, the device and the caller's wishes.

What a kernel does with them is in `kernels/`; the sizes were tuned on an H200, docs/measured.md has the measurements.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from math import ceil
from typing import Any, TypeVar

from onepass.core.device import Device
from onepass.core.problem import NormProblem
from onepass.core.view import ParamMap

Launch = TypeVar("Launch", bound=Any)  # a dataclass with `leads` and `follows`


ROW, TILE, TEAM, ALONE, RING, COMBINE = "row", "tile", "team", "whole_set", "ring", "combine"


LONGEST_ROW, LARGEST_TILE = 32768, 16384  # elements that one program can keep; beyond, registers spill


NARROWEST = 16  # columns of a tile


REGISTERS = 128  # for a thread at most, of programs that must run beside each other on a multiprocessor


@dataclass(frozen=True)
class Walk:
    """A problem as a kernel walks it: `total` sets, each of reps x run elements."""

    total: int
    reps: int
    sets: int
    run: int
    x: tuple[int, int, int]  # strides of o, r, s
    y: tuple[int, int, int]
    param: ParamMap
    modulation: ParamMap

    @property
    def outer(self) -> int:
        return self.total // self.sets

    @property
    def columns(self) -> int:
        return self.sets * self.run

    @property
    def dense(self) -> bool:
        """Whether columns are contiguous in x and y."""
        return self.sets == 1 or self.x[2] == self.y[2] == self.run


@dataclass(frozen=True)
class Segments:
    """The sets of a walk by their parameters: `members` of each segment use the same. Along o, as in a ParamMap; or one for each s, too."""

    every: int
    period: int
    members: int
    by_set: bool


@dataclass(frozen=True)
class Pass:
    """One launch. A program has blocks of block_i x block_j elements. A set is cut in parts_r x parts_t, every chunk_r and chunk_t.

    The row walk counts chunk_t in blocks; the tile walk parts every column from the next, and chunk_t is how many blocks of them there are.
    A team does too, but has whole sets in a block: parts_r members share the rows of a unit, one o and one block of columns (of a ring, one
    span of `tiles` blocks, chunk_t in all). Those of a set alone have block_i threads, each with `tiles` vectors of block_j elements.
    """

    kernel: str
    walk: Walk
    programs: int
    warps: int
    block_i: int
    block_j: int
    block_run: int = 1  # tile, resident: columns for each set; team: the same, or 0 where a run is no power of two; ring: sets in a block
    tail: int = 0  # resident: a second block along the set, where a power of two is too short
    resident: bool = False
    reduce: bool = False
    apply: bool = False
    parts_r: int = 1
    parts_t: int = 1
    chunk_r: int = 1
    chunk_t: int = 1
    stages: int = 1  # blocks in flight at a time
    leads: bool = False  # the next launch may start while this one runs
    follows: bool = False  # and waits for it
    sets: int = 1  # team: whole ones in a block; ring: in a unit
    tiles: int = 1  # ring: blocks of columns in a unit; alone: vectors for a thread
    keep: int = 0  # ring: of a unit's blocks, how many stay in shared memory
    back: int = 0  # ring: slots for the others, which come again
    beside: int = 1  # programs for each multiprocessor, where they must run at the same time; else any number
    across: Segments | None = None  # backward: sums over a parameter go from set to set; parts_r x parts_t are then of each segment

    @property
    def teams(self) -> int:
        return self.programs // self.parts_r

    @property
    def units(self) -> int:
        return self.walk.outer * self.chunk_t

    def __str__(self) -> str:
        what = "+".join(word for word, there in (("reduce", self.reduce), ("apply", self.apply), ("across", self.across)) if there)
        return f"{self.kernel} {what or 'parts'} {self.programs}x[{self.block_i}, {self.block_j}], {self.warps} warps"


def walk(problem: NormProblem, cut: bool = False) -> Walk:
    """`cut` turns runs in which channels follow one another into one run for each channel, so that no index needs a division."""
    x, y, p, m = problem.x, problem.y, problem.param, problem.modulation
    assert x is not None and y is not None and p is not None and m is not None
    found = Walk(x.outer * x.sets, x.reps, x.sets, x.run, x.strides[:3], y.strides[:3], p, m)
    channel_run = max(p.channel_run, m.channel_run)
    if not cut or channel_run == 1 or x.reps > 1 or x.run % channel_run:
        return found
    x_strides, y_strides = ((v.strides[0], channel_run, v.strides[2]) for v in (x, y))
    params = _cut(p, channel_run), _cut(m, channel_run)
    return Walk(found.total, x.run // channel_run, x.sets, channel_run, x_strides, y_strides, *params)


def _cut(p: ParamMap, run: int) -> ParamMap:
    inner = p.channel_run < run
    return replace(p, b=run // p.channel_run * p.d, d=p.d if inner else 0, channel_run=p.channel_run if inner else 1)


def power_of_two(n: int) -> int:
    """The next one, n itself if it is one."""
    return 1 << max(n - 1, 0).bit_length()


def quickest(
    problem: NormProblem,
    device: Device,
    invariant: bool,
    cuts: Callable[[NormProblem, Walk, Device], Iterable[Pass]],
    time: Callable[[NormProblem, Pass, Device], float],
) -> tuple[Pass, ...]:
    """A team's launch: the cut that takes the least time, of one sample where batches must not matter, for all that there is."""
    w = walk(problem)
    found = cuts(problem, replace(w, total=w.sets) if invariant else w, device)
    best = min(found, key=lambda step: time(problem, step, device))
    return (replace(best, walk=w, programs=programs_of(w.outer * best.chunk_t, best.parts_r, device, best.beside)),)


def programs_of(units: int, members: int, device: Device, beside: int = 1) -> int:
    """Of as many teams as there are units, or multiprocessors for."""
    return max(min(units, device.sms * beside // members), 1) * members


def head_and_tail(n: int) -> tuple[int, int]:
    """Two powers of two for n elements, where that spares a quarter of the next one; else that one, and 0."""
    whole = power_of_two(n)
    tail = power_of_two(n - whole // 2)
    return (whole // 2, tail) if n > 64 and tail <= whole // 4 else (whole, 0)


def _stages(problem: NormProblem, device: Device, elements: int, wanted: int) -> int:
    """How many blocks fit in shared memory at a time, parameters included; 1: the one at work, in registers."""
    if not device.prefetches:
        return 1
    operands = problem.dtype, problem.weight, problem.bias, problem.scale, problem.shift, *(problem.addends or ())
    size = elements * sum(dtype.itemsize for dtype in operands if dtype)
    return max(min(wanted, 1 + device.shared // size), 1)


def row(problem: NormProblem, device: Device, invariant: bool) -> tuple[Pass, ...]:
    """Whole rows in registers, `each` elements for a thread: short rows 32 to a program, long ones alone."""
    w = walk(problem)
    block_j, tail = head_and_tail(w.run)
    length, stages, most = block_j + tail, 1, 0
    block_i, each = 1, 36 if tail else 16 if length <= 2048 else 32
    if length > 8192:  # too few blocks fit on a multiprocessor to hide one's loads behind another's work
        each, stages, most = 48, 3, 1
    elif length <= 256:
        block_i = max(32, 2048 // length)
    elif problem.scale or problem.shift:  # read with each row, as much as x
        each, stages, most = 36, 3, 12
    elif 2048 < length <= 4096 or (length <= 1024 and not tail):
        block_i = 2
    if not invariant:  # few rows: some for each multiprocessor
        block_i = min(block_i, power_of_two(ceil(w.total / (4 * device.sms))))
    programs, stages = ceil(w.total / block_i), _stages(problem, device, length, stages)
    warps = warps_for(length * block_i // each, device)
    if stages > 1:
        programs = min(programs, max(most // warps, 1) * device.sms)
    return (Pass(ROW, w, programs, warps, block_i, block_j, 1, tail, True, True, True, stages=stages),)


def warps_for(threads: int, device: Device) -> int:
    """A power of two of them, for at most 1024 threads."""
    return max(power_of_two(min(threads, 1024) + 1) // 2 // device.warp, 1)


def row_reread(problem: NormProblem, device: Device, invariant: bool) -> tuple[Pass, ...]:
    """One kernel where there are sets for every multiprocessor, or small ones; else parts of sets, and their moments combined."""
    w, flat = walk(problem, cut=True), walk(problem)
    whole = w.total >= device.sms or w.reps * w.run <= 2**16
    if whole and not (invariant or problem.spec.mix or problem.addends):
        if w.reps > 1:
            return (_row(w, device, 1, *((16384, 512) if w.reps * w.run >= 2**17 else (8192, 256)), reduce=True, apply=True),)
        if not problem.spec.centered:
            return (_row(w, device, 1, 8192, 1024, reduce=True, apply=True),)
        if w.run <= 2**17:
            return (_row(w, device, 1, 4096, 512, reduce=True, apply=True),)
        return (_row(w, device, 1, 2048, 256, _stages(problem, device, 2048, 3), reduce=True, apply=True),)
    if flat.reps > 1:
        reduce, apply = (4, 2048, 128, 1), (16, 2048, 128)
    else:
        threads = 128 if device.chains else 256  # fewer spill on sm_80
        reduce, apply = (2, 4096, threads, _stages(problem, device, 4096, 3)), (8, 4096, 512)
    parts = ceil(reduce[0] * device.sms / w.total) if not invariant else ceil(flat.reps * flat.run / 32768)
    taken = _row(flat, device, parts, *reduce[1:], reduce=True)
    applied = _row(w, device, ceil(apply[0] * device.sms / w.total), *apply[1:], apply=True)
    return chained(device, (taken, _combine(flat, taken, device), applied))


def chained(device: Device, steps: Sequence[Launch]) -> tuple[Launch, ...]:
    """Launches, each of which starts while the one before ends, where the device can."""
    if not device.chains:
        return tuple(steps)
    last = len(steps) - 1
    return tuple(replace(step, leads=i < last, follows=i > 0) for i, step in enumerate(steps))


def _row(w: Walk, device: Device, parts: int, size: int, threads: int, stages: int = 1, reduce: bool = False, apply: bool = False) -> Pass:
    """Each set in about so many parts, in blocks of `size` elements."""
    block_j = min(power_of_two(w.run), size)
    block_i = min(size // block_j, power_of_two(w.reps)) if w.reps > 1 else size // block_j  # runs of a set, or sets of one run
    chunk_r = ceil(ceil(w.reps / block_i) / parts) * block_i
    parts_r = ceil(w.reps / chunk_r)
    steps = ceil(w.run / block_j)
    chunk_t = ceil(steps / ceil(parts / parts_r))
    parts_t = ceil(steps / chunk_t)
    warps = warps_for(threads * block_i * block_j // size, device)
    sets = ceil(w.total / block_i) if w.reps == 1 else w.total
    return Pass(
        *(ROW, w, sets * parts_r * parts_t, warps, block_i, block_j, 1, 0, False, reduce, apply),
        *(parts_r, parts_t, chunk_r, chunk_t, stages),
    )


def tile(problem: NormProblem, device: Device, invariant: bool) -> tuple[Pass, ...]:
    """Few warps with many elements each: sums over rows then stay in a thread."""
    w = walk(problem)
    block_run = power_of_two(w.run)
    block_i, tail = head_and_tail(w.reps)
    length = block_i + tail
    block_j = max(min(power_of_two(w.sets) * block_run, 32 if length <= 128 else NARROWEST), block_run)
    each = (128 if length <= 128 else 64) if device.prefetches else 32  # elements for a thread; AMD's compiler spills with more
    warps = warps_for(length * block_j // each, device)
    blocks = ceil(w.sets * block_run / block_j)
    stages = _stages(problem, device, length * block_j, 3) if length * block_j <= 8192 else 1
    programs = w.outer * blocks if stages == 1 else min(w.outer * blocks, max(8 // warps, 1) * device.sms)
    return (Pass(TILE, w, programs, warps, block_i, block_j, block_run, tail, True, True, True, 1, 1, w.reps, blocks, stages),)


def tile_reread(problem: NormProblem, device: Device, invariant: bool) -> tuple[Pass, ...]:
    w = walk(problem)
    programs = 3 if w.total * w.reps * w.run >= 2**23 else 2
    taken = _tile(w, device, programs, 64, 128, _stages(problem, device, 2048, 4), 256 if invariant else 0, reduce=True)
    return chained(device, (taken, _combine(w, taken, device), _tile_apply(problem, w, device)))


def _tile_apply(problem: NormProblem, w: Walk, device: Device) -> Pass:
    size = w.total * w.reps * w.run
    if w.columns % 128 == 0 and size >= 2**25:
        return _tile(w, device, 16, 128, 256, apply=True)
    programs, stages = (16, 4) if size >= 2**23 else (8, 3)
    return _tile(w, device, programs, 64, 128, _stages(problem, device, 2048, stages), apply=True)


def tile_size(problem: NormProblem) -> int:
    """The elements of the smallest block that holds whole sets."""
    w = walk(problem)
    block_run = power_of_two(w.run)
    return sum(head_and_tail(w.reps)) * max(block_run, min(NARROWEST, power_of_two(w.sets) * block_run))


def _tile(
    w: Walk,
    device: Device,
    programs: int,
    width: int,
    threads: int,
    stages: int = 1,
    rows: int = 0,
    reduce: bool = False,
    apply: bool = False,
) -> Pass:
    """About so many programs for each multiprocessor, or `rows` for each program. Blocks are 32 rows high, higher where columns are few."""
    block_j = min(power_of_two(w.columns), width)
    block_i = 32 * width // block_j
    blocks = ceil(w.columns / block_j)
    parts = ceil(w.reps / rows) if rows else ceil(programs * device.sms / (w.outer * blocks))
    chunk_r = ceil(ceil(w.reps / block_i) / parts) * block_i
    parts_r = ceil(w.reps / chunk_r)
    return Pass(
        *(TILE, w, w.outer * parts_r * blocks, warps_for(threads, device), block_i, block_j, 1, 0, False, reduce, apply),
        *(parts_r, w.run, chunk_r, blocks, stages),
    )


def _combine(w: Walk, taken: Pass, device: Device) -> Pass:
    """The moments of the parts that a reduction took."""
    size = 64 if taken.parts_r * taken.parts_t <= 64 else 1024  # few sizes, since each is compiled
    block_j = min(power_of_two(taken.parts_t), size)
    chunk_t = taken.chunk_t * taken.block_j if taken.kernel == ROW else 1
    return Pass(
        *(COMBINE, w, w.total, warps_for(size // 8, device), size // block_j, block_j, 1, 0, False, False, False),
        *(taken.parts_r, taken.parts_t, taken.chunk_r, chunk_t),
    )


def apply(problem: NormProblem, device: Device, invariant: bool) -> tuple[Pass, ...]:
    if used(problem, ROW) >= used(problem, TILE):
        w = walk(problem, cut=True)
        return (_row(w, device, ceil(8 * device.sms / w.total), 4096, 512, apply=True),)
    return (_tile_apply(problem, walk(problem), device),)


def used(problem: NormProblem, kernel: str) -> float:
    """What fraction of the memory that a walk touches it uses. Memory comes in lines of 128 bytes."""
    assert problem.x is not None
    w = walk(problem)
    line, gaps = 128 // problem.dtype.itemsize, [stride for stride, n in zip(w.x, (w.outer, w.reps, w.sets)) if n > 1]
    if kernel == ROW:
        width, pitch = w.run, min(gaps, default=w.run) if w.reps == 1 else line
    else:
        width, pitch = w.columns if w.dense else w.run, w.x[1] if w.reps > 1 else line
    return min(width / min(line, max(pitch, 1)), 1.0)


def filled(step: Pass) -> float:
    """What fraction of the lanes that keep a set has an element of it, in the tile walk, whose instructions count."""
    w = step.walk
    return w.reps * w.run / ((step.block_i + step.tail) * step.block_run) if step.kernel == TILE else 1.0


def axis_mask(p: ParamMap, w: Walk) -> int:
    """A bit for each of o, r, s, t on which a parameter depends: 1, 2, 4, 8."""
    steps = zip((w.outer, w.reps, w.sets, w.run), (p.a, p.b, p.c, p.d))
    return sum(1 << bit for bit, (extent, step) in enumerate(steps) if extent > 1 and step)


def divides(problem: NormProblem) -> bool:
    """Whether each element of a long row must find its parameter by a division."""
    p, m = problem.param, problem.modulation
    if problem.x is None or problem.x.run <= 1024:
        return False
    by_param = problem.affine and p is not None and p.channel_run > 1
    return by_param or (bool(problem.scale or problem.shift) and m is not None and m.channel_run > 1)
