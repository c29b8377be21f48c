import triton
import triton.language as tl

from .activations import activate_back
from .affine import affine


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
