from __future__ import annotations

from dataclasses import replace
from math import ceil

from onepass.backends.gpu.launch_shape import LaunchShape, block_bytes
from onepass.backends.gpu.launches import Pass, power_of_two, with_chaining
from onepass.backends.gpu.partials.parameters import Segments, any_axis, segments, varying_axes
from onepass.backends.gpu.partials.sums import Step, parameter_sums, set_sums_of, why_no_sums
from onepass.backends.gpu.walk import TILE, Walk, walk
from onepass.core.device import Device
from onepass.core.problem import NormProblem

from .schedule import NARROWEST

LARGEST_TILE = 8192  # elements of x that one program can keep, beside those of dy and two sums


@with_chaining
def tile_launches(problem: NormProblem, device: Device, invariant: bool) -> tuple[Step, ...]:
    """Whole sets of x and dy in registers, beside what a program has summed up so far of the parameters of rows."""
    w = walk(problem)
    block_run, block_i = power_of_two(w.run), power_of_two(w.reps)
    block_j = max(min(power_of_two(w.sets) * block_run, NARROWEST), block_run)
    warps = min(max(block_i * block_j // 1024, 1), 16)
    cut = LaunchShape(block_i, block_j, warps, max(8 // warps, 1), 1).on(device, 1)
    return across_tiles(problem, w, device, cut, block_run)


def across_tiles(problem: NormProblem, w: Walk, device: Device, cut: LaunchShape, block_run: int = 0) -> tuple[Step, ...]:
    """Programs take blocks of columns: of a segment, where each row has parameters of its own. With a `block_run`, of whole sets."""
    own = any_axis(varying_axes(problem, w))
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
        return main, *parameter_sums(problem, [("o", w.outer), *columns], w, 1, device)
    axes = [("o", found.period), ("part", parts), ("r", w.reps), *(columns if own & 12 else [])]
    return main, *parameter_sums(problem, axes, w, found.every, device)


@with_chaining
def tile_reread_launches(problem: NormProblem, device: Device, invariant: bool) -> tuple[Step, ...]:
    w, nbytes = walk(problem), block_bytes(problem, 4096)
    size = w.total * w.reps * w.run
    if size < 2**25:
        reduce, apply = LaunchShape(16, 128, 4, 2, 3), LaunchShape(32, 64, 4, 4, 3)
    else:
        reduce, apply = LaunchShape(32, 128, 4, 8 if size >= 2**27 else 2, 3), LaunchShape(32, 128, 8, 8, 3)
    taken = columns(w, device, reduce.on(device, nbytes), reduce=True, given=problem.given)
    axes = [("o", w.outer), ("part", taken.parts_r), ("s", w.sets), ("t", w.run)]
    if problem.given:
        return taken, *parameter_sums(problem, axes, w, 1, device)
    between = set_sums_of(axes, w, device)
    if 2 & any_axis(varying_axes(problem, w)):
        return (taken, *between, *across_tiles(problem, w, device, LaunchShape(32, 64, 4, 4, 1).on(device, nbytes)))
    applied = columns(w, device, apply.on(device, nbytes))
    return (taken, *between, applied, *parameter_sums(problem, axes, w, 1, device))


def columns(w: Walk, device: Device, cut: LaunchShape, reduce: bool = False, given: bool = False) -> Pass:
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


def tile_cannot(problem: NormProblem, device: Device) -> list[str]:
    own = any_axis(varying_axes(problem, walk(problem)))
    if own & 2 and own & 12:
        return ["each element of a set has a parameter of its own: too many sums for one program"]
    return why_no_sums(problem, device, tile_launches)


def tile_size(problem: NormProblem) -> int:
    """The elements of the smallest block that holds whole sets."""
    w = walk(problem)
    block_run = power_of_two(w.run)
    return power_of_two(w.reps) * max(block_run, min(NARROWEST, power_of_two(w.sets) * block_run))


def tile_reread_cannot(problem: NormProblem, device: Device) -> list[str]:
    return why_no_sums(problem, device, tile_reread_launches)
