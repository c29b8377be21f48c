"""Gradients of elements, and the sums over sets and over parameters that they need."""

import triton
import triton.language as tl

from .activations import activate_back
from .affine import scale_and_shift


@triton.jit
def load_both(io, x_at, y_at, mask):
    """x and dy."""
    return tl.load(io.x_ptr + x_at, mask=mask, other=0.0), tl.load(io.dy_ptr + y_at, mask=mask, other=0.0)


@triton.jit
def gradients(x, dy, mean, rstd, factor, term, mask, ACTIVATION: tl.constexpr, FROM_Y: tl.constexpr):
    """x_hat, and the gradients of z = x_hat·factor + term and of x_hat. (4), (32), (33)"""
    x, dy = x.to(tl.float32), dy.to(tl.float32)
    if FROM_Y:  # x holds y. If the factor is 0, x_hat is unknown.
        x_hat = tl.where(mask, tl.where(factor == 0, float("nan"), (x - term) / factor), 0.0)
    else:  # Outside the mask dy is 0, so sums are right unless mean·rstd overflows. A mask here cost up to 30 %.
        x_hat = (x - mean) * rstd
    dz = dy
    if ACTIVATION != "":
        dz = activate_back(dy, x_hat * factor + term, ACTIVATION)
    return x_hat, dz, dz * factor


@triton.jit
def load_saved(values, set_, here):
    """mean (0 if there is none) and rstd of sets, as the forward saved them."""
    mean = 0.0
    if values.mean_ptr is not None:
        mean = of_sets(values.mean_ptr, set_, here)
    return mean, of_sets(values.rstd_ptr, set_, here)


@triton.jit
def of_sets(ptr, set_, here):
    """One value for each set; `here` is None if all sets exist."""
    if here is None:
        return tl.load(ptr + set_)
    else:
        return tl.load(ptr + set_, mask=here, other=0.0)


@triton.jit
def load_sums(values, set_, here, count):
    """c1 and c2 of sets of `count` elements, from their sums; 0 where there is none. (6), (7)"""
    c1, c2 = 0.0, 0.0
    if values.c1_ptr is not None:
        c1 = of_sets(values.c1_ptr, set_, here) / count
    if values.c2_ptr is not None:
        c2 = of_sets(values.c2_ptr, set_, here) / count
    return c1, c2


@triton.jit
def store_gradient(io, at, mask, wdy, x_hat, rstd, c1, c2):
    """Store dx, plus dsum if there is one. If c2 is None, the statistics were given, and x_hat is not used. (8), (9)"""
    if io.dx_ptr is not None:
        if c2 is None:
            dx = wdy * rstd
        else:
            dx = (wdy - c1 - x_hat * c2) * rstd
        if io.dsum_ptr is not None:
            dx += tl.load(io.dsum_ptr + at, mask=mask, other=0.0).to(tl.float32)
        tl.store(io.dx_ptr + at, dx.to(io.dx_ptr.dtype.element_ty), mask=mask)


@triton.jit
def store_cells(cells, at, mask, a, b, affine, maps, place, norm: tl.constexpr, ALONG_I: tl.constexpr, ALONG_J: tl.constexpr):
    """Store what elements with the same parameters add to the gradients, from their a = Σ dz·x_hat, b = Σ dz. (39), (40)"""
    if cells.dweight_ptr is not None or cells.dbias_ptr is not None:
        gain, _ = scale_and_shift(
            1.0, 0.0, affine.scale_ptr, None, maps.modulation, place, 1.0, norm.modulation_axes, ALONG_I, ALONG_J
        )  # fmt: skip
        if cells.dweight_ptr is not None:
            tl.store(cells.dweight_ptr + at, a * gain, mask=mask)
        if cells.dbias_ptr is not None:
            tl.store(cells.dbias_ptr + at, b * gain, mask=mask)
    if cells.dscale_ptr is not None:
        weight, bias = scale_and_shift(
            1.0, 0.0, affine.weight_ptr, None, maps.param, place, norm.weight_offset, norm.param_axes, ALONG_I, ALONG_J
        )
        _, bias = scale_and_shift(0.0, 0.0, None, affine.bias_ptr, maps.param, place, 0.0, norm.param_axes, ALONG_I, ALONG_J)
        tl.store(cells.dscale_ptr + at, a * weight + b * bias, mask=mask)
    if cells.dshift_ptr is not None:
        tl.store(cells.dshift_ptr + at, b, mask=mask)
