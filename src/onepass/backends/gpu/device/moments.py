import triton
import triton.language as tl

# Sums from which a mean is made are scaled, so that they do not overflow. Powers of two change no digit. (43)
DOWN, UP = tl.constexpr(2.0**-32), tl.constexpr(2.0**32)


@triton.jit
def scaled_down(x, DTYPE: tl.constexpr):
    """An element of such a sum; one of float16 cannot overflow in float32, and is left as it is."""
    return x if tl.float16 == DTYPE else x * DOWN


@triton.jit
def scaled_up(mean, DTYPE: tl.constexpr):
    return mean if tl.float16 == DTYPE else mean * UP


@triton.jit
def update(mean, m2, k, x, inside, CENTERED: tl.constexpr):
    """Each lane takes in the k-th element it sees; outside, nothing. (14), (15) with a set of one."""
    if CENTERED:
        delta = tl.where(inside, x - mean, 0.0)
        mean += delta * (1.0 / k)
        m2 += delta * (x - mean)
    else:
        m2 += x * x
    return mean, m2


@triton.jit
def lanes(start, end, BLOCK: tl.constexpr):
    """How many of the indices from start to end, taken BLOCK at a time, each lane sees."""
    return tl.maximum((end - start - tl.arange(0, BLOCK) + BLOCK - 1) // BLOCK, 0).to(tl.float32)


@triton.jit
def merge(mean, m2, n, total, axis: tl.constexpr, CENTERED: tl.constexpr):
    """The moments of disjoint sets of n elements each, `total` in all, taken together along an axis, or both. (14), (15)"""
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
    """The moments of two disjoint sets, lane by lane, and how many elements they have together. (14), (15)"""
    m2 += other_m2
    if CENTERED:
        delta = tl.where(other_n > 0, other_mean - mean, 0.0)
        share = other_n / tl.maximum(n + other_n, 1.0)
        mean += delta * share
        m2 += delta * (delta * (n * share))  # n is 0 at first, and the square may be infinite
    return mean, m2, n + other_n


@triton.jit
def inverse_deviation(var, eps):
    """rstd. (4)"""
    return tl.div_rn(1.0, tl.sqrt_rn(var + eps))


@triton.jit
def store_statistics(pointers, at, mean, rstd, var, mask):
    mean_ptr, rstd_ptr, var_ptr = pointers
    if mean_ptr is not None:
        tl.store(mean_ptr + at, mean, mask=mask)
    if rstd_ptr is not None:
        tl.store(rstd_ptr + at, rstd, mask=mask)
    if var_ptr is not None:
        tl.store(var_ptr + at, var, mask=mask)


@triton.jit
def load_statistics(pointers, at, eps, mask):
    """The mean, 0 without one, and rstd, from the variance where that is given."""
    mean_ptr, rstd_ptr, var_ptr = pointers
    mean = 0.0
    if mean_ptr is not None:
        mean = tl.load(mean_ptr + at, mask=mask).to(tl.float32)
    if rstd_ptr is not None:
        rstd = tl.load(rstd_ptr + at, mask=mask)
    else:
        rstd = inverse_deviation(tl.load(var_ptr + at, mask=mask).to(tl.float32), eps)
    return mean, rstd
