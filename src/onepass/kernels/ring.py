"""The team walk on Hopper: x is read once, into a ring of blocks in shared memory, and stays there until the team's statistics are known.

A unit of work is one o and a span of columns that begins and ends with a set. The members of a team take its blocks of rows in turn. Five
groups of warps work side by side, each through all units, none waiting for another but where it needs what that makes:

- load fills the ring, block after block, as slots come free;
- reduce takes the moments of each column;
- publish makes of them the moments of each set, and hands them to the team;
- combine waits for all members' moments, and makes of them, for each column, what z needs: mean, rstd, gain and term;
- apply empties the ring.

So a team's exchange is hidden behind the blocks of the next unit. What exceeds KEEP blocks of a unit is reduced first and let go, and
comes again after the others, last first: from the cache, as far as that reaches.
"""

from triton import constexpr_function

from .gluon import async_load, barrier, fence_async_shared, gl, jit, mbarrier
from .math import activate, inverse_deviation, line, merge, store_statistics, update

# z/(1 + exp(-z)). The compiler takes an instruction more, to change a sign: of those that memory leaves time for, one in thirty.
SILU = gl.constexpr("""{
    .reg .f32 t;
    mul.ftz.f32 t, $1, 0fBFB8AA3B;
    ex2.approx.ftz.f32 t, t;
    add.ftz.f32 t, t, 0f3F800000;
    rcp.approx.ftz.f32 t, t;
    mul.ftz.f32 $0, $1, t;
}""")


@constexpr_function
def reduce_layout(columns, size, warps):
    """Of a block that is summed over rows: columns stay within a warp, so that warps need not wait for each other."""
    each = min(16 // size, columns // warps)
    wide = columns // each // warps
    return gl.BlockedLayout([1, each], [32 // wide, wide], [1, warps], [0, 1])


@constexpr_function
def apply_layout(columns, size, warps, at_once):
    """Of a block that is stored, along the columns first: 16 bytes for each thread, or 8, which leave registers for two blocks."""
    each = min(16 // at_once // size, columns)
    wide = min(columns // each, 32)
    return gl.BlockedLayout([1, each], [32 // wide, wide], [warps, 1], [1, 0])


@jit
def ring_forward(
    x_desc, y_ptr, weight_ptr, bias_ptr, scale_ptr, shift_ptr, mean_ptr, rstd_ptr, var_ptr, parts_ptr, counters_ptr,
    eps, total, reps, sets, run, x_o, x_r, x_s, y_o, y_r, y_s,
    p_every, p_period, p_o, p_r, p_s, p_run, p_t, m_every, m_period, m_o, m_r, m_s, m_run, m_t, members, teams, spans, columns,
    PARAM: gl.constexpr, MODULATION: gl.constexpr, OFFSET: gl.constexpr, CENTERED: gl.constexpr, ACTIVATION: gl.constexpr,
    RAGGED: gl.constexpr, BLOCK_I: gl.constexpr, BLOCK_J: gl.constexpr, SETS: gl.constexpr, NEAR: gl.constexpr, PARTS: gl.constexpr,
    TILES: gl.constexpr, SLOTS: gl.constexpr, KEEP: gl.constexpr, BACK: gl.constexpr, AT_ONCE: gl.constexpr,
    WARPS: gl.constexpr,
):  # fmt: skip
    """There are `teams` of `members` programs, and `spans` units for each o, of TILES blocks of columns and at most SETS sets each.

    The ring has SLOTS slots, and BACK more for what comes again. RAGGED: the last block of rows or of columns is not full. A block meets at
    most NEAR sets; PARTS members' moments are combined at a time. Blocks are applied AT_ONCE, 1 or 2. WARPS: of each of reduce and apply.
    """
    BYTES: gl.constexpr = BLOCK_I * BLOCK_J * x_desc.dtype.primitive_bitwidth // 8
    MBARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    ring = gl.allocate_shared_memory(x_desc.dtype, [SLOTS + BACK, BLOCK_I, BLOCK_J], x_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [SLOTS + BACK, 1], MBARRIER)
    empty = gl.allocate_shared_memory(gl.int64, [SLOTS + BACK, 1], MBARRIER)
    moments = gl.allocate_shared_memory(gl.float32, [2 * 2, BLOCK_J], PLAIN)  # of two tiles: each column's mean and m2
    taken = gl.allocate_shared_memory(gl.int64, [2, 1], MBARRIER)
    handed = gl.allocate_shared_memory(gl.int64, [2, 1], MBARRIER)
    lines = gl.allocate_shared_memory(gl.float32, [2 * TILES * 4, BLOCK_J], PLAIN)  # of two units: each column's mean, rstd, gain, term
    known = gl.allocate_shared_memory(gl.int64, [2, 1], MBARRIER)
    used = gl.allocate_shared_memory(gl.int64, [2, 1], MBARRIER)
    for slot in gl.static_range(SLOTS + BACK):
        mbarrier.init(full.index(slot), count=1)
        mbarrier.init(empty.index(slot), count=1)
    for slot in gl.static_range(2):
        mbarrier.init(taken.index(slot), count=1)
        mbarrier.init(handed.index(slot), count=1)
        mbarrier.init(known.index(slot), count=1)
        mbarrier.init(used.index(slot), count=1)
    fence_async_shared()
    team, member = gl.program_id(0) // members, gl.program_id(0) % members
    units = total // sets * spans
    blocks = ((reps + BLOCK_I - 1) // BLOCK_I - member + members - 1) // members  # of rows: every `members`-th
    again = gl.maximum(TILES * blocks - KEEP, 0)
    gl.warp_specialize(
        [
            (_apply, (
                ring, full, empty, lines, known, used, y_ptr, y_o, y_r,
                blocks, again, member, members, team, teams, units, spans, reps, columns,
                ACTIVATION, RAGGED, BLOCK_I, BLOCK_J, TILES, SLOTS, BACK, AT_ONCE, WARPS,
            )),
            (_reduce, (
                ring, full, empty, moments, taken, handed, blocks, again, member, members, team, teams, units, reps,
                CENTERED, RAGGED, BLOCK_I, BLOCK_J, TILES, SLOTS, BACK, WARPS,
            )),
            (_publish, (
                moments, taken, handed, parts_ptr, counters_ptr, member, members, team, teams, units, spans, reps, run, columns,
                CENTERED, BLOCK_I, BLOCK_J, SETS, NEAR, TILES, 1,
            )),
            (_combine, (
                lines, known, used, weight_ptr, bias_ptr, scale_ptr, shift_ptr, mean_ptr, rstd_ptr, var_ptr, parts_ptr, counters_ptr,
                p_every, p_period, p_o, p_r, p_s, p_run, p_t, m_every, m_period, m_o, m_r, m_s, m_run, m_t,
                eps, member, members, team, teams, units, spans, reps, sets, run, columns,
                PARAM, MODULATION, OFFSET, CENTERED, BLOCK_I, BLOCK_J, SETS, PARTS, TILES, 2,
            )),
            (_load, (
                x_desc, ring, full, empty, blocks, again, member, members, team, teams, units, spans, reps,
                BLOCK_I, BLOCK_J, TILES, SLOTS, BACK, BYTES,
            )),
        ],
        [WARPS, 1, 2, 1],
        [96, 96, 96, 24],
    )  # fmt: skip


@jit
def _load(
    x_desc, ring, full, empty, blocks, again, member, members, team, teams, units, spans, reps,
    BLOCK_I: gl.constexpr, BLOCK_J: gl.constexpr, TILES: gl.constexpr, SLOTS: gl.constexpr, BACK: gl.constexpr, BYTES: gl.constexpr,
):  # fmt: skip
    at = 0
    again_at = 0
    for unit in range(team, units, teams):
        for block in range(TILES * blocks):
            slot, phase = at % SLOTS, at // SLOTS & 1
            _load_block(
                x_desc, ring, full, empty, slot, phase, unit, block, blocks, member, members, spans, reps, BLOCK_I, BLOCK_J, TILES, BYTES
            )
            at += 1
            if BACK > 0:  # noqa: SIM102, the outer one is decided when this is compiled. Of the unit before, last first
                if (block < again) & (unit != team):
                    slot, phase = SLOTS + again_at % BACK, again_at // BACK & 1
                    _load_block(
                        x_desc, ring, full, empty, slot, phase, unit - teams, again - 1 - block, blocks, member, members, spans, reps,
                        BLOCK_I, BLOCK_J, TILES, BYTES,
                    )  # fmt: skip
                    again_at += 1
    if BACK > 0:
        last = team + (units - 1 - team) // teams * teams
        for block in range(again):
            slot, phase = SLOTS + again_at % BACK, again_at // BACK & 1
            _load_block(
                x_desc, ring, full, empty, slot, phase, last, again - 1 - block, blocks, member, members, spans, reps,
                BLOCK_I, BLOCK_J, TILES, BYTES,
            )  # fmt: skip
            again_at += 1


@jit
def _load_block(
    x_desc, ring, full, empty, slot, phase, unit, block, blocks, member, members, spans, reps,
    BLOCK_I: gl.constexpr, BLOCK_J: gl.constexpr, TILES: gl.constexpr, BYTES: gl.constexpr,
):  # fmt: skip
    row = unit // spans * reps + (member + block % blocks * members) * BLOCK_I
    column = (unit % spans * TILES + block // blocks) * BLOCK_J
    mbarrier.wait(empty.index(slot), phase ^ 1)
    mbarrier.expect(full.index(slot), BYTES)
    async_load(x_desc, [row, column], full.index(slot), ring.index(slot))


@jit
def _reduce(
    ring, full, empty, moments, taken, handed, blocks, again, member, members, team, teams, units, reps,
    CENTERED: gl.constexpr, RAGGED: gl.constexpr, BLOCK_I: gl.constexpr, BLOCK_J: gl.constexpr,
    TILES: gl.constexpr, SLOTS: gl.constexpr, BACK: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    BLOCK: gl.constexpr = reduce_layout(BLOCK_J, ring.dtype.primitive_bitwidth // 8, WARPS)
    i = gl.expand_dims(gl.arange(0, BLOCK_I, gl.SliceLayout(1, BLOCK)), 1)
    last = (member + (blocks - 1) * members) * BLOCK_I  # the first row of the last block
    rows = _rows(member, members, reps, BLOCK_I)
    at = 0
    turn = 0
    for _unit in range(team, units, teams):
        for tile in range(TILES):
            mean = gl.zeros([BLOCK_I, BLOCK_J], gl.float32, BLOCK)
            m2 = gl.zeros([BLOCK_I, BLOCK_J], gl.float32, BLOCK)
            k = 0.0
            for block in range(blocks):
                slot = at % SLOTS
                mbarrier.wait(full.index(slot), at // SLOTS & 1)
                x = ring.index(slot).load(BLOCK).to(gl.float32)
                if BACK > 0:  # noqa: SIM102
                    if tile * blocks + block < again:
                        barrier()
                        mbarrier.arrive(empty.index(slot), count=1)
                k += 1.0
                inside = True
                if RAGGED:
                    inside = (member + block * members) * BLOCK_I + i < reps
                    x = gl.where(inside, x, 0.0)
                mean, m2 = update(mean, m2, k, x, inside, CENTERED)
                at += 1
            n = k
            if RAGGED:
                n = gl.where(last + i < reps, k, k - 1.0)
            mean, m2 = merge(mean, m2, n, rows, 0, CENTERED)
            mbarrier.wait(handed.index(turn % 2), (turn // 2 & 1) ^ 1)
            moments.index(turn % 2 * 2).store(gl.reshape(mean, [BLOCK_J]))
            moments.index(turn % 2 * 2 + 1).store(gl.reshape(m2, [BLOCK_J]))
            barrier()
            mbarrier.arrive(taken.index(turn % 2), count=1)
            turn += 1


@jit
def _publish(
    moments, taken, handed, parts_ptr, counters_ptr, member, members, team, teams, units, spans, reps, run, columns,
    CENTERED: gl.constexpr, BLOCK_I: gl.constexpr, BLOCK_J: gl.constexpr, SETS: gl.constexpr, NEAR: gl.constexpr, TILES: gl.constexpr,
    WARPS: gl.constexpr,
):  # fmt: skip
    TABLE: gl.constexpr = gl.BlockedLayout([1, BLOCK_J // 4], [8, 4], [WARPS, 1], [1, 0])  # sums over columns take two shuffles
    SET: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    set_ = gl.arange(0, SETS, SET)
    rows = _rows(member, members, reps, BLOCK_I)
    turn = 0
    for unit in range(team, units, teams):
        width = columns - unit % spans * (TILES * BLOCK_J)  # of this unit, and perhaps more
        n, mean, m2 = gl.zeros([SETS], gl.float32, SET), gl.zeros([SETS], gl.float32, SET), gl.zeros([SETS], gl.float32, SET)
        for tile in range(TILES):
            mbarrier.wait(taken.index(turn % 2), turn // 2 & 1)
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
                    more = _overlap(set_, run, start, end)
                    place = gl.minimum(gl.maximum(set_ - first, 0), NEAR - 1)
                    share = more / gl.maximum(n + more, 1.0)
                    delta = gl.where(more > 0, gl.gather(near_mean, place, 0) - mean, 0.0)
                    m2 += gl.where(more > 0, gl.gather(near_m2, place, 0), 0.0) + delta * delta * n * share * rows
                    mean += delta * share
                    n += more
            barrier()
            mbarrier.arrive(handed.index(turn % 2), count=1)
            turn += 1
        part = _part_of(parts_ptr, unit, set_, member, members, SETS)
        gl.store(part, mean)
        gl.store(part + SETS * members, m2)
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
        mean = gl.sum(gl.where(mine, each, 0.0), 1) / gl.maximum(_overlap(here, run, start, end), 1.0)
        delta = each - gl.expand_dims(mean, 1)
        m2 = m2 + delta * delta * rows
    return mean, gl.sum(gl.where(mine, m2, 0.0), 1)


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
def _rows(member, members, reps, BLOCK_I: gl.constexpr):
    """How many rows a member has: all but the last block are full, and one that does not exist has none."""
    blocks = (reps + BLOCK_I - 1) // BLOCK_I
    mine = blocks // members + gl.where(member < blocks % members, 1, 0)
    missing = gl.where(member == (blocks - 1) % members, blocks * BLOCK_I - reps, 0)
    return gl.where(member < members, mine * BLOCK_I - missing, 0).to(gl.float32)


@jit
def _combine(
    lines, known, used, weight_ptr, bias_ptr, scale_ptr, shift_ptr, mean_ptr, rstd_ptr, var_ptr, parts_ptr, counters_ptr,
    p_every, p_period, p_o, p_r, p_s, p_run, p_t, m_every, m_period, m_o, m_r, m_s, m_run, m_t,
    eps, member, members, team, teams, units, spans, reps, sets, run, columns,
    PARAM: gl.constexpr, MODULATION: gl.constexpr, OFFSET: gl.constexpr, CENTERED: gl.constexpr, BLOCK_I: gl.constexpr,
    BLOCK_J: gl.constexpr, SETS: gl.constexpr, PARTS: gl.constexpr, TILES: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    PART: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [WARPS, 1], [1, 0])  # sums over members stay in a warp
    COLUMN: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    operands = weight_ptr, bias_ptr, scale_ptr, shift_ptr
    maps = (p_every, p_period, p_o, p_r, p_s, p_run, p_t), (m_every, m_period, m_o, m_r, m_s, m_run, m_t)
    part = gl.expand_dims(gl.arange(0, PARTS, gl.SliceLayout(0, PART)), 0)
    set_ = gl.expand_dims(gl.arange(0, SETS, gl.SliceLayout(1, PART)), 1)
    j = gl.arange(0, BLOCK_J, COLUMN)
    count = reps.to(gl.float32) * run
    n = _rows(part, members, reps, BLOCK_I) * run
    turn = 0
    for unit in range(team, units, teams):
        o, span = unit // spans, unit % spans
        line_at = turn % 2 * (TILES * 4)
        mbarrier.wait(used.index(turn % 2), (turn // 2 & 1) ^ 1)
        for tile in range(TILES):  # what does not need the statistics
            column = (span * TILES + tile) * BLOCK_J + j
            of = _over(column, run)
            place = o, 0, of, column - of * run
            gain, term = line(1.0, operands, maps, place, None, column < columns, OFFSET, PARAM, MODULATION, 2, 12)
            lines.index(line_at + tile * 4 + 2).store(gl.zeros([BLOCK_J], gl.float32, COLUMN) + gain)
            lines.index(line_at + tile * 4 + 3).store(gl.zeros([BLOCK_J], gl.float32, COLUMN) + term)
        seen = gl.atomic_add(counters_ptr + unit, 0, sem="acquire", scope="gpu")
        while seen < members:
            seen = gl.atomic_add(counters_ptr + unit, 0, sem="acquire", scope="gpu")
        at = _part_of(parts_ptr, unit, set_, part, members, SETS)
        mean, m2 = _load_parts(at, part < members, SETS * members)
        n_mean = n
        for first in range(PARTS, members, PARTS):
            more_mean, more_m2 = _load_parts(at + first, first + part < members, SETS * members)
            more = _rows(first + part, members, reps, BLOCK_I) * run
            delta = gl.where(more > 0, more_mean - mean, 0.0)
            share = more / gl.maximum(n_mean + more, 1.0)
            mean += delta * share
            m2 += more_m2 + delta * delta * n_mean * share
            n_mean += more
        mean, m2 = merge(mean, m2, n_mean, count, 1, CENTERED)
        var = m2 / count
        rstd = inverse_deviation(var, eps)
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
        if gl.atomic_add(counters_ptr + unit, 1, sem="relaxed", scope="gpu") == 2 * members - 1:
            gl.store(counters_ptr + unit, 0)
        turn += 1  # noqa: SIM113


@jit
def _apply(
    ring, full, empty, lines, known, used, y_ptr, y_o, y_r, blocks, again, member, members, team, teams, units, spans, reps, columns,
    ACTIVATION: gl.constexpr, RAGGED: gl.constexpr, BLOCK_I: gl.constexpr, BLOCK_J: gl.constexpr, TILES: gl.constexpr,
    SLOTS: gl.constexpr, BACK: gl.constexpr, AT_ONCE: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    BLOCK: gl.constexpr = apply_layout(BLOCK_J, ring.dtype.primitive_bitwidth // 8, WARPS, AT_ONCE)
    i = gl.expand_dims(gl.arange(0, BLOCK_I, gl.SliceLayout(1, BLOCK)), 1)
    j = gl.expand_dims(gl.arange(0, BLOCK_J, gl.SliceLayout(0, BLOCK)), 0)
    here = TILES * blocks
    at = 0
    again_at = 0
    turn = 0
    for unit in range(team, units, teams):
        o, column = unit // spans, unit % spans * (TILES * BLOCK_J)
        line_at = turn % 2 * (TILES * 4)
        mbarrier.wait(known.index(turn % 2), turn // 2 & 1)
        mean, factor, term = _line(lines, line_at, BLOCK)
        for step in range(0, here, AT_ONCE):
            x = _take(ring, full, empty, step, here, again, at, again_at, SLOTS, BACK, BLOCK)
            if AT_ONCE == 2:  # the second block is on its way while the first is worked on
                following = _take(ring, full, empty, step + 1, here, again, at, again_at, SLOTS, BACK, BLOCK)
            for more in gl.static_range(AT_ONCE):
                block = gl.where(again + step + more < here, again + step + more, here - 1 - step - more)
                if TILES > 1:
                    mean, factor, term = _line(lines, line_at + block // blocks * 4, BLOCK)
                y = _activate((x.to(gl.float32) - mean) * factor + term, ACTIVATION).to(y_ptr.dtype.element_ty)
                r, c = (member + block % blocks * members) * BLOCK_I + i, column + block // blocks * BLOCK_J + j
                to = y_ptr + o.to(gl.int64) * y_o + r.to(gl.int64) * y_r + c
                if RAGGED:
                    gl.store(to, y, mask=(r < reps) & (c < columns), cache_modifier=".cs")
                else:
                    gl.store(to, y, cache_modifier=".cs")
                if AT_ONCE == 2:
                    x = following
        at += here
        again_at += again
        barrier()
        mbarrier.arrive(used.index(turn % 2), count=1)
        turn += 1  # noqa: SIM113


@jit
def _activate(z, ACTIVATION: gl.constexpr):
    if ACTIVATION == "silu":
        z = gl.inline_asm_elementwise(SILU, "=f,f", [z], dtype=gl.float32, is_pure=True, pack=1)
    else:
        z = activate(z, ACTIVATION)
    return z


@jit
def _take(ring, full, empty, step, here, again, at, again_at, SLOTS: gl.constexpr, BACK: gl.constexpr, BLOCK: gl.constexpr):
    """The block that is applied at this step, out of the ring."""
    slot, phase = (at + again + step) % SLOTS, (at + again + step) // SLOTS & 1
    if BACK > 0:  # noqa: SIM102
        if again + step >= here:
            slot, phase = SLOTS + (again_at + again + step - here) % BACK, (again_at + again + step - here) // BACK & 1
    mbarrier.wait(full.index(slot), phase)
    x = ring.index(slot).load(BLOCK)
    barrier()
    mbarrier.arrive(empty.index(slot), count=1)
    return x


@jit
def _line(lines, at, BLOCK: gl.constexpr):
    """mean, factor and term of the columns of a block."""
    mean = lines.index(at).load(gl.SliceLayout(0, BLOCK))
    factor = lines.index(at + 1).load(gl.SliceLayout(0, BLOCK)) * lines.index(at + 2).load(gl.SliceLayout(0, BLOCK))
    term = lines.index(at + 3).load(gl.SliceLayout(0, BLOCK))
    return gl.expand_dims(mean, 0), gl.expand_dims(factor, 0), gl.expand_dims(term, 0)
