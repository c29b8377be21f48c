"""Gradients of elements, and the sums over sets and over parameters that they need.

A set is the elements that share a mean and a variance. A cell is a partial sum of the gradient of a parameter; a later
kernel adds up the cells. Numbers such as (4) are equations of docs/theory.md.
"""

import triton
import triton.language as tl

from .activations import activate_back
from .affine import scale_and_shift

INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))  # Triton's interpreter has no inline assembly


@triton.jit
def load_both(io, x_at, y_at, mask):
    """Load x and dy. Return both, in their own dtypes."""
    return tl.load(io.x_ptr + x_at, mask=mask, other=0.0), tl.load(io.dy_ptr + y_at, mask=mask, other=0.0)


@triton.jit
def again(x):
    """Return x, as something that the compiler does not know. So it computes x_hat and dz again from x: to keep them takes more registers.

    float32 is as large as x_hat, so there is nothing to save.
    """
    if x.dtype.primitive_bitwidth == 16 and not INTERPRETED:
        x = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=x.dtype, is_pure=False, pack=2)
    return x


@triton.jit
def gradients(x, dy, mean, rstd, factor, term, mask, ACTIVATION: tl.constexpr, FROM_Y: tl.constexpr):
    """Return x_hat, dz (the gradient of z = x_hat·factor + term), and the gradient of x_hat. (4), (32), (33)

    With FROM_Y, `x` holds y. Outside the mask, dy must be 0.
    """
    x, dy = x.to(tl.float32), dy.to(tl.float32)
    if FROM_Y:  # where the factor is 0, y says nothing about x_hat
        x_hat = tl.where(mask, tl.where(factor == 0, float("nan"), (x - term) / factor), 0.0)
    else:  # A mask would make kernels up to 30 % slower. Without it, sums are wrong only if mean·rstd overflows.
        x_hat = (x - mean) * rstd
    dz = dy
    if ACTIVATION != "":
        dz = activate_back(dy, x_hat * factor + term, ACTIVATION)
    return x_hat, dz, dz * factor


@triton.jit
def load_saved(values, set_, here):
    """Return mean and rstd of sets, as the forward saved them. The mean is 0 if the forward saved none."""
    mean = 0.0
    if values.mean_ptr is not None:
        mean = of_sets(values.mean_ptr, set_, here)
    return mean, of_sets(values.rstd_ptr, set_, here)


@triton.jit
def of_sets(ptr, set_, here):
    """Load one value for each set. `here` is a mask of the sets that exist, or None if all do."""
    if here is None:
        return tl.load(ptr + set_)
    else:
        return tl.load(ptr + set_, mask=here, other=0.0)


@triton.jit
def load_sums(values, set_, here, count):
    """Return c1 and c2 of sets of `count` elements: the sums of (6) and (7), divided by `count`. A missing sum gives 0."""
    c1, c2 = 0.0, 0.0
    if values.c1_ptr is not None:
        c1 = of_sets(values.c1_ptr, set_, here) / count
    if values.c2_ptr is not None:
        c2 = of_sets(values.c2_ptr, set_, here) / count
    return c1, c2


@triton.jit
def store_gradient(io, at, mask, wdy, x_hat, rstd, c1, c2):
    """Store dx, or dx + dsum if there is a dsum, the gradient of x + residual. Do nothing if dx is not needed.

    dx is (8), or (9) if c2 is None: then the statistics were given, and x_hat is not used.
    """
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
    """Store the cells of elements that share their parameters, from the sums (39) over these elements.

    The sums are a = Σ dz·x_hat and b = Σ dz. (40) gives the cells of dweight, dbias, dscale and dshift.
    """
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
