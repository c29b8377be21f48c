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

from onepass.backends.gpu.device.activations import activate
from onepass.backends.gpu.device.moments import merge, update

from .exchange import combine, publish, rows_of
from .gluon import async_load, barrier, fence_async_shared, gl, jit, mbarrier
from .stress import crowded, fenced, late, spare

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
    WARPS: gl.constexpr, STRESS: gl.constexpr = None,
):  # fmt: skip
    """There are `teams` of `members` programs, and `spans` units for each o, of TILES blocks of columns and at most SETS sets each.

    The ring has SLOTS slots, and BACK more for what comes again. RAGGED: the last block of rows or of columns is not full. A block meets at
    most NEAR sets; PARTS members' moments are combined at a time. Blocks are applied AT_ONCE, 1 or 2. WARPS: of each of reduce and apply.
    STRESS: what a stress test changes (see `ring_stress`).
    """
    BYTES: gl.constexpr = BLOCK_I * BLOCK_J * x_desc.dtype.primitive_bitwidth // 8
    MBARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    ring = gl.allocate_shared_memory(x_desc.dtype, [SLOTS + BACK + spare(STRESS), BLOCK_I, BLOCK_J], x_desc.layout)
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
                ACTIVATION, RAGGED, BLOCK_I, BLOCK_J, TILES, SLOTS, BACK, AT_ONCE, WARPS, STRESS,
            )),
            (_reduce, (
                ring, full, empty, moments, taken, handed, blocks, again, member, members, team, teams, units, reps,
                CENTERED, RAGGED, BLOCK_I, BLOCK_J, TILES, SLOTS, BACK, WARPS, STRESS,
            )),
            (publish, (
                moments, taken, handed, parts_ptr, counters_ptr, member, members, team, teams, units, spans, reps, run, columns,
                CENTERED, BLOCK_I, BLOCK_J, SETS, NEAR, TILES, 1, STRESS,
            )),
            (combine, (
                lines, known, used, weight_ptr, bias_ptr, scale_ptr, shift_ptr, mean_ptr, rstd_ptr, var_ptr, parts_ptr, counters_ptr,
                p_every, p_period, p_o, p_r, p_s, p_run, p_t, m_every, m_period, m_o, m_r, m_s, m_run, m_t,
                eps, member, members, team, teams, units, spans, reps, sets, run, columns,
                PARAM, MODULATION, OFFSET, CENTERED, BLOCK_I, BLOCK_J, SETS, PARTS, TILES, 2, STRESS,
            )),
            (_load, (
                x_desc, ring, full, empty, blocks, again, member, members, team, teams, units, spans, reps,
                BLOCK_I, BLOCK_J, TILES, SLOTS, BACK, BYTES, STRESS,
            )),
        ],
        [WARPS, 1, 2, 1],
        [96, 96, 96, 24],
    )  # fmt: skip


@jit
def _load(
    x_desc, ring, full, empty, blocks, again, member, members, team, teams, units, spans, reps,
    BLOCK_I: gl.constexpr, BLOCK_J: gl.constexpr, TILES: gl.constexpr, SLOTS: gl.constexpr, BACK: gl.constexpr, BYTES: gl.constexpr,
    STRESS: gl.constexpr,
):  # fmt: skip
    """Blocks in the order in which they are reduced; between them, those of the unit before that come again."""
    at = 0
    again_at = 0
    for unit in range(team, units, teams):
        for block in range(TILES * blocks):
            slot, phase = at % SLOTS, at // SLOTS & 1
            _load_block(
                x_desc, ring, full, empty, slot, phase, unit, block, blocks, member, members, spans, reps,
                BLOCK_I, BLOCK_J, TILES, BYTES, STRESS,
            )  # fmt: skip
            at += 1
            if BACK > 0:  # noqa: SIM102, the outer one is decided when this is compiled. Of the unit before, last first
                if (block < again) & (unit != team):
                    slot, phase = SLOTS + again_at % BACK, again_at // BACK & 1
                    _load_block(
                        x_desc, ring, full, empty, slot, phase, unit - teams, again - 1 - block, blocks, member, members, spans, reps,
                        BLOCK_I, BLOCK_J, TILES, BYTES, STRESS,
                    )  # fmt: skip
                    again_at += 1
    if BACK > 0:
        last = team + (units - 1 - team) // teams * teams
        for block in range(again):
            slot, phase = SLOTS + again_at % BACK, again_at // BACK & 1
            _load_block(
                x_desc, ring, full, empty, slot, phase, last, again - 1 - block, blocks, member, members, spans, reps,
                BLOCK_I, BLOCK_J, TILES, BYTES, STRESS,
            )  # fmt: skip
            again_at += 1


@jit
def _load_block(
    x_desc, ring, full, empty, slot, phase, unit, block, blocks, member, members, spans, reps,
    BLOCK_I: gl.constexpr, BLOCK_J: gl.constexpr, TILES: gl.constexpr, BYTES: gl.constexpr, STRESS: gl.constexpr,
):  # fmt: skip
    row = unit // spans * reps + (member + block % blocks * members) * BLOCK_I
    column = (unit % spans * TILES + block // blocks) * BLOCK_J
    mbarrier.wait(empty.index(slot), phase ^ 1)
    # Barriers do not order loads from shared memory and copies into it by descriptor, which are of another proxy: without the fence, the
    # next block may overtake a load of the last one that is still on its way.
    if fenced(STRESS, "load"):
        fence_async_shared()
    late(STRESS, "load copy", 1)
    mbarrier.expect(full.index(slot), BYTES)
    async_load(x_desc, [row, column], full.index(slot), ring.index(slot))


@jit
def _reduce(
    ring, full, empty, moments, taken, handed, blocks, again, member, members, team, teams, units, reps,
    CENTERED: gl.constexpr, RAGGED: gl.constexpr, BLOCK_I: gl.constexpr, BLOCK_J: gl.constexpr,
    TILES: gl.constexpr, SLOTS: gl.constexpr, BACK: gl.constexpr, WARPS: gl.constexpr, STRESS: gl.constexpr,
):  # fmt: skip
    """The moments of the columns of each tile, handed to `publish`; blocks that will come again are let go."""
    BLOCK: gl.constexpr = reduce_layout(BLOCK_J, ring.dtype.primitive_bitwidth // 8, WARPS)
    i = gl.expand_dims(gl.arange(0, BLOCK_I, gl.SliceLayout(1, BLOCK)), 1)
    last = (member + (blocks - 1) * members) * BLOCK_I  # the first row of the last block
    rows = rows_of(member, members, reps, BLOCK_I)
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
                late(STRESS, "reduce block", WARPS)
                crowded(STRESS, "reduce crowd", ring, WARPS)
                x = ring.index(slot).load(BLOCK).to(gl.float32)
                if BACK > 0:  # noqa: SIM102
                    if tile * blocks + block < again:
                        late(STRESS, "reduce release", WARPS)
                        _release(empty, slot, STRESS)
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
            late(STRESS, "reduce moments", WARPS)
            moments.index(turn % 2 * 2).store(gl.reshape(mean, [BLOCK_J]))
            moments.index(turn % 2 * 2 + 1).store(gl.reshape(m2, [BLOCK_J]))
            barrier()
            mbarrier.arrive(taken.index(turn % 2), count=1)
            turn += 1


@jit
def _apply(
    ring, full, empty, lines, known, used, y_ptr, y_o, y_r, blocks, again, member, members, team, teams, units, spans, reps, columns,
    ACTIVATION: gl.constexpr, RAGGED: gl.constexpr, BLOCK_I: gl.constexpr, BLOCK_J: gl.constexpr, TILES: gl.constexpr,
    SLOTS: gl.constexpr, BACK: gl.constexpr, AT_ONCE: gl.constexpr, WARPS: gl.constexpr, STRESS: gl.constexpr,
):  # fmt: skip
    """y, of the blocks that stayed, then of those that come again."""
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
        late(STRESS, "apply lines", WARPS)
        mean, factor, term = _line(lines, line_at, BLOCK)
        for step in range(0, here, AT_ONCE):
            x = _take(ring, full, empty, step, here, again, at, again_at, SLOTS, BACK, BLOCK, WARPS, STRESS)
            if AT_ONCE == 2:  # the second block is on its way while the first is worked on
                following = _take(ring, full, empty, step + 1, here, again, at, again_at, SLOTS, BACK, BLOCK, WARPS, STRESS)
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
        late(STRESS, "apply used", WARPS)
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
def _take(
    ring, full, empty, step, here, again, at, again_at,
    SLOTS: gl.constexpr, BACK: gl.constexpr, BLOCK: gl.constexpr, WARPS: gl.constexpr, STRESS: gl.constexpr,
):  # fmt: skip
    """The block that is applied at this step, out of the ring."""
    slot, phase = (at + again + step) % SLOTS, (at + again + step) // SLOTS & 1
    if BACK > 0:  # noqa: SIM102
        if again + step >= here:
            slot, phase = SLOTS + (again_at + again + step - here) % BACK, (again_at + again + step - here) // BACK & 1
    mbarrier.wait(full.index(slot), phase)
    if fenced(STRESS, "early"):
        _release(empty, slot, STRESS)
    late(STRESS, "apply block", WARPS)
    crowded(STRESS, "apply crowd", ring, WARPS)
    x = ring.index(slot).load(BLOCK)
    late(STRESS, "apply release", WARPS)
    if not fenced(STRESS, "early"):
        _release(empty, slot, STRESS)
    return x


@jit
def _release(empty, slot, STRESS: gl.constexpr):
    """A group of warps has loaded a block: its slot may be refilled."""
    if fenced(STRESS, "readers"):
        fence_async_shared()
    barrier()
    mbarrier.arrive(empty.index(slot), count=1)


@jit
def _line(lines, at, BLOCK: gl.constexpr):
    """mean, factor and term of the columns of a block."""
    mean = lines.index(at).load(gl.SliceLayout(0, BLOCK))
    factor = lines.index(at + 1).load(gl.SliceLayout(0, BLOCK)) * lines.index(at + 2).load(gl.SliceLayout(0, BLOCK))
    term = lines.index(at + 3).load(gl.SliceLayout(0, BLOCK))
    return gl.expand_dims(mean, 0), gl.expand_dims(factor, 0), gl.expand_dims(term, 0)
