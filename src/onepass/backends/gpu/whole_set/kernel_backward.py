"""The backward kernel of the whole_set family: x and dy of a set are read once, and stay in registers until its sums are known.

Memory is x[o, r, s, t]. A set is one o and s, and here it is one run: its elements are contiguous. A channel is the elements
of a set that share their parameters. A program takes a set in stretches of one channel each. Their sums (39) give the partial
gradients of parameters, called cells (40), and the sums over the set (41). A set that is too large for one program is shared
by a team: its members take some stretches each, and add up the sums of all in the same order. Then each computes dx (8). The
numbers are equations of docs/theory.md.
"""

import triton
import triton.language as tl

from onepass.backends.gpu.device.affine import fold_affine
from onepass.backends.gpu.device.axes import AXIS_T, NO_AXIS
from onepass.backends.gpu.device.elements import program
from onepass.backends.gpu.device.gradients import again, gradients, load_both, load_saved, store_cells, store_gradient
from onepass.backends.gpu.device.groups import Affine, Cells, GradientTensors, Maps, Place, SetValues
from onepass.backends.gpu.team.exchange import wait_for_team
from onepass.backends.gpu.team.launch import Exchange

from .launch_backward import WholeSetBackwardSplit, WholeSetBackwardView


@triton.jit
def whole_set_backward(
    io: GradientTensors, affine: Affine, exchange: Exchange, values: SetValues, cells: Cells, count, total, view: WholeSetBackwardView,
    maps: Maps, split: WholeSetBackwardSplit, norm: tl.constexpr, mode: tl.constexpr,
):  # fmt: skip
    """Compute dx and the cells of `total` sets of `count` elements.

    `norm` is a Norm of device/groups.py, `mode` a WholeSetBackwardMode of whole_set/launch_backward.py.
    """
    pid = program(False, mode.wide, mode.pdl_trigger, False)
    team, member = pid, 0
    if mode.members > 1:
        team, member = pid // split.members, pid % split.members
    for set_ in tl.range(team, total, split.teams, num_stages=1):
        o, s = set_ // view.sets, set_ % view.sets
        x_at, y_at = o.to(tl.int64) * view.x_o + s.to(tl.int64) * view.x_s, o.to(tl.int64) * view.y_o + s.to(tl.int64) * view.y_s
        if mode.int32_offsets:
            x_at, y_at = x_at.to(tl.int32), y_at.to(tl.int32)
        mean, rstd = load_saved(values, set_, None)
        xs = ()
        dys = ()
        factors = ()
        terms = ()
        sum1, sum2 = tl.zeros((mode.block_i, 1), tl.float32), tl.zeros((mode.block_i, 1), tl.float32)
        # A loop of loads alone: stores of cells need barriers, and the compiler moves no load over a barrier.
        for n in tl.static_range(mode.steps):
            stretch, at, inside = _stretches(member * mode.steps + n, split, mode)
            x, dy = load_both(io, x_at + at, y_at + at, inside)
            place = _place(o, s, stretch, inside, split)
            factor, term = fold_affine(1.0, affine, maps, place, norm, AXIS_T, NO_AXIS)
            xs += (x,)
            dys += (dy,)
            factors += (factor,)
            terms += (term,)
        for n in tl.static_range(mode.steps):
            stretch, _, inside = _stretches(member * mode.steps + n, split, mode)
            x_hat, dz, _ = gradients(xs[n], dys[n], mean, rstd, factors[n], terms[n], inside, norm.activation, mode.from_y)
            a, b = tl.sum(dz * x_hat, 1, keep_dims=True), tl.sum(dz, 1, keep_dims=True)
            place = _place(o, s, stretch, inside, split)
            to = (o.to(tl.int64) * view.sets + s) * split.stretches + stretch
            store_cells(cells, to, inside, a, b, affine, maps, place, norm, AXIS_T, NO_AXIS)
            sum1 += b * factors[n]
            sum2 += a * factors[n]
        sum1, sum2 = tl.sum(sum1), tl.sum(sum2)
        if mode.members > 1:
            parts = exchange.parts_ptr + o.to(tl.int64) * split.members * view.sets
            if norm.centered:
                tl.store(parts + member * view.sets + s, sum1)
            tl.store(parts + split.offset + member * view.sets + s, sum2)
            wait_for_team(exchange.counters_ptr + team, member, split.members)
            sum1, sum2 = _add_members(parts + s, view, split, norm, mode)
        c1, c2 = 0.0, sum2 / count
        if norm.centered:
            c1 = sum1 / count
        for n in tl.static_range(mode.steps):
            _, at, inside = _stretches(member * mode.steps + n, split, mode)
            x_hat, _, wdy = gradients(
                again(xs[n]), again(dys[n]), mean, rstd, factors[n], terms[n], inside, norm.activation, mode.from_y
            )  # fmt: skip
            store_gradient(io, y_at + at, inside, wdy, x_hat, rstd, c1, c2)


@triton.jit
def _stretches(step, split, mode: tl.constexpr):
    """Return the numbers of the stretches of a step, where their elements are in the set, and whether they exist."""
    stretch = step * mode.block_i + tl.arange(0, mode.block_i)[:, None]
    inside = stretch < split.stretches
    if mode.full:
        inside = tl.full((mode.block_i, 1), True, tl.int1)
    return stretch, stretch * mode.block_j + tl.arange(0, mode.block_j)[None, :], inside


@triton.jit
def _add_members(parts, view, split, norm: tl.constexpr, mode: tl.constexpr):
    """Return both sums of a set, from those of all members. `parts` points to the first sum of the first member.

    Without a mean, the first sum is 0.
    """
    BLOCK: tl.constexpr = min(mode.members, 32)  # few at a time: see `merge_members` of team/exchange.py
    sum1, sum2 = tl.zeros((BLOCK,), tl.float32), tl.zeros((BLOCK,), tl.float32)
    for first in range(0, split.members, BLOCK):
        member = first + tl.arange(0, BLOCK)
        at, mask = parts + member * view.sets, member < split.members
        sum2 += tl.load(at + split.offset, mask=mask, other=0.0, cache_modifier=".cg")
        if norm.centered:
            sum1 += tl.load(at, mask=mask, other=0.0, cache_modifier=".cg")
    return tl.sum(sum1), tl.sum(sum2)


@triton.jit
def _place(o, s, stretch, inside, split):
    """Return the Place of stretches. Its t is a channel."""
    return Place(o=o, r=0, s=s, t=stretch // split.of_channel, i_inside=inside, j_inside=inside)
