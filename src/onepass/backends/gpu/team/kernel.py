"""The team kernel: in one launch, programs that run at the same time share large sets.

Memory is x[o, r, s, t]. A set is the elements of one o and s, which share a mean and a variance. A unit of work is one o
and a block of columns (s, t), which holds whole sets. A team of programs, its members, shares the rows r of a unit. Each
member computes the moments (mean and M2) of its rows, waits for those of the others, merges all of them in the same
order, and normalizes its rows. (2), (3), (14) and (15) are equations of docs/theory.md.
"""

import triton
import triton.language as tl

from onepass.backends.gpu.device.affine import fold_affine
from onepass.backends.gpu.device.axes import AXIS_R, AXIS_S, AXIS_T
from onepass.backends.gpu.device.columns import locate_columns
from onepass.backends.gpu.device.elements import load, load_x, program, store
from onepass.backends.gpu.device.groups import Affine, Maps, Place, Statistics, Tensors, View
from onepass.backends.gpu.device.moments import (
    DOWN,
    UP,
    inverse_deviation,
    lanes,
    merge,
    scaled_down,
    scaled_up,
    store_statistics,
    update,
)

from .exchange import merge_members, wait_for_team
from .launch import Exchange, TeamSplit


@triton.jit
def team_forward(
    io: Tensors, affine: Affine, exchange: Exchange, stats: Statistics, eps, view: View, maps: Maps, split: TeamSplit,
    norm: tl.constexpr, block: tl.constexpr, mode: tl.constexpr,
):  # fmt: skip
    """Normalize all units of work.

    `norm` is a Norm of device/groups.py, `block` a TeamBlock and `mode` a TeamMode of team/launch.py.
    """
    if mode.same_strides:
        view = View(
            reps=view.reps, sets=view.sets, run=view.run,
            x_o=view.x_o, x_r=view.x_r, x_s=view.x_s, y_o=view.x_o, y_r=view.x_r, y_s=view.x_s,
        )  # fmt: skip
    pid = program(False, mode.wide, False, False)
    team, member, start, end = pid, 0, 0, view.reps
    if mode.members > 1:
        team, member = pid // split.members, pid % split.members
        start = member * split.rows
        end = tl.minimum(start + split.rows, view.reps)
    count = (end - start) * 1.0 * view.run  # elements of a set that this member has
    PARAM_PER_ROW: tl.constexpr = (norm.param_axes | norm.modulation_axes) & AXIS_R
    i = tl.arange(0, block.i)[:, None]
    lane = tl.arange(0, block.j)[None, :]
    for unit in tl.range(team, split.units, split.teams, num_stages=1):
        o, number = unit // split.blocks, unit % split.blocks
        s0, parts = number * split.sets, exchange.parts_ptr
        if mode.members > 1:
            parts = exchange.parts_ptr + o.to(tl.int64) * split.members * view.sets
        column = number * split.width + lane
        if block.run:
            s, t = column // block.run, column % block.run
        else:
            s, t = column // view.run, column % view.run
        x_at, y_at, here = locate_columns(o, s, t, column, view, split.columns, mode.dense)
        here &= lane < split.width
        if mode.even:
            here = tl.full((1, block.j), True, tl.int1)
        if mode.int32_offsets:
            x_at, y_at = x_at.to(tl.int32), y_at.to(tl.int32)
        if mode.resident:
            r = start + i
            inside = r < end
            if mode.even:
                inside = tl.full((block.i, 1), True, tl.int1)
            kept = load(io, x_at + _offset(r, mode.int32_offsets) * view.x_r, inside & here, "")
            # Parameters do not need the statistics, so they are loaded while x is on its way.
            place = Place(o=o, r=r, s=s, t=t, i_inside=inside, j_inside=here)
            gain, term = fold_affine(1.0, affine, maps, place, norm, AXIS_R, AXIS_S | AXIS_T)
            DTYPE: tl.constexpr = io.y_ptr.dtype.element_ty
            sums = tl.sum(scaled_down(kept, DTYPE), 0, keep_dims=True)
            own = scaled_up(_sum_sets(sums, s - s0, block) / count, DTYPE)  # the mean (2) of this member's rows
            if norm.centered:
                kept = tl.where(inside & here, kept - _to_columns(own, s - s0, block), 0.0)
            m2 = _sum_sets(tl.sum(kept * kept, 0, keep_dims=True), s - s0, block)
        else:
            own, m2 = _reduce(io, x_at, start, end, view, s - s0, here, norm, block, mode)
        of = s0 + tl.arange(0, block.sets)[:, None]  # the sets of this unit, as [SETS, 1]
        mean, writes = own, (of < view.sets) & (of - s0 < split.sets)
        if mode.members > 1:
            if norm.centered:
                tl.store(parts + member * view.sets + of, own, mask=writes)
            tl.store(parts + split.m2_offset + member * view.sets + of, m2, mask=writes)
            wait_for_team(exchange.counters_ptr + team, member, split.members)
            mean, m2 = merge_members(
                parts, s0, view, split.members, split.rows, split.m2_offset, norm.centered, block.sets, mode.members
            )  # fmt: skip
            writes &= member == 0
        var = m2 / view.reps / view.run  # (3)
        rstd = inverse_deviation(var, eps)
        store_statistics(stats, o * view.sets + of, mean, rstd, var, writes)
        if mode.resident:
            factor = gain * _to_columns(rstd, s - s0, block)
            if norm.centered and mode.members > 1:  # `kept` has the member's own mean subtracted, not the mean of the set
                term += _to_columns(own - mean, s - s0, block) * factor
            y_row = y_at + _offset(r, mode.int32_offsets) * view.y_r
            store(io.y_ptr, y_row, kept * factor + term, inside & here, norm.activation, "")
        else:
            mean, rstd = _to_columns(mean, s - s0, block), _to_columns(rstd, s - s0, block)
            source = io.x_ptr
            if io.residual_ptr is not None:
                source = io.sum_ptr
                if mode.members == 1:
                    tl.debug_barrier()  # below, a thread may read what another thread has stored
            if not PARAM_PER_ROW:
                place = Place(o=o, r=0, s=s, t=t, i_inside=None, j_inside=here)
                factor, term = fold_affine(rstd, affine, maps, place, norm, AXIS_R, AXIS_S | AXIS_T)
            last = start + (end - start - 1) // block.i * block.i  # go backwards: the rows read last may still be in the cache
            for back in tl.range(0, end - start, block.i, num_stages=block.stages):
                r = last - back + i
                inside = r < end
                again = load_x(source, x_at + _offset(r, mode.int32_offsets) * view.x_r, inside & here, "")
                if PARAM_PER_ROW:
                    place = Place(o=o, r=r, s=s, t=t, i_inside=inside, j_inside=here)
                    factor, term = fold_affine(rstd, affine, maps, place, norm, AXIS_R, AXIS_S | AXIS_T)
                if norm.centered:
                    again -= mean
                y_row = y_at + _offset(r, mode.int32_offsets) * view.y_r
                store(io.y_ptr, y_row, again * factor + term, inside & here, norm.activation, "")


@triton.jit
def _offset(r, INT32: tl.constexpr):
    if INT32:
        return r
    else:
        return r.to(tl.int64)


@triton.jit
def _reduce(io, x_at, start, end, view, set_, here, norm: tl.constexpr, block: tl.constexpr, mode: tl.constexpr):
    """Return the mean and M2 of each set over the rows from start to end, each of shape [SETS, 1]. (14), (15)"""
    i = tl.arange(0, block.i)[:, None]
    mean, m2 = tl.zeros((block.i, block.j), tl.float32), tl.zeros((block.i, block.j), tl.float32)
    k = 0.0
    for r0 in tl.range(start, end, block.i, num_stages=block.stages):
        mask = (r0 + i < end) & here
        k += 1.0
        x = load(io, x_at + _offset(r0 + i, mode.int32_offsets) * view.x_r, mask, "")
        mean, m2 = update(mean, m2, k, x, mask, norm.centered)
    rows = (end - start) * 1.0
    mean, m2 = merge(mean, m2, lanes(start, end, i, block.i), rows, 0, norm.centered)
    if norm.centered:
        of_set = _sum_sets(mean * DOWN, set_, block) / view.run * UP
        delta = tl.where(here, mean - _to_columns(of_set, set_, block), 0.0)
        mean, m2 = of_set, m2 + delta * delta * rows
    else:
        mean = tl.zeros((block.sets, 1), tl.float32)
    return mean, _sum_sets(m2, set_, block)


@triton.jit
def _sum_sets(sums, set_, block: tl.constexpr):
    """Return the sum over the columns of each set, of shape [SETS, 1]."""
    if block.run:
        return tl.sum(tl.reshape(sums, (block.sets, block.run)), 1, keep_dims=True)
    else:
        return tl.sum(tl.where(set_ == tl.arange(0, block.sets)[:, None], sums, 0.0), 1, keep_dims=True)


@triton.jit
def _to_columns(each, set_, block: tl.constexpr):
    """Repeat the value of each set, of shape [SETS, 1], in all columns of that set. The result has the shape [1, J]."""
    if block.run:
        return tl.reshape(tl.broadcast_to(each, (block.sets, block.run)), (1, block.j))
    else:
        return tl.sum(tl.where(set_ == tl.arange(0, block.sets)[:, None], each, 0.0), 0, keep_dims=True)
