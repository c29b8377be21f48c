"""Columns of the tile walk, forward and backward, and of `team`."""

import triton
import triton.language as tl


@triton.jit
def locate_columns(o, s, t, column, view, columns, DENSE: tl.constexpr):
    """Where columns begin in x and in y, and whether they exist.

    DENSE: they are contiguous in both, `columns` for each o.
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
    """The sum over the columns of each set, repeated in each of these columns."""
    if BLOCK_RUN > 1:
        each = tl.sum(tl.reshape(sums, (BLOCK_J // BLOCK_RUN, BLOCK_RUN)), 1, keep_dims=True)
        sums = tl.reshape(tl.broadcast_to(each, (BLOCK_J // BLOCK_RUN, BLOCK_RUN)), (1, BLOCK_J))
    return sums
