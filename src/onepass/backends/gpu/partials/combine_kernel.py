"""The kernel that computes the statistics of sets from the moments of their parts.

A set is the elements that share one mean and variance, and a part is the share of a set that one program works on. The
moments are the mean and M2, the sum of (x - mean)². (14) and (15) are equations of docs/theory.md.
"""

import triton
import triton.language as tl

from onepass.backends.gpu.device.elements import program
from onepass.backends.gpu.device.groups import Statistics
from onepass.backends.gpu.device.moments import inverse_deviation, join, merge, store_statistics

from .combine import PartArguments, SetSizes


@triton.jit
def combine(parts_ptr, stats: Statistics, eps, sizes: SetSizes, split: PartArguments, mode: tl.constexpr):
    """Store the statistics of one set, merged from the moments of its parts. (14), (15)

    The set has `reps` runs of `run` elements, cut into parts_r x parts_t parts. A part has chunk_r runs, and chunk_t
    elements of each run. The last parts may be smaller. If rows lie abreast, `abreast` neighbouring parts take the runs of a
    chunk in turn: part r has every abreast-th run, beginning with run r % abreast.
    """
    BLOCK_I: tl.constexpr = mode.block_i
    BLOCK_J: tl.constexpr = mode.block_j
    set_ = program(False, True, mode.pdl_trigger, mode.pdl_wait)
    o, s = set_ // sizes.sets, set_ % sizes.sets
    i, j = tl.arange(0, BLOCK_I)[:, None], tl.arange(0, BLOCK_J)[None, :]
    first = (o * split.parts_r * sizes.sets + s) * split.parts_t
    n, mean, m2 = (
        tl.zeros((BLOCK_I, BLOCK_J), tl.float32),
        tl.zeros((BLOCK_I, BLOCK_J), tl.float32),
        tl.zeros((BLOCK_I, BLOCK_J), tl.float32),
    )
    for r0 in range(0, split.parts_r, BLOCK_I):
        for t0 in range(0, split.parts_t, BLOCK_J):
            turn = (r0 + i) // sizes.abreast  # in 32 bits: a division of 64 bits takes a hundred instructions
            one_more = r0 + i - turn * sizes.abreast < sizes.reps % sizes.abreast
            r, t = (r0 + i).to(tl.int64), (t0 + j).to(tl.int64)
            mask = (r < split.parts_r) & (t < split.parts_t)
            at = parts_ptr + first + r * sizes.sets * split.parts_t + t
            left = sizes.reps // sizes.abreast - turn.to(tl.int64) * split.chunk_r + one_more.to(tl.int32)
            runs = tl.minimum(tl.maximum(left, 0), split.chunk_r)
            n_part = tl.where(mask, runs * 1.0 * tl.minimum(sizes.run - t * split.chunk_t, split.chunk_t), 0.0)
            m2_part = tl.load(at + split.m2_offset, mask=mask, other=0.0)
            mean_part = m2_part
            if mode.centered:
                mean_part = tl.load(at, mask=mask, other=0.0)
            mean, m2, n = join(mean, m2, n, mean_part, m2_part, n_part, mode.centered)
    mean, m2 = merge(mean, m2, n, sizes.reps * 1.0 * sizes.run, None, mode.centered)
    var = m2 / sizes.reps / sizes.run
    store_statistics(stats, set_, mean, inverse_deviation(var, eps), var, None)
