"""How the programs of the ring kernel exchange moments (mean and M2).

Memory is x[o, r, s, t]. A set is the elements of one o and s, which share a mean and a variance. A unit of work is one o
and the columns (s, t) of some whole sets, in tiles of block_j columns. A team of programs, its members, shares the rows
r of a unit. Each member stores the moments of its rows in `parts`, and merges the moments of all members, by equations
(14) and (15) of docs/theory.md.

Members run on different multiprocessors, so `parts` lies in global memory. Each unit has a counter there, which is 0
before and after a launch. A team of one member needs neither: `combine` takes the moments from `reduce`, and `publish` has no work.
"""

from onepass.backends.gpu.device.affine import fold_affine
from onepass.backends.gpu.device.axes import AXIS_R, AXIS_S, AXIS_T
from onepass.backends.gpu.device.groups import Place
from onepass.backends.gpu.device.moments import DOWN, UP, inverse_deviation, join, merge, store_statistics

from .channel import acquire_to_read, acquire_to_write, release_to_readers, release_to_writer
from .elements import activated
from .gluon import barrier, gl, jit
from .layouts import part_layout
from .parameters import ELEMENT
from .reduce import PARTS, elements_of, merge_warps, share_of
from .runs import run_of, runs_of
from .stress import late

PUBLISH_WARPS = gl.constexpr(1)
COMBINE_WARPS = gl.constexpr(2)


@jit
def publish(moments, exchange, work, view, split, norm: gl.constexpr, mode: gl.constexpr):
    """Compute the moments of each set in this member's rows, and store them for all members."""
    WARPS: gl.constexpr = PUBLISH_WARPS
    set_ = gl.arange(0, mode.sets, gl.BlockedLayout([1], [32], [WARPS], [0]))
    at = 0
    if exchange.parts_ptr is not None:
        for unit in range(work.team, work.units, split.teams):
            mean, m2 = _of_sets(moments, at, unit, set_, work, view, split, norm, mode, WARPS)
            at += mode.messages
            part = part_of(exchange.parts_ptr, unit, set_, work.member, split.members, mode)
            late(mode.stress, "publish parts", WARPS)
            gl.store(part, mean)
            gl.store(part + mode.sets * split.members, m2)
            late(mode.stress, "publish count", WARPS)
            barrier()
            gl.atomic_add(exchange.counters_ptr + unit, 1, sem="release", scope="gpu")


@jit
def _of_sets(moments, at, unit, set_, work, view, split, norm: gl.constexpr, mode: gl.constexpr, WARPS: gl.constexpr):
    """Return mean and M2 of the sets `set_` of a unit, in this member's rows. Each of WARPS warps has some of them.

    The moments come through the channel `moments` from `reduce`, tile by tile, or once if the unit is one set. `at` counts the
    messages before this unit.
    """
    BLOCK_J: gl.constexpr = mode.block_j
    TABLE: gl.constexpr = gl.BlockedLayout([1, BLOCK_J // 4], [8, 4], [WARPS, 1], [1, 0])  # a sum over columns takes two shuffles
    SET: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    rows = share_of(work.member, split.members, view.reps, mode.block_i)
    width = split.columns - unit % split.spans * split.span  # columns from the start of this unit to the last one
    mean = gl.zeros([mode.sets], gl.float32, SET)
    m2 = mean
    n = mean
    for tile in range(mode.messages):
        slot = (at + tile) % 2
        acquire_to_read(moments, slot, (at + tile) // 2 & 1)
        late(mode.stress, "publish moments", WARPS)
        column_mean, column_m2 = moments.buffer.index(slot * 2), moments.buffer.index(slot * 2 + 1)
        if mode.folded or mode.single:  # each message is a set
            tile_mean, tile_m2 = merge_warps(moments, slot * PARTS, norm, WARPS)
            mean, m2 = gl.where(set_ == tile, tile_mean, mean), gl.where(set_ == tile, tile_m2, m2)
        elif mode.by_column:  # each column is a set
            mean, m2 = column_mean.load(SET), column_m2.load(SET)
        else:
            start, end = tile * BLOCK_J, gl.minimum(tile * BLOCK_J + BLOCK_J, width)
            first = start // view.run
            tile_mean, tile_m2 = _merge_columns(column_mean, column_m2, start, end, view.run, rows, norm, mode, TABLE)
            if mode.tiles == 1:
                mean, m2 = gl.convert_layout(tile_mean, SET), gl.convert_layout(tile_m2, SET)
            else:
                more = overlap(set_, view.run, start, end) * rows
                place = gl.minimum(gl.maximum(set_ - first, 0), mode.sets_per_block - 1)
                more_m2 = gl.where(more > 0, gl.gather(tile_m2, place, 0), 0.0)
                mean, m2, n = join(mean, m2, n, gl.gather(tile_mean, place, 0), more_m2, more, norm.centered)
        release_to_writer(moments, slot)
    return mean, m2


@jit
def _merge_columns(
    column_mean, column_m2, start, end, run, rows, norm: gl.constexpr, mode: gl.constexpr, TABLE: gl.constexpr
):  # fmt: skip
    """Merge the moments of a tile's columns, from start to end, into those of each set that the tile overlaps.

    Return mean and M2 of these sets. Each column has `rows` rows. (14), (15)
    """
    column = start + gl.arange(0, column_mean.shape[0], gl.SliceLayout(0, TABLE))
    here = start // run + gl.arange(0, mode.sets_per_block, gl.SliceLayout(1, TABLE))
    mine = gl.expand_dims(gl.where(column < end, set_of(column, run), -1), 0) == gl.expand_dims(here, 1)
    m2 = gl.expand_dims(column_m2.load(gl.SliceLayout(0, TABLE)), 0)
    mean = gl.zeros([mode.sets_per_block], gl.float32, gl.SliceLayout(1, TABLE))
    if norm.centered:
        each = gl.expand_dims(column_mean.load(gl.SliceLayout(0, TABLE)), 0)
        mean = gl.sum(gl.where(mine, each * DOWN, 0.0), 1) / gl.maximum(overlap(here, run, start, end), 1.0) * UP
        delta = each - gl.expand_dims(mean, 1)
        m2 = m2 + delta * delta * rows
    return mean, gl.sum(gl.where(mine, m2, 0.0), 1)


@jit
def combine(
    moments, lines, x_ptr, y_ptr, affine, stats, exchange, eps, work, total, view, maps, split, norm: gl.constexpr, mode: gl.constexpr
):
    """Wait for the moments of all members, merge them, and store the statistics of each set.

    Send mean, rstd, gain and term of each column through the channel `lines` to `apply`, which
    computes y = activation((x - mean)·rstd·gain + term).
    """
    WARPS: gl.constexpr = COMBINE_WARPS
    SETS: gl.constexpr = mode.sets
    BLOCK_J: gl.constexpr = mode.block_j
    PART: gl.constexpr = part_layout(SETS, WARPS, mode.by_column)
    COLUMN: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    set_ = gl.expand_dims(gl.arange(0, SETS, gl.SliceLayout(1, PART)), 1)
    part = gl.expand_dims(gl.arange(0, mode.parts, gl.SliceLayout(0, PART)), 0)
    j = gl.arange(0, BLOCK_J, COLUMN)
    n = elements_of(part, split.members, 0, view, mode)
    count = view.reps.to(gl.float32) * view.run
    if mode.folded:
        count = view.length.to(gl.float32)
    turn = 0
    for unit in range(work.team, work.units, split.teams):
        o, span = unit // split.spans, unit % split.spans
        line_at = turn % 2 * (mode.lines * 4)
        acquire_to_write(lines, turn % 2, turn // 2 & 1)
        late(mode.stress, "combine lines", WARPS)
        if not (mode.folded or mode.by_row):  # otherwise gain and term differ from row to row
            for tile in range(mode.lines):  # they do not need the statistics
                column = span * split.span + tile * BLOCK_J + j
                of = set_of(column, view.run)
                place = Place(o=o, r=0, s=of, t=column - of * view.run, i_inside=None, j_inside=column < split.columns)
                gain, term = fold_affine(1.0, affine, maps, place, norm, AXIS_R, AXIS_S | AXIS_T)
                lines.buffer.index(line_at + tile * 4 + 2).store(gl.zeros([BLOCK_J], gl.float32, COLUMN) + gain)
                lines.buffer.index(line_at + tile * 4 + 3).store(gl.zeros([BLOCK_J], gl.float32, COLUMN) + term)
        runs = runs_of(unit, total, view, split, mode)
        if exchange.parts_ptr is not None:
            late(mode.stress, "combine count", WARPS)
            seen = gl.atomic_add(exchange.counters_ptr + unit, 0, sem="acquire", scope="gpu")
            while seen < split.members:
                seen = gl.atomic_add(exchange.counters_ptr + unit, 0, sem="acquire", scope="gpu")
            late(mode.stress, "combine parts", WARPS)
            mean, m2 = _of_members(exchange.parts_ptr, unit, set_, count, n, runs.phase, view, split, norm, mode, PART)
        else:
            own_set = gl.arange(0, SETS, COLUMN)
            own_mean, own_m2 = _of_sets(moments, turn * mode.messages, unit, own_set, work, view, split, norm, mode, WARPS)
            mean = gl.expand_dims(gl.convert_layout(own_mean, gl.SliceLayout(1, PART)), 1)
            m2 = gl.expand_dims(gl.convert_layout(own_m2, gl.SliceLayout(1, PART)), 1)
        var = m2 / count
        rstd = inverse_deviation(var, eps)
        late(mode.stress, "combine known", WARPS)
        if mode.by_column:
            lines.buffer.index(line_at).store(gl.convert_layout(gl.reshape(mean, [SETS]), COLUMN))
            lines.buffer.index(line_at + 1).store(gl.convert_layout(gl.reshape(rstd, [SETS]), COLUMN))
        else:
            for tile in range(1 if mode.single else mode.tiles):
                set_of_column = gl.minimum(set_of(tile * BLOCK_J + j, view.run), SETS - 1)
                lines.buffer.index(line_at + tile * 4).store(gl.gather(gl.reshape(mean, [SETS]), set_of_column, 0))
                lines.buffer.index(line_at + tile * 4 + 1).store(gl.gather(gl.reshape(rstd, [SETS]), set_of_column, 0))
        release_to_readers(lines, turn % 2)
        if work.member == 0:
            if mode.folded:
                to = run_of(runs, set_, view, mode).o
                there = (set_ < mode.tiles) & (to < total)
            else:
                of = span * (split.span // view.run) + set_
                to = o * view.sets + of
                there = (of < view.sets) & (set_ < split.span // view.run)
            store_statistics(stats, to, mean, rstd, var, there)
        if mode.phases > 1:  # noqa: SIM102
            if work.member == split.members - 1:
                _apply_ends(x_ptr, y_ptr, affine, mean, rstd, runs, set_, total, view, maps, norm, mode, PART)
        if exchange.parts_ptr is not None:
            # The counter now counts the members that have read `parts`. The last of them resets it to 0.
            late(mode.stress, "combine leave", WARPS)
            if gl.atomic_add(exchange.counters_ptr + unit, 1, sem="relaxed", scope="gpu") == 2 * split.members - 1:
                late(mode.stress, "combine reset", WARPS)
                gl.store(exchange.counters_ptr + unit, 0)
        turn += 1  # noqa: SIM113


@jit
def _apply_ends(
    x_ptr, y_ptr, affine, mean, rstd, runs, set_, total, view, maps, norm: gl.constexpr, mode: gl.constexpr, PART: gl.constexpr
):
    """Store y at both ends of a unit's runs, where a run shares 16 bytes with its neighbour. `apply` stores whole vectors only.

    This group has time for it. In `apply`, which sets the pace, such stores cost each run a microsecond.
    """
    run = run_of(runs, set_, view, mode)
    number = gl.expand_dims(gl.arange(0, 2 * mode.vector, gl.SliceLayout(0, PART)), 0)  # the first vector of a run, and its last one
    at_start = number < mode.vector
    at = gl.where(at_start, number, run.end // mode.vector * mode.vector + number - mode.vector)
    inside = gl.where(at_start, (run.phase > 0) & (at >= run.phase), at < run.end) & (set_ < mode.tiles) & (run.o < total)
    t = at - run.phase
    if mode.differ != ELEMENT:  # a run has one channel
        t = at * 0
    place = Place(o=run.o, r=0, s=0, t=t, i_inside=inside, j_inside=inside)
    gain, term = fold_affine(1.0, affine, maps, place, norm, AXIS_T, AXIS_T)
    x = gl.load(x_ptr + run.start + at, mask=inside, other=0.0).to(gl.float32)
    if norm.centered:
        x = x - mean
    y = activated(x * (rstd * gain) + term, norm.activation)
    gl.store(y_ptr + run.start + at, y.to(y_ptr.dtype.element_ty), mask=inside)


@jit
def _of_members(parts_ptr, unit, set_, count, n, phase, view, split, norm: gl.constexpr, mode: gl.constexpr, PART: gl.constexpr):
    """Merge the moments of all members. Return mean and M2 of the sets `set_`, which have `count` elements each. (14), (15)

    Without phases, `n` is how many elements of a set each of the first members has.
    """
    STEP: gl.constexpr = mode.sets if mode.by_column else 1  # from one member's mean of a set to the next one's
    part = gl.expand_dims(gl.arange(0, mode.parts, gl.SliceLayout(0, PART)), 0)
    at = part_of(parts_ptr, unit, set_, part, split.members, mode)
    mean, m2 = load_parts(at, part < split.members, mode.sets * split.members)
    if mode.phases > 1:
        n = elements_of(part, split.members, phase, view, mode)
    for first in range(mode.parts, split.members, mode.parts):
        more_mean, more_m2 = load_parts(at + first * STEP, first + part < split.members, mode.sets * split.members)
        more = elements_of(first + part, split.members, phase, view, mode)
        mean, m2, n = join(mean, m2, n, more_mean, more_m2, more, norm.centered)
    return merge(mean, m2, n, count, 1, norm.centered)


@jit
def part_of(parts_ptr, unit, set_, member, members, mode: gl.constexpr):
    """Return the address of a member's mean of a set. The M2 lies mode.sets * members elements further on.

    Neighbouring threads of `combine` have neighbouring members; if each column is a set, neighbouring sets.
    """
    unit_ptr = parts_ptr + unit.to(gl.int64) * (2 * mode.sets) * members
    if mode.by_column:
        part = unit_ptr + member * mode.sets + set_
    else:
        part = unit_ptr + set_ * members + member
    return part


@jit
def load_parts(at, there, m2_offset):
    """Load the moments that members have stored. Return mean and M2.

    `.cg` skips the first-level cache, which does not see the stores of other multiprocessors.
    """
    mean = gl.load(at, mask=there, other=0.0, cache_modifier=".cg")
    return mean, gl.load(at + m2_offset, mask=there, other=0.0, cache_modifier=".cg")


@jit
def set_of(column, run):
    """Return column // run, in three instructions instead of twenty. The result is exact for columns below 2²⁰."""
    return ((column.to(gl.float32) + 0.5) * (1.0 / run)).to(gl.int32)


@jit
def overlap(set_, run, start, end):
    """Return how many of the columns from start to end belong to the set `set_`, which has `run` columns."""
    return gl.maximum(gl.minimum(set_ * run + run, end) - gl.maximum(set_ * run, start), 0).to(gl.float32)
