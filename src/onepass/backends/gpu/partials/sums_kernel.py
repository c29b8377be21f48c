"""Sums of cells, in a fixed order: what programs left of the gradients of parameters, or of sets, added up."""

import triton
import triton.language as tl

from onepass.backends.gpu.device.elements import program


@triton.jit
def add_up(
    cells1_ptr, cells2_ptr, sum1_ptr, sum2_ptr, across, kept1, between, kept2, within, to1, to2, kept, reduced,
    WIDE: tl.constexpr, BLOCK_I: tl.constexpr, BLOCK_J: tl.constexpr, LEADS: tl.constexpr, FOLLOWS: tl.constexpr,
):  # fmt: skip
    """Cells are [across, kept1, between, kept2, within], and are summed over all but `kept`; kept1 and kept2 step by `to1` and `to2`."""
    pid = program(False, WIDE, LEADS, FOLLOWS)
    k = pid * BLOCK_J + tl.arange(0, BLOCK_J)[None, :]
    here = k < kept
    k1, k2 = k // kept2, k % kept2
    first = (k1.to(tl.int64) * between * kept2 + k2) * within
    sum1, sum2 = tl.zeros((BLOCK_I, BLOCK_J), tl.float32), tl.zeros((BLOCK_I, BLOCK_J), tl.float32)
    for n0 in range(0, reduced, BLOCK_I):
        n = (n0 + tl.arange(0, BLOCK_I)[:, None]).to(tl.int64)
        mask = (n < reduced) & here
        inner, rest = n % within, n // within
        at = first + ((rest // between * kept1 * between + rest % between) * kept2) * within + inner
        if sum1_ptr is not None:
            sum1 += tl.load(cells1_ptr + at, mask=mask, other=0.0)
        if sum2_ptr is not None:
            sum2 += tl.load(cells2_ptr + at, mask=mask, other=0.0)
    to = k1.to(tl.int64) * to1 + k2.to(tl.int64) * to2
    if sum1_ptr is not None:
        tl.store(sum1_ptr + to, tl.sum(sum1, 0, keep_dims=True).to(sum1_ptr.dtype.element_ty), mask=here)
    if sum2_ptr is not None:
        tl.store(sum2_ptr + to, tl.sum(sum2, 0, keep_dims=True).to(sum2_ptr.dtype.element_ty), mask=here)
