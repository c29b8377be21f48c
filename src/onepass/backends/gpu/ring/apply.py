"""The group `apply` of the ring kernel: y = activation((x - mean)·rstd·gain + term), block by block, from the ring to memory.

Memory is x[o, r, s, t]. A unit of work is cut into tiles, and each tile into blocks of rows r. The blocks that stayed in the
ring come first, then those that are loaded again. Mean, rstd, gain and term of each column come through the channel `lines`. If
gain and term differ from row to row, or in a folded walk (gpu/walk.py), where each tile is one run, `apply` finds them itself
(ring/parameters.py).
"""

from .channel import acquire_to_read, release_block, release_to_writer
from .elements import activated, as_float32, beyond_reach
from .gluon import gl, jit
from .layouts import apply_layout
from .parameters import ELEMENT, ROW, fill, gain_and_term, of_rows
from .runs import run_of, runs_of
from .stress import crowded, fenced, late
from .work import of_tile


@jit
def apply(ring, lines, x_ptr, y_ptr, affine, kept, work, total, view, maps, split, norm: gl.constexpr, mode: gl.constexpr):
    """Compute and store y of all units. Release each slot of the ring."""
    if mode.folded:
        _apply_runs(ring, lines, x_ptr, y_ptr, affine, kept, work, total, view, maps, split, norm, mode)
    else:
        _apply_columns(ring, lines, y_ptr, affine, work, view, maps, split, norm, mode)


@jit
def _apply_columns(ring, lines, y_ptr, affine, work, view, maps, split, norm: gl.constexpr, mode: gl.constexpr):
    BLOCK: gl.constexpr = apply_layout(mode.block_j, ring.buffer.dtype.primitive_bitwidth // 8, mode.warps, mode.at_once)
    i, j = _indices(BLOCK, mode)
    here = mode.tiles * work.blocks
    at = 0
    again_at = 0
    turn = 0
    for unit in range(work.team, work.units, split.teams):
        o, column = unit // split.spans, unit % split.spans * split.span
        line_at = _acquire_line(lines, turn, mode)
        mean, factor, term = _line(lines, line_at, 0, BLOCK, mode)
        for step in range(0, here, mode.at_once):
            if mode.by_row:  # before the wait for the block, because these loads take a while
                _, block = _of_step(step, here, work, mode)
                row = (work.member + block * split.members) * mode.block_i
                row_gain, row_term = of_rows(o, row, affine, maps, view, norm, mode, BLOCK)
            x = _take(ring, step, here, work.again, at, again_at, BLOCK, mode)
            if mode.at_once == 2:  # load the second block while the first is applied
                following = _take(ring, step + 1, here, work.again, at, again_at, BLOCK, mode)
            for more in gl.static_range(mode.at_once):
                tile, block = _of_step(step + more, here, work, mode)
                if mode.lines > 1:
                    mean, factor, term = _line(lines, line_at, tile, BLOCK, mode)
                z = _centered(x, mean, norm) * factor
                if mode.by_row:
                    z = z * row_gain + row_term
                else:
                    z = z + term
                y = activated(z, norm.activation).to(y_ptr.dtype.element_ty)
                r, c = (work.member + block * split.members) * mode.block_i + i, column + tile * mode.block_j + j
                to = y_ptr + o.to(gl.int64) * view.y_o + r.to(gl.int64) * view.y_r + c
                if mode.single and mode.ragged:  # `run` is a multiple of a vector, and the compiler must see it
                    inside = (tile * mode.block_j + j // mode.vector * mode.vector) < view.run
                    gl.store(to, y, mask=(r < view.reps) & inside, cache_modifier=".cs")
                elif mode.ragged:
                    gl.store(to, y, mask=(r < view.reps) & (c < split.columns), cache_modifier=".cs")
                else:
                    gl.store(to, y, cache_modifier=".cs")
                if mode.at_once == 2:
                    x = following
        at += here
        again_at += work.again
        _release_line(lines, turn, mode)
        turn += 1  # noqa: SIM113


@jit
def _apply_runs(ring, lines, x_ptr, y_ptr, affine, kept, work, total, view, maps, split, norm: gl.constexpr, mode: gl.constexpr):
    BLOCK: gl.constexpr = apply_layout(mode.block_j, ring.buffer.dtype.primitive_bitwidth // 8, mode.warps, 1)
    i, j = _indices(BLOCK, mode)
    number = i * mode.block_j + j  # of each element of a block
    here = mode.tiles * work.blocks
    runs = runs_of(work.team, total, view, split, mode)
    kept_phase = runs.phase
    if mode.kept > 0:
        fill(kept, kept_phase, affine, maps, work, view, split, norm, mode, BLOCK)
    gain, shift = _parameters(runs, 0, here, kept, affine, maps, work, view, split, norm, mode, BLOCK)
    at = 0
    again_at = 0
    turn = 0
    for unit in range(work.team, work.units, split.teams):
        runs = runs_of(unit, total, view, split, mode)
        if mode.kept > 0 and mode.phases > 1:  # noqa: SIM102
            if runs.phase != kept_phase:
                fill(kept, runs.phase, affine, maps, work, view, split, norm, mode, BLOCK)
                kept_phase = runs.phase
        line_at = _acquire_line(lines, turn, mode)
        mean, rstd, _ = _line(lines, line_at, 0, BLOCK, mode)
        for step in range(0, here, mode.at_once):
            x = _take(ring, step, here, work.again, at, again_at, BLOCK, mode)
            if mode.at_once == 2:  # load the second block while the first is applied
                following = _take(ring, step + 1, here, work.again, at, again_at, BLOCK, mode)
            for more in gl.static_range(mode.at_once):
                tile, block = _of_step(step + more, here, work, mode)
                if mode.tiles > 1:
                    mean, rstd, _ = _line(lines, line_at, tile, BLOCK, mode)
                row = (work.member + block * split.members) * mode.block_i
                first = row * mode.block_j  # the number of the block's first element
                run = run_of(runs, tile, view, mode)
                if mode.phased:  # noqa: SIM102
                    if run.end - first < (mode.block_i + 2) * mode.block_j:  # the end of the run is near
                        x = beyond_reach(x, number, x_ptr, run, first, total, view, split)
                if mode.differ == ELEMENT:
                    each_gain, each_shift = gain_and_term(kept, affine, maps, run, row, block, view, split, norm, mode, BLOCK)
                    z = _centered(x, mean, norm) * (rstd * each_gain) + each_shift
                else:  # load those of the next block while this one is applied
                    is_last = step + more + 1 == here
                    next_runs = runs_of(gl.where(is_last, unit + split.teams, unit), total, view, split, mode)
                    next_step = gl.where(is_last, 0, step + more + 1)
                    next_gain, next_shift = _parameters(
                        next_runs, next_step, here, kept, affine, maps, work, view, split, norm, mode, BLOCK
                    )
                    z = _centered(x, mean, norm) * (rstd * gain) + shift
                    gain, shift = next_gain, next_shift
                y = activated(z, norm.activation).to(y_ptr.dtype.element_ty)
                _store_run(y_ptr + run.start, y, number, first, run, total, mode)
                if mode.at_once == 2:
                    x = following
        at += here
        again_at += work.again
        _release_line(lines, turn, mode)
        turn += 1  # noqa: SIM113


@jit
def _indices(BLOCK: gl.constexpr, mode: gl.constexpr):
    """Return the rows and the columns of the elements of a block, of shape [I, 1] and [1, J]."""
    i = gl.arange(0, mode.block_i, gl.SliceLayout(1, BLOCK))
    j = gl.arange(0, mode.block_j, gl.SliceLayout(0, BLOCK))
    return gl.expand_dims(i, 1), gl.expand_dims(j, 0)


@jit
def _of_step(step, here, work, mode: gl.constexpr):
    """Return tile and block of a step of `apply`. The last blocks are those that are loaded again, in reverse order."""
    number = work.again + step
    return of_tile(gl.where(number < here, number, here - 1 - step), work, mode)


@jit
def _parameters(runs, step, here, kept, affine, maps, work, view, split, norm: gl.constexpr, mode: gl.constexpr, BLOCK: gl.constexpr):
    """Return gain and term of a step, of shape [I, 1] or [1, 1], if they differ by rows or by blocks; otherwise 0."""
    gain = gl.zeros([mode.block_i if mode.differ == ROW else 1, 1], gl.float32, BLOCK)
    term = gain
    if mode.folded and mode.differ != ELEMENT:
        tile, block = _of_step(step, here, work, mode)
        first = (work.member + block * split.members) * mode.block_i
        run = run_of(runs, tile, view, mode)
        a, b = gain_and_term(kept, affine, maps, run, first, block, view, split, norm, mode, BLOCK)
        gain, term = gain + a, term + b
    return gain, term


@jit
def _centered(x, mean, norm: gl.constexpr):
    x = as_float32(x)
    if norm.centered:
        x = x - mean
    return x


@jit
def _store_run(y_ptr, y, number, first, run, total, mode: gl.constexpr):
    """Store a block of a run. `number` counts the elements of the block, and `first` is the number of its first element.

    At both ends of a run, a part of a vector may be missing: `combine` stores it.
    """
    to = y_ptr + first + number
    if mode.ragged:
        if (first >= run.phase) & (first + mode.block_i * mode.block_j <= run.end) & (run.o < total):
            gl.store(to, y, cache_modifier=".cs")
        else:
            vector = first + number // mode.vector * mode.vector  # the first element of each vector
            whole = (vector >= run.phase) & (vector + mode.vector <= run.end) & (run.o < total)
            gl.store(to, y, mask=whole, cache_modifier=".cs")
    else:
        gl.store(to, y, cache_modifier=".cs")


@jit
def _take(ring, step, here, again, at, again_at, BLOCK: gl.constexpr, mode: gl.constexpr):
    """Return the block of this step, in registers, and release its slot of the ring."""
    slot, phase = (at + again + step) % mode.slots, (at + again + step) // mode.slots & 1
    if mode.back > 0:  # noqa: SIM102
        if again + step >= here:
            number = again_at + again + step - here
            slot, phase = mode.slots + number % mode.back, number // mode.back & 1
    acquire_to_read(ring, slot, phase)
    if fenced(mode.stress, "early"):
        release_block(ring, slot, mode)
    late(mode.stress, "apply block", mode.warps)
    crowded(mode.stress, "apply crowd", ring.buffer, mode.warps)
    x = ring.buffer.index(slot).load(BLOCK)
    late(mode.stress, "apply release", mode.warps)
    if not fenced(mode.stress, "early"):
        release_block(ring, slot, mode)
    return x


@jit
def _acquire_line(lines, turn, mode: gl.constexpr):
    """Wait for the statistics of a unit. Return where its first tile has them."""
    acquire_to_read(lines, turn % 2, turn // 2 & 1)
    late(mode.stress, "apply lines", mode.warps)
    return turn % 2 * (mode.lines * 4)


@jit
def _release_line(lines, turn, mode: gl.constexpr):
    late(mode.stress, "apply used", mode.warps)
    release_to_writer(lines, turn % 2)


@jit
def _line(lines, first, tile, BLOCK: gl.constexpr, mode: gl.constexpr):
    """Return mean, factor = rstd·gain and term of the columns of a tile, each of shape [1, J]. `first` is the line of the first tile.

    In a folded walk, all columns have the same mean and rstd, and the shapes are [1, 1]. There, and if gain and term differ from row
    to row, factor is rstd, and term has no meaning.
    """
    WIDTH: gl.constexpr = 1 if mode.folded else mode.block_j
    own = first + tile * 4
    of_set = first if mode.single else own  # if a unit is one set, the first line has its mean and rstd
    mean = lines.buffer.index(of_set).slice(0, WIDTH).load(gl.SliceLayout(0, BLOCK))
    factor = lines.buffer.index(of_set + 1).slice(0, WIDTH).load(gl.SliceLayout(0, BLOCK))
    term = mean
    if not (mode.folded or mode.by_row):
        factor = factor * lines.buffer.index(own + 2).load(gl.SliceLayout(0, BLOCK))
        term = lines.buffer.index(own + 3).load(gl.SliceLayout(0, BLOCK))
    return gl.expand_dims(mean, 0), gl.expand_dims(factor, 0), gl.expand_dims(term, 0)
