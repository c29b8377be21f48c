"""The forward kernel of the tile walk, which reads memory across sets.

A set is the elements that share one mean and variance. In `x[o, r, s, t]` a set is one (o, s). A row is one r, a column is
one (s, t), and a set has `run` columns. A block is [I, J]: I indexes rows, J indexes columns. A part is the rows that one
program works on. If rows of x lie abreast, one row of a block is several rows of x, which follow one another in memory.
"""

import triton
import triton.language as tl

from onepass.backends.gpu.device.affine import fold_affine
from onepass.backends.gpu.device.axes import AXIS_R, AXIS_S, AXIS_T
from onepass.backends.gpu.device.columns import locate_columns, sum_over_run
from onepass.backends.gpu.device.elements import load, load_x, program, store
from onepass.backends.gpu.device.groups import Affine, Maps, Place, Statistics, Tensors, View
from onepass.backends.gpu.device.moments import (
    inverse_deviation,
    join,
    known_rstd,
    lanes,
    load_statistics,
    merge,
    scaled_down,
    scaled_up,
    store_statistics,
    update,
)

from .launch import TileSplit


@triton.jit
def tile_forward(
    io: Tensors, affine: Affine, stats: Statistics, parts_ptr, eps, total, view: View, maps: Maps, split: TileSplit,
    norm: tl.constexpr, block: tl.constexpr, mode: tl.constexpr,
):  # fmt: skip
    """Compute the moments of parts of `total` sets, or y, or both, as `mode` says.

    `norm` is a Norm of device/groups.py. `block` is a TileBlock and `mode` a TileMode of tile/launch.py.
    """
    pid = program(not mode.reduce, mode.wide, mode.pdl_trigger, mode.pdl_wait)
    if mode.resident:
        if block.stages > 1:  # a program takes blocks in turn, and loads the next ones while it works on one
            for number in tl.range(pid, total // view.sets * split.blocks, tl.num_programs(0), num_stages=block.stages):
                _resident(io, affine, stats, eps, number, view, maps, split, norm, block, mode)
        else:
            _resident(io, affine, stats, eps, pid, view, maps, split, norm, block, mode)
    else:
        _part(io, affine, stats, parts_ptr, eps, pid, view, maps, split, norm, block, mode)


@triton.jit
def _resident(io, affine, stats, eps, number, view, maps, split, norm: tl.constexpr, block: tl.constexpr, mode: tl.constexpr):
    """Compute the statistics and y of the whole sets in the `number`-th block of columns. x is read once.

    A set has block.run columns of the block. If block.remainder is not 0, its rows are held as two blocks, of block.i and
    block.remainder rows.
    """
    r = tl.arange(0, block.i)[:, None]
    o, column = number // split.blocks, number % split.blocks * block.j + tl.arange(0, block.j)[None, :]
    s, t = column // block.run, column % block.run
    x_at, y_at, here = locate_columns(o, s, t, column, view, split.columns, mode.dense)
    inside = r < view.reps
    x = load(io, x_at + r.to(tl.int64) * view.x_r, inside & here, "")
    DTYPE: tl.constexpr = io.y_ptr.dtype.element_ty
    mean = tl.sum(scaled_down(x, DTYPE), 0, keep_dims=True)
    if block.remainder:
        r_rest = block.i + tl.arange(0, block.remainder)[:, None]
        inside_rest = r_rest < view.reps
        x_rest = load(io, x_at + r_rest.to(tl.int64) * view.x_r, inside_rest & here, "")
        mean += tl.sum(scaled_down(x_rest, DTYPE), 0, keep_dims=True)
    mean = scaled_up(sum_over_run(mean, block.j, block.run) / view.reps / view.run, DTYPE)  # (2) of docs/theory.md
    if norm.centered:
        x = tl.where(inside & here, x - mean, 0.0)
    var = tl.sum(x * x, 0, keep_dims=True)
    if block.remainder:
        if norm.centered:
            x_rest = tl.where(inside_rest & here, x_rest - mean, 0.0)
        var += tl.sum(x_rest * x_rest, 0, keep_dims=True)
    var = sum_over_run(var, block.j, block.run) / view.reps / view.run  # (3) of docs/theory.md
    rstd = inverse_deviation(var, eps)
    store_statistics(stats, o * view.sets + s, mean, rstd, var, here & (t == 0))
    place = Place(o=o, r=r, s=s, t=t, i_inside=inside, j_inside=here)
    factor, term = fold_affine(rstd, affine, maps, place, norm, AXIS_R, AXIS_S | AXIS_T)
    store(io.y_ptr, y_at + r.to(tl.int64) * view.y_r, x * factor + term, inside & here, norm.activation, "")
    if block.remainder:
        place = Place(o=o, r=r_rest, s=s, t=t, i_inside=inside_rest, j_inside=here)
        factor, term = fold_affine(rstd, affine, maps, place, norm, AXIS_R, AXIS_S | AXIS_T)
        store(io.y_ptr, y_at + r_rest.to(tl.int64) * view.y_r, x_rest * factor + term, inside_rest & here, norm.activation, "")


@triton.jit
def _part(io, affine, stats, parts_ptr, eps, pid, view, maps, split, norm: tl.constexpr, block: tl.constexpr, mode: tl.constexpr):
    """Store the moments (mean and M2) of each of block.j columns over one part of the rows, or y for these elements."""
    i = tl.arange(0, block.i)[:, None]
    o, part = pid // split.blocks // split.parts_r, pid // split.blocks % split.parts_r
    column = pid % split.blocks * block.j + tl.arange(0, block.j)[None, :]
    in_row = column % split.columns_of_x if mode.abreast else column
    s, t = in_row // view.run, in_row % view.run
    x_at, y_at, here = locate_columns(o, s, t, column, view, split.columns, mode.dense)
    start = part * split.chunk_r
    end = tl.minimum(start + split.chunk_r, view.reps)
    if mode.abreast:
        # The last row may lack some rows of x. It is read separately, because its mask would prevent vector loads of the others.
        abreast = split.columns // split.columns_of_x
        full = split.rows_of_x // abreast
        in_last = here & (column < tl.where(end > full, split.rows_of_x % abreast * split.columns_of_x, 0))
        x_last, y_last = x_at + full.to(tl.int64) * view.x_r, y_at + full.to(tl.int64) * view.y_r
        end = tl.minimum(end, full)
    if mode.reduce:
        mean, m2 = tl.zeros((block.i, block.j), tl.float32), tl.zeros((block.i, block.j), tl.float32)
        k = 0.0
        for r0 in tl.range(start, end, block.i, num_stages=block.stages):
            mask = (r0 + i < end) & here
            k += 1.0
            x = load(io, x_at + (r0 + i).to(tl.int64) * view.x_r, mask, "")
            mean, m2 = update(mean, m2, k, x, mask, norm.centered)
        mean, m2 = merge(mean, m2, lanes(start, end, i, block.i), tl.maximum(end - start, 1) * 1.0, 0, norm.centered)
        if mode.abreast:
            x = load(io, x_last, in_last, "")
            mean, m2, _ = join(mean, m2, (end - start) * 1.0, x, 0.0 if norm.centered else x * x, in_last.to(tl.float32), norm.centered)
        at = (o.to(tl.int64) * split.parts_r + part) * split.columns + column
        tl.store(parts_ptr + at, mean, mask=here)
        tl.store(parts_ptr + split.m2_offset + at, m2, mask=here)
    else:
        PARAM_PER_ROW: tl.constexpr = (norm.param_axes | norm.modulation_axes) & AXIS_R
        mean, spread = load_statistics(stats, o * view.sets + s, here)
        rstd = known_rstd(stats, spread, eps)
        if not PARAM_PER_ROW:
            place = Place(o=o, r=0, s=s, t=t, i_inside=None, j_inside=here)
            factor, term = fold_affine(rstd, affine, maps, place, norm, AXIS_R, AXIS_S | AXIS_T)
        for r0 in tl.range(start, end, block.i, num_stages=block.stages):
            r = r0 + i
            inside = r < end
            x = load_x(io.x_ptr, x_at + r.to(tl.int64) * view.x_r, inside & here, "")
            if PARAM_PER_ROW:
                place = Place(o=o, r=r, s=s, t=t, i_inside=inside, j_inside=here)
                factor, term = fold_affine(rstd, affine, maps, place, norm, AXIS_R, AXIS_S | AXIS_T)
            store(io.y_ptr, y_at + r.to(tl.int64) * view.y_r, (x - mean) * factor + term, inside & here, norm.activation, "")
        if mode.abreast:
            x = load_x(io.x_ptr, x_last, in_last, "")
            store(io.y_ptr, y_last, (x - mean) * factor + term, in_last, norm.activation, "")
