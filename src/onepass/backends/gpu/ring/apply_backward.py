"""The group `apply` of the backward kernel of ring: dx = (dz·gain - c1 - x_hat·c2)·rstd, block by block, from the ring to memory. (8)

dz is computed again from x and dy: rounded to the dtype of dy, it would be less exact than the error budget allows.
"""

from .channel import acquire_to_read, release_block, release_to_writer
from .elements import as_float32, slopes
from .gluon import gl, jit
from .layouts import apply_layout
from .reduce_backward import KNOWN, line
from .stress import crowded, late
from .work import of_tile

LINES = gl.constexpr(6)  # what `apply` must know of each column: the lines KNOWN, c1 and c2


@jit
def apply_columns(ring, lines, dx_ptr, work, view, split, norm: gl.constexpr, mode: gl.constexpr):
    """Compute and store dx of all units. Release each slot of the ring."""
    BLOCK: gl.constexpr = apply_layout(mode.block_j, ring.buffer.dtype.primitive_bitwidth // 8, mode.warps, mode.halves)
    i = gl.expand_dims(gl.arange(0, mode.block_i, gl.SliceLayout(1, BLOCK)), 1)
    j = gl.expand_dims(gl.arange(0, mode.block_j, gl.SliceLayout(0, BLOCK)), 0)
    here = mode.tiles * work.blocks
    at = 0
    turn = 0
    for unit in range(work.team, work.units, split.teams):
        o, column = unit // split.spans, unit % split.spans * split.span
        acquire_to_read(lines, turn % 2, turn // 2 & 1)
        late(mode.stress, "apply lines", mode.warps)
        first = turn % 2 * (mode.tiles * LINES)
        mean, rstd, gain, term, c1, c2 = _lines(lines, first, BLOCK)
        for step in range(here):
            x, dy = _take(ring, at, BLOCK, mode)
            tile, block = of_tile(step, work, mode)
            if mode.tiles > 1:
                mean, rstd, gain, term, c1, c2 = _lines(lines, first + tile * LINES, BLOCK)
            if dx_ptr is not None:
                x_hat, dz = slopes(as_float32(x), as_float32(dy), mean, rstd, gain, term, norm, mode)
                dx = dz * gain - x_hat * c2
                if norm.centered:
                    dx = dx - c1
                r, c = (work.member + block * split.members) * mode.block_i + i, column + tile * mode.block_j + j
                to = dx_ptr + o.to(gl.int64) * view.y_o + r.to(gl.int64) * view.y_r + c
                there = (r < view.reps) & (c < split.columns) if mode.ragged else None
                gl.store(to, (dx * rstd).to(dx_ptr.dtype.element_ty), mask=there, cache_modifier=".cs")
            at += 1
        late(mode.stress, "apply used", mode.warps)
        release_to_writer(lines, turn % 2)
        turn += 1  # noqa: SIM113


@jit
def _take(ring, at, BLOCK: gl.constexpr, mode: gl.constexpr):
    """Return the next blocks of x and dy, in registers, and release their slot of the ring."""
    slot = at % mode.slots
    acquire_to_read(ring, slot, at // mode.slots & 1)
    late(mode.stress, "apply block", mode.warps)
    crowded(mode.stress, "apply crowd", ring.buffer, mode.warps)
    x, dy = ring.buffer.index(2 * slot).load(BLOCK), ring.buffer.index(2 * slot + 1).load(BLOCK)
    late(mode.stress, "apply release", mode.warps)
    release_block(ring, slot, mode)
    return x, dy


@jit
def _lines(lines, first, BLOCK: gl.constexpr):
    mean, rstd, gain, term = (
        line(lines, first, BLOCK), line(lines, first + 1, BLOCK), line(lines, first + 2, BLOCK), line(lines, first + 3, BLOCK)
    )  # fmt: skip
    return mean, rstd, gain, term, line(lines, first + KNOWN, BLOCK), line(lines, first + KNOWN + 1, BLOCK)
