"""The statistics of sets from the moments of their parts: on tensors of the size of statistics, between the passes over x."""

import triton
import triton.language as tl

from onepass.backends.gpu.device.elements import program
from onepass.backends.gpu.device.moments import inverse_deviation, join, merge, store_statistics


@triton.jit
def combine(
    parts_ptr, mean_ptr, rstd_ptr, var_ptr, eps, reps, sets, run, parts_r, parts_t, chunk_r, chunk_t, m2_at,
    CENTERED: tl.constexpr, BLOCK_I: tl.constexpr, BLOCK_J: tl.constexpr, LEADS: tl.constexpr, FOLLOWS: tl.constexpr,
):  # fmt: skip
    """Of one set. Its parts are the cells of a grid of parts_r x parts_t that cuts reps x run every chunk_r and chunk_t. (14), (15)"""
    set_ = program(False, True, LEADS, FOLLOWS)
    o, s = set_ // sets, set_ % sets
    i, j = tl.arange(0, BLOCK_I)[:, None], tl.arange(0, BLOCK_J)[None, :]
    first = (o * parts_r * sets + s) * parts_t
    n, mean, m2 = (
        tl.zeros((BLOCK_I, BLOCK_J), tl.float32),
        tl.zeros((BLOCK_I, BLOCK_J), tl.float32),
        tl.zeros((BLOCK_I, BLOCK_J), tl.float32),
    )
    for r0 in range(0, parts_r, BLOCK_I):
        for t0 in range(0, parts_t, BLOCK_J):
            r, t = (r0 + i).to(tl.int64), (t0 + j).to(tl.int64)
            mask = (r < parts_r) & (t < parts_t)
            at = parts_ptr + first + r * sets * parts_t + t
            n_part = tl.where(mask, tl.minimum(reps - r * chunk_r, chunk_r) * 1.0 * tl.minimum(run - t * chunk_t, chunk_t), 0.0)
            m2_part = tl.load(at + m2_at, mask=mask, other=0.0)
            mean_part = m2_part
            if CENTERED:
                mean_part = tl.load(at, mask=mask, other=0.0)
            mean, m2, n = join(mean, m2, n, mean_part, m2_part, n_part, CENTERED)
    mean, m2 = merge(mean, m2, n, reps * 1.0 * run, None, CENTERED)
    var = m2 / reps / run
    store_statistics((mean_ptr, rstd_ptr, var_ptr), set_, mean, inverse_deviation(var, eps), var, None)
