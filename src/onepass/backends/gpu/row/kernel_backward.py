"""The row walk backward: a block is [I, J], along J lies a run.

Gradients are sums of two kinds, over a set and over a parameter. Where parameters vary along a run, sums over a parameter go `across` sets,
and a program takes sets one after the other; else they lie inside a set, and give its sums too.
"""

import triton
import triton.language as tl

from onepass.backends.gpu.device.affine import fold_affine
from onepass.backends.gpu.device.elements import program
from onepass.backends.gpu.device.gradients import gradients, load_saved, load_sums, store_cells, store_gradient


@triton.jit
def row_backward(
    x_ptr, dy_ptr, dsum_ptr, dx_ptr, weight_ptr, bias_ptr, scale_ptr, shift_ptr, mean_ptr, rstd_ptr, c1_ptr, c2_ptr,
    dweight_ptr, dbias_ptr, dscale_ptr, dshift_ptr,
    count, total, reps, sets, run, x_o, x_r, x_s, y_o, y_r, y_s,
    p_every, p_period, p_o, p_r, p_s, p_run, p_t, m_every, m_period, m_o, m_r, m_s, m_run, m_t,
    every, period, members, parts_r, parts_t, chunk_r, chunk_t, columns,
    PARAM: tl.constexpr, MODULATION: tl.constexpr, OFFSET: tl.constexpr, ACTIVATION: tl.constexpr, FROM_Y: tl.constexpr,
    CENTERED: tl.constexpr, GIVEN: tl.constexpr, RESIDENT: tl.constexpr, REDUCE: tl.constexpr, APPLY: tl.constexpr,
    ACROSS: tl.constexpr, BY_SET: tl.constexpr, TWO: tl.constexpr,
    WIDE: tl.constexpr, FLAT: tl.constexpr, BLOCK_I: tl.constexpr, BLOCK_J: tl.constexpr, BLOCK_RUN: tl.constexpr, TAIL: tl.constexpr,
    STAGES: tl.constexpr, SHORT: tl.constexpr, LEADS: tl.constexpr, FOLLOWS: tl.constexpr,
):  # fmt: skip
    tensors, operands = (x_ptr, dy_ptr, dsum_ptr, dx_ptr), (weight_ptr, bias_ptr, scale_ptr, shift_ptr)
    statistics, sums, cells = (mean_ptr, rstd_ptr), (c1_ptr, c2_ptr), (dweight_ptr, dbias_ptr, dscale_ptr, dshift_ptr)
    maps = (p_every, p_period, p_o, p_r, p_s, p_run, p_t), (m_every, m_period, m_o, m_r, m_s, m_run, m_t)
    strides = x_o, x_r, x_s, y_o, y_r, y_s
    pid = program(not REDUCE, WIDE, LEADS, FOLLOWS)
    if ACROSS:
        _across(
            tensors, operands, statistics, sums, cells, count, pid, sets, run, strides, maps, (every, period, members), parts_r, parts_t,
            PARAM, MODULATION, OFFSET, ACTIVATION, FROM_Y, CENTERED, GIVEN, RESIDENT, BY_SET, TWO, BLOCK_I, BLOCK_J, TAIL, STAGES,
        )  # fmt: skip
    elif FLAT:
        _sets(
            tensors, operands, statistics, sums, pid, total, sets, run, strides, maps, parts_t, chunk_t,
            PARAM, MODULATION, OFFSET, ACTIVATION, FROM_Y, BLOCK_I, BLOCK_J, STAGES,
        )  # fmt: skip
    else:
        _part(
            tensors, operands, statistics, sums, cells, count, pid, reps, sets, run, strides, maps, parts_r, parts_t, chunk_r, chunk_t,
            PARAM, MODULATION, OFFSET, ACTIVATION, FROM_Y, CENTERED, GIVEN, REDUCE, APPLY, BLOCK_I, BLOCK_J, SHORT, STAGES,
        )  # fmt: skip


@triton.jit
def member(q, segment, sets, pattern, BY_SET: tl.constexpr):
    """o and s of the q-th set of a segment: of those whose elements use the same parameters.

    Segments are cut along o as parameters are, every so many and after a period again; BY_SET: and one for each s.
    """
    every, period, _ = pattern
    if BY_SET:
        s, middle = segment % sets, segment // sets
    else:
        s, middle, q = q % sets, segment, q // sets
    return (q // every * period + middle) * every + q % every, s


@triton.jit
def load(tensors, x_at, y_at, mask):
    x_ptr, dy_ptr, _, _ = tensors
    return tl.load(x_ptr + x_at, mask=mask, other=0.0), tl.load(dy_ptr + y_at, mask=mask, other=0.0)


@triton.jit
def _across(
    tensors, operands, statistics, sums, cells, count, pid, sets, run, strides, maps, pattern, parts_r, parts_t,
    PARAM: tl.constexpr, MODULATION: tl.constexpr, OFFSET: tl.constexpr, ACTIVATION: tl.constexpr, FROM_Y: tl.constexpr,
    CENTERED: tl.constexpr, GIVEN: tl.constexpr, RESIDENT: tl.constexpr, BY_SET: tl.constexpr, TWO: tl.constexpr,
    BLOCK_I: tl.constexpr, BLOCK_J: tl.constexpr, TAIL: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Sets of one run, BLOCK_I at a time, of one segment. RESIDENT: whole runs, so that their sums are at hand; else a block of each."""
    ALONG: tl.constexpr = (PARAM | MODULATION) & 8
    x_o, _, x_s, y_o, _, y_s = strides
    _, _, dsum_ptr, dx_ptr = tensors
    segment, part = pid // (parts_r * parts_t), pid % (parts_r * parts_t)
    members = pattern[2]
    i, j = tl.arange(0, BLOCK_I)[:, None], part % parts_t * BLOCK_J + tl.arange(0, BLOCK_J)[None, :]
    inside = j < run
    first_o, first_s = member(0, segment, sets, pattern, BY_SET)
    factor, term = fold_affine(1.0, operands, maps, (first_o, 0, first_s, j), None, inside, OFFSET, PARAM, MODULATION, 0, 8)
    if TWO:  # the other block of a run is another program's work, but its sums are needed here, too
        j_other = (1 - part % parts_t) * BLOCK_J + tl.arange(0, BLOCK_J)[None, :]
        inside_other, place_other = j_other < run, (first_o, 0, first_s, j_other)
        factor_other, term_other = fold_affine(1.0, operands, maps, place_other, None, inside_other, OFFSET, PARAM, MODULATION, 0, 8)
    WIDTH: tl.constexpr = BLOCK_J if ALONG else 1
    a, b = tl.zeros((BLOCK_I, WIDTH), tl.float32), tl.zeros((BLOCK_I, WIDTH), tl.float32)
    if TAIL:
        j_tail = BLOCK_J + tl.arange(0, TAIL)[None, :]
        inside_tail = j_tail < run
        factor_tail, term_tail = fold_affine(
            1.0, operands, maps, (first_o, 0, first_s, j_tail), None, inside_tail, OFFSET, PARAM, MODULATION, 0, 8
        )
        a_tail, b_tail = tl.zeros((BLOCK_I, TAIL), tl.float32), tl.zeros((BLOCK_I, TAIL), tl.float32)
    for q0 in tl.range(part // parts_t * BLOCK_I, members, parts_r * BLOCK_I, num_stages=STAGES):
        q = q0 + i
        if not RESIDENT:
            q = (members - 1) // BLOCK_I * BLOCK_I - q0 + i  # backwards: what was read last is still in the cache
        here = q < members
        o, s = member(q, segment, sets, pattern, BY_SET)
        set_ = o.to(tl.int64) * sets + s
        x_at, y_at = o.to(tl.int64) * x_o + s.to(tl.int64) * x_s, o.to(tl.int64) * y_o + s.to(tl.int64) * y_s
        mean, rstd = load_saved(statistics, set_, here)
        x, dy = load(tensors, x_at + j, y_at + j, here & inside)
        x_hat, dz, wdy = gradients(x, dy, mean, rstd, factor, term, here & inside, ACTIVATION, FROM_Y)
        if ALONG:
            a += dz * x_hat
            b += dz
            sum1, sum2 = wdy, wdy * x_hat
        else:
            sum1, sum2 = dz, dz * x_hat
        if TAIL:
            x_tail, dy_tail = load(tensors, x_at + j_tail, y_at + j_tail, here & inside_tail)
            mask = here & inside_tail
            x_hat_tail, dz_tail, wdy_tail = gradients(x_tail, dy_tail, mean, rstd, factor_tail, term_tail, mask, ACTIVATION, FROM_Y)
            a_tail += dz_tail * x_hat_tail
            b_tail += dz_tail
        c1, c2 = 0.0, 0.0
        if (RESIDENT and not GIVEN and dx_ptr is not None) or not ALONG:
            sum1, sum2 = tl.sum(sum1, 1, keep_dims=True), tl.sum(sum2, 1, keep_dims=True)
            if not ALONG:
                a += sum2
                b += sum1
                sum1, sum2 = sum1 * factor, sum2 * factor
            if TAIL:
                sum1 += tl.sum(wdy_tail, 1, keep_dims=True)
                sum2 += tl.sum(wdy_tail * x_hat_tail, 1, keep_dims=True)
            if TWO:
                mask_other = here & inside_other
                x, dy = load(tensors, x_at + j_other, y_at + j_other, mask_other)
                x_hat_other, _dz, wdy_other = gradients(x, dy, mean, rstd, factor_other, term_other, mask_other, ACTIVATION, FROM_Y)
                sum1 += tl.sum(wdy_other, 1, keep_dims=True)
                sum2 += tl.sum(wdy_other * x_hat_other, 1, keep_dims=True)
        if GIVEN:
            c1, c2 = None, None
        elif RESIDENT:
            if CENTERED:
                c1 = sum1 / count
            c2 = sum2 / count
        else:
            c1, c2 = load_sums(sums, set_, here, count)
        store_gradient(dx_ptr, dsum_ptr, y_at + j, here & inside, wdy, x_hat, rstd, c1, c2)
        if TAIL:
            store_gradient(dx_ptr, dsum_ptr, y_at + j_tail, here & inside_tail, wdy_tail, x_hat_tail, rstd, c1, c2)
    place = first_o, 0, first_s, j
    row = segment.to(tl.int64) * parts_r + part // parts_t
    a, b = tl.sum(a, 0, keep_dims=True), tl.sum(b, 0, keep_dims=True)
    if ALONG:
        at = row * run
        store_cells(cells, at + j, inside, a, b, operands, maps, place, None, inside, OFFSET, PARAM, MODULATION, 0, 8)
        if TAIL:
            a_tail, b_tail = tl.sum(a_tail, 0, keep_dims=True), tl.sum(b_tail, 0, keep_dims=True)
            place = first_o, 0, first_s, j_tail
            store_cells(
                cells, at + j_tail, inside_tail, a_tail, b_tail, operands, maps, place, None, inside_tail, OFFSET, PARAM, MODULATION, 0, 8
            )
    else:
        at = row * parts_t + part % parts_t + tl.zeros((1, 1), tl.int32)
        store_cells(cells, at, None, a, b, operands, maps, place, None, None, OFFSET, PARAM, MODULATION, 0, 0)


@triton.jit
def _sets(
    tensors, operands, statistics, sums, pid, total, sets, run, strides, maps, parts_t, chunk_t,
    PARAM: tl.constexpr, MODULATION: tl.constexpr, OFFSET: tl.constexpr, ACTIVATION: tl.constexpr, FROM_Y: tl.constexpr,
    BLOCK_I: tl.constexpr, BLOCK_J: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """The sums of sets of one run, BLOCK_I of them, block by block: of whole runs, or of parts."""
    x_o, _, x_s, y_o, _, y_s = strides
    c1_ptr, c2_ptr = sums
    set_, part = pid // parts_t * BLOCK_I + tl.arange(0, BLOCK_I)[:, None], pid % parts_t
    here = set_ < total
    o, s = set_ // sets, set_ % sets
    x_at, y_at = o.to(tl.int64) * x_o + s.to(tl.int64) * x_s, o.to(tl.int64) * y_o + s.to(tl.int64) * y_s
    mean, rstd = load_saved(statistics, set_, here)
    start = part * chunk_t * BLOCK_J
    end = tl.minimum(start + chunk_t * BLOCK_J, run)
    sum1, sum2 = tl.zeros((BLOCK_I, BLOCK_J), tl.float32), tl.zeros((BLOCK_I, BLOCK_J), tl.float32)
    for t0 in tl.range(start, end, BLOCK_J, num_stages=STAGES):
        t = t0 + tl.arange(0, BLOCK_J)[None, :]
        mask = here & (t < end)
        factor, term = fold_affine(1.0, operands, maps, (o, 0, s, t), here, t < end, OFFSET, PARAM, MODULATION, 5, 8)
        x, dy = load(tensors, x_at + t, y_at + t, mask)
        x_hat, _dz, wdy = gradients(x, dy, mean, rstd, factor, term, mask, ACTIVATION, FROM_Y)
        sum1 += wdy
        sum2 += wdy * x_hat
    at = set_.to(tl.int64) * parts_t + part
    if c1_ptr is not None:
        tl.store(c1_ptr + at, tl.sum(sum1, 1, keep_dims=True), mask=here)
    tl.store(c2_ptr + at, tl.sum(sum2, 1, keep_dims=True), mask=here)


@triton.jit
def _part(
    tensors, operands, statistics, sums, cells, count, pid, reps, sets, run, strides, maps, parts_r, parts_t, chunk_r, chunk_t,
    PARAM: tl.constexpr, MODULATION: tl.constexpr, OFFSET: tl.constexpr, ACTIVATION: tl.constexpr, FROM_Y: tl.constexpr,
    CENTERED: tl.constexpr, GIVEN: tl.constexpr, REDUCE: tl.constexpr, APPLY: tl.constexpr,
    BLOCK_I: tl.constexpr, BLOCK_J: tl.constexpr, SHORT: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """A part of one set, several runs along I, none of which varies in its parameters: its sums, or dx, or one after the other."""
    EACH: tl.constexpr = (PARAM | MODULATION) & 2  # each run has parameters of its own
    x_o, x_r, x_s, y_o, y_r, y_s = strides
    _, _, dsum_ptr, dx_ptr = tensors
    c1_ptr, c2_ptr = sums
    i, j = tl.arange(0, BLOCK_I)[:, None], tl.arange(0, BLOCK_J)[None, :]
    set_, part = pid // (parts_r * parts_t), pid % (parts_r * parts_t)
    part_r, part_t = part // parts_t, part % parts_t
    r_start = part_r * chunk_r
    r_end = tl.minimum(r_start + chunk_r, reps)
    if SHORT:
        t_start, t_end, steps = 0, run, 1
    else:
        t_start = part_t * chunk_t * BLOCK_J
        t_end = tl.minimum(t_start + chunk_t * BLOCK_J, run)
        steps = tl.cdiv(t_end - t_start, BLOCK_J)
    o, s = set_ // sets, set_ % sets
    x_at, y_at = o.to(tl.int64) * x_o + s.to(tl.int64) * x_s, o.to(tl.int64) * y_o + s.to(tl.int64) * y_s
    mean, rstd = load_saved(statistics, set_, None)
    at = ((o.to(tl.int64) * parts_r + part_r) * sets + s) * parts_t + part_t
    c1, c2 = 0.0, 0.0
    if not EACH:
        factor, term = fold_affine(1.0, operands, maps, (o, 0, s, 0), None, None, OFFSET, PARAM, MODULATION, 0, 0)
    if REDUCE:
        if EACH:
            for r0 in range(r_start, r_end, BLOCK_I):
                r = r0 + i
                here = r < r_end
                factor, term = fold_affine(1.0, operands, maps, (o, r, s, 0), here, None, OFFSET, PARAM, MODULATION, 2, 0)
                a, b = tl.zeros((BLOCK_I, BLOCK_J), tl.float32), tl.zeros((BLOCK_I, BLOCK_J), tl.float32)
                for step in tl.range(0, steps, num_stages=STAGES):
                    t = t_start + step * BLOCK_J + j
                    mask, wide = here & (t < t_end), r.to(tl.int64)
                    x, dy = load(tensors, x_at + wide * x_r + t, y_at + wide * y_r + t, mask)
                    x_hat, dz, wdy = gradients(x, dy, mean, rstd, factor, term, mask, ACTIVATION, FROM_Y)
                    a += dz * x_hat
                    b += dz
                    if GIVEN:
                        store_gradient(dx_ptr, dsum_ptr, y_at + wide * y_r + t, mask, wdy, x_hat, rstd, None, None)
                a, b = tl.sum(a, 1, keep_dims=True), tl.sum(b, 1, keep_dims=True)
                cell = ((o.to(tl.int64) * reps + r) * sets + s) * parts_t + part_t
                store_cells(cells, cell, here, a, b, operands, maps, (o, r, s, 0), here, None, OFFSET, PARAM, MODULATION, 2, 0)
                c1 += tl.sum(tl.where(here, b * factor, 0.0))
                c2 += tl.sum(tl.where(here, a * factor, 0.0))
        else:
            a, b = tl.zeros((BLOCK_I, BLOCK_J), tl.float32), tl.zeros((BLOCK_I, BLOCK_J), tl.float32)
            for step in range(steps):
                t = t_start + step * BLOCK_J + j
                for r0 in tl.range(r_start, r_end, BLOCK_I, num_stages=STAGES):
                    mask, wide = (r0 + i < r_end) & (t < t_end), (r0 + i).to(tl.int64)
                    x, dy = load(tensors, x_at + wide * x_r + t, y_at + wide * y_r + t, mask)
                    x_hat, dz, wdy = gradients(x, dy, mean, rstd, factor, term, mask, ACTIVATION, FROM_Y)
                    a += dz * x_hat
                    b += dz
                    if GIVEN:
                        store_gradient(dx_ptr, dsum_ptr, y_at + wide * y_r + t, mask, wdy, x_hat, rstd, None, None)
            a, b = tl.sum(a), tl.sum(b)
            store_cells(cells, at, None, a, b, operands, maps, (o, 0, s, 0), None, None, OFFSET, PARAM, MODULATION, 0, 0)
            c1, c2 = b * factor, a * factor
        if APPLY and not GIVEN:
            c1, c2 = c1 / count, c2 / count
            if not CENTERED:
                c1 = 0.0
        elif not APPLY:
            if c1_ptr is not None:
                tl.store(c1_ptr + at, c1)
            if c2_ptr is not None:
                tl.store(c2_ptr + at, c2)
    else:
        c1, c2 = load_sums(sums, set_, None, count)
    if APPLY and not GIVEN:
        for step in range(steps):
            t = t_start + (steps - 1 - step) * BLOCK_J + j  # backwards: what was read last is still in the cache
            for r0 in tl.range(r_start, r_end, BLOCK_I, num_stages=STAGES):
                r = r0 + i
                mask, wide = (r < r_end) & (t < t_end), r.to(tl.int64)
                if EACH:
                    factor, term = fold_affine(1.0, operands, maps, (o, r, s, 0), r < r_end, None, OFFSET, PARAM, MODULATION, 2, 0)
                x, dy = load(tensors, x_at + wide * x_r + t, y_at + wide * y_r + t, mask)
                x_hat, dz, wdy = gradients(x, dy, mean, rstd, factor, term, mask, ACTIVATION, FROM_Y)
                store_gradient(dx_ptr, dsum_ptr, y_at + wide * y_r + t, mask, wdy, x_hat, rstd, c1, c2)
