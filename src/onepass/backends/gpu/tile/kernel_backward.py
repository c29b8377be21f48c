"""The tile walk backward: a block is [I, J], along I lie the rows r of sets, along J columns (s, t).

As in the row walk, where parameters vary along the rows, sums over a parameter go `across` sets.
"""

import triton
import triton.language as tl

from onepass.backends.gpu.device.affine import fold_affine
from onepass.backends.gpu.device.elements import program
from onepass.backends.gpu.device.gradients import gradients, load_saved, load_sums, store_cells, store_gradient
from onepass.backends.gpu.row.kernel_backward import load, member

from .kernel import columns_at, over_run


@triton.jit
def tile_backward(
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
    """The arguments are the row walk's. FLAT: columns are contiguous, in x and in y. There are chunk_t blocks of columns."""
    tensors, operands = (x_ptr, dy_ptr, dsum_ptr, dx_ptr), (weight_ptr, bias_ptr, scale_ptr, shift_ptr)
    statistics, sums, cells = (mean_ptr, rstd_ptr), (c1_ptr, c2_ptr), (dweight_ptr, dbias_ptr, dscale_ptr, dshift_ptr)
    maps = (p_every, p_period, p_o, p_r, p_s, p_run, p_t), (m_every, m_period, m_o, m_r, m_s, m_run, m_t)
    strides = x_o, x_r, x_s, y_o, y_r, y_s
    pid = program(not REDUCE, WIDE, LEADS, FOLLOWS)
    if ACROSS:
        _across(
            tensors, operands, statistics, sums, cells, count, pid, reps, sets, run, strides, maps, (every, period, members),
            parts_r, parts_t, chunk_t, columns,
            PARAM, MODULATION, OFFSET, ACTIVATION, FROM_Y, CENTERED, RESIDENT, FLAT, BLOCK_I, BLOCK_J, BLOCK_RUN, STAGES,
        )  # fmt: skip
    else:
        _part(
            tensors, operands, statistics, sums, cells, count, pid, reps, sets, run, strides, maps, parts_r, chunk_r, chunk_t, columns,
            PARAM, MODULATION, OFFSET, ACTIVATION, FROM_Y, GIVEN, REDUCE, FLAT, BLOCK_I, BLOCK_J, STAGES,
        )  # fmt: skip


@triton.jit
def _across(
    tensors, operands, statistics, sums, cells, count, pid, reps, sets, run, strides, maps, pattern,
    parts_r, parts_t, chunk_t, columns,
    PARAM: tl.constexpr, MODULATION: tl.constexpr, OFFSET: tl.constexpr, ACTIVATION: tl.constexpr, FROM_Y: tl.constexpr,
    CENTERED: tl.constexpr, RESIDENT: tl.constexpr, FLAT: tl.constexpr,
    BLOCK_I: tl.constexpr, BLOCK_J: tl.constexpr, BLOCK_RUN: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Blocks of columns of the same segment, one after the other. RESIDENT: whole sets, so that their sums are at hand; else BLOCK_I rows.

    Where parameters vary along columns but not along rows, every block has its own.
    """
    EACH: tl.constexpr = (PARAM | MODULATION) & 2  # each row has parameters of its own
    OWN: tl.constexpr = (PARAM | MODULATION) & 12  # and each column
    _, x_r, _, _, y_r, _ = strides
    _, _, dsum_ptr, dx_ptr = tensors
    blocks = chunk_t  # of columns that a member has
    segment, part = pid // (parts_r * parts_t), pid % (parts_r * parts_t)
    r = part % parts_t * BLOCK_I + tl.arange(0, BLOCK_I)[:, None]
    first = 0
    if EACH and OWN:
        r = part % parts_t // chunk_t * BLOCK_I + tl.arange(0, BLOCK_I)[:, None]
        first, blocks = part % parts_t % chunk_t, 1
    part = part // parts_t
    inside, wide = r < reps, r.to(tl.int64)
    members = pattern[2] * blocks
    first_o, _ = member(0, segment, 1, pattern, False)
    a, b = tl.zeros((BLOCK_I, BLOCK_J), tl.float32), tl.zeros((BLOCK_I, BLOCK_J), tl.float32)
    if EACH and not OWN:
        factor, term = fold_affine(1.0, operands, maps, (first_o, r, 0, 0), inside, None, OFFSET, PARAM, MODULATION, 2, 0)
    for m0 in tl.range(part, members, parts_r, num_stages=STAGES):
        m = m0 if RESIDENT else members - 1 - m0  # backwards: what was read last is still in the cache
        o, _zero = member(m // blocks, segment, 1, pattern, False)
        column = (first + m % blocks) * BLOCK_J + tl.arange(0, BLOCK_J)[None, :]
        if RESIDENT:
            s, t = column // BLOCK_RUN, column % BLOCK_RUN
        else:
            s, t = column // run, column % run
        x_at, y_at, here = columns_at(o, s, t, column, sets, run, columns, strides, FLAT)
        mask, place = inside & here, (o, r, s, t)
        if not EACH or OWN:
            factor, term = fold_affine(1.0, operands, maps, place, inside, here, OFFSET, PARAM, MODULATION, 2, 12)
        set_ = o.to(tl.int64) * sets + s
        mean, rstd = load_saved(statistics, set_, here)
        x, dy = load(tensors, x_at + wide * x_r, y_at + wide * y_r, mask)
        x_hat, dz, wdy = gradients(x, dy, mean, rstd, factor, term, mask, ACTIVATION, FROM_Y)
        c1, c2 = 0.0, 0.0
        if EACH:
            a += dz * x_hat
            b += dz
            if RESIDENT:
                c1, c2 = tl.sum(wdy, 0, keep_dims=True), tl.sum(wdy * x_hat, 0, keep_dims=True)
        else:
            own_a, own_b = tl.sum(dz * x_hat, 0, keep_dims=True), tl.sum(dz, 0, keep_dims=True)
            at = (o.to(tl.int64) * sets + s) * run + t
            store_cells(cells, at, here, own_a, own_b, operands, maps, place, None, here, OFFSET, PARAM, MODULATION, 0, 12)
            c1, c2 = own_b * factor, own_a * factor
        if RESIDENT:
            c2 = over_run(tl.where(here, c2, 0.0), BLOCK_J, BLOCK_RUN) / count
            if CENTERED:
                c1 = over_run(tl.where(here, c1, 0.0), BLOCK_J, BLOCK_RUN) / count
            else:
                c1 = 0.0
        else:
            c1, c2 = load_sums(sums, set_, here, count)
        store_gradient(dx_ptr, dsum_ptr, y_at + wide * y_r, mask, wdy, x_hat, rstd, c1, c2)
    if EACH:
        row = (segment.to(tl.int64) * parts_r + part) * reps + r
        if OWN:
            column = first * BLOCK_J + tl.arange(0, BLOCK_J)[None, :]
            s, t = column // run, column % run
            here = (s < sets) & (t < run)
            place = first_o, r, s, t
            store_cells(
                cells, row * columns + column, inside & here, a, b, operands, maps, place, inside, here, OFFSET, PARAM, MODULATION, 2, 12
            )
        else:
            a, b = tl.sum(a, 1, keep_dims=True), tl.sum(b, 1, keep_dims=True)
            store_cells(cells, row, inside, a, b, operands, maps, (first_o, r, 0, 0), inside, None, OFFSET, PARAM, MODULATION, 2, 0)


@triton.jit
def _part(
    tensors, operands, statistics, sums, cells, count, pid, reps, sets, run, strides, maps, parts_r, chunk_r, chunk_t, columns,
    PARAM: tl.constexpr, MODULATION: tl.constexpr, OFFSET: tl.constexpr, ACTIVATION: tl.constexpr, FROM_Y: tl.constexpr,
    GIVEN: tl.constexpr, REDUCE: tl.constexpr, FLAT: tl.constexpr, BLOCK_I: tl.constexpr, BLOCK_J: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Some rows of some columns, block by block: the sums of each column, or dx; both where the statistics were given."""
    EACH: tl.constexpr = (PARAM | MODULATION) & 2
    _, x_r, _, _, y_r, _ = strides
    _, _, dsum_ptr, dx_ptr = tensors
    c1_ptr, c2_ptr = sums
    i = tl.arange(0, BLOCK_I)[:, None]
    o, part = pid // chunk_t // parts_r, pid // chunk_t % parts_r
    column = pid % chunk_t * BLOCK_J + tl.arange(0, BLOCK_J)[None, :]
    s, t = column // run, column % run
    x_at, y_at, here = columns_at(o, s, t, column, sets, run, columns, strides, FLAT)
    start = part * chunk_r
    end = tl.minimum(start + chunk_r, reps)
    set_ = o.to(tl.int64) * sets + s
    mean, rstd = load_saved(statistics, set_, here)
    c1, c2 = None, None
    if not REDUCE:
        c1, c2 = load_sums(sums, set_, here, count)
    if not EACH:
        factor, term = fold_affine(1.0, operands, maps, (o, 0, s, t), None, here, OFFSET, PARAM, MODULATION, 0, 12)
    a, b = tl.zeros((BLOCK_I, BLOCK_J), tl.float32), tl.zeros((BLOCK_I, BLOCK_J), tl.float32)
    for r0 in tl.range(start, end, BLOCK_I, num_stages=STAGES):
        r = r0 + i
        mask, wide = (r < end) & here, r.to(tl.int64)
        if EACH:
            factor, term = fold_affine(1.0, operands, maps, (o, r, s, t), r < end, here, OFFSET, PARAM, MODULATION, 2, 12)
        x, dy = load(tensors, x_at + wide * x_r, y_at + wide * y_r, mask)
        x_hat, dz, wdy = gradients(x, dy, mean, rstd, factor, term, mask, ACTIVATION, FROM_Y)
        if REDUCE:
            if EACH:
                a += wdy * x_hat
                b += wdy
            else:
                a += dz * x_hat
                b += dz
        if GIVEN or not REDUCE:
            store_gradient(dx_ptr, dsum_ptr, y_at + wide * y_r, mask, wdy, x_hat, rstd, c1, c2)
    if REDUCE:
        at = (o.to(tl.int64) * parts_r + part) * columns + column
        a, b = tl.sum(a, 0, keep_dims=True), tl.sum(b, 0, keep_dims=True)
        if not EACH:
            store_cells(cells, at, here, a, b, operands, maps, (o, 0, s, t), None, here, OFFSET, PARAM, MODULATION, 0, 12)
            a, b = a * factor, b * factor
        if c1_ptr is not None:
            tl.store(c1_ptr + at, b, mask=here)
        if c2_ptr is not None:
            tl.store(c2_ptr + at, a, mask=here)
