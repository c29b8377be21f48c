"""The kernel that adds up cells, in a fixed order.

Cells are partial sums over the elements that use a parameter, or over a set: the elements that share one mean and variance.
"""

import triton
import triton.language as tl

from onepass.backends.gpu.device.elements import program

from .sums import JointSplit, SecondSumPointers, SumPointers, SumSizes


@triton.jit
def add_up(pointers: SumPointers, sizes: SumSizes, mode: tl.constexpr):
    """Store the sums of two tensors of cells [across, kept1, between, kept2, within] over all axes but kept1 and kept2."""
    _add_up(program(False, mode.wide, mode.pdl_trigger, mode.pdl_wait), pointers, sizes, mode)


@triton.jit
def add_up_both(
    pointers: SumPointers, second: SecondSumPointers, sizes: SumSizes, second_sizes: SumSizes, split: JointSplit,
    mode: tl.constexpr, second_mode: tl.constexpr,
):  # fmt: skip
    """Do that for two pairs of tensors. The first split.first programs work on the first pair."""
    pid = program(False, mode.wide, mode.pdl_trigger, mode.pdl_wait)
    if pid < split.first:
        _add_up(pid, pointers, sizes, mode)
    else:
        others = SumPointers(second.cells3_ptr, second.cells4_ptr, second.sum3_ptr, second.sum4_ptr)
        _add_up(pid - split.first, others, second_sizes, second_mode)


@triton.jit
def _add_up(pid, pointers, sizes, mode: tl.constexpr):
    BLOCK_I: tl.constexpr = mode.block_i
    BLOCK_J: tl.constexpr = mode.block_j
    k = pid * BLOCK_J + tl.arange(0, BLOCK_J)[None, :]
    here = k < sizes.kept
    k1, k2 = k // sizes.kept2, k % sizes.kept2
    first = (k1.to(tl.int64) * sizes.between * sizes.kept2 + k2) * sizes.within
    sum1, sum2 = tl.zeros((BLOCK_I, BLOCK_J), tl.float32), tl.zeros((BLOCK_I, BLOCK_J), tl.float32)
    for n0 in range(0, sizes.reduced, BLOCK_I):
        n = (n0 + tl.arange(0, BLOCK_I)[:, None]).to(tl.int64)
        mask = (n < sizes.reduced) & here
        inner, rest = n % sizes.within, n // sizes.within
        outer = rest // sizes.between * sizes.kept1 * sizes.between + rest % sizes.between
        at = first + (outer * sizes.kept2) * sizes.within + inner
        if pointers.sum1_ptr is not None:
            sum1 += tl.load(pointers.cells1_ptr + at, mask=mask, other=0.0)
        if pointers.sum2_ptr is not None:
            sum2 += tl.load(pointers.cells2_ptr + at, mask=mask, other=0.0)
    to = k1.to(tl.int64) * sizes.stride1 + k2.to(tl.int64) * sizes.stride2
    if pointers.sum1_ptr is not None:
        tl.store(pointers.sum1_ptr + to, tl.sum(sum1, 0, keep_dims=True).to(pointers.sum1_ptr.dtype.element_ty), mask=here)
    if pointers.sum2_ptr is not None:
        tl.store(pointers.sum2_ptr + to, tl.sum(sum2, 0, keep_dims=True).to(pointers.sum2_ptr.dtype.element_ty), mask=here)
