from __future__ import annotations

from math import ceil

from onepass.backends.gpu.launch_shape import LaunchShape, block_bytes
from onepass.backends.gpu.launches import Pass, head_and_tail, power_of_two, with_chaining
from onepass.backends.gpu.partials.parameters import any_axis, segments, varying_axes
from onepass.backends.gpu.partials.sums import Step, parameter_sums, set_sums_of, why_no_sums
from onepass.backends.gpu.walk import ROW, Walk, walk
from onepass.core.device import Device
from onepass.core.problem import NormProblem

BLOCK = 8192  # elements of x that one program can keep, beside those of dy and two sums


LONGEST_ROW = 2 * BLOCK


TINY = 8192  # elements of x for which a second launch costs more than it brings


@with_chaining
def row_launches(problem: NormProblem, device: Device, invariant: bool) -> tuple[Step, ...]:
    """Rows of x and dy in registers, beside what a program has summed up so far of the parameters.

    Rows too long for that are cut in blocks: each program takes the sums of a whole row, but works on its block alone. The others read what
    it reads at the same time, so that it comes from memory once.
    """
    w = walk(problem)
    along = bool(8 & any_axis(varying_axes(problem, w)))
    length, tail = head_and_tail(w.run) if along and 512 < w.run <= BLOCK else (power_of_two(w.run), 0)
    if tail:
        block_i = 2 if length == 1024 and tail <= 256 else 1
        warps = power_of_two(ceil((length + tail) * block_i / 1280))
        cut = LaunchShape(block_i, length, warps, 8 // warps, 3)
    elif not along:
        block_i = max(1024 // length, 1)
        warps = min(max(length * block_i // 512, 1), 16)
        cut = LaunchShape(block_i, min(length, BLOCK), warps, max(16 // warps, 1), 3)
    elif length <= 64:
        cut = LaunchShape(2048 // length, length, 4, 4, 3)
    elif length <= 256:
        cut = LaunchShape(1024 // length, length, 1, 8, 3)
    elif length <= 512:
        cut = LaunchShape(2048 // length, length, 2, 4, 3)
    elif length <= 1024:
        cut = LaunchShape(4096 // length, length, 4, 2, 3)
    else:
        cut = LaunchShape(max(BLOCK // length, 1), min(length, BLOCK), 8, 1, 3)
    if w.total * w.run > TINY:
        few = power_of_two(max(w.total // (cut.programs * device.sms), 1))  # few rows: some for each multiprocessor
        cut = cut._replace(block_i=min(cut.block_i, few))
    cut = cut.on(device, block_bytes(problem, cut.block_i * (min(length, w.run) + tail)))
    return across_rows(problem, w, device, cut, tail)


def across_rows(problem: NormProblem, w: Walk, device: Device, cut: LaunchShape, tail: int = 0, resident: bool = True) -> tuple[Step, ...]:
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
    axes.append(("t", w.run) if 8 & any_axis(varying_axes(problem, w)) else ("part", blocks))
    return main, *parameter_sums(problem, axes, w, found.every, device)


@with_chaining
def row_reread_launches(problem: NormProblem, device: Device, invariant: bool) -> tuple[Step, ...]:
    """Where parameters vary along runs, first the sums over sets, and those over parameters with dx; else both sums first."""
    w = walk(problem, cut=True)
    if not 8 & any_axis(varying_axes(problem, w)):
        return rows_of_sets(problem, w, device)
    w = walk(problem)
    rows = 2 if w.run > 2**16 else 1  # which share the parameters they read
    reduce = LaunchShape(rows, min(4096 // rows, power_of_two(w.run)), 8, 2, 3)
    apply = LaunchShape(2, min(2048, power_of_two(w.run)), 4, 2, 3)
    taken = set_sums(w, device, reduce.on(device, block_bytes(problem, 4096, 4096)))
    between = set_sums_of([("o", w.outer), ("s", w.sets), ("part", taken.parts_t)], w, device)
    return (taken, *between, *across_rows(problem, w, device, apply.on(device, block_bytes(problem, 4096)), resident=False))


def set_sums(w: Walk, device: Device, cut: LaunchShape) -> Pass:
    """The sums of rows, of parts of them where there are few."""
    steps = ceil(w.run / cut.block_j)
    chunk_t = ceil(steps / (1 if w.total >= device.sms else ceil(2 * device.sms / w.total)))
    parts_t = ceil(steps / chunk_t)
    programs = ceil(w.total / cut.block_i) * parts_t
    return Pass(ROW, w, programs, cut.warps, cut.block_i, cut.block_j, reduce=True, parts_t=parts_t, chunk_t=chunk_t, stages=cut.stages)


def rows_of_sets(problem: NormProblem, w: Walk, device: Device) -> tuple[Step, ...]:
    """Sets whose parameters do not vary along a run: by one kernel where there are many, or by two and what lies between."""
    nbytes = block_bytes(problem, 2048)
    if problem.given:
        taken = set_parts(w, device, LaunchShape(0, 2048, 4, 8, 3).on(device, nbytes), reduce=True, apply=True, resident=True)
    elif (w.total >= 2 * device.sms or w.reps * w.run <= 2**14) and w.reps * w.run <= 2**16 and not problem.spec.mix:
        taken = set_parts(w, device, LaunchShape(0, 4096, 8, 0, 1).on(device, nbytes), reduce=True, apply=True)
    else:
        taken = set_parts(w, device, LaunchShape(0, 2048, 4, 2, 3).on(device, nbytes), reduce=True)
    runs = ("r", w.reps) if 2 & any_axis(varying_axes(problem, w)) else ("part", taken.parts_r)
    sums = parameter_sums(problem, [("o", w.outer), runs, ("s", w.sets), ("part", taken.parts_t)], w, 1, device)
    if taken.apply:
        return taken, *sums
    between = set_sums_of([("o", w.outer), ("part", taken.parts_r), ("s", w.sets), ("part", taken.parts_t)], w, device)
    return (taken, *between, set_parts(w, device, LaunchShape(0, 2048, 8, 8, 1).on(device, nbytes), apply=True), *sums)


def set_parts(w: Walk, device: Device, cut: LaunchShape, reduce: bool = False, apply: bool = False, resident: bool = False) -> Pass:
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


_ALONG_RUNS = "its parameters vary along runs of which a set has several: sums over them go across"


def row_cannot(problem: NormProblem, device: Device) -> list[str]:
    w, run = walk(problem, cut=True), walk(problem).run
    if BLOCK < run < 1.75 * BLOCK:
        return [f"a row of {run} would leave much of two blocks of {BLOCK} empty"]
    if w.reps > 1 and not 8 & any_axis(varying_axes(problem, w)):
        return [f"a row has {w.reps} parts with parameters of their own, each summed over: too many sums for one program"]
    return why_no_sums(problem, device, row_launches)


def row_reread_cannot(problem: NormProblem, device: Device) -> list[str]:
    w = walk(problem, cut=True)
    if 8 & any_axis(varying_axes(problem, w)) and walk(problem).reps > 1:
        return [_ALONG_RUNS]
    return why_no_sums(problem, device, row_reread_launches)
