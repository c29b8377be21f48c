"""Columns (s, t) of x[o, r, s, t], for the kernels of `tile` and `team`, which work on blocks of columns.

A set is the elements of one o and s, so it has `run` columns, one for each t.
"""

import triton
import triton.language as tl


@triton.jit
def locate_columns(o, s, t, column, view, columns, DENSE: tl.constexpr):
    """Return the offsets at which columns begin in x and in y, and a mask of the columns that exist.

    With DENSE, the `columns` columns of each o are contiguous in x and in y.
    """
    x_at, y_at = o.to(tl.int64) * view.x_o, o.to(tl.int64) * view.y_o
    if DENSE:
        x_at, y_at, here = x_at + column, y_at + column, column < columns
    else:
        x_at, y_at = x_at + s.to(tl.int64) * view.x_s + t, y_at + s.to(tl.int64) * view.y_s + t
        here = (s < view.sets) & (t < view.run)
    return x_at, y_at, here


@triton.jit
def sum_over_run(sums, BLOCK_J: tl.constexpr, BLOCK_RUN: tl.constexpr):
    """Sum over the columns of each set, and return the sum in each of these columns. A set has BLOCK_RUN columns of the block."""
    if BLOCK_RUN > 1:
        each = tl.sum(tl.reshape(sums, (BLOCK_J // BLOCK_RUN, BLOCK_RUN)), 1, keep_dims=True)
        sums = tl.reshape(tl.broadcast_to(each, (BLOCK_J // BLOCK_RUN, BLOCK_RUN)), (1, BLOCK_J))
    return sums
