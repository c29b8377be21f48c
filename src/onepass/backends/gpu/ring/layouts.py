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
def rows_at_a_time(columns, size, warps):
    """Return how many rows a warp has at a time in `reduce_layout`."""
    return 32 * warps // (columns // min(16 // size, columns // warps))


@constexpr_function
def steps_layout(columns, size, warps):
    """Return `reduce_layout` for blocks of shape [steps, rows at a time, J]. Sums along the first axis stay within a thread."""
    each = min(16 // size, columns // warps)
    wide = columns // each // warps
    return gl.BlockedLayout([1, 1, each], [1, 32 // wide, wide], [1, 1, warps], [1, 2, 0])


@constexpr_function
def column_layout(rows, columns, warps):
    """Return the layout of a block in which a thread has several rows of one column. A warp has the columns of `reduce_layout`."""
    wide = columns // warps
    return gl.BlockedLayout([rows // (32 // wide), 1], [32 // wide, wide], [1, warps], [1, 0])


@constexpr_function
def part_layout(sets, warps, by_column):
    """Return the layout of moments, of shape [sets, members], for sums over members, which need a few shuffles or none."""
    high = 32 if by_column else max(min(sets // warps, 8), 1)
    return gl.BlockedLayout([1, 1], [high, 32 // high], [warps, 1], [1, 0])


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


@constexpr_function
def message_layout(warps):
    """Return the layout of sums of blocks, of shape [BLOCKS_OF_UNIT, warps]: a warp has its own sums, and a lane those of one block."""
    return gl.BlockedLayout([1, 1], [32, 1], [1, warps], [1, 0])
