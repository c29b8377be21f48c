"""Moments of groups of elements: the mean, and M2, the sum of squared differences from the mean.

A lane is one position in a block. It has moments of its own, to which it adds one element of x at a time. Without
CENTERED, means are not computed, and M2 is the sum of squares. Numbers such as (14) are equations of docs/theory.md.
"""

import triton
import triton.language as tl

# To compute a mean, elements are multiplied by DOWN so that their sum does not overflow, and the result by UP. Powers of
# two change no digit. (43)
DOWN, UP = tl.constexpr(2.0**-32), tl.constexpr(2.0**32)

SMALLEST_NORMAL = tl.constexpr(2.0**-126)


@triton.jit
def scaled_down(x, DTYPE: tl.constexpr):
    """Return x·DOWN, or x itself for float16, because sums of float16 cannot overflow in float32."""
    return x if tl.float16 == DTYPE else x * DOWN


@triton.jit
def scaled_up(mean, DTYPE: tl.constexpr):
    return mean if tl.float16 == DTYPE else mean * UP


@triton.jit
def mean_of(total, n, inverse_n, DTYPE: tl.constexpr):
    """Return total/n, for a sum `total` of elements that were scaled down. `inverse_n` is 1/n, rounded. (2)

    The remainder corrects the product, because 1/n is rounded. The correction is nan if the sum is infinite.
    """
    mean = total * inverse_n
    step = tl.fma(-mean, n, total) * inverse_n
    return scaled_up(tl.where(step == step, mean + step, mean), DTYPE)


@triton.jit
def update(mean, m2, k, x, inside, CENTERED: tl.constexpr):
    """Add the k-th element of each lane, x, to the moments of that lane. Return the new mean and M2. (14), (15)

    Lanes where `inside` is False must have x = 0, and add nothing.
    """
    if CENTERED:
        delta = tl.where(inside, x - mean, 0.0)
        mean += delta * (1.0 / k)
        m2 += delta * (x - mean)
    else:
        m2 += x * x
    return mean, m2


@triton.jit
def lanes(start, end, lane, BLOCK: tl.constexpr):
    """Return how many indices each lane has, if BLOCK lanes take the indices from start to end in turn.

    Example: `lanes(0, 5, tl.arange(0, 4), 4)` is [2, 1, 1, 1].
    """
    return tl.maximum((end - start - lane + BLOCK - 1) // BLOCK, 0).to(tl.float32)


@triton.jit
def merge(mean, m2, n, total, axis: tl.constexpr, CENTERED: tl.constexpr):
    """Merge the moments of groups of elements along one axis, or along all if `axis` is None. Return mean and M2. (14), (15)

    `n` is the number of elements of each group, and `total` of all groups together.
    """
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
    """Merge two groups of elements in each lane. Return their common mean, M2 and number of elements. (14), (15)"""
    m2 += other_m2
    if CENTERED:
        delta = tl.where(other_n > 0, other_mean - mean, 0.0)
        share = other_n / tl.maximum(n + other_n, 1.0)
        mean += delta * share
        m2 += delta * (delta * (n * share))  # in this order: n is 0 at first, and 0 times an infinite delta * delta is nan
    return mean, m2, n + other_n


@triton.jit
def inverse_deviation(var, eps, TINY_EPS: tl.constexpr = True):
    """Return rstd = 1/sqrt(var + eps). (4)

    One step of Newton's method makes the GPU's estimate as exact as a rounded root and a rounded quotient are, in a quarter of the
    instructions. The estimate takes subnormal numbers for 0, so these are scaled up first, unless eps is larger than all of them. The
    step is nan where var + eps is 0 or infinite. There, the estimate is exact.
    """
    square = var + eps
    if TINY_EPS:
        tiny = square < SMALLEST_NORMAL
        square = tl.where(tiny, square * 2.0**48, square)
    estimate = tl.rsqrt(square)
    step = 0.5 * estimate * (1.0 - square * estimate * estimate)
    rstd = tl.where(step == step, estimate + step, estimate)
    if TINY_EPS:
        rstd = tl.where(tiny, rstd * 2.0**24, rstd)
    return rstd


@triton.jit
def store_statistics(stats, at, mean, rstd, var, mask):
    """Store the statistics of sets, and update running ones. Each set must be stored once only."""
    if stats.mean_ptr is not None:
        tl.store(stats.mean_ptr + at, mean, mask=mask)
    if stats.rstd_ptr is not None:
        tl.store(stats.rstd_ptr + at, rstd, mask=mask)
    if stats.var_ptr is not None:
        tl.store(stats.var_ptr + at, var, mask=mask)
    if stats.running_mean_ptr is not None:
        _update_running(stats.running_mean_ptr + at, mean, stats.momentum, mask)
        _update_running(stats.running_var_ptr + at, var * stats.unbiased, stats.momentum, mask)


@triton.jit
def _update_running(running_ptr, batch, momentum, mask):
    """running = (1 - momentum)·running + momentum·batch, rounded as torch.lerp does. (12), (13)"""
    running = tl.load(running_ptr, mask=mask)
    step = batch - running
    tl.store(running_ptr, tl.where(momentum < 0.5, running + momentum * step, batch - step * (1.0 - momentum)), mask=mask)


@triton.jit
def load_statistics(stats, at, mask):
    """Return mean and rstd, or mean and var if rstd is not stored: `known_rstd` computes it. The mean is 0 if there is none."""
    mean = 0.0
    if stats.mean_ptr is not None:
        mean = tl.load(stats.mean_ptr + at, mask=mask).to(tl.float32)
    if stats.rstd_ptr is not None:
        spread = tl.load(stats.rstd_ptr + at, mask=mask)
    else:
        spread = tl.load(stats.var_ptr + at, mask=mask).to(tl.float32)
    return mean, spread


@triton.jit
def known_rstd(stats, spread, eps):
    """Return rstd, from what `load_statistics` returned."""
    if stats.rstd_ptr is not None:
        return spread
    else:
        return inverse_deviation(spread, eps)
