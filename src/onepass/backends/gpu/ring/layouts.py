"""How the threads of a group of warps share a block of the ring kernel. Blocks have the shape [I, J]; sizes are in bytes."""

from triton import constexpr_function

from .gluon import gl


@constexpr_function
def reduce_layout(columns, size, warps):
    """Return the layout of a block for sums over its rows. `size` is the size of an element.

    Each column stays within one warp, so warps do not wait for each other.
    """
    each = min(16 // size, columns // warps)
    wide = columns // each // warps
    return gl.BlockedLayout([1, each], [32 // wide, wide], [1, warps], [0, 1])


@constexpr_function
def apply_layout(columns, size, warps, halves):
    """Return the layout of a block for storing it: neighbouring threads have neighbouring columns.

    A thread has 16 contiguous bytes of a row, or 8 if `halves` is 2. `size` is the size of an element.
    """
    each = min(16 // halves // size, columns)
    wide = min(columns // each, 32)
    return gl.BlockedLayout([1, each], [32 // wide, wide], [warps, 1], [1, 0])


@constexpr_function
def lanes_of_row(columns, size):
    """Return how many threads share a row in `lane_layout`."""
    return columns // min(16 // size, columns)


@constexpr_function
def lane_layout(columns, size, warps):
    """Return `apply_layout`, without pairs, for blocks of shape [rows of a lane, rows at a time, lanes of a row, elements of a lane].

    Sums along the first and the last axis stay within a lane, which is a thread.
    """
    each = min(16 // size, columns)
    wide = columns // each
    return gl.BlockedLayout([1, 1, 1, each], [1, 32 // wide, wide, 1], [1, warps, 1, 1], [3, 2, 1, 0])


@constexpr_function
def flat_layout(columns, warps):
    """Return the layout of a block that is read one element at a time: neighbouring threads have neighbouring elements."""
    wide = min(max(columns // 32, 1), warps)
    return gl.BlockedLayout([1, 1], [max(32 // columns, 1), min(columns, 32)], [warps // wide, wide], [1, 0])
