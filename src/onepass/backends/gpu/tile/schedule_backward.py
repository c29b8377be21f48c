"""The launches that compute a backward by the tile walk, and their sizes, which were tuned on an H200.

The tile walk reads memory across sets. A set is the elements that share one mean and variance. In `x[o, r, s, t]` a set is
one (o, s), a row is one r, and a column is one (s, t). A segment is a group of values of o whose sets use the same
parameters. A cell is a partial sum of the gradient of a parameter.
"""

from __future__ import annotations

from dataclasses import replace
from math import ceil

from onepass.backends.gpu.launch_shape import LaunchShape, block_bytes
from onepass.backends.gpu.launches import power_of_two, with_chaining
from onepass.backends.gpu.partials.parameters import parameter_axes, segments
from onepass.backends.gpu.partials.sums import Step, parameter_sums, set_sums, why_no_sums, with_joint_sums
from onepass.backends.gpu.walk import AXIS_R, AXIS_S, AXIS_T, Walk, walk
from onepass.core.device import Device
from onepass.core.problem import NormProblem

from .launch_backward import TileBackwardLaunch
from .schedule import NARROWEST

LARGEST_TILE = 8192  # elements of the largest block: x, dy and two sums of this size fit in the registers of one program


@with_chaining
def tile_launches(problem: NormProblem, device: Device, invariant: bool) -> tuple[Step, ...]:
    """Return a launch whose programs keep sets of x and dy in registers, and launches that add up its partial sums (cells)."""
    w = walk(problem)
    block_run, block_i = power_of_two(w.run), power_of_two(w.reps)
    block_j = max(min(power_of_two(w.sets) * block_run, NARROWEST), block_run)
    warps = min(max(block_i * block_j // 1024, 1), 16)
    shape = LaunchShape(block_i, block_j, warps, max(8 // warps, 1), 1).on(device, 1)
    return across_tiles(problem, w, device, shape, block_run)


def across_tiles(problem: NormProblem, w: Walk, device: Device, shape: LaunchShape, block_run: int = 0) -> tuple[Step, ...]:
    """Return a launch whose programs take blocks of columns in turn, and launches that add up its partial sums (cells).

    The blocks of a program are in one segment. If parameters vary from row to row only, they have different columns. Otherwise they
    have the same columns of different values of o, so that the program can add up the gradients of these columns.
    If `block_run` is not 0, blocks hold whole sets, with block_run columns for each.
    """
    axes = parameter_axes(problem, w)
    per_row, per_column, resident = bool(axes & AXIS_R), bool(axes & (AXIS_S | AXIS_T)), block_run > 0
    found = segments(problem, w)
    found = replace(found, members=w.outer // found.period, by_set=False)
    blocks = ceil(w.sets * block_run / shape.block_j) if resident else ceil(w.columns / shape.block_j)
    parts_t = 1 if resident else ceil(w.reps / shape.block_i)
    members = found.members
    if per_row and not per_column:
        members *= blocks
    else:
        parts_t *= blocks
    share = shape.programs * device.sms / (found.period * parts_t)
    parts = min(max(int(share), 1) if per_row else ceil(share), members)
    main = TileBackwardLaunch(
        walk=w,
        programs=found.period * parts * parts_t,
        warps=shape.warps,
        block_i=shape.block_i,
        block_j=shape.block_j,
        stages=shape.stages,
        blocks=blocks,
        parts_r=parts,
        parts_t=parts_t,
        block_run=block_run,
        resident=resident,
        reduce=resident,
        apply=True,
        segments=found,
    )
    rows, columns = [("r", w.reps)] * per_row, [("s", w.sets), ("t", w.run)] * (per_column or not per_row)
    cells = [("o", found.period), ("part", parts), *rows, *columns]
    return main, *parameter_sums(problem, cells, w, found.every, device)


@with_chaining
def tile_reread_launches(problem: NormProblem, device: Device, invariant: bool) -> tuple[Step, ...]:
    """Return the launches that compute the sums over sets and then dx, and those that add up partial sums (cells).

    If parameters vary from row to row, the launch that computes dx stores the cells. Otherwise the first launch does. If
    the statistics were given, the first launch computes everything.
    """
    w, nbytes = walk(problem), block_bytes(problem, 4096)
    size = w.total * w.reps * w.run
    if size < 2**25:
        reduce, apply = LaunchShape(16, 128, 4, 2, 3), LaunchShape(32, 64, 4, 4, 3)
    else:
        reduce, apply = LaunchShape(32, 128, 4, 8 if size >= 2**27 else 2, 3), LaunchShape(32, 128, 8, 8, 3)
    reduced = column_parts(w, device, reduce.at(problem).on(device, nbytes), reduce=True, given=problem.given)
    axes = [("o", w.outer), ("part", reduced.parts_r), ("s", w.sets), ("t", w.run)]
    if problem.given:
        return reduced, *parameter_sums(problem, axes, w, 1, device)
    between = set_sums(axes, w, device)
    if AXIS_R & parameter_axes(problem, w):
        return (reduced, *between, *across_tiles(problem, w, device, LaunchShape(32, 64, 4, 4, 1).on(device, nbytes)))
    applied = column_parts(w, device, apply.at(problem).on(device, nbytes))
    return (reduced, *with_joint_sums(between, applied, parameter_sums(problem, axes, w, 1, device)))


def column_parts(w: Walk, device: Device, shape: LaunchShape, reduce: bool = False, given: bool = False) -> TileBackwardLaunch:
    """Return a launch whose programs work on some rows of one block of columns each.

    Blocks have shape.block_j columns, or half as many and twice the rows if that leaves fewer columns of a block empty.
    """
    width = min((shape.block_j, shape.block_j // 2), key=lambda width: ceil(w.columns / width) * width)
    block_j = min(width, power_of_two(w.columns))
    block_i = shape.block_i * shape.block_j // block_j
    blocks = ceil(w.columns / block_j)
    parts = ceil(shape.programs * device.sms / (w.outer * blocks))
    chunk_r = ceil(ceil(w.reps / block_i) / parts) * block_i
    parts_r = ceil(w.reps / chunk_r)
    return TileBackwardLaunch(
        walk=w,
        programs=w.outer * parts_r * blocks,
        warps=shape.warps,
        block_i=block_i,
        block_j=block_j,
        stages=shape.stages,
        blocks=blocks,
        parts_r=parts_r,
        chunk_r=chunk_r,
        resident=given,
        reduce=reduce,
        apply=given or not reduce,
    )


def tile_unsupported(problem: NormProblem, device: Device) -> list[str]:
    axes = parameter_axes(problem, walk(problem))
    if axes & AXIS_R and axes & (AXIS_S | AXIS_T):
        return ["each element of a set has its own parameter: too many sums for one program"]
    return why_no_sums(problem, device, tile_launches)


def tile_size(problem: NormProblem) -> int:
    """Return the number of elements of the smallest block that holds whole sets."""
    w = walk(problem)
    block_run = power_of_two(w.run)
    return power_of_two(w.reps) * max(block_run, min(NARROWEST, power_of_two(w.sets) * block_run))


def tile_reread_unsupported(problem: NormProblem, device: Device) -> list[str]:
    return why_no_sums(problem, device, tile_reread_launches)
