"""The backward kernel of the team family: x and dy are read once, and stay in registers until the sums over sets are known.

Memory is x[o, r, s, t]. A set is the elements of one o and s, which share a mean and a variance. A column is one (s, t). A
unit of work is one o and a block of columns, which holds whole sets. A team of programs, its members, shares the rows r of
a unit. Each member computes the sums (39) of each column over its rows. They give the partial gradients of parameters,
called cells (40), and the sums over sets in its rows (41). It waits for the sums of the others, adds all of them in the same
order, and computes dx of its rows (8). The numbers are equations of docs/theory.md.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from onepass.backends.gpu.device.affine import fold_affine
from onepass.backends.gpu.device.axes import AXIS_S, AXIS_T, NO_AXIS
from onepass.backends.gpu.device.columns import locate_columns
from onepass.backends.gpu.device.elements import program
from onepass.backends.gpu.device.gradients import again, gradients, load_both, load_saved, store_cells, store_gradient
from onepass.backends.gpu.device.groups import Affine, Cells, GradientTensors, Maps, Place, SetValues, View

from .exchange import add_members, wait_for_team
from .kernel import offset, sum_sets, to_columns
from .launch import Exchange, TeamSplit


@triton.jit
def team_backward(
    io: GradientTensors, affine: Affine, exchange: Exchange, values: SetValues, cells: Cells, count, view: View, maps: Maps,
    split: TeamSplit, norm: tl.constexpr, block: tl.constexpr, mode: tl.constexpr,
):  # fmt: skip
    """Compute dx and the cells of all units. Sets have `count` elements.

    `norm` is a Norm of device/groups.py, `block` a TeamBackwardBlock and `mode` a TeamBackwardMode of team/launch_backward.py.
    """
    pid = program(False, mode.wide, mode.pdl_trigger, False)
    team, member, start, end = pid, 0, 0, view.reps
    if mode.members > 1:
        team, member = pid // split.members, pid % split.members
        start = member * split.rows
        end = tl.minimum(start + split.rows, view.reps)
    for unit in tl.range(team, split.units, split.teams, num_stages=1):
        o, number = unit // split.blocks, unit % split.blocks
        s0, first = number * split.sets, number * split.width
        to_cells = (o.to(tl.int64) * split.members + member) * split.columns
        set_ = (first + tl.arange(0, block.j)[None, :]) // view.run - s0  # the set of each column, counted from the first of this unit
        columns = _columns(values, affine, maps, o, first, 0, view, split, norm, block.j, mode)
        xs, dys = _load(io, columns, start, end, view, block.i, block.steps, mode)
        if block.remainder > 0:  # a unit is one set. All loads come first: stores of cells need barriers, and no load moves over a barrier
            more = _columns(values, affine, maps, o, first, block.j, view, split, norm, block.remainder, mode)
            xs_more, dys_more = _load(io, more, start, end, view, block.i_more, block.steps_more, mode)
        a, b = _reduce(xs, dys, columns, start, end, norm, block.i, block.j, block.steps, mode)
        own1, own2 = _store_cells(cells, to_cells, a, b, affine, maps, columns, norm)
        sum1, sum2 = sum_sets(own1, set_, block), sum_sets(own2, set_, block)
        if block.remainder > 0:
            a, b = _reduce(xs_more, dys_more, more, start, end, norm, block.i_more, block.remainder, block.steps_more, mode)
            own1, own2 = _store_cells(cells, to_cells, a, b, affine, maps, more, norm)
            sum1 += tl.sum(own1, 1, keep_dims=True)
            sum2 += tl.sum(own2, 1, keep_dims=True)
        if mode.members > 1:
            of = s0 + tl.arange(0, block.sets)[:, None]  # the sets of this unit, as [SETS, 1]
            there = (of < view.sets) & (of - s0 < split.sets)
            parts = exchange.parts_ptr + o.to(tl.int64) * split.members * view.sets
            if norm.centered:
                tl.store(parts + member * view.sets + of, sum1, mask=there)
            tl.store(parts + split.m2_offset + member * view.sets + of, sum2, mask=there)
            wait_for_team(exchange.counters_ptr + team, member, split.members)
            sum1, sum2 = add_members(
                parts, s0, view, split.members, split.m2_offset, norm.centered, block.sets, mode.members
            )  # fmt: skip
        c1, c2 = sum1 / count, sum2 / count
        c1_columns, c2_columns = to_columns(c1, set_, block), to_columns(c2, set_, block)
        _apply(io, xs, dys, columns, c1_columns, c2_columns, start, end, view, norm, block.i, block.steps, mode)
        if block.remainder > 0:
            _apply(io, xs_more, dys_more, more, c1, c2, start, end, view, norm, block.i_more, block.steps_more, mode)


class _Columns(NamedTuple):
    """What x_hat and dz of some columns depend on, of shape [1, J], and where the columns lie."""

    mean: Any
    rstd: Any
    factor: Any
    term: Any
    x_at: Any
    y_at: Any
    column: Any  # counted from the first of this o
    place: Any


@triton.jit
def _columns(
    values, affine, maps, o, first, skipped, view, split, norm: tl.constexpr, BLOCK_J: tl.constexpr, mode: tl.constexpr
):  # fmt: skip
    """Return the BLOCK_J columns of a unit after its first `skipped` columns. The unit begins at column `first` of o."""
    j = skipped + tl.arange(0, BLOCK_J)[None, :]
    column = first + j
    s, t = column // view.run, column % view.run
    x_at, y_at, here = locate_columns(o, s, t, column, view, split.columns, mode.dense)
    here &= j < split.width
    if mode.full_columns:
        here = tl.full((1, BLOCK_J), True, tl.int1)
    if mode.int32_offsets:
        x_at, y_at = x_at.to(tl.int32), y_at.to(tl.int32)
    place = Place(o=o, r=0, s=s, t=t, i_inside=here, j_inside=here)
    factor, term = fold_affine(1.0, affine, maps, place, norm, NO_AXIS, AXIS_S | AXIS_T)
    mean, rstd = load_saved(values, o.to(tl.int64) * view.sets + s, here)
    return _Columns(mean=mean, rstd=rstd, factor=factor, term=term, x_at=x_at, y_at=y_at, column=column, place=place)


@triton.jit
def _rows(n, start, end, BLOCK_I: tl.constexpr, mode: tl.constexpr):
    """Return the rows of step n, and whether they are rows of this member."""
    r = start + n * BLOCK_I + tl.arange(0, BLOCK_I)[:, None]
    inside = r < end
    if mode.full_rows:
        inside = tl.full((BLOCK_I, 1), True, tl.int1)
    return r, inside


@triton.jit
def _load(io, columns, start, end, view, BLOCK_I: tl.constexpr, STEPS: tl.constexpr, mode: tl.constexpr):
    """Return x and dy of this member's rows, step by step."""
    xs = ()
    dys = ()
    for n in tl.static_range(STEPS):
        r, inside = _rows(n, start, end, BLOCK_I, mode)
        x_at = columns.x_at + offset(r, mode.int32_offsets) * view.x_r
        y_at = columns.y_at + offset(r, mode.int32_offsets) * view.y_r
        x, dy = load_both(io, x_at, y_at, inside & columns.place.j_inside)
        xs += (x,)
        dys += (dy,)
    return xs, dys


@triton.jit
def _reduce(
    xs, dys, columns, start, end, norm: tl.constexpr, BLOCK_I: tl.constexpr, BLOCK_J: tl.constexpr, STEPS: tl.constexpr,
    mode: tl.constexpr,
):  # fmt: skip
    """Return for each column the sums a = Σ dz·x_hat and b = Σ dz over this member's rows. (39)"""
    a, b = tl.zeros((BLOCK_I, BLOCK_J), tl.float32), tl.zeros((BLOCK_I, BLOCK_J), tl.float32)
    for n in tl.static_range(STEPS):
        _, inside = _rows(n, start, end, BLOCK_I, mode)
        mask = inside & columns.place.j_inside
        x_hat, dz, _ = gradients(
            xs[n], dys[n], columns.mean, columns.rstd, columns.factor, columns.term, mask, norm.activation, mode.from_y
        )  # fmt: skip
        a += dz * x_hat
        b += dz
    return tl.sum(a, 0, keep_dims=True), tl.sum(b, 0, keep_dims=True)


@triton.jit
def _store_cells(cells, at, a, b, affine, maps, columns, norm: tl.constexpr):
    """Store the cells of some columns. Return the sums of wdy and of wdy·x_hat over each column. (40), (41)"""
    place = columns.place
    store_cells(cells, at + columns.column, place.j_inside, a, b, affine, maps, place, norm, NO_AXIS, AXIS_S | AXIS_T)
    return b * columns.factor, a * columns.factor


@triton.jit
def _apply(
    io, xs, dys, columns, c1, c2, start, end, view, norm: tl.constexpr, BLOCK_I: tl.constexpr, STEPS: tl.constexpr, mode: tl.constexpr
):  # fmt: skip
    """Compute dx from c1 and c2 of each column, and store it. (8)"""
    if not norm.centered:
        c1 = 0.0
    for n in tl.static_range(STEPS):
        r, inside = _rows(n, start, end, BLOCK_I, mode)
        mask = inside & columns.place.j_inside
        x_hat, _, wdy = gradients(
            again(xs[n]), again(dys[n]), columns.mean, columns.rstd, columns.factor, columns.term, mask, norm.activation, mode.from_y
        )  # fmt: skip
        store_gradient(io, columns.y_at + offset(r, mode.int32_offsets) * view.y_r, mask, wdy, x_hat, columns.rstd, c1, c2)
