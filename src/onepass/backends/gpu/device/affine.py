import triton
import triton.language as tl


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
