"""The arithmetic of the kernels, whatever their walk. Blocks are fp32; equations cite docs/theory.md.

A block is [I, J]. Along J memory is contiguous; along I lie several sets, or several runs of one set. What varies along one of them alone
is [I, 1] or [1, J], and is loaded no more often than that. Four bits say on which of o, r, s, t something depends: 1, 2, 4, 8.
"""

import triton
import triton.language as tl
from triton.language.extra import libdevice
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))  # the interpreter has no libdevice


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
def program(BACKWARDS: tl.constexpr, WIDE: tl.constexpr, LEADS: tl.constexpr, FOLLOWS: tl.constexpr):
    """Which program this is. Backwards, what the kernel before read last comes first: it is still in the cache.

    A kernel that leads lets the next one start while it runs; one that follows waits here until the last one's results are there.
    """
    if LEADS:
        gdc_launch_dependents()
    if FOLLOWS:
        gdc_wait()
    pid = tl.program_id(0)
    if BACKWARDS:
        pid = tl.num_programs(0) - 1 - pid
    if WIDE:
        pid = pid.to(tl.int64)
    return pid


@triton.jit
def load(pointers, at, mask, EVICT: tl.constexpr):
    """x; with a residual their sum, rounded to its dtype and stored."""
    x_ptr, residual_ptr, sum_ptr = pointers
    x = tl.load(x_ptr + at, mask=mask, other=0.0, eviction_policy=EVICT).to(tl.float32)
    if residual_ptr is not None:
        residual = tl.load(residual_ptr + at, mask=mask, other=0.0, eviction_policy=EVICT).to(tl.float32)
        total = (x + residual).to(sum_ptr.dtype.element_ty)
        tl.store(sum_ptr + at, total, mask=mask)
        x = total.to(tl.float32)
    return x


@triton.jit
def store(y_ptr, at, z, mask, ACTIVATION: tl.constexpr, EVICT: tl.constexpr):
    tl.store(y_ptr + at, activate(z, ACTIVATION).to(y_ptr.dtype.element_ty), mask=mask, eviction_policy=EVICT)


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


@triton.jit
def fold_affine(
    rstd, operands, maps, place, i_inside, j_inside,
    OFFSET: tl.constexpr, PARAM: tl.constexpr, MODULATION: tl.constexpr, ALONG_I: tl.constexpr, ALONG_J: tl.constexpr,
):  # fmt: skip
    """factor and term, such that z = (x - mean)·factor + term: all that comes before the activation. (4), (5), (31)

    ALONG_I and ALONG_J say which of o, r, s, t vary along I and J.
    """
    weight_ptr, bias_ptr, scale_ptr, shift_ptr = operands
    factor, term = affine(rstd, 0.0, weight_ptr, bias_ptr, maps[0], place, i_inside, j_inside, OFFSET, PARAM, ALONG_I, ALONG_J)
    return affine(factor, term, scale_ptr, shift_ptr, maps[1], place, i_inside, j_inside, 1.0, MODULATION, ALONG_I, ALONG_J)


@triton.jit
def affine(
    factor, term, weight_ptr, bias_ptr, index_map, place, i_inside, j_inside,
    OFFSET: tl.constexpr, USES: tl.constexpr, ALONG_I: tl.constexpr, ALONG_J: tl.constexpr,
):  # fmt: skip
    """x·factor + term, followed by ·(OFFSET + weight) + bias, as one factor and term."""
    if weight_ptr is not None:
        weight = parameter(weight_ptr, index_map, place, i_inside, j_inside, USES, ALONG_I, ALONG_J) + OFFSET
        factor = factor * weight
        term = term * weight
    if bias_ptr is not None:
        term = term + parameter(bias_ptr, index_map, place, i_inside, j_inside, USES, ALONG_I, ALONG_J)
    return factor, term


@triton.jit
def parameter(
    ptr, index_map, place, i_inside, j_inside, USES: tl.constexpr, ALONG_I: tl.constexpr, ALONG_J: tl.constexpr
):  # fmt: skip
    """A parameter by (1), as large a block as it varies over."""
    every, period, a, b, c, channel_run, d = index_map
    o, r, s, t = place
    at = 0
    if USES & 1:
        at += o // every % period * a
    if USES & 2:
        at += r * b
    if USES & 4:
        at += s * c
    if USES & 8:
        at += t // channel_run * d
    if (USES & ALONG_I) and (USES & ALONG_J):
        value = tl.load(ptr + at, mask=i_inside & j_inside, other=0.0)
    elif USES & ALONG_I:
        value = tl.load(ptr + at, mask=i_inside, other=0.0)
    elif USES & ALONG_J:
        value = tl.load(ptr + at, mask=j_inside, other=0.0)
    else:
        value = tl.load(ptr + at)
    return value.to(tl.float32)


@triton.jit
def activate(z, ACTIVATION: tl.constexpr):
    """The last step of (31)."""
    if ACTIVATION == "silu":
        z = over_one_plus_exp(z, z)
    elif ACTIVATION == "relu":
        z = tl.where(z < 0, 0.0, z)  # a nan stays
    elif ACTIVATION == "gelu":
        z = 0.5 * z * (1.0 + tl.erf(z * 0.7071067811865476))
    elif ACTIVATION == "gelu_tanh":
        z = over_one_plus_exp(z, 1.5957691216057308 * (z + 0.044715 * z * z * z))  # (1 + tanh(u))/2 = 1/(1 + exp(-2u))
    return z


@triton.jit
def over_one_plus_exp(z, u):
    """z/(1 + exp(-u)), in five instructions rather than thirteen: a kernel that reads half types has no more to spare."""
    if INTERPRETED:
        return z / (1.0 + tl.exp(-u))
    else:
        return libdevice.fast_dividef(z, 1.0 + libdevice.fast_expf(-u))


@triton.jit
def activate_back(dy, z, ACTIVATION: tl.constexpr):
    """dz. (32)"""
    if ACTIVATION == "silu":
        s = over_one_plus_exp(tl.full(z.shape, 1.0, tl.float32), z)
        dy = dy * (s * (1.0 + z * (1.0 - s)))
    elif ACTIVATION == "relu":
        dy = tl.where(z <= 0, 0.0, dy)
    elif ACTIVATION == "gelu":
        dy = dy * (0.5 * (1.0 + tl.erf(z * 0.7071067811865476)) + z * 0.3989422804014327 * tl.exp(-0.5 * z * z))
    elif ACTIVATION == "gelu_tanh":
        s = over_one_plus_exp(tl.full(z.shape, 1.0, tl.float32), 1.5957691216057308 * (z + 0.044715 * z * z * z))
        dy = dy * (s + z * (s * (1.0 - s)) * (1.5957691216057308 + 0.21406863 * z * z))
    return dy


@triton.jit
def gradients(x, dy, mean, rstd, factor, term, mask, ACTIVATION: tl.constexpr, FROM_Y: tl.constexpr):
    """x_hat, and the gradients of z = x_hat·factor + term and of x_hat. (4), (32), (33)"""
    x, dy = x.to(tl.float32), dy.to(tl.float32)
    if FROM_Y:  # where the factor is 0, x_hat cannot be known
        x_hat = tl.where(mask, tl.where(factor == 0, float("nan"), (x - term) / factor), 0.0)
    else:  # Outside of the mask dy is 0, and so is all that is summed, unless mean·rstd overflows; masking here too cost up to 30 %.
        x_hat = (x - mean) * rstd
    dz = dy
    if ACTIVATION != "":
        dz = activate_back(dy, x_hat * factor + term, ACTIVATION)
    return x_hat, dz, dz * factor


@triton.jit
def load_saved(pointers, set_, here):
    """mean and rstd of sets as the forward left them."""
    mean_ptr, rstd_ptr = pointers
    mean = 0.0
    if mean_ptr is not None:
        mean = of_sets(mean_ptr, set_, here)
    return mean, of_sets(rstd_ptr, set_, here)


@triton.jit
def of_sets(ptr, set_, here):
    """One value for each set; `here` is None where all are there."""
    if here is None:
        return tl.load(ptr + set_)
    else:
        return tl.load(ptr + set_, mask=here, other=0.0)


@triton.jit
def load_sums(pointers, set_, here, count):
    """c1 and c2 of sets, 0 where there is none, from their sums. (6), (7)"""
    c1_ptr, c2_ptr = pointers
    c1, c2 = 0.0, 0.0
    if c1_ptr is not None:
        c1 = of_sets(c1_ptr, set_, here) / count
    if c2_ptr is not None:
        c2 = of_sets(c2_ptr, set_, here) / count
    return c1, c2


@triton.jit
def store_gradient(dx_ptr, dsum_ptr, at, mask, wdy, x_hat, rstd, c1, c2):
    """dx, plus what arrives at the sum with a residual. Without c2, the statistics were given, and x_hat may be anything. (8), (9)"""
    if dx_ptr is not None:
        if c2 is None:
            dx = wdy * rstd
        else:
            dx = (wdy - c1 - x_hat * c2) * rstd
        if dsum_ptr is not None:
            dx += tl.load(dsum_ptr + at, mask=mask, other=0.0).to(tl.float32)
        tl.store(dx_ptr + at, dx.to(dx_ptr.dtype.element_ty), mask=mask)


@triton.jit
def store_cells(
    cells, at, mask, a, b, operands, maps, place, i_inside, j_inside,
    OFFSET: tl.constexpr, PARAM: tl.constexpr, MODULATION: tl.constexpr, ALONG_I: tl.constexpr, ALONG_J: tl.constexpr,
):  # fmt: skip
    """What elements of the same parameters add to their gradients, from a = Σ dz·x_hat and b = Σ dz of them. (39)"""
    weight_ptr, bias_ptr, scale_ptr, _ = operands
    dweight_ptr, dbias_ptr, dscale_ptr, dshift_ptr = cells
    if dweight_ptr is not None or dbias_ptr is not None:
        gain, _ = affine(1.0, 0.0, scale_ptr, None, maps[1], place, i_inside, j_inside, 1.0, MODULATION, ALONG_I, ALONG_J)
        if dweight_ptr is not None:
            tl.store(dweight_ptr + at, a * gain, mask=mask)
        if dbias_ptr is not None:
            tl.store(dbias_ptr + at, b * gain, mask=mask)
    if dscale_ptr is not None:
        weight, bias = affine(1.0, 0.0, weight_ptr, None, maps[0], place, i_inside, j_inside, OFFSET, PARAM, ALONG_I, ALONG_J)
        _, bias = affine(0.0, 0.0, None, bias_ptr, maps[0], place, i_inside, j_inside, 0.0, PARAM, ALONG_I, ALONG_J)
        tl.store(dscale_ptr + at, a * weight + b * bias, mask=mask)
    if dshift_ptr is not None:
        tl.store(dshift_ptr + at, b, mask=mask)
