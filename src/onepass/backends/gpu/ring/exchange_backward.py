"""How the programs of the backward kernel of ring exchange the sums over sets.

Memory is x[o, r, s, t]. A unit of work is one o and the columns (s, t) of some whole sets, or some values of o whose sets are one run each.
A team of programs, its members, shares the blocks of a unit. From the sums a and b of elements that share their parameters (39), a member
stores the partial gradients of parameters, called cells (40), and the sums over each set (41). c1 and c2 are the sums of all members.
They are added in the same order by each member, so two runs give the same bits.
"""

from onepass.backends.gpu.device.affine import fold_affine
from onepass.backends.gpu.device.axes import AXIS_O, AXIS_R, AXIS_S, AXIS_T, NO_AXIS
from onepass.backends.gpu.device.gradients import store_cells
from onepass.backends.gpu.device.groups import Place

from .apply_backward import LINES, VALUES
from .channel import acquire_to_read, acquire_to_write, release_to_readers, release_to_writer
from .exchange import COMBINE_WARPS, PUBLISH_WARPS, load_parts, overlap, part_of, set_of
from .gluon import barrier, gl, jit
from .known import BLOCKS, BLOCKS_OF_UNIT, COLUMNS, ELEMENTS, KNOWN, SET, place_of_block, place_of_columns, store_lines
from .layouts import part_layout


@jit
def publish(sums, known, exchange, affine, values, cells, work, total, view, maps, split, norm: gl.constexpr, mode: gl.constexpr):
    """Store the cells, and the sums over sets of this member's rows. If columns differ, tell `reduce` about each unit, one unit ahead."""
    WARPS: gl.constexpr = PUBLISH_WARPS
    set_ = gl.arange(0, mode.sets, gl.BlockedLayout([1], [32], [WARPS], [0]))
    at = 0
    turn = 0
    if mode.kind == COLUMNS:
        _tell(known, 0, work.team, affine, values, view, maps, split, norm, mode, WARPS)
    for unit in range(work.team, work.units, split.teams):
        turn += 1  # noqa: SIM113
        if mode.kind == COLUMNS:  # noqa: SIM102, the outer `if` is decided at compile time
            if unit + split.teams < work.units:
                _tell(known, turn, unit + split.teams, affine, values, view, maps, split, norm, mode, WARPS)
        if exchange.parts_ptr is not None:
            sum1, sum2 = _of_sets(sums, at, unit, set_, affine, cells, work, total, view, maps, split, norm, mode, WARPS)
            at += _messages(work, mode)
            part = part_of(exchange.parts_ptr, unit, set_, work.member, split.members, mode)
            gl.store(part, sum1)
            gl.store(part + mode.sets * split.members, sum2)
            barrier()
            gl.atomic_add(exchange.counters_ptr + unit, 1, sem="release", scope="gpu")


@jit
def _tell(known, turn, unit, affine, values, view, maps, split, norm: gl.constexpr, mode: gl.constexpr, WARPS: gl.constexpr):
    """Tell `reduce` mean, rstd, gain and term of the columns of a unit."""
    acquire_to_write(known, turn % 2, turn // 2 & 1)
    for tile in range(mode.tiles):
        store_lines(known, (turn % 2 * mode.tiles + tile) * KNOWN, unit, tile, affine, values, view, maps, split, norm, mode, WARPS)
    release_to_readers(known, turn % 2)


@jit
def _messages(work, mode: gl.constexpr):
    """Return how often `reduce` sends sums for each unit."""
    if mode.kind == COLUMNS or mode.kind == ELEMENTS:
        messages = mode.tiles
    else:
        messages = 1
    return messages


@jit
def _of_sets(
    sums, at, unit, set_, affine, cells, work, total, view, maps, split, norm: gl.constexpr, mode: gl.constexpr, WARPS: gl.constexpr
):  # fmt: skip
    """Store the cells of a unit. Return the sums of wdy and wdy·x_hat over the sets `set_`, in this member's rows. (40), (41)

    The sums of `reduce` come through the channel `sums`. `at` counts the messages before this unit.
    """
    if mode.kind == COLUMNS:
        sum1, sum2 = _of_columns(sums, at, unit, set_, affine, cells, work, view, maps, split, norm, mode, WARPS)
    elif mode.kind == BLOCKS:
        sum1, sum2 = _of_blocks(sums, at, unit, set_, affine, cells, work, total, maps, split, norm, mode, WARPS)
    else:
        sum1, sum2 = _of_tiles(sums, at, unit, set_, affine, cells, work, total, view, maps, split, norm, mode, WARPS)
    return sum1, sum2


@jit
def _of_tiles(
    sums, at, unit, set_, affine, cells, work, total, view, maps, split, norm: gl.constexpr, mode: gl.constexpr, WARPS: gl.constexpr
):  # fmt: skip
    """The same, if each message has the sums of all warps, of a unit (SET) or of a tile (ELEMENTS, whose cells are stored at the end)."""
    WARP: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    sum1 = gl.zeros([mode.sets], gl.float32, WARP)
    sum2 = sum1
    for tile in range(mode.tiles):
        slot = (at + tile) % 2
        place = place_of_block(unit, tile, 0, work, total, split, mode)
        gain = 1.0
        if mode.kind == SET:
            gain, _ = fold_affine(1.0, affine, maps, place, norm, NO_AXIS, NO_AXIS)  # before the wait, because these loads take a while
        acquire_to_read(sums, slot, (at + tile) // 2 & 1)
        a, b = gl.sum(sums.buffer.index(slot * 2).load(WARP), 0), gl.sum(sums.buffer.index(slot * 2 + 1).load(WARP), 0)
        release_to_writer(sums, slot)
        if mode.kind == SET:
            cell = (place.o * split.members + work.member).to(gl.int64) * view.sets + place.s
            store_cells(cells, cell, place.i_inside, a, b, affine, maps, place, norm, NO_AXIS, NO_AXIS)
        sum1, sum2 = gl.where(set_ == tile, b * gain, sum1), gl.where(set_ == tile, a * gain, sum2)
    return sum1, sum2


@jit
def _of_blocks(
    sums, at, unit, set_, affine, cells, work, total, maps, split, norm: gl.constexpr, mode: gl.constexpr, WARPS: gl.constexpr
):  # fmt: skip
    """The same, if each message has the sums of all blocks of a unit, of shape [BLOCKS_OF_UNIT, warps]. A lane takes one block."""
    LANE: gl.constexpr = gl.BlockedLayout([1, mode.warps], [32, 1], [WARPS, 1], [1, 0])
    slot = at % 2
    number = gl.arange(0, BLOCKS_OF_UNIT, gl.SliceLayout(1, LANE))
    tile, block = number // work.blocks, number % work.blocks
    place = place_of_block(unit, tile, block, work, total, split, mode)
    inside = (tile < mode.tiles) & place.i_inside
    place = Place(o=place.o, r=0, s=0, t=place.t, i_inside=inside, j_inside=inside)
    gain, _ = fold_affine(1.0, affine, maps, place, norm, AXIS_O | AXIS_T, NO_AXIS)  # before the wait, because these loads take a while
    acquire_to_read(sums, slot, at // 2 & 1)
    a, b = gl.sum(sums.buffer.index(slot * 2).load(LANE), 1), gl.sum(sums.buffer.index(slot * 2 + 1).load(LANE), 1)
    release_to_writer(sums, slot)
    cell = place.o.to(gl.int64) * split.blocks_of_run + work.member + block * split.members
    store_cells(cells, cell, inside, a, b, affine, maps, place, norm, AXIS_O | AXIS_T, NO_AXIS)
    sum1 = gl.zeros([mode.sets], gl.float32, gl.BlockedLayout([1], [32], [WARPS], [0]))
    sum2 = sum1
    for this in range(mode.tiles):
        here = inside & (tile == this)
        sum1 = gl.where(set_ == this, gl.sum(gl.where(here, b * gain, 0.0), 0), sum1)
        sum2 = gl.where(set_ == this, gl.sum(gl.where(here, a * gain, 0.0), 0), sum2)
    return sum1, sum2


@jit
def _of_columns(
    sums, at, unit, set_, affine, cells, work, view, maps, split, norm: gl.constexpr, mode: gl.constexpr, WARPS: gl.constexpr
):  # fmt: skip
    """The same, if each message has the sums of a tile's columns."""
    TABLE: gl.constexpr = gl.BlockedLayout([1, mode.block_j // 4], [8, 4], [WARPS, 1], [1, 0])  # a sum over columns takes two shuffles
    COLUMN: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    width = gl.minimum(split.columns - unit % split.spans * split.span, split.span)  # columns of this unit
    sum1 = gl.zeros([mode.sets], gl.float32, COLUMN)
    sum2 = sum1
    for tile in range(mode.tiles):
        slot = (at + tile) % 2
        place = place_of_columns(unit, tile, view, split, mode, WARPS)
        gain, _ = fold_affine(1.0, affine, maps, place, norm, AXIS_R, AXIS_S | AXIS_T)  # before the wait, because these loads take a while
        acquire_to_read(sums, slot, (at + tile) // 2 & 1)
        a, b = sums.buffer.index(slot * 2).load(COLUMN), sums.buffer.index(slot * 2 + 1).load(COLUMN)
        release_to_writer(sums, slot)
        cell = (place.o * split.members + work.member).to(gl.int64) * split.columns + place.s * view.run + place.t
        store_cells(cells, cell, place.j_inside, a, b, affine, maps, place, norm, AXIS_R, AXIS_S | AXIS_T)
        if mode.by_column:  # each column is a set
            sum1, sum2 = b * gain, a * gain
        else:
            start, end = tile * mode.block_j, gl.minimum(tile * mode.block_j + mode.block_j, width)
            tile1 = _of_tile(b * gain, start, end, view.run, mode, TABLE)
            tile2 = _of_tile(a * gain, start, end, view.run, mode, TABLE)
            if mode.tiles == 1:
                sum1, sum2 = gl.convert_layout(tile1, COLUMN), gl.convert_layout(tile2, COLUMN)
            else:
                there = overlap(set_, view.run, start, end) > 0
                which = gl.minimum(gl.maximum(set_ - start // view.run, 0), mode.sets_per_block - 1)
                sum1 += gl.where(there, gl.gather(tile1, which, 0), 0.0)
                sum2 += gl.where(there, gl.gather(tile2, which, 0), 0.0)
    return sum1, sum2


@jit
def _of_tile(values, start, end, run, mode: gl.constexpr, TABLE: gl.constexpr):
    """Add up the values of a tile's columns, from start to end, for each set that the tile overlaps."""
    column = start + gl.arange(0, values.shape[0], gl.SliceLayout(0, TABLE))
    here = start // run + gl.arange(0, mode.sets_per_block, gl.SliceLayout(1, TABLE))
    mine = gl.expand_dims(gl.where(column < end, set_of(column, run), -1), 0) == gl.expand_dims(here, 1)
    return gl.sum(gl.where(mine, gl.expand_dims(gl.convert_layout(values, gl.SliceLayout(0, TABLE)), 0), 0.0), 1)


@jit
def combine(sums, lines, affine, values, cells, exchange, work, total, view, maps, split, norm: gl.constexpr, mode: gl.constexpr):
    """Wait for the sums of all members and add them up. Tell `apply` c1 and c2, and if columns differ, all that it must know of them."""
    WARPS: gl.constexpr = COMBINE_WARPS
    SETS: gl.constexpr = mode.sets
    PART: gl.constexpr = part_layout(SETS, WARPS, mode.by_column)
    COLUMN: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    set_ = gl.expand_dims(gl.arange(0, SETS, gl.SliceLayout(1, PART)), 1)
    part = gl.expand_dims(gl.arange(0, mode.parts, gl.SliceLayout(0, PART)), 0)
    count = view.reps.to(gl.float32) * view.run  # elements of a set, also of a folded one
    turn = 0
    for unit in range(work.team, work.units, split.teams):
        acquire_to_write(lines, turn % 2, turn // 2 & 1)
        if mode.kind == COLUMNS:
            for tile in range(mode.tiles):  # these lines do not need the sums
                at = (turn % 2 * mode.tiles + tile) * LINES
                store_lines(lines, at, unit, tile, affine, values, view, maps, split, norm, mode, WARPS)
        if exchange.parts_ptr is not None:
            seen = gl.atomic_add(exchange.counters_ptr + unit, 0, sem="acquire", scope="gpu")
            while seen < split.members:
                seen = gl.atomic_add(exchange.counters_ptr + unit, 0, sem="acquire", scope="gpu")
            sum1, sum2 = _of_members(exchange.parts_ptr, unit, set_, part, split, mode)
            sum1 = gl.convert_layout(gl.reshape(sum1, [SETS]), COLUMN)
            sum2 = gl.convert_layout(gl.reshape(sum2, [SETS]), COLUMN)
        else:
            own, messages = gl.arange(0, SETS, COLUMN), turn * _messages(work, mode)
            sum1, sum2 = _of_sets(sums, messages, unit, own, affine, cells, work, total, view, maps, split, norm, mode, WARPS)
        c1, c2 = sum1 / count, sum2 / count
        j = gl.arange(0, mode.block_j, COLUMN)
        for tile in range(mode.tiles):
            at = (turn % 2 * mode.tiles + tile) * VALUES
            of = gl.zeros([mode.block_j], gl.int32, COLUMN) + tile
            if mode.kind == COLUMNS:
                at = (turn % 2 * mode.tiles + tile) * LINES + KNOWN
                of = gl.minimum(set_of(tile * mode.block_j + j, view.run), SETS - 1)
            if mode.by_column:
                c1_line, c2_line = c1, c2
            else:
                c1_line, c2_line = gl.gather(c1, of, 0), gl.gather(c2, of, 0)
            lines.buffer.index(at).store(c1_line)
            lines.buffer.index(at + 1).store(c2_line)
        release_to_readers(lines, turn % 2)
        if exchange.parts_ptr is not None:  # noqa: SIM102, the outer `if` is decided at compile time
            # The counter now counts the members that have read `parts`. The last of them resets it to 0.
            if gl.atomic_add(exchange.counters_ptr + unit, 1, sem="relaxed", scope="gpu") == 2 * split.members - 1:
                gl.store(exchange.counters_ptr + unit, 0)
        turn += 1  # noqa: SIM113


@jit
def _of_members(parts_ptr, unit, set_, part, split, mode: gl.constexpr):
    """Add up the sums of all members. Return both sums of the sets `set_`, of shape [SETS, 1]."""
    STEP: gl.constexpr = mode.sets if mode.by_column else 1  # from one member's sum of a set to the next one's
    at = part_of(parts_ptr, unit, set_, part, split.members, mode)
    sum1, sum2 = load_parts(at, part < split.members, mode.sets * split.members)
    for first in range(mode.parts, split.members, mode.parts):
        more1, more2 = load_parts(at + first * STEP, first + part < split.members, mode.sets * split.members)
        sum1 += more1
        sum2 += more2
    return gl.sum(sum1, 1, keep_dims=True), gl.sum(sum2, 1, keep_dims=True)
