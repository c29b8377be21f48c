"""The group `reduce` of the backward kernel of ring: sums over the blocks of x and dy in the ring, tile by tile, for `publish`.

Memory is x[o, r, s, t]. A tile is some columns (s, t) of one o, in blocks of rows r. Each column gets two sums, a = Σ dz·x_hat and
b = Σ dz. All other sums of a backward follow from them. Numbers such as (39) are equations of docs/theory.md.
"""

from .channel import acquire_to_read, acquire_to_write, release_to_readers, release_to_writer
from .elements import as_float32, slopes
from .gluon import gl, jit
from .layouts import column_layout, reduce_layout, rows_at_a_time, steps_layout
from .stress import crowded, late

KNOWN = gl.constexpr(4)  # what `reduce` must know of each column: mean, rstd, gain and term


@jit
def reduce_columns(ring, sums, known, work, view, split, norm: gl.constexpr, mode: gl.constexpr):
    """Compute a and b of each column (39), for `publish`."""
    SIZE: gl.constexpr = ring.buffer.dtype.primitive_bitwidth // 8
    BLOCK: gl.constexpr = reduce_layout(mode.block_j, SIZE, mode.warps)
    HIGH: gl.constexpr = rows_at_a_time(mode.block_j, SIZE, mode.warps)
    STEPS: gl.constexpr = mode.block_i // HIGH
    OWN: gl.constexpr = steps_layout(mode.block_j, SIZE, mode.warps)
    SWAPPED: gl.constexpr = column_layout(HIGH, mode.block_j, mode.warps)
    i = gl.expand_dims(gl.arange(0, mode.block_i, gl.SliceLayout(1, BLOCK)), 1)
    at = 0
    turn = 0
    units = 0
    for _unit in range(work.team, work.units, split.teams):
        acquire_to_read(known, units % 2, units // 2 & 1)
        for tile in range(mode.tiles):
            first_line = (units % 2 * mode.tiles + tile) * KNOWN
            mean, rstd = line(known, first_line, BLOCK), line(known, first_line + 1, BLOCK)
            gain, term = line(known, first_line + 2, BLOCK), line(known, first_line + 3, BLOCK)
            a = gl.zeros([HIGH, mode.block_j], gl.float32, gl.SliceLayout(0, OWN))
            b = a
            for block in range(work.blocks):
                x, dy = _take(ring, at, BLOCK, mode)
                if mode.ragged:
                    first = (work.member + block * split.members) * mode.block_i
                    if first + mode.block_i > view.reps:  # only the last block of a tile needs a mask
                        inside = first + i < view.reps
                        x, dy = gl.where(inside, x, 0.0), gl.where(inside, dy, 0.0)
                x_hat, dz = slopes(x, dy, mean, rstd, gain, term, norm, mode)
                a += gl.sum(gl.convert_layout(gl.reshape(dz * x_hat, [STEPS, HIGH, mode.block_j]), OWN), 0)
                b += gl.sum(gl.convert_layout(gl.reshape(dz, [STEPS, HIGH, mode.block_j]), OWN), 0)
                at += 1
            acquire_to_write(sums, turn % 2, turn // 2 & 1)
            late(mode.stress, "reduce moments", mode.warps)
            a, b = gl.sum(gl.convert_layout(a, SWAPPED), 0), gl.sum(gl.convert_layout(b, SWAPPED), 0)
            sums.buffer.index(turn % 2 * 2).store(a)
            sums.buffer.index(turn % 2 * 2 + 1).store(b)
            release_to_readers(sums, turn % 2)
            turn += 1
        release_to_writer(known, units % 2)
        units += 1  # noqa: SIM113


@jit
def _take(ring, at, BLOCK: gl.constexpr, mode: gl.constexpr):
    """Return this member's next blocks of x and dy, in registers. They stay in the ring."""
    slot = at % mode.slots
    acquire_to_read(ring, slot, at // mode.slots & 1)
    late(mode.stress, "reduce block", mode.warps)
    crowded(mode.stress, "reduce crowd", ring.buffer, mode.warps)
    return as_float32(ring.buffer.index(2 * slot).load(BLOCK)), as_float32(ring.buffer.index(2 * slot + 1).load(BLOCK))


@jit
def line(channel, at, BLOCK: gl.constexpr):
    """Return a line of a channel, one value for each column, of shape [1, J]."""
    return gl.expand_dims(channel.buffer.index(at).load(gl.SliceLayout(0, BLOCK)), 0)
