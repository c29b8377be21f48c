"""What the members of a ring's team tell each other: the moments of the sets of a unit, each member's, and what all of them make of them.

In memory, since members are on several multiprocessors: `parts` for the moments, and a counter for each unit, 0 before and after a launch.
"""

from onepass.backends.gpu.device.affine import fold_affine
from onepass.backends.gpu.device.moments import DOWN, UP, inverse_deviation, join, merge, store_statistics

from .gluon import barrier, gl, jit, mbarrier
from .stress import late


@jit
def publish(
    moments, taken, handed, parts_ptr, counters_ptr, member, members, team, teams, units, spans, reps, run, columns,
    CENTERED: gl.constexpr, BLOCK_I: gl.constexpr, BLOCK_J: gl.constexpr, SETS: gl.constexpr, NEAR: gl.constexpr, TILES: gl.constexpr,
    WARPS: gl.constexpr, STRESS: gl.constexpr,
):  # fmt: skip
    """From the moments of columns, tile by tile, to those of sets, for all members to see."""
    TABLE: gl.constexpr = gl.BlockedLayout([1, BLOCK_J // 4], [8, 4], [WARPS, 1], [1, 0])  # sums over columns take two shuffles
    SET: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    set_ = gl.arange(0, SETS, SET)
    rows = rows_of(member, members, reps, BLOCK_I)
    turn = 0
    for unit in range(team, units, teams):
        width = columns - unit % spans * (TILES * BLOCK_J)  # of this unit, and perhaps more
        n, mean, m2 = gl.zeros([SETS], gl.float32, SET), gl.zeros([SETS], gl.float32, SET), gl.zeros([SETS], gl.float32, SET)
        for tile in range(TILES):
            mbarrier.wait(taken.index(turn % 2), turn // 2 & 1)
            late(STRESS, "publish moments", WARPS)
            column_mean, column_m2 = moments.index(turn % 2 * 2), moments.index(turn % 2 * 2 + 1)
            if SETS == BLOCK_J and TILES == 1:  # each column is a set
                mean, m2 = column_mean.load(SET), column_m2.load(SET)
            else:
                start, end = tile * BLOCK_J, gl.minimum(tile * BLOCK_J + BLOCK_J, width)
                first = start // run
                near_mean, near_m2 = _near(column_mean, column_m2, start, end, run, rows, NEAR, CENTERED, TABLE)
                if TILES == 1:
                    mean, m2 = gl.convert_layout(near_mean, SET), gl.convert_layout(near_m2, SET)
                else:
                    more = _overlap(set_, run, start, end) * rows
                    place = gl.minimum(gl.maximum(set_ - first, 0), NEAR - 1)
                    more_m2 = gl.where(more > 0, gl.gather(near_m2, place, 0), 0.0)
                    mean, m2, n = join(mean, m2, n, gl.gather(near_mean, place, 0), more_m2, more, CENTERED)
            barrier()
            mbarrier.arrive(handed.index(turn % 2), count=1)
            turn += 1
        part = _part_of(parts_ptr, unit, set_, member, members, SETS)
        late(STRESS, "publish parts", WARPS)
        gl.store(part, mean)
        gl.store(part + SETS * members, m2)
        late(STRESS, "publish count", WARPS)
        barrier()
        gl.atomic_add(counters_ptr + unit, 1, sem="release", scope="gpu")


@jit
def _near(column_mean, column_m2, start, end, run, rows, NEAR: gl.constexpr, CENTERED: gl.constexpr, TABLE: gl.constexpr):
    """Columns of a tile that are of one set, together: the moments of each set that the tile meets. (14), (15)"""
    column = start + gl.arange(0, column_mean.shape[0], gl.SliceLayout(0, TABLE))
    here = start // run + gl.arange(0, NEAR, gl.SliceLayout(1, TABLE))
    mine = gl.expand_dims(gl.where(column < end, _over(column, run), -1), 0) == gl.expand_dims(here, 1)
    m2 = gl.expand_dims(column_m2.load(gl.SliceLayout(0, TABLE)), 0)
    mean = gl.zeros([NEAR], gl.float32, gl.SliceLayout(1, TABLE))
    if CENTERED:
        each = gl.expand_dims(column_mean.load(gl.SliceLayout(0, TABLE)), 0)
        mean = gl.sum(gl.where(mine, each * DOWN, 0.0), 1) / gl.maximum(_overlap(here, run, start, end), 1.0) * UP
        delta = each - gl.expand_dims(mean, 1)
        m2 = m2 + delta * delta * rows
    return mean, gl.sum(gl.where(mine, m2, 0.0), 1)


@jit
def combine(
    lines, known, used, weight_ptr, bias_ptr, scale_ptr, shift_ptr, mean_ptr, rstd_ptr, var_ptr, parts_ptr, counters_ptr,
    p_every, p_period, p_o, p_r, p_s, p_run, p_t, m_every, m_period, m_o, m_r, m_s, m_run, m_t,
    eps, member, members, team, teams, units, spans, reps, sets, run, columns,
    PARAM: gl.constexpr, MODULATION: gl.constexpr, OFFSET: gl.constexpr, CENTERED: gl.constexpr, BLOCK_I: gl.constexpr,
    BLOCK_J: gl.constexpr, SETS: gl.constexpr, PARTS: gl.constexpr, TILES: gl.constexpr, WARPS: gl.constexpr,
    STRESS: gl.constexpr,
):  # fmt: skip
    """From all members' moments to the statistics of sets, and to what z needs of them in each column."""
    PART: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [WARPS, 1], [1, 0])  # sums over members stay in a warp
    COLUMN: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    operands = weight_ptr, bias_ptr, scale_ptr, shift_ptr
    maps = (p_every, p_period, p_o, p_r, p_s, p_run, p_t), (m_every, m_period, m_o, m_r, m_s, m_run, m_t)
    part = gl.expand_dims(gl.arange(0, PARTS, gl.SliceLayout(0, PART)), 0)
    set_ = gl.expand_dims(gl.arange(0, SETS, gl.SliceLayout(1, PART)), 1)
    j = gl.arange(0, BLOCK_J, COLUMN)
    count = reps.to(gl.float32) * run
    n = rows_of(part, members, reps, BLOCK_I) * run
    turn = 0
    for unit in range(team, units, teams):
        o, span = unit // spans, unit % spans
        line_at = turn % 2 * (TILES * 4)
        mbarrier.wait(used.index(turn % 2), (turn // 2 & 1) ^ 1)
        late(STRESS, "combine lines", WARPS)
        for tile in range(TILES):  # what does not need the statistics
            column = (span * TILES + tile) * BLOCK_J + j
            of = _over(column, run)
            place = o, 0, of, column - of * run
            gain, term = fold_affine(1.0, operands, maps, place, None, column < columns, OFFSET, PARAM, MODULATION, 2, 12)
            lines.index(line_at + tile * 4 + 2).store(gl.zeros([BLOCK_J], gl.float32, COLUMN) + gain)
            lines.index(line_at + tile * 4 + 3).store(gl.zeros([BLOCK_J], gl.float32, COLUMN) + term)
        late(STRESS, "combine count", WARPS)
        seen = gl.atomic_add(counters_ptr + unit, 0, sem="acquire", scope="gpu")
        while seen < members:
            seen = gl.atomic_add(counters_ptr + unit, 0, sem="acquire", scope="gpu")
        late(STRESS, "combine parts", WARPS)
        at = _part_of(parts_ptr, unit, set_, part, members, SETS)
        mean, m2 = _load_parts(at, part < members, SETS * members)
        n_mean = n
        for first in range(PARTS, members, PARTS):
            more_mean, more_m2 = _load_parts(at + first, first + part < members, SETS * members)
            more = rows_of(first + part, members, reps, BLOCK_I) * run
            mean, m2, n_mean = join(mean, m2, n_mean, more_mean, more_m2, more, CENTERED)
        mean, m2 = merge(mean, m2, n_mean, count, 1, CENTERED)
        var = m2 / count
        rstd = inverse_deviation(var, eps)
        late(STRESS, "combine known", WARPS)
        for tile in range(TILES):
            place = gl.minimum(_over(tile * BLOCK_J + j, run), SETS - 1)
            lines.index(line_at + tile * 4).store(gl.gather(gl.reshape(mean, [SETS]), place, 0))
            lines.index(line_at + tile * 4 + 1).store(gl.gather(gl.reshape(rstd, [SETS]), place, 0))
        barrier()
        mbarrier.arrive(known.index(turn % 2), count=1)
        if member == 0:
            of = span * (TILES * BLOCK_J // run) + set_
            there = (of < sets) & (set_ < TILES * BLOCK_J // run)
            store_statistics((mean_ptr, rstd_ptr, var_ptr), o * sets + of, mean, rstd, var, there)
        # The parts have been read. The last one to leave resets the counter: it is 0 before and after every launch.
        late(STRESS, "combine leave", WARPS)
        if gl.atomic_add(counters_ptr + unit, 1, sem="relaxed", scope="gpu") == 2 * members - 1:
            late(STRESS, "combine reset", WARPS)
            gl.store(counters_ptr + unit, 0)
        turn += 1  # noqa: SIM113


@jit
def _part_of(parts_ptr, unit, set_, member, members, SETS: gl.constexpr):
    """Where a member leaves the mean of a set; the m2 is SETS * members further on."""
    return parts_ptr + (unit.to(gl.int64) * (2 * SETS) + set_) * members + member


@jit
def _load_parts(at, there, m2_at):
    """The moments that members have left; past the first-level cache, which knows nothing of other multiprocessors."""
    mean = gl.load(at, mask=there, other=0.0, cache_modifier=".cg")
    return mean, gl.load(at + m2_at, mask=there, other=0.0, cache_modifier=".cg")


@jit
def _over(column, run):
    """column // run, in three instructions rather than twenty: exact below 2²⁰."""
    return ((column.to(gl.float32) + 0.5) * (1.0 / run)).to(gl.int32)


@jit
def _overlap(set_, run, start, end):
    """How many of the columns from start to end are of a set."""
    return gl.maximum(gl.minimum(set_ * run + run, end) - gl.maximum(set_ * run, start), 0).to(gl.float32)


@jit
def rows_of(member, members, reps, BLOCK_I: gl.constexpr):
    """How many rows a member has: all but the last block are full, and one that does not exist has none."""
    blocks = (reps + BLOCK_I - 1) // BLOCK_I
    mine = blocks // members + gl.where(member < blocks % members, 1, 0)
    missing = gl.where(member == (blocks - 1) % members, blocks * BLOCK_I - reps, 0)
    return gl.where(member < members, mine * BLOCK_I - missing, 0).to(gl.float32)
