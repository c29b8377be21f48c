"""The whole_set kernel: a program, or a team of programs, takes one set at a time.

Memory is x[o, r, s, t]. A set is the elements of one o and s, which share a mean and a variance. Its rows r are runs of
`run` contiguous elements. Threads load a set row after row, one vector of a few elements at a time. So all threads have
work, however short a row is, and sums need not distinguish columns. The elements between the rows belong to other sets,
whose programs read them at the same time. In a folded walk (gpu/walk.py), a set is one run, which is read as rows that follow
one another. A set that is too large for one program is shared by a team: its members take
some rows each. (2) and (3) are equations of docs/theory.md.
"""

import triton
import triton.language as tl

from onepass.backends.gpu.device.affine import fold_affine
from onepass.backends.gpu.device.axes import AXIS_R, AXIS_T, NO_AXIS
from onepass.backends.gpu.device.elements import load, store
from onepass.backends.gpu.device.groups import Affine, Maps, Place, Statistics, Tensors, View
from onepass.backends.gpu.device.moments import inverse_deviation, scaled_down, scaled_up, store_statistics
from onepass.backends.gpu.team.exchange import merge_members, wait_for_team
from onepass.backends.gpu.team.launch import Exchange

from .launch import WholeSetSplit


@triton.jit
def whole_set_forward(
    io: Tensors, affine: Affine, exchange: Exchange, stats: Statistics, eps, total, view: View, maps: Maps, split: WholeSetSplit,
    norm: tl.constexpr, mode: tl.constexpr,
):  # fmt: skip
    """Normalize `total` sets. `norm` is a Norm of device/groups.py, `mode` a WholeSetMode of whole_set/launch.py."""
    x_s, y_o, y_r, y_s = view.x_s, view.y_o, view.y_r, view.y_s
    if mode.dense:
        x_s, y_s = view.run, view.run
    if mode.same_strides:
        y_o, y_r, y_s = view.x_o, view.x_r, x_s
    team, member = tl.program_id(0) // split.members, tl.program_id(0) % split.members
    start = member * split.rows
    end = tl.minimum(start + split.rows, view.reps)
    count = (end - start) * 1.0 * view.run  # elements of a set that this member has
    here = tl.full((1, mode.vector), True, tl.int1)
    for set_ in tl.range(team, total, split.teams, num_stages=1):
        o, s = set_ // view.sets, set_ % view.sets
        DTYPE: tl.constexpr = io.y_ptr.dtype.element_ty
        kept = ()
        sums = tl.zeros((mode.threads, mode.vector), tl.float32)
        for n in tl.static_range(mode.vectors):
            r, t, inside = _vectors(n, start, end, mode)
            kept += (load(io, _offset(o, s, r, t, view.x_o, view.x_r, x_s, mode.int32_offsets), inside, ""),)
            sums += scaled_down(kept[n], DTYPE)
        # The mean (2) of this member's rows. With `/` instead of `div_rn`, the compiler would round the mean differently,
        # depending on whether the kernel stores it.
        own = scaled_up(tl.div_rn(tl.sum(sums), count), DTYPE)
        centered = ()
        sums = tl.zeros((mode.threads, mode.vector), tl.float32)
        for n in tl.static_range(mode.vectors):
            away = kept[n]
            if norm.centered:
                _, _, inside = _vectors(n, start, end, mode)
                away = tl.where(inside, away - own, 0.0)
            centered += (away,)
            sums += away * away
        mean, m2 = own, tl.sum(sums)
        if mode.members > 1:
            parts = exchange.parts_ptr + o.to(tl.int64) * split.members * view.sets
            if norm.centered:
                tl.store(parts + member * view.sets + s, own)
            tl.store(parts + split.m2_offset + member * view.sets + s, m2)
            wait_for_team(exchange.counters_ptr + team, member, split.members)
            mean, m2 = merge_members(parts, s, view, split.members, split.rows, split.m2_offset, norm.centered, 1, mode.members)
            mean, m2 = tl.sum(mean), tl.sum(m2)  # from the shape [1, 1] to scalars
        var = m2 / view.reps / view.run  # (3)
        rstd = inverse_deviation(var, eps)
        store_statistics(stats, set_, mean, rstd, var, member == 0)
        for n in tl.static_range(mode.vectors):
            r, t, inside = _vectors(n, start, end, mode)
            if not mode.folded:
                place = Place(o=o, r=r, s=s, t=t, i_inside=inside, j_inside=here)
                factor, term = fold_affine(rstd, affine, maps, place, norm, AXIS_R | AXIS_T, AXIS_T)
            elif mode.per_vector:  # all elements of a vector have the same parameters: take the t of the first
                first = r * mode.run + _start(n, mode)
                place = Place(o=o, r=0, s=s, t=first, i_inside=inside, j_inside=here)
                factor, term = fold_affine(rstd, affine, maps, place, norm, AXIS_T, NO_AXIS)
            else:
                place = Place(o=o, r=0, s=s, t=r * mode.run + t, i_inside=inside, j_inside=here)
                factor, term = fold_affine(rstd, affine, maps, place, norm, AXIS_T, AXIS_T)
            if norm.centered and mode.members > 1:  # `centered` has the member's own mean subtracted, not the mean of the set
                term += (own - mean) * factor
            y_at = _offset(o, s, r, t, y_o, y_r, y_s, mode.int32_offsets)
            store(io.y_ptr, y_at, centered[n] * factor + term, inside, norm.activation, "")


@triton.jit
def _vectors(n, start, end, mode: tl.constexpr):
    """Return r and t of the n-th vector of each thread, and whether the vector lies in this member's rows."""
    vector = n * mode.threads + tl.arange(0, mode.threads)[:, None]
    r = start + vector // (mode.run // mode.vector)
    t = _start(n, mode) + tl.arange(0, mode.vector)[None, :]
    inside = r < end
    if mode.even:
        inside = tl.full((mode.threads, 1), True, tl.int1)
    return r, t, inside


@triton.jit
def _start(n, mode: tl.constexpr):
    """Return t of the first element of the n-th vector of each thread."""
    vector = n * mode.threads + tl.arange(0, mode.threads)[:, None]
    return vector % (mode.run // mode.vector) * mode.vector


@triton.jit
def _offset(o, s, r, t, stride_o, stride_r, stride_s, INT32: tl.constexpr):
    first = o.to(tl.int64) * stride_o + s.to(tl.int64) * stride_s
    if INT32:
        return first.to(tl.int32) + r * stride_r + t
    else:
        return first + r.to(tl.int64) * stride_r + t
