"""The backward kernel of the row walk, which reads each set along its runs.

A set is the elements that share one mean and variance. It has one or several runs, each contiguous in memory. In
`x[o, r, s, t]` a set is one (o, s), r numbers its runs, and t goes along a run. A block is [I, J]. J goes along a run, and
I indexes sets of one run each, or the runs of one set. A part is the share of a set that one program works on.

Gradients need two sums over each set, c1 and c2, and for each parameter a sum over the elements that use it. Programs
store partial sums for parameters, called cells, and `add_up` of partials/sums_kernel.py adds these. If parameters vary
along a run, the elements of one parameter lie in many sets. Then a program takes in turn the sets of one segment, a group
of sets that use the same parameters. Otherwise a program sums the elements of each parameter within a set, and the sums
over the set follow by equation (41). (6), (7) and (41) are equations of docs/theory.md.
"""

import triton
import triton.language as tl

from onepass.backends.gpu.device.affine import fold_affine
from onepass.backends.gpu.device.axes import AXIS_O, AXIS_R, AXIS_S, AXIS_T, NO_AXIS
from onepass.backends.gpu.device.elements import program
from onepass.backends.gpu.device.gradients import gradients, load_both, load_saved, load_sums, store_cells, store_gradient
from onepass.backends.gpu.device.groups import Affine, Cells, GradientTensors, Maps, Place, SetValues, View
from onepass.backends.gpu.device.segments import member_of
from onepass.backends.gpu.partials.gradient import SegmentArguments, SplitArguments

from .kernel import RUNS_OF_ENDS, ends_of, first_vector, in_vectors


@triton.jit
def row_backward(
    io: GradientTensors, affine: Affine, values: SetValues, cells: Cells, count, total, view: View, maps: Maps,
    segments: SegmentArguments, split: SplitArguments, norm: tl.constexpr, block: tl.constexpr, mode: tl.constexpr,
):  # fmt: skip
    """Compute c1 and c2 of `total` sets of `count` elements, partial sums for parameters (cells), or dx, as `mode` says.

    `norm` is a Norm of device/groups.py, `block` a RowBlock of row/launch.py, `mode` a RowBackwardMode of
    row/launch_backward.py.
    """
    PARAM_ALONG_RUN: tl.constexpr = (norm.param_axes | norm.modulation_axes) & AXIS_T
    pid = program(not mode.reduce, mode.wide, mode.pdl_trigger, mode.pdl_wait)
    if mode.across:
        _across(io, affine, values, cells, count, pid, view, maps, segments, split, norm, block, mode)
    elif PARAM_ALONG_RUN:
        _set_sums(io, affine, values, pid, total, view, maps, split, norm, block, mode)
    else:
        _part(io, affine, values, cells, count, pid, view, maps, split, norm, block, mode)


@triton.jit
def _across(
    io, affine, values, cells, count, pid, view, maps, segments, split,
    norm: tl.constexpr, block: tl.constexpr, mode: tl.constexpr,
):  # fmt: skip
    """Store dx for sets of one segment, block.i sets at a time, and then their partial sums for parameters (cells).

    Each set is one run, and all sets of a segment use the same parameters. A resident program reads whole runs and computes
    c1 and c2, the sums over each set, itself. Other programs load c1 and c2.

    If mode.peel is not 0, the block holds whole vectors of mode.peel elements, and the programs of the first block also take the ends of
    the run, as a remainder. A program takes every mode.phases-th set. So its sets begin equally far from a multiple of mode.peel.
    """
    PARAM_ALONG_RUN: tl.constexpr = (norm.param_axes | norm.modulation_axes) & AXIS_T
    PEEL: tl.constexpr = mode.peel
    segment, part = pid // (split.parts_r * split.parts_t), pid % (split.parts_r * split.parts_t)
    share = part // split.parts_t
    i, j = tl.arange(0, block.i)[:, None], part % split.parts_t * block.j + tl.arange(0, block.j)[None, :]
    n_whole, before = in_vectors(view.run, PEEL), _before(share % mode.phases, view, PEEL)
    inside = j < n_whole
    first_o, first_s = member_of(0, segment, view.sets, segments, mode.by_set)
    place = Place(o=first_o, r=0, s=first_s, t=before + j, i_inside=None, j_inside=inside)
    factor, term = fold_affine(1.0, affine, maps, place, norm, NO_AXIS, AXIS_T)
    if mode.split_row:  # a run is two blocks. Another program stores dx of the other block, but c1 and c2 need the sums of both
        j_other = (1 - part % split.parts_t) * block.j + tl.arange(0, block.j)[None, :]
        inside_other = j_other < view.run
        place_other = Place(o=first_o, r=0, s=first_s, t=j_other, i_inside=None, j_inside=inside_other)
        factor_other, term_other = fold_affine(1.0, affine, maps, place_other, norm, NO_AXIS, AXIS_T)
    WIDTH: tl.constexpr = block.j if PARAM_ALONG_RUN else 1
    a, b = tl.zeros((block.i, WIDTH), tl.float32), tl.zeros((block.i, WIDTH), tl.float32)
    if block.remainder:
        if PEEL:
            taken = tl.where(part % split.parts_t == 0, view.run, n_whole)
            j_rest, inside_rest = ends_of(before, taken, n_whole, block.remainder)
        else:
            j_rest = block.j + tl.arange(0, block.remainder)[None, :]
            inside_rest = j_rest < view.run
        place_rest = Place(o=first_o, r=0, s=first_s, t=j_rest, i_inside=None, j_inside=inside_rest)
        factor_rest, term_rest = fold_affine(1.0, affine, maps, place_rest, norm, NO_AXIS, AXIS_T)
        a_rest, b_rest = tl.zeros((block.i, block.remainder), tl.float32), tl.zeros((block.i, block.remainder), tl.float32)
    shares = split.parts_r // mode.phases  # of the sets with the same phase
    most = tl.cdiv(segments.members, mode.phases)  # sets with the same phase
    for q0 in tl.range(share // mode.phases * block.i, most, shares * block.i, num_stages=block.stages):
        q = q0 + i
        if not mode.resident:
            q = (most - 1) // block.i * block.i - q0 + i  # last sets first: they may still be cached
        q = q * mode.phases + share % mode.phases
        here = q < segments.members
        o, s = member_of(q, segment, view.sets, segments, mode.by_set)
        set_ = o.to(tl.int64) * view.sets + s
        x_at, y_at = o.to(tl.int64) * view.x_o + s.to(tl.int64) * view.x_s, o.to(tl.int64) * view.y_o + s.to(tl.int64) * view.y_s
        x_first, y_first = first_vector(x_at, PEEL), first_vector(y_at, PEEL)
        mean, rstd = load_saved(values, set_, here)
        x, dy = load_both(io, x_first + j, y_first + j, here & inside)
        x_hat, dz, wdy = gradients(x, dy, mean, rstd, factor, term, here & inside, norm.activation, mode.from_y)
        if PARAM_ALONG_RUN:
            a += dz * x_hat
            b += dz
            sum1, sum2 = wdy, wdy * x_hat
        else:
            sum1, sum2 = dz, dz * x_hat
        if block.remainder:
            x_rest, dy_rest = load_both(io, x_at + j_rest, y_at + j_rest, here & inside_rest)
            mask = here & inside_rest
            x_hat_rest, dz_rest, wdy_rest = gradients(
                x_rest, dy_rest, mean, rstd, factor_rest, term_rest, mask, norm.activation, mode.from_y
            )  # fmt: skip
            a_rest += dz_rest * x_hat_rest
            b_rest += dz_rest
        c1, c2 = 0.0, 0.0
        if (mode.resident and not mode.given and io.dx_ptr is not None) or not PARAM_ALONG_RUN:
            sum1, sum2 = tl.sum(sum1, 1, keep_dims=True), tl.sum(sum2, 1, keep_dims=True)
            if not PARAM_ALONG_RUN:
                a += sum2
                b += sum1
                sum1, sum2 = sum1 * factor, sum2 * factor
            if block.remainder:
                sum1 += tl.sum(wdy_rest, 1, keep_dims=True)
                sum2 += tl.sum(wdy_rest * x_hat_rest, 1, keep_dims=True)
            if mode.split_row:
                mask_other = here & inside_other
                x, dy = load_both(io, x_at + j_other, y_at + j_other, mask_other)
                x_hat_other, _dz, wdy_other = gradients(
                    x, dy, mean, rstd, factor_other, term_other, mask_other, norm.activation, mode.from_y
                )  # fmt: skip
                sum1 += tl.sum(wdy_other, 1, keep_dims=True)
                sum2 += tl.sum(wdy_other * x_hat_other, 1, keep_dims=True)
        if mode.given:
            c1, c2 = None, None
        elif mode.resident:
            if norm.centered:
                c1 = sum1 / count
            c2 = sum2 / count
        else:
            c1, c2 = load_sums(values, set_, here, count)
        store_gradient(io, y_first + j, here & inside, wdy, x_hat, rstd, c1, c2)
        if block.remainder:
            store_gradient(io, y_at + j_rest, here & inside_rest, wdy_rest, x_hat_rest, rstd, c1, c2)
    row = segment.to(tl.int64) * split.parts_r + share
    a, b = tl.sum(a, 0, keep_dims=True), tl.sum(b, 0, keep_dims=True)
    if PARAM_ALONG_RUN:
        at = row * view.run
        store_cells(cells, at + before + j, inside, a, b, affine, maps, place, norm, NO_AXIS, AXIS_T)
        if block.remainder:
            a_rest, b_rest = tl.sum(a_rest, 0, keep_dims=True), tl.sum(b_rest, 0, keep_dims=True)
            store_cells(cells, at + j_rest, inside_rest, a_rest, b_rest, affine, maps, place_rest, norm, NO_AXIS, AXIS_T)
    else:
        at = row * split.parts_t + part % split.parts_t + tl.zeros((1, 1), tl.int32)
        store_cells(cells, at, None, a, b, affine, maps, place, norm, NO_AXIS, NO_AXIS)


@triton.jit
def _before(phase, view, PEEL: tl.constexpr):
    """Return how many elements of the sets phase, phase + phases, ... come before the first multiple of PEEL."""
    if PEEL:
        at = phase.to(tl.int64) * view.x_o
        return (first_vector(at, PEEL) - at).to(tl.int32)
    else:
        return 0


@triton.jit
def _set_sums(io, affine, values, pid, total, view, maps, split, norm: tl.constexpr, block: tl.constexpr, mode: tl.constexpr):
    """Store the sums of wdy and of wdy·x_hat for each of block.i sets, over its whole run or over a part of it.

    Each set is one run. The sums are (6) and (7) without the division by n. If mode.peel is not 0, whole vectors of mode.peel elements
    are loaded apart from the ends of the run, and a program takes every mode.phases-th set, as in `_across`.
    """
    PEEL: tl.constexpr = mode.peel
    group, part = pid // split.parts_t, pid % split.parts_t
    phase = group % mode.phases
    set_ = (group // mode.phases * block.i + tl.arange(0, block.i)[:, None]) * mode.phases + phase
    here = set_ < total
    o, s = set_ // view.sets, set_ % view.sets
    x_at, y_at = o.to(tl.int64) * view.x_o + s.to(tl.int64) * view.x_s, o.to(tl.int64) * view.y_o + s.to(tl.int64) * view.y_s
    mean, rstd = load_saved(values, set_, here)
    n_whole, before = in_vectors(view.run, PEEL), _before(phase, view, PEEL)
    x_first, y_first = first_vector(x_at, PEEL), first_vector(y_at, PEEL)
    start = part * split.chunk_t * block.j
    end = tl.minimum(start + split.chunk_t * block.j, n_whole)
    sum1, sum2 = tl.zeros((block.i, block.j), tl.float32), tl.zeros((block.i, block.j), tl.float32)
    for at0 in tl.range(start, end, block.j, num_stages=block.stages):
        at = at0 + tl.arange(0, block.j)[None, :]
        mask = here & (at < end)
        place = Place(o=o, r=0, s=s, t=before + at, i_inside=here, j_inside=at < end)
        factor, term = fold_affine(1.0, affine, maps, place, norm, AXIS_O | AXIS_S, AXIS_T)
        x, dy = load_both(io, x_first + at, y_first + at, mask)
        x_hat, _dz, wdy = gradients(x, dy, mean, rstd, factor, term, mask, norm.activation, mode.from_y)
        sum1 += wdy
        sum2 += wdy * x_hat
    sum1, sum2 = tl.sum(sum1, 1, keep_dims=True), tl.sum(sum2, 1, keep_dims=True)
    if PEEL:
        t, inside = ends_of(before, tl.where(part == 0, view.run, n_whole), n_whole, 2 * PEEL)
        place = Place(o=o, r=0, s=s, t=t, i_inside=here, j_inside=inside)
        factor, term = fold_affine(1.0, affine, maps, place, norm, AXIS_O | AXIS_S, AXIS_T)
        x, dy = load_both(io, x_at + t, y_at + t, here & inside)
        x_hat, _dz, wdy = gradients(x, dy, mean, rstd, factor, term, here & inside, norm.activation, mode.from_y)
        sum1 += tl.sum(wdy, 1, keep_dims=True)
        sum2 += tl.sum(wdy * x_hat, 1, keep_dims=True)
    to = set_.to(tl.int64) * split.parts_t + part
    if values.c1_ptr is not None:
        tl.store(values.c1_ptr + to, sum1, mask=here)
    tl.store(values.c2_ptr + to, sum2, mask=here)


@triton.jit
def _part(
    io, affine, values, cells, count, pid, view, maps, split, norm: tl.constexpr, block: tl.constexpr, mode: tl.constexpr
):  # fmt: skip
    """Store the sums c1 and c2 and the cells of one part of a set, or its dx, or both.

    Parameters do not vary along a run, and I indexes the runs of the set. A program that stores both works on a whole
    set, or the statistics were given. If mode.peel is not 0, whole vectors of mode.peel elements are loaded apart from the ends of the
    stretch of each run that belongs to the part.
    """
    PARAM_PER_ROW: tl.constexpr = (norm.param_axes | norm.modulation_axes) & AXIS_R
    PEEL: tl.constexpr = mode.peel
    i, j = tl.arange(0, block.i)[:, None], tl.arange(0, block.j)[None, :]
    set_, part = pid // (split.parts_r * split.parts_t), pid % (split.parts_r * split.parts_t)
    part_r, part_t = part // split.parts_t, part % split.parts_t
    r_start = part_r * split.chunk_r
    r_end = tl.minimum(r_start + split.chunk_r, view.reps)
    if block.run_fits:
        t_start, n, steps = 0, view.run, 1
    else:
        t_start = part_t * split.chunk_t * block.j
        n = tl.minimum(split.chunk_t * block.j, view.run - t_start)
        steps = tl.cdiv(n, block.j)
    n_whole = in_vectors(n, PEEL)
    o, s = set_ // view.sets, set_ % view.sets
    x_at = o.to(tl.int64) * view.x_o + s.to(tl.int64) * view.x_s + t_start
    y_at = o.to(tl.int64) * view.y_o + s.to(tl.int64) * view.y_s + t_start
    mean, rstd = load_saved(values, set_, None)
    cell = ((o.to(tl.int64) * split.parts_r + part_r) * view.sets + s) * split.parts_t + part_t
    c1, c2 = 0.0, 0.0
    if not PARAM_PER_ROW:
        whole = Place(o=o, r=0, s=s, t=0, i_inside=None, j_inside=None)
        factor, term = fold_affine(1.0, affine, maps, whole, norm, NO_AXIS, NO_AXIS)
    if mode.reduce:
        if PARAM_PER_ROW:
            for r0 in range(r_start, r_end, block.i):
                r = r0 + i
                here = r < r_end
                place = Place(o=o, r=r, s=s, t=0, i_inside=here, j_inside=None)
                factor, term = fold_affine(1.0, affine, maps, place, norm, AXIS_R, NO_AXIS)
                a, b = tl.zeros((block.i, block.j), tl.float32), tl.zeros((block.i, block.j), tl.float32)
                for step in tl.range(0, steps, num_stages=block.stages):
                    at = step * block.j + j
                    x, dy, mask, to = _load_runs(io, x_at, y_at, r, at, here & (at < n_whole), view, PEEL)
                    x_hat, dz, wdy = gradients(x, dy, mean, rstd, factor, term, mask, norm.activation, mode.from_y)
                    a += dz * x_hat
                    b += dz
                    if mode.given:
                        store_gradient(io, to, mask, wdy, x_hat, rstd, None, None)
                a, b = tl.sum(a, 1, keep_dims=True), tl.sum(b, 1, keep_dims=True)
                if PEEL:
                    x, dy, mask, to = _load_ends(io, x_at, y_at, r, here, n, n_whole, view, PEEL)
                    x_hat, dz, wdy = gradients(x, dy, mean, rstd, factor, term, mask, norm.activation, mode.from_y)
                    a += tl.sum(dz * x_hat, 1, keep_dims=True)
                    b += tl.sum(dz, 1, keep_dims=True)
                cell_of_row = ((o.to(tl.int64) * view.reps + r) * view.sets + s) * split.parts_t + part_t
                store_cells(cells, cell_of_row, here, a, b, affine, maps, place, norm, AXIS_R, NO_AXIS)
                c1 += tl.sum(tl.where(here, b * factor, 0.0))
                c2 += tl.sum(tl.where(here, a * factor, 0.0))
        else:
            a, b = tl.zeros((block.i, block.j), tl.float32), tl.zeros((block.i, block.j), tl.float32)
            for step in range(steps):
                at = step * block.j + j
                for r0 in tl.range(r_start, r_end, block.i, num_stages=block.stages):
                    r = r0 + i
                    x, dy, mask, to = _load_runs(io, x_at, y_at, r, at, (r < r_end) & (at < n_whole), view, PEEL)
                    x_hat, dz, wdy = gradients(x, dy, mean, rstd, factor, term, mask, norm.activation, mode.from_y)
                    a += dz * x_hat
                    b += dz
                    if mode.given:
                        store_gradient(io, to, mask, wdy, x_hat, rstd, None, None)
            a, b = tl.sum(a), tl.sum(b)
            if PEEL:
                a_ends, b_ends = tl.zeros((RUNS_OF_ENDS, 2 * PEEL), tl.float32), tl.zeros((RUNS_OF_ENDS, 2 * PEEL), tl.float32)
                for r0 in range(r_start, r_end, RUNS_OF_ENDS):
                    r = r0 + tl.arange(0, RUNS_OF_ENDS)[:, None]
                    x, dy, mask, to = _load_ends(io, x_at, y_at, r, r < r_end, n, n_whole, view, PEEL)
                    x_hat, dz, wdy = gradients(x, dy, mean, rstd, factor, term, mask, norm.activation, mode.from_y)
                    a_ends += dz * x_hat
                    b_ends += dz
                a, b = a + tl.sum(a_ends), b + tl.sum(b_ends)
            store_cells(cells, cell, None, a, b, affine, maps, whole, norm, NO_AXIS, NO_AXIS)
            c1, c2 = b * factor, a * factor
        if mode.apply and not mode.given:
            c1, c2 = c1 / count, c2 / count
            if not norm.centered:
                c1 = 0.0
        elif not mode.apply:
            if values.c1_ptr is not None:
                tl.store(values.c1_ptr + cell, c1)
            if values.c2_ptr is not None:
                tl.store(values.c2_ptr + cell, c2)
    else:
        c1, c2 = load_sums(values, set_, None, count)
    if mode.apply and not mode.given:
        for step in range(steps):
            at = (steps - 1 - step) * block.j + j  # last block first: it was read last and may still be cached
            for r0 in tl.range(r_start, r_end, block.i, num_stages=block.stages):
                r = r0 + i
                if PARAM_PER_ROW:
                    place = Place(o=o, r=r, s=s, t=0, i_inside=r < r_end, j_inside=None)
                    factor, term = fold_affine(1.0, affine, maps, place, norm, AXIS_R, NO_AXIS)
                x, dy, mask, to = _load_runs(io, x_at, y_at, r, at, (r < r_end) & (at < n_whole), view, PEEL)
                x_hat, dz, wdy = gradients(x, dy, mean, rstd, factor, term, mask, norm.activation, mode.from_y)
                store_gradient(io, to, mask, wdy, x_hat, rstd, c1, c2)
        if PEEL:
            for r0 in range(r_start, r_end, RUNS_OF_ENDS):
                r = r0 + tl.arange(0, RUNS_OF_ENDS)[:, None]
                if PARAM_PER_ROW:
                    place = Place(o=o, r=r, s=s, t=0, i_inside=r < r_end, j_inside=None)
                    factor, term = fold_affine(1.0, affine, maps, place, norm, AXIS_R, NO_AXIS)
                x, dy, mask, to = _load_ends(io, x_at, y_at, r, r < r_end, n, n_whole, view, PEEL)
                x_hat, dz, wdy = gradients(x, dy, mean, rstd, factor, term, mask, norm.activation, mode.from_y)
                store_gradient(io, to, mask, wdy, x_hat, rstd, c1, c2)


@triton.jit
def _load_runs(io, x_at, y_at, r, at, mask, view, PEEL: tl.constexpr):
    """Return x, dy, the mask, and where dx is stored, for the elements `at` of the runs r: with PEEL, from the first whole vector on."""
    x_run, y_run = x_at + r.to(tl.int64) * view.x_r, y_at + r.to(tl.int64) * view.y_r
    to = first_vector(y_run, PEEL) + at
    x, dy = load_both(io, first_vector(x_run, PEEL) + at, to, mask)
    return x, dy, mask, to


@triton.jit
def _load_ends(io, x_at, y_at, r, here, n, n_whole, view, PEEL: tl.constexpr):
    """Do the same for the ends of the runs r: those of n elements that are not in n_whole whole vectors."""
    x_run, y_run = x_at + r.to(tl.int64) * view.x_r, y_at + r.to(tl.int64) * view.y_r
    at, is_end = ends_of(first_vector(x_run, PEEL) - x_run, n, n_whole, 2 * PEEL)
    x, dy = load_both(io, x_run + at, y_run + at, here & is_end)
    return x, dy, here & is_end, y_run + at
