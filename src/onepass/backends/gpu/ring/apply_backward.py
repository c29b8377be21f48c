"""The group `apply` of the backward kernel of ring: dx = (dz·gain - c1 - x_hat·c2)·rstd, block by block, from the ring to memory. (8)

dz is computed again from x and dy: rounded to the dtype of dy, it would be less exact than the error budget allows.
"""

from .channel import acquire_to_read, release_block, release_to_writer
from .elements import as_float32, slopes
from .gluon import gl, jit, mbarrier
from .known import COLUMNS, ELEMENTS, KNOWN, SET, after, corner_in_set, load_line, load_value, of_block, place_of_block
from .layouts import apply_layout
from .parameters import gain_and_term
from .runs import Run

LINES = gl.constexpr(6)  # lines of a tile: those of KNOWN, c1 and c2
VALUES = gl.constexpr(2)  # if all columns of a tile have the same values: c1 and c2


@jit
def apply(ring, lines, kept, ready, dx_ptr, affine, values, work, total, view, maps, split, norm: gl.constexpr, mode: gl.constexpr):
    """Compute and store dx of all units. Release each slot of the ring."""
    if mode.kind == COLUMNS:
        _apply_columns(ring, lines, dx_ptr, work, view, split, norm, mode)
    elif mode.kind == SET:
        _apply_sets(ring, lines, dx_ptr, affine, values, work, total, view, maps, split, norm, mode)
    else:
        _apply_runs(ring, lines, kept, ready, dx_ptr, affine, values, work, total, view, maps, split, norm, mode)


@jit
def _apply_columns(ring, lines, dx_ptr, work, view, split, norm: gl.constexpr, mode: gl.constexpr):
    BLOCK: gl.constexpr = apply_layout(mode.block_j, ring.buffer.dtype.primitive_bitwidth // 8, mode.warps, mode.halves)
    i = gl.expand_dims(gl.arange(0, mode.block_i, gl.SliceLayout(1, BLOCK)), 1)
    j = gl.expand_dims(gl.arange(0, mode.block_j, gl.SliceLayout(0, BLOCK)), 0)
    at = 0
    turn = 0
    for unit in range(work.team, work.units, split.teams):
        o, column = unit // split.spans, unit % split.spans * split.span
        acquire_to_read(lines, turn % 2, turn // 2 & 1)
        for tile in range(mode.tiles):
            first = (turn % 2 * mode.tiles + tile) * LINES
            mean, rstd = load_line(lines, first, BLOCK), load_line(lines, first + 1, BLOCK)
            gain, term = load_line(lines, first + 2, BLOCK), load_line(lines, first + 3, BLOCK)
            c1, c2 = load_line(lines, first + KNOWN, BLOCK), load_line(lines, first + KNOWN + 1, BLOCK)
            for block in range(work.blocks):
                x, dy = _take(ring, at, BLOCK, mode)
                if dx_ptr is not None:
                    dx = _gradient(x, dy, mean, rstd, gain, term, c1, c2, norm, mode)
                    r, c = (work.member + block * split.members) * mode.block_i + i, tile * mode.block_j + j
                    to = dx_ptr + o.to(gl.int64) * view.y_o + r.to(gl.int64) * view.y_r + (column + c)
                    there = (r < view.reps) & (column + c < split.columns) & (c < split.span) if mode.ragged else None
                    gl.store(to, dx.to(dx_ptr.dtype.element_ty), mask=there, cache_modifier=".cs")
                at += 1
        release_to_writer(lines, turn % 2)
        turn += 1  # noqa: SIM113


@jit
def _apply_sets(ring, lines, dx_ptr, affine, values, work, total, view, maps, split, norm: gl.constexpr, mode: gl.constexpr):
    BLOCK: gl.constexpr = apply_layout(mode.block_j, ring.buffer.dtype.primitive_bitwidth // 8, mode.warps, 1)
    i = gl.expand_dims(gl.arange(0, mode.block_i, gl.SliceLayout(1, BLOCK)), 1)
    j = gl.expand_dims(gl.arange(0, mode.block_j, gl.SliceLayout(0, BLOCK)), 0)
    mean, rstd, gain, term = of_block(place_of_block(work.team, 0, 0, work, total, split, mode), affine, values, view, maps, norm, mode)
    at = 0
    turn = 0
    for unit in range(work.team, work.units, split.teams):
        place = place_of_block(unit + split.teams, 0, 0, work, total, split, mode)
        next_mean, next_rstd, next_gain, next_term = of_block(place, affine, values, view, maps, norm, mode)
        o, s = unit // split.spans, unit % split.spans
        acquire_to_read(lines, turn % 2, turn // 2 & 1)
        c1, c2 = load_value(lines, turn % 2 * VALUES, BLOCK), load_value(lines, turn % 2 * VALUES + 1, BLOCK)
        for block in range(work.blocks):
            x, dy = _take(ring, at, BLOCK, mode)
            if dx_ptr is not None:
                dx = _gradient(x, dy, mean, rstd, gain, term, c1, c2, norm, mode)
                row, column = corner_in_set(block, work, split, mode)
                r = row + i
                to = dx_ptr + o.to(gl.int64) * view.y_o + r.to(gl.int64) * view.y_r + (s * split.span + column + j)
                # `run` is a multiple of a vector, and the compiler must see it
                there = (r < view.reps) & (column + j // mode.vector * mode.vector < view.run)
                gl.store(to, dx.to(dx_ptr.dtype.element_ty), mask=there if mode.ragged else None, cache_modifier=".cs")
            at += 1
        release_to_writer(lines, turn % 2)
        mean, rstd, gain, term = next_mean, next_rstd, next_gain, next_term
        turn += 1  # noqa: SIM113


@jit
def _apply_runs(
    ring, lines, kept, ready, dx_ptr, affine, values, work, total, view, maps, split, norm: gl.constexpr, mode: gl.constexpr
):  # fmt: skip
    BLOCK: gl.constexpr = apply_layout(mode.block_j, ring.buffer.dtype.primitive_bitwidth // 8, mode.warps, 1)
    i = gl.expand_dims(gl.arange(0, mode.block_i, gl.SliceLayout(1, BLOCK)), 1)
    j = gl.expand_dims(gl.arange(0, mode.block_j, gl.SliceLayout(0, BLOCK)), 0)
    if mode.kept > 0:
        mbarrier.wait(ready.index(0), 0)
    place = place_of_block(work.team, 0, 0, work, total, split, mode)
    mean, rstd, gain, term = of_block(place, affine, values, view, maps, norm, mode)
    at = 0
    turn = 0
    for unit in range(work.team, work.units, split.teams):
        acquire_to_read(lines, turn % 2, turn // 2 & 1)
        for tile in range(mode.tiles):
            first_value = (turn % 2 * mode.tiles + tile) * VALUES
            c1, c2 = load_value(lines, first_value, BLOCK), load_value(lines, first_value + 1, BLOCK)
            for block in range(work.blocks):
                next_unit, next_tile, next_block = after(unit, tile, block, work, split, mode)
                place = place_of_block(next_unit, next_tile, next_block, work, total, split, mode)
                next_mean, next_rstd, next_gain, next_term = of_block(place, affine, values, view, maps, norm, mode)
                x, dy = _take(ring, at, BLOCK, mode)
                if dx_ptr is not None:
                    o = unit * mode.tiles + tile
                    first = (work.member + block * split.members) * mode.block_i
                    if mode.kind == ELEMENTS:
                        run = Run(o=o, phase=0, start=0, end=0)
                        each_gain, each_term = gain_and_term(kept, affine, maps, run, first, block, view, split, norm, mode, BLOCK)
                        dx = _gradient(x, dy, mean, rstd, each_gain, each_term, c1, c2, norm, mode)
                    else:
                        dx = _gradient(x, dy, mean, rstd, gain, term, c1, c2, norm, mode)
                    r = first + i
                    to = dx_ptr + o.to(gl.int64) * view.y_o + (r * mode.block_j + j)
                    there = (r < view.reps) & (o < total)
                    gl.store(to, dx.to(dx_ptr.dtype.element_ty), mask=there if mode.ragged else None, cache_modifier=".cs")
                mean, rstd, gain, term = next_mean, next_rstd, next_gain, next_term
                at += 1
        release_to_writer(lines, turn % 2)
        turn += 1  # noqa: SIM113


@jit
def _gradient(x, dy, mean, rstd, gain, term, c1, c2, norm: gl.constexpr, mode: gl.constexpr):
    """Return dx. (8)"""
    x_hat, dz = slopes(as_float32(x), as_float32(dy), mean, rstd, gain, term, norm, mode)
    dx = dz * gain - x_hat * c2
    if norm.centered:
        dx = dx - c1
    return dx * rstd


@jit
def _take(ring, at, BLOCK: gl.constexpr, mode: gl.constexpr):
    """Return the next blocks of x and dy, in registers, and release their slot of the ring."""
    slot = at % mode.slots
    acquire_to_read(ring, slot, at // mode.slots & 1)
    x, dy = ring.buffer.index(2 * slot).load(BLOCK), ring.buffer.index(2 * slot + 1).load(BLOCK)
    release_block(ring, slot, mode)
    return x, dy
