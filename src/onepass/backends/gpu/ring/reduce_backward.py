"""The group `reduce` of the backward kernel of ring: sums over the blocks of x and dy in the ring, for `publish`.

Memory is x[o, r, s, t]. A tile is some columns (s, t) of one o, in blocks of rows r. All sums of a backward follow from a = Σ dz·x_hat
and b = Σ dz over elements that share their parameters. The kinds of ring/launch_backward.py say which elements these are, and how often
`reduce` sends sums. Numbers such as (39) are equations of docs/theory.md.
"""

from .channel import acquire_to_read, acquire_to_write, release_to_readers, release_to_writer
from .elements import as_float32, slopes
from .gluon import barrier, gl, jit, mbarrier
from .known import (
    BLOCKS_OF_UNIT,
    COLUMNS,
    ELEMENTS,
    KNOWN,
    SET,
    after,
    corner_in_set,
    load_line,
    of_block,
    place_of_block,
    store_totals,
)
from .layouts import apply_layout, column_layout, lane_layout, lanes_of_row, message_layout, reduce_layout, rows_at_a_time, steps_layout
from .parameters import fill, gain_and_term
from .reduce import by_lanes, by_warps, lane_sums
from .runs import Run


@jit
def reduce(ring, sums, known, kept, ready, affine, values, cells, work, total, view, maps, split, norm: gl.constexpr, mode: gl.constexpr):
    """Compute the sums of all units. The blocks stay in the ring."""
    if mode.kind == COLUMNS:
        _reduce_columns(ring, sums, known, work, view, split, norm, mode)
    elif mode.kind == ELEMENTS:
        _reduce_elements(ring, sums, kept, ready, affine, values, cells, work, total, view, maps, split, norm, mode)
    elif mode.kind == SET:
        _reduce_sets(ring, sums, affine, values, work, total, view, maps, split, norm, mode)
    else:
        _reduce_blocks(ring, sums, affine, values, work, total, view, maps, split, norm, mode)


@jit
def _reduce_columns(ring, sums, known, work, view, split, norm: gl.constexpr, mode: gl.constexpr):
    """Compute a and b of each column (39)."""
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
            lines = (units % 2 * mode.tiles + tile) * KNOWN
            mean, rstd = load_line(known, lines, BLOCK), load_line(known, lines + 1, BLOCK)
            gain, term = load_line(known, lines + 2, BLOCK), load_line(known, lines + 3, BLOCK)
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
            a, b = gl.sum(gl.convert_layout(a, SWAPPED), 0), gl.sum(gl.convert_layout(b, SWAPPED), 0)
            turn = _send(sums, turn, a, b, mode)
        release_to_writer(known, units % 2)
        units += 1  # noqa: SIM113


@jit
def _reduce_sets(ring, sums, affine, values, work, total, view, maps, split, norm: gl.constexpr, mode: gl.constexpr):
    """Compute the sums of sets: those of each warp, which `publish` adds up. All elements of a unit share their parameters."""
    SIZE: gl.constexpr = ring.buffer.dtype.primitive_bitwidth // 8
    BLOCK: gl.constexpr = apply_layout(mode.block_j, SIZE, mode.warps, 1)
    LANES: gl.constexpr = lane_layout(mode.block_j, SIZE, mode.warps)
    WIDE: gl.constexpr = lanes_of_row(mode.block_j, SIZE)
    HIGH: gl.constexpr = 32 * mode.warps // WIDE  # rows that all lanes together have at a time
    i = gl.expand_dims(gl.arange(0, mode.block_i, gl.SliceLayout(1, BLOCK)), 1)
    j = gl.expand_dims(gl.arange(0, mode.block_j, gl.SliceLayout(0, BLOCK)), 0) // mode.vector * mode.vector
    mean, rstd, gain, term = of_block(place_of_block(work.team, 0, 0, work, total, split, mode), affine, values, view, maps, norm, mode)
    at = 0
    turn = 0
    for unit in range(work.team, work.units, split.teams):
        place = place_of_block(unit + split.teams, 0, 0, work, total, split, mode)
        next_mean, next_rstd, next_gain, next_term = of_block(place, affine, values, view, maps, norm, mode)
        a = gl.zeros([HIGH, WIDE], gl.float32, gl.SliceLayout(0, gl.SliceLayout(3, LANES)))
        b = a
        for block in range(work.blocks):
            x, dy = _take(ring, at, BLOCK, mode)
            if mode.ragged:
                row, column = corner_in_set(block, work, split, mode)
                if (row + mode.block_i > view.reps) | (column + mode.block_j > view.run):  # other blocks need no mask
                    inside = (row + i < view.reps) & (column + j < view.run)  # `run` is a multiple of a vector
                    x, dy = gl.where(inside, x, 0.0), gl.where(inside, dy, 0.0)
            x_hat, dz = slopes(x, dy, mean, rstd, gain, term, norm, mode)
            a += lane_sums(by_lanes(dz * x_hat, HIGH, WIDE, LANES))
            b += lane_sums(by_lanes(dz, HIGH, WIDE, LANES))
            at += 1
        turn = _send(sums, turn, gl.sum(by_warps(a, mode.warps), 1), gl.sum(by_warps(b, mode.warps), 1), mode)
        mean, rstd, gain, term = next_mean, next_rstd, next_gain, next_term


@jit
def _reduce_blocks(ring, sums, affine, values, work, total, view, maps, split, norm: gl.constexpr, mode: gl.constexpr):
    """Compute the sums of blocks: those of each warp, which `publish` adds up."""
    SIZE: gl.constexpr = ring.buffer.dtype.primitive_bitwidth // 8
    BLOCK: gl.constexpr = apply_layout(mode.block_j, SIZE, mode.warps, 1)
    LANES: gl.constexpr = lane_layout(mode.block_j, SIZE, mode.warps)
    WIDE: gl.constexpr = lanes_of_row(mode.block_j, SIZE)
    HIGH: gl.constexpr = 32 * mode.warps // WIDE  # rows that all lanes together have at a time
    MESSAGE: gl.constexpr = message_layout(mode.warps)
    i = gl.expand_dims(gl.arange(0, mode.block_i, gl.SliceLayout(1, BLOCK)), 1)
    place = place_of_block(work.team, 0, 0, work, total, split, mode)
    mean, rstd, gain, term = of_block(place, affine, values, view, maps, norm, mode)
    at = 0
    turn = 0
    zero = gl.zeros([HIGH, WIDE], gl.float32, gl.SliceLayout(0, gl.SliceLayout(3, LANES)))
    unit_a = gl.zeros([BLOCKS_OF_UNIT, mode.warps], gl.float32, MESSAGE)
    unit_b = unit_a
    number = gl.expand_dims(gl.arange(0, BLOCKS_OF_UNIT, gl.SliceLayout(1, MESSAGE)), 1)
    for unit in range(work.team, work.units, split.teams):
        for tile in range(mode.tiles):
            for block in range(work.blocks):
                next_unit, next_tile, next_block = after(unit, tile, block, work, split, mode)
                place = place_of_block(next_unit, next_tile, next_block, work, total, split, mode)
                next_mean, next_rstd, next_gain, next_term = of_block(place, affine, values, view, maps, norm, mode)
                x, dy = _take(ring, at, BLOCK, mode)
                if mode.ragged:
                    inside = (work.member + block * split.members) * mode.block_i + i < view.reps
                    x, dy = gl.where(inside, x, 0.0), gl.where(inside, dy, 0.0)
                x_hat, dz = slopes(x, dy, mean, rstd, gain, term, norm, mode)
                # Adding `zero` changes no sum. Without it, the compiler makes another kernel, which nobody has measured.
                a = zero + lane_sums(by_lanes(dz * x_hat, HIGH, WIDE, LANES))
                b = zero + lane_sums(by_lanes(dz, HIGH, WIDE, LANES))
                at += 1
                this = number == tile * work.blocks + block
                unit_a = gl.where(this, _of_warps(a, MESSAGE, mode), unit_a)
                unit_b = gl.where(this, _of_warps(b, MESSAGE, mode), unit_b)
                mean, rstd, gain, term = next_mean, next_rstd, next_gain, next_term
        turn = _send(sums, turn, unit_a, unit_b, mode)


@jit
def _reduce_elements(
    ring, sums, kept, ready, affine, values, cells, work, total, view, maps, split, norm: gl.constexpr, mode: gl.constexpr
):  # fmt: skip
    """Compute the sums of wdy·x_hat and wdy of each run. Keep those of each element's parameters in registers, and store them at the end.

    A thread has the same elements of every run.
    """
    SIZE: gl.constexpr = ring.buffer.dtype.primitive_bitwidth // 8
    BLOCK: gl.constexpr = apply_layout(mode.block_j, SIZE, mode.warps, 1)
    WIDE: gl.constexpr = lanes_of_row(mode.block_j, SIZE)
    LANE: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(3, lane_layout(mode.block_j, SIZE, mode.warps)))
    if mode.kept > 0:  # `apply` needs the parameters, too
        fill(kept, 0, affine, maps, work, view, split, norm, mode, BLOCK)
        barrier()
        mbarrier.arrive(ready.index(0), count=1)
    zero = gl.zeros([mode.block_i, mode.block_j], gl.float32, BLOCK)
    a = (zero,)  # of each block of a run
    b = (zero,)
    for _ in gl.static_range(1, mode.rows):
        a, b = a + (zero,), b + (zero,)  # noqa: RUF005
    mean, rstd, _gain, _term = of_block(place_of_block(work.team, 0, 0, work, total, split, mode), affine, values, view, maps, norm, mode)
    at = 0
    turn = 0
    for unit in range(work.team, work.units, split.teams):
        for tile in range(mode.tiles):
            next_unit, next_tile, _block = after(unit, tile, work.blocks - 1, work, split, mode)
            place = place_of_block(next_unit, next_tile, 0, work, total, split, mode)
            next_mean, next_rstd, _gain, _term = of_block(place, affine, values, view, maps, norm, mode)
            sum1 = gl.zeros([32 * mode.warps // WIDE, WIDE], gl.float32, LANE)
            sum2 = sum1
            for block in gl.static_range(mode.rows):
                each = a[0], b[0], sum1, sum2
                if mode.blocks > 0 or block < mode.rows - 1:
                    each = _add(each, at, block, ring, mean, rstd, kept, affine, work, view, maps, split, norm, mode, BLOCK)
                    at += 1
                else:  # some members have one block less
                    if block < work.blocks:
                        each = _add(each, at, block, ring, mean, rstd, kept, affine, work, view, maps, split, norm, mode, BLOCK)
                        at += 1
                a, b = a[1:] + (each[0],), b[1:] + (each[1],)  # noqa: RUF005
                sum1, sum2 = each[2], each[3]
            mean, rstd = next_mean, next_rstd
            turn = _send(sums, turn, gl.sum(by_warps(sum2, mode.warps), 1), gl.sum(by_warps(sum1, mode.warps), 1), mode)
    for block in gl.static_range(mode.rows):
        store_totals(a[block], b[block], block, affine, cells, maps, work, view, split, norm, mode, BLOCK)


@jit
def _add(
    sums, at, block, ring, mean, rstd, kept, affine, work, view, maps, split, norm: gl.constexpr, mode: gl.constexpr, BLOCK: gl.constexpr
):  # fmt: skip
    """Add the next block of a run to its sums: those of its elements' parameters, and each lane's sums of wdy and wdy·x_hat."""
    SIZE: gl.constexpr = ring.buffer.dtype.primitive_bitwidth // 8
    LANES: gl.constexpr = lane_layout(mode.block_j, SIZE, mode.warps)
    WIDE: gl.constexpr = lanes_of_row(mode.block_j, SIZE)
    HIGH: gl.constexpr = 32 * mode.warps // WIDE
    first = (work.member + block * split.members) * mode.block_i
    x, dy = _take(ring, at, BLOCK, mode)
    if mode.ragged:
        inside = first + gl.expand_dims(gl.arange(0, mode.block_i, gl.SliceLayout(1, BLOCK)), 1) < view.reps
        x, dy = gl.where(inside, x, 0.0), gl.where(inside, dy, 0.0)
    run = Run(o=0, phase=0, start=0, end=0)  # all runs have the same parameters
    gain, term = gain_and_term(kept, affine, maps, run, first, block, view, split, norm, mode, BLOCK)
    x_hat, dz = slopes(x, dy, mean, rstd, gain, term, norm, mode)
    wdy = dz * gain
    a, b, sum1, sum2 = sums
    sum1 += lane_sums(by_lanes(wdy, HIGH, WIDE, LANES))
    sum2 += lane_sums(by_lanes(wdy * x_hat, HIGH, WIDE, LANES))
    return a + dz * x_hat, b + dz, sum1, sum2


@jit
def _of_warps(lanes, MESSAGE: gl.constexpr, mode: gl.constexpr):
    """Add up the values of the lanes of each warp. Return the sums of the warps, of shape [1, warps]."""
    return gl.expand_dims(gl.convert_layout(gl.sum(by_warps(lanes, mode.warps), 1), gl.SliceLayout(0, MESSAGE)), 0)


@jit
def _send(sums, turn, a, b, mode: gl.constexpr):
    """Send sums of both kinds: for each column, for each warp, or for each block and warp. Return the number of the next message."""
    acquire_to_write(sums, turn % 2, turn // 2 & 1)
    sums.buffer.index(turn % 2 * 2).store(a)
    sums.buffer.index(turn % 2 * 2 + 1).store(b)
    release_to_readers(sums, turn % 2)
    return turn + 1


@jit
def _take(ring, at, BLOCK: gl.constexpr, mode: gl.constexpr):
    """Return this member's next blocks of x and dy, in registers. They stay in the ring."""
    slot = at % mode.slots
    acquire_to_read(ring, slot, at // mode.slots & 1)
    return as_float32(ring.buffer.index(2 * slot).load(BLOCK)), as_float32(ring.buffer.index(2 * slot + 1).load(BLOCK))
