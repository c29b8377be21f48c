"""The arithmetic of the kernels, whatever their walk. Blocks are fp32; equations cite docs/theory.md.

A block is [I, J]. Along J memory is contiguous; along I lie several sets, or several runs of one set. What varies along one of them alone
is [I, 1] or [1, J], and is loaded no more often than that. Four bits say on which of o, r, s, t something depends: 1, 2, 4, 8.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .activations import activate


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
