"""Means and sums of squared differences (M2): of lanes, of parts, of sets."""

import triton
import triton.language as tl

# Sums for a mean are scaled down so that they do not overflow, and the mean is scaled up again. Powers of two change no
# digit. (43)
DOWN, UP = tl.constexpr(2.0**-32), tl.constexpr(2.0**32)


@triton.jit
def scaled_down(x, DTYPE: tl.constexpr):
    """x, scaled for such a sum. Sums of float16 cannot overflow in float32 and need no scaling."""
    return x if tl.float16 == DTYPE else x * DOWN


@triton.jit
def scaled_up(mean, DTYPE: tl.constexpr):
    return mean if tl.float16 == DTYPE else mean * UP


@triton.jit
def update(mean, m2, k, x, inside, CENTERED: tl.constexpr):
    """Each lane adds its k-th element; lanes outside add nothing. (14), (15) for one new element."""
    if CENTERED:
        delta = tl.where(inside, x - mean, 0.0)
        mean += delta * (1.0 / k)
        m2 += delta * (x - mean)
    else:
        m2 += x * x
    return mean, m2


@triton.jit
def lanes(start, end, BLOCK: tl.constexpr):
    """How many indices each lane has, if BLOCK lanes take the indices from start to end in turn."""
    return tl.maximum((end - start - tl.arange(0, BLOCK) + BLOCK - 1) // BLOCK, 0).to(tl.float32)


@triton.jit
def merge(mean, m2, n, total, axis: tl.constexpr, CENTERED: tl.constexpr):
    """The moments of disjoint sets merged along one axis, or both. Each has n elements, all have `total`. (14), (15)"""
    KEEP: tl.constexpr = axis is not None
    if CENTERED:
        merged = tl.sum(mean * (n * DOWN), axis, keep_dims=KEEP) / total * UP
        delta = tl.where(n > 0, mean - merged, 0.0)
        mean, m2 = merged, m2 + delta * delta * n
    else:
        mean = tl.sum(mean, axis, keep_dims=KEEP)
    return mean, tl.sum(m2, axis, keep_dims=KEEP)


@triton.jit
def join(mean, m2, n, other_mean, other_m2, other_n, CENTERED: tl.constexpr):
    """The moments of two disjoint sets merged lane by lane, and their number of elements. (14), (15)"""
    m2 += other_m2
    if CENTERED:
        delta = tl.where(other_n > 0, other_mean - mean, 0.0)
        share = other_n / tl.maximum(n + other_n, 1.0)
        mean += delta * share
        m2 += delta * (delta * (n * share))  # in this order, because n is 0 at first and delta * delta may be infinite
    return mean, m2, n + other_n


@triton.jit
def inverse_deviation(var, eps):
    """rstd. (4)"""
    return tl.div_rn(1.0, tl.sqrt_rn(var + eps))


@triton.jit
def store_statistics(stats, at, mean, rstd, var, mask):
    if stats.mean_ptr is not None:
        tl.store(stats.mean_ptr + at, mean, mask=mask)
    if stats.rstd_ptr is not None:
        tl.store(stats.rstd_ptr + at, rstd, mask=mask)
    if stats.var_ptr is not None:
        tl.store(stats.var_ptr + at, var, mask=mask)


@triton.jit
def load_statistics(stats, at, eps, mask):
    """mean (0 if there is none) and rstd, which comes from var if var is given."""
    mean = 0.0
    if stats.mean_ptr is not None:
        mean = tl.load(stats.mean_ptr + at, mask=mask).to(tl.float32)
    if stats.rstd_ptr is not None:
        rstd = tl.load(stats.rstd_ptr + at, mask=mask)
    else:
        rstd = inverse_deviation(tl.load(stats.var_ptr + at, mask=mask).to(tl.float32), eps)
    return mean, rstd
