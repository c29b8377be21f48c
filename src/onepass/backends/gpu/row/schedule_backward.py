"""The launches that compute a backward by the row walk, and their sizes, which were tuned on an H200.

The row walk reads each set along its runs. A set is the elements that share one mean and variance. A run is a stretch of
a set that is contiguous in memory, and a row is a set of one run. A part is the share of a set that one program works on.
A segment is a group of sets that use the same parameters. A cell is a partial sum of the gradient of a parameter.
"""

from __future__ import annotations

from math import ceil, gcd

from onepass.backends.gpu.launch_shape import LaunchShape, block_bytes
from onepass.backends.gpu.launches import block_and_remainder, peel_of, power_of_two, with_chaining
from onepass.backends.gpu.partials.combine import Split
from onepass.backends.gpu.partials.parameters import parameter_axes, segments
from onepass.backends.gpu.partials.sums import Step, parameter_sums, set_sums, why_no_sums, with_joint_sums
from onepass.backends.gpu.walk import AXIS_R, AXIS_T, Walk, walk
from onepass.core.device import Device
from onepass.core.problem import NormProblem

from .launch import in_vectors
from .launch_backward import RowBackwardLaunch
from .schedule import split_set

BLOCK = 8192  # elements of the largest block: x, dy and two sums of this size fit in the registers of one program

LONGEST_ROW = 2 * BLOCK

LEAST_FILLED = 0.7  # with the ends of rows peeled off, this share of a block's elements, or more, must belong to its rows

LEAST_ROWS = 8  # that begin at the same place: with fewer, each has cells of its own, which take longer than loads of single elements

MANY_ROWS = 256  # that begin at the same place: from so many on, a block has several of them

TINY = 8192  # elements of x: up to this size, one program for each segment beats several, whose cells must be added up


@with_chaining
def row_launches(problem: NormProblem, device: Device, invariant: bool) -> tuple[Step, ...]:
    """Return a launch whose programs keep rows of x and dy in registers, and launches that add up its partial sums (cells).

    A row of more than BLOCK elements is cut into two blocks, one for each of two programs. Both programs compute the sums
    of the whole row. They read the row at the same time, so it comes from memory once.
    """
    w = walk(problem)
    along = bool(AXIS_T & parameter_axes(problem, w))  # parameters vary along a row
    peel, phases = peeled(problem, w) if along and not invariant else (0, 1)
    if peel and (found := peeled_rows(problem, w, device, peel, phases)):
        return found
    length, remainder = block_and_remainder(w.run) if along and 512 < w.run <= BLOCK else (power_of_two(w.run), 0)
    if remainder:
        wide = problem.dtype.itemsize == 4  # float32 takes twice the registers
        block_i = 2 if length == 1024 and remainder <= 256 and not wide else 1
        warps = power_of_two(ceil((length + remainder) * block_i / (768 if wide else 1280)))
        shape = LaunchShape(block_i, length, warps, 8 // warps, 3)
    elif not along:
        block_i = max(1024 // length, 1)
        warps = min(max(length * block_i // 512, 1), 16)
        shape = LaunchShape(block_i, min(length, BLOCK), warps, max(16 // warps, 1), 3)
    elif length <= 64:
        shape = LaunchShape(2048 // length, length, 4, 4, 3)
    elif length <= 256:
        shape = LaunchShape(1024 // length, length, 1, 8, 3)
    elif length <= 512:
        shape = LaunchShape(2048 // length, length, 2, 4, 3)
    elif length <= 1024:
        shape = LaunchShape(4096 // length, length, 4, 2, 3)
    else:
        shape = LaunchShape(max(BLOCK // length, 1), min(length, BLOCK), 8, 1, 3)
    if w.total * w.run > TINY:
        # If there are few rows, blocks get fewer rows, so that all multiprocessors have work.
        few = power_of_two(max(w.total // (shape.programs * device.sms), 1))
        shape = shape._replace(block_i=min(shape.block_i, few))
    shape = shape.at(problem).on(device, block_bytes(problem, shape.block_i * (min(length, w.run) + remainder)))
    return across_rows(problem, w, device, shape, remainder)


def peeled_rows(problem: NormProblem, w: Walk, device: Device, peel: int, phases: int) -> tuple[Step, ...]:
    """Return the same launches for rows that begin between multiples of 16 bytes: `peeled` explains `peel` and `phases`.

    Return nothing if rows are too long, if they would leave much of a block empty, or if there are few of them.
    """
    n = in_vectors(w.run, peel)
    length = power_of_two(n)
    elements = min(max(4 * length, 2048), BLOCK)  # of a block
    programs = BLOCK // elements
    rows = max(elements // length // (2 if problem.dtype.itemsize == 4 else 1), 1)  # float32 would spill
    if length > BLOCK or n < LEAST_FILLED * length or w.total < rows * programs * device.sms:
        return ()
    shape = LaunchShape(rows, length, elements // 1024, programs, 3)
    return across_rows(problem, w, device, shape.on(device, block_bytes(problem, rows * w.run)), 2 * peel, peel=peel, phases=phases)


def across_rows(
    problem: NormProblem,
    w: Walk,
    device: Device,
    shape: LaunchShape,
    remainder: int = 0,
    resident: bool = True,
    peel: int = 0,
    phases: int = 1,
) -> tuple[Step, ...]:
    """Return a launch whose programs take the sets of a segment in turn, and launches that add up its partial sums (cells).

    All sets of a segment use the same parameters. With `resident`, programs read whole rows and compute the sums c1 and c2
    over each. Otherwise an earlier launch must have computed c1 and c2. With `peel`, see `peeled`.
    """
    found = segments(problem, w)
    count = w.total // found.members
    blocks = 1 if remainder and not peel else ceil((in_vectors(w.run, peel) if peel else w.run) / shape.block_j)
    parts = min(max(round(shape.programs * device.sms / (count * blocks * phases)), 1), ceil(found.members / (shape.block_i * phases)))
    parts = phases * (1 if w.total * w.run <= TINY else parts)
    main = RowBackwardLaunch(
        walk=w,
        programs=count * parts * blocks,
        warps=shape.warps,
        block_i=shape.block_i,
        block_j=shape.block_j,
        stages=shape.stages,
        split=Split(parts, blocks),
        remainder=remainder,
        resident=resident,
        reduce=resident,
        apply=True,
        segments=found,
        peel=peel,
        phases=phases,
    )
    axes = [("o", found.period), ("s", w.sets if found.by_set else 1), ("part", parts)]
    axes.append(("t", w.run) if AXIS_T & parameter_axes(problem, w) else ("part", blocks))
    return main, *parameter_sums(problem, axes, w, found.every, device)


@with_chaining
def row_reread_launches(problem: NormProblem, device: Device, invariant: bool) -> tuple[Step, ...]:
    """Return the launches that compute the sums over sets and then dx, and those that add up partial sums (cells).

    If parameters vary along runs, the launch that computes dx stores the cells. Otherwise the launch that computes the
    sums over sets does.
    """
    w = walk(problem, cut=True)
    if not AXIS_T & parameter_axes(problem, w):
        return parts_of_sets(problem, w, device, 0 if invariant else peel_of(problem, w))
    w = walk(problem)
    peel, phases = (0, 1) if invariant else peeled(problem, w)
    rows = 2 if w.run > 2**16 else 1  # rows of a block: they share the weights that are loaded
    reduce = LaunchShape(rows, min(4096 // rows, power_of_two(w.run)), 8, 2, 3)
    if peel:
        reduce = LaunchShape(1, min(2048, power_of_two(w.run)), 4, 8, 3)
    apply = LaunchShape(2, min(2048, power_of_two(w.run)), 4, 2, 3)
    reduced = sums_of_rows(w, device, reduce.at(problem).on(device, block_bytes(problem, 4096, 4096)), peel, phases)
    if w.total < LEAST_ROWS * phases:
        peel, phases = 0, 1
    if peel:  # smaller blocks, so that programs with the ends of runs do not spill
        if w.total >= MANY_ROWS * phases:
            apply = LaunchShape(4, min(1024, power_of_two(w.run)), 4, 5, 3)
        else:
            apply = LaunchShape(1, 2048, 4, 4, 3) if w.run > 2**17 else LaunchShape(1, min(1024, power_of_two(w.run)), 2, 8, 3)
    between = set_sums([("o", w.outer), ("s", w.sets), ("part", reduced.split.parts_t)], w, device)
    apply = apply.at(problem).on(device, block_bytes(problem, 4096))
    return (reduced, *between, *across_rows(problem, w, device, apply, 2 * peel, resident=False, peel=peel, phases=phases))


def peeled(problem: NormProblem, w: Walk) -> tuple[int, int]:
    """Return the elements of a vector, if loops over rows should take whole vectors and the ends apart, and how far such rows may begin
    from a multiple of a vector: at one of so many places. Return 0 and 1 if they should not.
    """
    peel, found = peel_of(problem, w), segments(problem, w)
    if not peel or w.sets > 1 or found.every * found.period > 1:
        return 0, 1
    return peel, min(peel // gcd(w.x[0], peel), power_of_two(w.total))


def sums_of_rows(w: Walk, device: Device, shape: LaunchShape, peel: int = 0, phases: int = 1) -> RowBackwardLaunch:
    """Return a launch that sums over rows, or over parts of rows if there are few rows. With `peel`, see `peeled`."""
    groups = ceil(w.total / (shape.block_i * phases)) * phases
    if peel:
        steps, parts = ceil(in_vectors(w.run, peel) / shape.block_j), ceil(4 * device.sms / groups)
    else:
        steps, parts = ceil(w.run / shape.block_j), 1 if w.total >= device.sms else ceil(2 * device.sms / w.total)
    chunk_t = ceil(steps / parts)
    parts_t = ceil(steps / chunk_t)
    return RowBackwardLaunch(
        walk=w,
        programs=groups * parts_t,
        warps=shape.warps,
        block_i=shape.block_i,
        block_j=shape.block_j,
        stages=shape.stages,
        split=Split(parts_t=parts_t, chunk_t=chunk_t),
        reduce=True,
        peel=peel,
        phases=phases,
    )


def parts_of_sets(problem: NormProblem, w: Walk, device: Device, peel: int = 0) -> tuple[Step, ...]:
    """Return the launches for sets whose parameters do not vary along a run.

    One launch computes the sums over sets, the sums for parameters (cells) and dx, if sets are small, or many and of medium
    size, or if the statistics were given. Otherwise one launch computes both kinds of sums, and another dx.
    """
    nbytes = block_bytes(problem, 2048)
    if problem.given:
        main = set_parts(w, device, LaunchShape(0, 2048, 4, 8, 3).at(problem).on(device, nbytes), reduce=True, apply=True, resident=True)
    elif (w.total >= 2 * device.sms or w.reps * w.run <= 2**14) and w.reps * w.run <= 2**16 and not problem.spec.mix:
        main = set_parts(w, device, LaunchShape(0, 4096, 8, 0, 1).on(device, nbytes), reduce=True, apply=True, peel=peel)
    else:
        main = set_parts(w, device, LaunchShape(0, 2048, 4, 2, 3).at(problem).on(device, nbytes), reduce=True, peel=peel)
    parts_r, parts_t = main.split[:2]
    runs = ("r", w.reps) if AXIS_R & parameter_axes(problem, w) else ("part", parts_r)
    sums = parameter_sums(problem, [("o", w.outer), runs, ("s", w.sets), ("part", parts_t)], w, 1, device)
    if main.apply:
        return main, *sums
    between = set_sums([("o", w.outer), ("part", parts_r), ("s", w.sets), ("part", parts_t)], w, device)
    applied = set_parts(w, device, LaunchShape(0, 2048, 8, 8, 1).on(device, nbytes), apply=True, peel=peel)
    return (main, *with_joint_sums(between, applied, sums))


def set_parts(
    w: Walk, device: Device, shape: LaunchShape, reduce: bool = False, apply: bool = False, resident: bool = False, peel: int = 0
) -> RowBackwardLaunch:
    """Return a launch that cuts sets into parts, and parts into blocks of at most shape.block_j elements.

    A block has elements of one run or of several; shape.block_i is not used. If shape.programs is 0, a part is a whole set.
    """
    size, block_j = shape.block_j, min(power_of_two(w.run), shape.block_j)
    block_i = min(size // block_j, power_of_two(w.reps))
    parts = max(min(ceil(shape.programs * device.sms / w.total), ceil(w.reps * w.run / size)), 1)
    split = split_set(w, parts, block_i, block_j)
    return RowBackwardLaunch(
        walk=w,
        programs=w.total * split.parts_r * split.parts_t,
        warps=max(shape.warps * block_i * block_j // size, 1),
        block_i=block_i,
        block_j=block_j,
        stages=shape.stages,
        split=split,
        resident=resident,
        reduce=reduce,
        apply=apply,
        peel=peel,
    )


def row_unsupported(problem: NormProblem, device: Device) -> list[str]:
    w, run = walk(problem, cut=True), walk(problem).run
    if BLOCK < run < 1.75 * BLOCK:
        return [f"a row of {run} would leave much of two blocks of {BLOCK} empty"]
    if w.reps > 1 and not AXIS_T & parameter_axes(problem, w):
        return [f"a row has {w.reps} parts with their own parameters: too many sums for one program"]
    return why_no_sums(problem, device, row_launches)


def row_reread_unsupported(problem: NormProblem, device: Device) -> list[str]:
    w = walk(problem, cut=True)
    if AXIS_T & parameter_axes(problem, w) and walk(problem).reps > 1:
        return ["its parameters vary along runs, and a set has several runs: sums over parameters go across them"]
    return why_no_sums(problem, device, row_reread_launches)
