"""The tile walk: the elements of a set lie apart, and memory is read across sets. A row is one r, a column one (s, t)."""

import triton
import triton.language as tl

from onepass.backends.gpu.device.affine import fold_affine
from onepass.backends.gpu.device.elements import load, program, store
from onepass.backends.gpu.device.moments import (
    inverse_deviation,
    lanes,
    load_statistics,
    merge,
    scaled_down,
    scaled_up,
    store_statistics,
    update,
)


@triton.jit
def tile_forward(
    x_ptr, residual_ptr, sum_ptr, y_ptr, weight_ptr, bias_ptr, scale_ptr, shift_ptr, mean_ptr, rstd_ptr, var_ptr, parts_ptr,
    eps, total, reps, sets, run, x_o, x_r, x_s, y_o, y_r, y_s,
    p_every, p_period, p_o, p_r, p_s, p_run, p_t, m_every, m_period, m_o, m_r, m_s, m_run, m_t,
    parts_r, parts_t, chunk_r, chunk_t, m2_at, columns,
    PARAM: tl.constexpr, MODULATION: tl.constexpr, OFFSET: tl.constexpr, CENTERED: tl.constexpr, ACTIVATION: tl.constexpr,
    RESIDENT: tl.constexpr, REDUCE: tl.constexpr, APPLY: tl.constexpr, WIDE: tl.constexpr, FLAT: tl.constexpr,
    BLOCK_I: tl.constexpr, BLOCK_J: tl.constexpr, BLOCK_RUN: tl.constexpr, TAIL: tl.constexpr, STAGES: tl.constexpr,
    SHORT: tl.constexpr, LEADS: tl.constexpr, FOLLOWS: tl.constexpr,
):  # fmt: skip
    """The arguments are the row walk's. FLAT: columns are contiguous, in x and in y. There are chunk_t blocks of columns."""
    x, operands, statistics = (x_ptr, residual_ptr, sum_ptr), (weight_ptr, bias_ptr, scale_ptr, shift_ptr), (mean_ptr, rstd_ptr, var_ptr)
    maps = (p_every, p_period, p_o, p_r, p_s, p_run, p_t), (m_every, m_period, m_o, m_r, m_s, m_run, m_t)
    strides = x_o, x_r, x_s, y_o, y_r, y_s
    pid = program(not REDUCE, WIDE, LEADS, FOLLOWS)
    if RESIDENT:
        if STAGES > 1:  # each program has many blocks, and loads one while it works on another
            for block in tl.range(pid, total // sets * chunk_t, tl.num_programs(0), num_stages=STAGES):
                _resident(
                    x, y_ptr, operands, statistics, eps, block, reps, sets, run, chunk_t, columns, strides, maps,
                    PARAM, MODULATION, OFFSET, CENTERED, ACTIVATION, FLAT, BLOCK_I, BLOCK_J, BLOCK_RUN, TAIL,
                )  # fmt: skip
        else:
            _resident(
                x, y_ptr, operands, statistics, eps, pid, reps, sets, run, chunk_t, columns, strides, maps,
                PARAM, MODULATION, OFFSET, CENTERED, ACTIVATION, FLAT, BLOCK_I, BLOCK_J, BLOCK_RUN, TAIL,
            )  # fmt: skip
    else:
        _part(
            x, y_ptr, operands, statistics, parts_ptr, eps, pid, reps, sets, run, parts_r, chunk_r, chunk_t, m2_at, columns, strides, maps,
            PARAM, MODULATION, OFFSET, CENTERED, ACTIVATION, REDUCE, FLAT, BLOCK_I, BLOCK_J, STAGES,
        )  # fmt: skip


@triton.jit
def _resident(
    x_ptrs, y_ptr, operands, statistics, eps, block, reps, sets, run, chunk_t, columns, strides, maps,
    PARAM: tl.constexpr, MODULATION: tl.constexpr, OFFSET: tl.constexpr, CENTERED: tl.constexpr, ACTIVATION: tl.constexpr,
    FLAT: tl.constexpr, BLOCK_I: tl.constexpr, BLOCK_J: tl.constexpr, BLOCK_RUN: tl.constexpr, TAIL: tl.constexpr,
):  # fmt: skip
    """Whole sets, BLOCK_RUN columns for each. Where a power of two is too long by far, a set is two blocks of rows, the second its tail."""
    _, x_r, _, _, y_r, _ = strides
    r = tl.arange(0, BLOCK_I)[:, None]
    o, column = block // chunk_t, block % chunk_t * BLOCK_J + tl.arange(0, BLOCK_J)[None, :]
    s, t = column // BLOCK_RUN, column % BLOCK_RUN
    x_at, y_at, here = columns_at(o, s, t, column, sets, run, columns, strides, FLAT)
    inside = r < reps
    x = load(x_ptrs, x_at + r.to(tl.int64) * x_r, inside & here, "")
    DTYPE: tl.constexpr = y_ptr.dtype.element_ty
    mean = tl.sum(scaled_down(x, DTYPE), 0, keep_dims=True)
    if TAIL:
        r_tail = BLOCK_I + tl.arange(0, TAIL)[:, None]
        inside_tail = r_tail < reps
        x_tail = load(x_ptrs, x_at + r_tail.to(tl.int64) * x_r, inside_tail & here, "")
        mean += tl.sum(scaled_down(x_tail, DTYPE), 0, keep_dims=True)
    mean = scaled_up(over_run(mean, BLOCK_J, BLOCK_RUN) / reps / run, DTYPE)  # (2)
    if CENTERED:
        x = tl.where(inside & here, x - mean, 0.0)
    var = tl.sum(x * x, 0, keep_dims=True)
    if TAIL:
        if CENTERED:
            x_tail = tl.where(inside_tail & here, x_tail - mean, 0.0)
        var += tl.sum(x_tail * x_tail, 0, keep_dims=True)
    var = over_run(var, BLOCK_J, BLOCK_RUN) / reps / run  # (3)
    rstd = inverse_deviation(var, eps)
    store_statistics(statistics, o * sets + s, mean, rstd, var, here & (t == 0))
    factor, term = fold_affine(rstd, operands, maps, (o, r, s, t), inside, here, OFFSET, PARAM, MODULATION, 2, 12)
    store(y_ptr, y_at + r.to(tl.int64) * y_r, x * factor + term, inside & here, ACTIVATION, "")
    if TAIL:
        factor, term = fold_affine(rstd, operands, maps, (o, r_tail, s, t), inside_tail, here, OFFSET, PARAM, MODULATION, 2, 12)
        store(y_ptr, y_at + r_tail.to(tl.int64) * y_r, x_tail * factor + term, inside_tail & here, ACTIVATION, "")


@triton.jit
def _part(
    x_ptrs, y_ptr, operands, statistics, parts_ptr, eps, pid, reps, sets, run, parts_r, chunk_r, chunk_t, m2_at, columns, strides, maps,
    PARAM: tl.constexpr, MODULATION: tl.constexpr, OFFSET: tl.constexpr, CENTERED: tl.constexpr, ACTIVATION: tl.constexpr,
    REDUCE: tl.constexpr, FLAT: tl.constexpr, BLOCK_I: tl.constexpr, BLOCK_J: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Some rows of some columns, block by block: the moments of each column, or y."""
    _, x_r, _, _, y_r, _ = strides
    i = tl.arange(0, BLOCK_I)[:, None]
    o, part = pid // chunk_t // parts_r, pid // chunk_t % parts_r
    column = pid % chunk_t * BLOCK_J + tl.arange(0, BLOCK_J)[None, :]
    s, t = column // run, column % run
    x_at, y_at, here = columns_at(o, s, t, column, sets, run, columns, strides, FLAT)
    start = part * chunk_r
    end = tl.minimum(start + chunk_r, reps)
    if REDUCE:
        mean, m2 = tl.zeros((BLOCK_I, BLOCK_J), tl.float32), tl.zeros((BLOCK_I, BLOCK_J), tl.float32)
        k = 0.0
        for r0 in tl.range(start, end, BLOCK_I, num_stages=STAGES):
            mask = (r0 + i < end) & here
            k += 1.0
            mean, m2 = update(mean, m2, k, load(x_ptrs, x_at + (r0 + i).to(tl.int64) * x_r, mask, ""), mask, CENTERED)
        mean, m2 = merge(mean, m2, lanes(start, end, BLOCK_I)[:, None], (end - start) * 1.0, 0, CENTERED)
        at = (o.to(tl.int64) * parts_r + part) * columns + column
        tl.store(parts_ptr + at, mean, mask=here)
        tl.store(parts_ptr + m2_at + at, m2, mask=here)
    else:
        EACH: tl.constexpr = (PARAM | MODULATION) & 2  # each row has parameters of its own
        mean, rstd = load_statistics(statistics, o * sets + s, eps, here)
        if not EACH:
            factor, term = fold_affine(rstd, operands, maps, (o, 0, s, t), None, here, OFFSET, PARAM, MODULATION, 2, 12)
        for r0 in tl.range(start, end, BLOCK_I, num_stages=STAGES):
            r = r0 + i
            inside = r < end
            x = load((x_ptrs[0], None, None), x_at + r.to(tl.int64) * x_r, inside & here, "")
            if EACH:
                factor, term = fold_affine(rstd, operands, maps, (o, r, s, t), inside, here, OFFSET, PARAM, MODULATION, 2, 12)
            store(y_ptr, y_at + r.to(tl.int64) * y_r, (x - mean) * factor + term, inside & here, ACTIVATION, "")


@triton.jit
def columns_at(o, s, t, column, sets, run, columns, strides, FLAT: tl.constexpr):
    """Where columns begin in x and in y, and whether they exist."""
    x_o, _, x_s, y_o, _, y_s = strides
    x_at, y_at = o.to(tl.int64) * x_o, o.to(tl.int64) * y_o
    if FLAT:
        x_at, y_at, here = x_at + column, y_at + column, column < columns
    else:
        x_at, y_at, here = x_at + s.to(tl.int64) * x_s + t, y_at + s.to(tl.int64) * y_s + t, (s < sets) & (t < run)
    return x_at, y_at, here


@triton.jit
def over_run(sums, BLOCK_J: tl.constexpr, BLOCK_RUN: tl.constexpr):
    """The sum over the columns of each set, in each of them."""
    if BLOCK_RUN > 1:
        each = tl.sum(tl.reshape(sums, (BLOCK_J // BLOCK_RUN, BLOCK_RUN)), 1, keep_dims=True)
        sums = tl.reshape(tl.broadcast_to(each, (BLOCK_J // BLOCK_RUN, BLOCK_RUN)), (1, BLOCK_J))
    return sums
