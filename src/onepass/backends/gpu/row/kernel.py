"""The row walk: a set is a run of contiguous elements, or several such runs."""

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
def row_forward(
    x_ptr, residual_ptr, sum_ptr, y_ptr, weight_ptr, bias_ptr, scale_ptr, shift_ptr, mean_ptr, rstd_ptr, var_ptr, parts_ptr,
    eps, total, reps, sets, run, x_o, x_r, x_s, y_o, y_r, y_s,
    p_every, p_period, p_o, p_r, p_s, p_run, p_t, m_every, m_period, m_o, m_r, m_s, m_run, m_t,
    parts_r, parts_t, chunk_r, chunk_t, m2_at, columns,
    PARAM: tl.constexpr, MODULATION: tl.constexpr, OFFSET: tl.constexpr, CENTERED: tl.constexpr, ACTIVATION: tl.constexpr,
    RESIDENT: tl.constexpr, REDUCE: tl.constexpr, APPLY: tl.constexpr, WIDE: tl.constexpr, FLAT: tl.constexpr,
    BLOCK_I: tl.constexpr, BLOCK_J: tl.constexpr, BLOCK_RUN: tl.constexpr, TAIL: tl.constexpr, STAGES: tl.constexpr,
    SHORT: tl.constexpr, LEADS: tl.constexpr, FOLLOWS: tl.constexpr,
):  # fmt: skip
    """FLAT: a set is one run, and along I lie several sets. Else a program has one set or a part of it, and along I lie its runs.

    SHORT: a run fits into a block.
    """
    x, operands, statistics = (x_ptr, residual_ptr, sum_ptr), (weight_ptr, bias_ptr, scale_ptr, shift_ptr), (mean_ptr, rstd_ptr, var_ptr)
    maps = (p_every, p_period, p_o, p_r, p_s, p_run, p_t), (m_every, m_period, m_o, m_r, m_s, m_run, m_t)
    strides = x_o, x_r, x_s, y_o, y_r, y_s
    pid = program(not REDUCE, WIDE, LEADS, FOLLOWS)
    if RESIDENT:
        step = tl.num_programs(0) * BLOCK_I
        if STAGES > 1:  # each program has many blocks, and loads one while it works on another
            for first in tl.range(pid * BLOCK_I, total, step, num_stages=STAGES):
                _resident(
                    x, y_ptr, operands, statistics, eps, first, total, sets, run, strides, maps,
                    PARAM, MODULATION, OFFSET, CENTERED, ACTIVATION, BLOCK_I, BLOCK_J, TAIL,
                )  # fmt: skip
        else:
            _resident(
                x, y_ptr, operands, statistics, eps, pid * BLOCK_I, total, sets, run, strides, maps,
                PARAM, MODULATION, OFFSET, CENTERED, ACTIVATION, BLOCK_I, BLOCK_J, TAIL,
            )  # fmt: skip
    else:
        _part(
            x, y_ptr, operands, statistics, parts_ptr, eps, pid, total, reps, sets, run, strides, maps,
            parts_r, parts_t, chunk_r, chunk_t, m2_at,
            PARAM, MODULATION, OFFSET, CENTERED, ACTIVATION, REDUCE, APPLY, FLAT, BLOCK_I, BLOCK_J, SHORT, STAGES,
        )  # fmt: skip


@triton.jit
def _resident(
    x_ptrs, y_ptr, operands, statistics, eps, first, total, sets, run, strides, maps,
    PARAM: tl.constexpr, MODULATION: tl.constexpr, OFFSET: tl.constexpr, CENTERED: tl.constexpr, ACTIVATION: tl.constexpr,
    BLOCK_I: tl.constexpr, BLOCK_J: tl.constexpr, TAIL: tl.constexpr,
):  # fmt: skip
    """Whole sets, of one run each, from `first` on. Where a power of two is too long by far, a run is two blocks, the second its tail."""
    x_o, _, x_s, y_o, _, y_s = strides
    set_, j = first + tl.arange(0, BLOCK_I)[:, None], tl.arange(0, BLOCK_J)[None, :]
    o, s = set_ // sets, set_ % sets
    x_at, y_at = o.to(tl.int64) * x_o + s.to(tl.int64) * x_s, o.to(tl.int64) * y_o + s.to(tl.int64) * y_s
    here, inside = set_ < total, j < run
    x = load(x_ptrs, x_at + j, here & inside, "")
    DTYPE: tl.constexpr = y_ptr.dtype.element_ty
    mean = tl.sum(scaled_down(x, DTYPE), 1, keep_dims=True)
    if TAIL:
        j_tail = BLOCK_J + tl.arange(0, TAIL)[None, :]
        inside_tail = j_tail < run
        x_tail = load(x_ptrs, x_at + j_tail, here & inside_tail, "")
        mean += tl.sum(scaled_down(x_tail, DTYPE), 1, keep_dims=True)
    mean = scaled_up(mean / run, DTYPE)  # (2)
    if CENTERED:
        x = tl.where(here & inside, x - mean, 0.0)
    var = tl.sum(x * x, 1, keep_dims=True)
    if TAIL:
        if CENTERED:
            x_tail = tl.where(here & inside_tail, x_tail - mean, 0.0)
        var += tl.sum(x_tail * x_tail, 1, keep_dims=True)
    var = var / run  # (3)
    rstd = inverse_deviation(var, eps)
    store_statistics(statistics, set_, mean, rstd, var, here)
    factor, term = fold_affine(rstd, operands, maps, (o, 0, s, j), here, inside, OFFSET, PARAM, MODULATION, 5, 8)
    store(y_ptr, y_at + j, x * factor + term, here & inside, ACTIVATION, "")
    if TAIL:
        factor, term = fold_affine(rstd, operands, maps, (o, 0, s, j_tail), here, inside_tail, OFFSET, PARAM, MODULATION, 5, 8)
        store(y_ptr, y_at + j_tail, x_tail * factor + term, here & inside_tail, ACTIVATION, "")


@triton.jit
def _part(
    x_ptrs, y_ptr, operands, statistics, parts_ptr, eps, pid, total, reps, sets, run, strides, maps,
    parts_r, parts_t, chunk_r, chunk_t, m2_at,
    PARAM: tl.constexpr, MODULATION: tl.constexpr, OFFSET: tl.constexpr, CENTERED: tl.constexpr, ACTIVATION: tl.constexpr,
    REDUCE: tl.constexpr, APPLY: tl.constexpr, FLAT: tl.constexpr,
    BLOCK_I: tl.constexpr, BLOCK_J: tl.constexpr, SHORT: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """A part of sets, block by block: their moments, or y, or one after the other."""
    BOTH: tl.constexpr = REDUCE and APPLY
    x_o, x_r, x_s, y_o, y_r, y_s = strides
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
    here = None
    if FLAT:
        set_ = set_ * BLOCK_I + i
        here = set_ < total
    o, s = set_ // sets, set_ % sets
    x_at, y_at = o.to(tl.int64) * x_o + s.to(tl.int64) * x_s, o.to(tl.int64) * y_o + s.to(tl.int64) * y_s
    if REDUCE:
        KEEP: tl.constexpr = "evict_last" if BOTH else ""
        mean, m2 = tl.zeros((BLOCK_I, BLOCK_J), tl.float32), tl.zeros((BLOCK_I, BLOCK_J), tl.float32)
        k = 0.0
        n = lanes(t_start, t_end, BLOCK_J)[None, :]
        if FLAT:
            for t0 in tl.range(t_start, t_end, BLOCK_J, num_stages=STAGES):
                mask = here & (t0 + j < t_end)
                k += 1.0
                mean, m2 = update(mean, m2, k, load(x_ptrs, x_at + (t0 + j), mask, KEEP), mask, CENTERED)
            mean, m2 = merge(mean, m2, n, (t_end - t_start) * 1.0, 1, CENTERED)
        else:
            # A lane that has run past the end sees no more elements: there is one step along t, or one run at a time.
            for step in range(steps):
                t = t_start + step * BLOCK_J + j
                for r0 in tl.range(r_start, r_end, BLOCK_I, num_stages=STAGES):
                    mask = (r0 + i < r_end) & (t < t_end)
                    k += 1.0
                    x = load(x_ptrs, x_at + (r0 + i).to(tl.int64) * x_r + t, mask, KEEP)
                    mean, m2 = update(mean, m2, k, x, mask, CENTERED)
            n = n * lanes(r_start, r_end, BLOCK_I)[:, None]
            mean, m2 = merge(mean, m2, n, (r_end - r_start) * 1.0 * (t_end - t_start), None, CENTERED)
        if APPLY:
            var = m2 / reps / run
            rstd = inverse_deviation(var, eps)
            store_statistics(statistics, set_, mean, rstd, var, here)
        else:
            at = ((o.to(tl.int64) * parts_r + part_r) * sets + s) * parts_t + part_t
            tl.store(parts_ptr + at, mean, mask=here)
            tl.store(parts_ptr + m2_at + at, m2, mask=here)
    else:
        mean, rstd = load_statistics(statistics, set_, eps, here)
    if APPLY:
        DROP: tl.constexpr = "evict_first" if BOTH else ""
        x_ptr = x_ptrs[0]
        if FLAT:
            for step in tl.range(0, steps, num_stages=STAGES):
                t = t_start + (steps - 1 - step) * BLOCK_J + j  # backwards: what was read last is still in the cache
                inside = t < t_end
                x = load((x_ptr, None, None), x_at + t, here & inside, DROP)
                factor, term = fold_affine(rstd, operands, maps, (o, 0, s, t), here, inside, OFFSET, PARAM, MODULATION, 5, 8)
                store(y_ptr, y_at + t, (x - mean) * factor + term, here & inside, ACTIVATION, DROP)
        else:
            for step in range(steps):
                t = t_start + (steps - 1 - step) * BLOCK_J + j
                inside = t < t_end
                for r0 in tl.range(r_start, r_end, BLOCK_I, num_stages=STAGES):
                    r = r0 + i
                    x = load((x_ptr, None, None), x_at + r.to(tl.int64) * x_r + t, (r < r_end) & inside, DROP)
                    factor, term = fold_affine(rstd, operands, maps, (o, r, s, t), r < r_end, inside, OFFSET, PARAM, MODULATION, 2, 8)
                    store(y_ptr, y_at + r.to(tl.int64) * y_r + t, (x - mean) * factor + term, (r < r_end) & inside, ACTIVATION, DROP)
