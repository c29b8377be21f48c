"""The backward kernel of the tile walk, which reads memory across sets.

A set is the elements that share one mean and variance. In `x[o, r, s, t]` a set is one (o, s). A row is one r, a column is
one (s, t), and a set has `run` columns. A block is [I, J]: I indexes rows, J indexes columns. A part is the rows that one
program works on.

Gradients need two sums over each set, c1 and c2, and for each parameter a sum over the elements that use it. Programs
store partial sums for parameters, called cells, and `add_up` of partials/sums_kernel.py adds these. If parameters vary
from row to row, the elements of one parameter lie in many sets, and a program sums over the blocks of one segment: a
group of values of o whose sets use the same parameters. Otherwise a program sums over blocks with the same columns. Each
block gives sums for its columns, and the sums over sets follow from them by equation (41) of docs/theory.md.
"""

import triton
import triton.language as tl

from onepass.backends.gpu.device.affine import fold_affine
from onepass.backends.gpu.device.axes import AXIS_R, AXIS_S, AXIS_T, NO_AXIS
from onepass.backends.gpu.device.columns import locate_columns, sum_over_run
from onepass.backends.gpu.device.elements import program
from onepass.backends.gpu.device.gradients import gradients, load_both, load_saved, load_sums, store_cells, store_gradient
from onepass.backends.gpu.device.groups import Affine, Cells, GradientTensors, Maps, Place, SetValues, View
from onepass.backends.gpu.device.segments import member_of
from onepass.backends.gpu.partials.gradient import SegmentArguments

from .launch_backward import TileBackwardSplit


@triton.jit
def tile_backward(
    io: GradientTensors, affine: Affine, values: SetValues, cells: Cells, count, view: View, maps: Maps,
    segments: SegmentArguments, split: TileBackwardSplit, norm: tl.constexpr, block: tl.constexpr, mode: tl.constexpr,
):  # fmt: skip
    """Compute c1 and c2 of sets of `count` elements, partial sums for parameters (cells), or dx, as `mode` says.

    `norm` is a Norm of device/groups.py. `block` is a TileBackwardBlock and `mode` a TileBackwardMode of
    tile/launch_backward.py.
    """
    pid = program(not mode.reduce, mode.wide, mode.pdl_trigger, mode.pdl_wait)
    if mode.across:
        _across(io, affine, values, cells, count, pid, view, maps, segments, split, norm, block, mode)
    else:
        _part(io, affine, values, cells, count, pid, view, maps, split, norm, block, mode)


@triton.jit
def _across(
    io, affine, values, cells, count, pid, view, maps, segments, split,
    norm: tl.constexpr, block: tl.constexpr, mode: tl.constexpr,
):  # fmt: skip
    """Take blocks of columns of one segment in turn, and store their dx. Then store their partial sums for parameters (cells).

    A resident program reads whole sets and computes c1 and c2 itself. Other programs read block.i rows and load c1 and c2.

    If parameters vary from row to row only, the blocks have different columns. Otherwise all have the same columns, of different o.
    """
    PARAM_PER_ROW: tl.constexpr = (norm.param_axes | norm.modulation_axes) & AXIS_R
    PARAM_PER_COLUMN: tl.constexpr = (norm.param_axes | norm.modulation_axes) & (AXIS_S | AXIS_T)
    blocks = split.blocks
    segment, part = pid // (split.parts_r * split.parts_t), pid % (split.parts_r * split.parts_t)
    r = part % split.parts_t * block.i + tl.arange(0, block.i)[:, None]
    first = 0
    SAME_COLUMNS: tl.constexpr = PARAM_PER_COLUMN or not PARAM_PER_ROW
    if SAME_COLUMNS:
        r = part % split.parts_t // split.blocks * block.i + tl.arange(0, block.i)[:, None]
        first, blocks = part % split.parts_t % split.blocks, 1
    part = part // split.parts_t
    inside, wide = r < view.reps, r.to(tl.int64)
    members = segments.members * blocks
    first_o, _ = member_of(0, segment, 1, segments, False)
    SUMMED: tl.constexpr = block.i if PARAM_PER_ROW else 1  # rows of a and b
    a, b = tl.zeros((SUMMED, block.j), tl.float32), tl.zeros((SUMMED, block.j), tl.float32)
    if not SAME_COLUMNS:
        row_place = Place(o=first_o, r=r, s=0, t=0, i_inside=inside, j_inside=None)
        factor, term = fold_affine(1.0, affine, maps, row_place, norm, AXIS_R, NO_AXIS)
    for m0 in tl.range(part, members, split.parts_r, num_stages=block.stages):
        m = m0 if mode.resident else members - 1 - m0  # if not resident, last block first: it may still be cached
        o, _zero = member_of(m // blocks, segment, 1, segments, False)
        column = (first + m % blocks) * block.j + tl.arange(0, block.j)[None, :]
        if mode.resident:
            s, t = column // block.run, column % block.run
        else:
            s, t = column // view.run, column % view.run
        x_at, y_at, here = locate_columns(o, s, t, column, view, split.columns, mode.dense)
        mask = inside & here
        if SAME_COLUMNS:
            place = Place(o=o, r=r, s=s, t=t, i_inside=inside, j_inside=here)
            factor, term = fold_affine(1.0, affine, maps, place, norm, AXIS_R, AXIS_S | AXIS_T)
        set_ = o.to(tl.int64) * view.sets + s
        mean, rstd = load_saved(values, set_, here)
        x, dy = load_both(io, x_at + wide * view.x_r, y_at + wide * view.y_r, mask)
        x_hat, dz, wdy = gradients(x, dy, mean, rstd, factor, term, mask, norm.activation, mode.from_y)
        c1, c2 = 0.0, 0.0
        if PARAM_PER_ROW:
            a += dz * x_hat
            b += dz
            if mode.resident:
                c1, c2 = tl.sum(wdy, 0, keep_dims=True), tl.sum(wdy * x_hat, 0, keep_dims=True)
        else:
            own_a, own_b = tl.sum(dz * x_hat, 0, keep_dims=True), tl.sum(dz, 0, keep_dims=True)
            a += own_a
            b += own_b
            c1, c2 = own_b * factor, own_a * factor
        if mode.resident:
            c2 = sum_over_run(tl.where(here, c2, 0.0), block.j, block.run) / count
            if norm.centered:
                c1 = sum_over_run(tl.where(here, c1, 0.0), block.j, block.run) / count
            else:
                c1 = 0.0
        else:
            c1, c2 = load_sums(values, set_, here, count)
        store_gradient(io, y_at + wide * view.y_r, mask, wdy, x_hat, rstd, c1, c2)
    share = segment.to(tl.int64) * split.parts_r + part
    if not SAME_COLUMNS:
        a, b = tl.sum(a, 1, keep_dims=True), tl.sum(b, 1, keep_dims=True)
        store_cells(cells, share * view.reps + r, inside, a, b, affine, maps, row_place, norm, AXIS_R, NO_AXIS)
    else:
        column = first * block.j + tl.arange(0, block.j)[None, :]
        if mode.resident:
            s, t = column // block.run, column % block.run
        else:
            s, t = column // view.run, column % view.run
        here = (s < view.sets) & (t < view.run)
        cell_place = Place(o=first_o, r=r, s=s, t=t, i_inside=inside, j_inside=here)
        if PARAM_PER_ROW:
            at = (share * view.reps + r) * split.columns + column
            store_cells(cells, at, inside & here, a, b, affine, maps, cell_place, norm, AXIS_R, AXIS_S | AXIS_T)
        else:
            at = share * split.columns + s * view.run + t
            store_cells(cells, at, here, a, b, affine, maps, cell_place, norm, NO_AXIS, AXIS_S | AXIS_T)


@triton.jit
def _part(
    io, affine, values, cells, count, pid, view, maps, split, norm: tl.constexpr, block: tl.constexpr, mode: tl.constexpr
):  # fmt: skip
    """Store sums over one part of the rows of block.j columns, or dx, or both if the statistics were given.

    The sums are those that give c1 and c2 and, if parameters do not vary from row to row, partial sums for them (cells).
    """
    PARAM_PER_ROW: tl.constexpr = (norm.param_axes | norm.modulation_axes) & AXIS_R
    i = tl.arange(0, block.i)[:, None]
    o, part = pid // split.blocks // split.parts_r, pid // split.blocks % split.parts_r
    column = pid % split.blocks * block.j + tl.arange(0, block.j)[None, :]
    s, t = column // view.run, column % view.run
    x_at, y_at, here = locate_columns(o, s, t, column, view, split.columns, mode.dense)
    start = part * split.chunk_r
    end = tl.minimum(start + split.chunk_r, view.reps)
    set_ = o.to(tl.int64) * view.sets + s
    mean, rstd = load_saved(values, set_, here)
    c1, c2 = None, None
    if not mode.reduce:
        c1, c2 = load_sums(values, set_, here, count)
    if not PARAM_PER_ROW:
        whole = Place(o=o, r=0, s=s, t=t, i_inside=None, j_inside=here)
        factor, term = fold_affine(1.0, affine, maps, whole, norm, NO_AXIS, AXIS_S | AXIS_T)
    a, b = tl.zeros((block.i, block.j), tl.float32), tl.zeros((block.i, block.j), tl.float32)
    for r0 in tl.range(start, end, block.i, num_stages=block.stages):
        r = r0 + i
        mask, wide = (r < end) & here, r.to(tl.int64)
        if PARAM_PER_ROW:
            place = Place(o=o, r=r, s=s, t=t, i_inside=r < end, j_inside=here)
            factor, term = fold_affine(1.0, affine, maps, place, norm, AXIS_R, AXIS_S | AXIS_T)
        x, dy = load_both(io, x_at + wide * view.x_r, y_at + wide * view.y_r, mask)
        x_hat, dz, wdy = gradients(x, dy, mean, rstd, factor, term, mask, norm.activation, mode.from_y)
        if mode.reduce:
            if PARAM_PER_ROW:
                a += wdy * x_hat
                b += wdy
            else:
                a += dz * x_hat
                b += dz
        if mode.given or not mode.reduce:
            store_gradient(io, y_at + wide * view.y_r, mask, wdy, x_hat, rstd, c1, c2)
    if mode.reduce:
        at = (o.to(tl.int64) * split.parts_r + part) * split.columns + column
        a, b = tl.sum(a, 0, keep_dims=True), tl.sum(b, 0, keep_dims=True)
        if not PARAM_PER_ROW:
            store_cells(cells, at, here, a, b, affine, maps, whole, norm, NO_AXIS, AXIS_S | AXIS_T)
            a, b = a * factor, b * factor
        if values.c1_ptr is not None:
            tl.store(values.c1_ptr + at, b, mask=here)
        if values.c2_ptr is not None:
            tl.store(values.c2_ptr + at, a, mask=here)
