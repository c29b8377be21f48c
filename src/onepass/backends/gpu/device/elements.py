"""The number of a program, and loading and storing elements."""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .activations import activate


@triton.jit
def program(BACKWARDS: tl.constexpr, WIDE: tl.constexpr, PDL_TRIGGER: tl.constexpr, PDL_WAIT: tl.constexpr):
    """Return the number of this program, in 64 bits if WIDE.

    BACKWARDS counts from the last program, because what the previous kernel read last may still be in the cache. PDL is
    programmatic dependent launch: with PDL_TRIGGER, the next kernel may start while this one runs. With PDL_WAIT, wait
    for the results of the previous kernel.
    """
    if PDL_TRIGGER:
        gdc_launch_dependents()
    if PDL_WAIT:
        gdc_wait()
    pid = tl.program_id(0)
    if BACKWARDS:
        pid = tl.num_programs(0) - 1 - pid
    if WIDE:
        pid = pid.to(tl.int64)
    return pid


@triton.jit
def load(io, at, mask, EVICT: tl.constexpr):
    """Return x as float32. With a residual, store x + residual in `sum`, and return that sum, rounded to the dtype of `sum`."""
    x = load_x(io.x_ptr, at, mask, EVICT)
    if io.residual_ptr is not None:
        residual = tl.load(io.residual_ptr + at, mask=mask, other=0.0, eviction_policy=EVICT).to(tl.float32)
        total = (x + residual).to(io.sum_ptr.dtype.element_ty)
        tl.store(io.sum_ptr + at, total, mask=mask)
        x = total.to(tl.float32)
    return x


@triton.jit
def load_x(x_ptr, at, mask, EVICT: tl.constexpr):
    """Return x as float32, without adding a residual."""
    return tl.load(x_ptr + at, mask=mask, other=0.0, eviction_policy=EVICT).to(tl.float32)


@triton.jit
def store(y_ptr, at, z, mask, ACTIVATION: tl.constexpr, EVICT: tl.constexpr):
    tl.store(y_ptr + at, activate(z, ACTIVATION).to(y_ptr.dtype.element_ty), mask=mask, eviction_policy=EVICT)
