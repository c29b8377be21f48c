"""The ring kernel, for Hopper GPUs: x stays in a ring buffer in shared memory until the statistics are known.

Memory is x[o, r, s, t]. A set is the elements of one o and s, which share a mean and a variance. A unit of work is one o
and the columns (s, t) of some whole sets. It is cut into tiles of block_j columns, and each tile into blocks of block_i
rows r. A team of programs shares a unit: its members take the blocks of rows in turn. A slot of the ring holds a block.

Five groups of warps work side by side. Each group goes through all units of the team, and waits only for what it needs
from another group:

- `load` fills the ring, block after block, as slots become free;
- `reduce` computes the moments (mean and M2) of each column;
- `publish` merges them into the moments of each set, and stores these for the team;
- `combine` waits for the moments of all members, and computes mean, rstd, gain and term for each column;
- `apply` computes y = activation((x - mean)·rstd·gain + term) and empties the ring.

So the exchange of one unit's moments overlaps with the blocks of the next unit. If a member has more than `keep` blocks
of a unit, the first ones are reduced and dropped. They are loaded again after the others, in reverse order, because the
L2 cache may still hold the last of them.
"""

from typing import Any, NamedTuple

from triton import constexpr_function

from onepass.backends.gpu.device.activations import activate
from onepass.backends.gpu.device.groups import Affine, Maps, Statistics
from onepass.backends.gpu.device.moments import merge, update
from onepass.backends.gpu.team.launch import Exchange

from .channel import Channel, acquire_to_read, acquire_to_write, release_to_readers, release_to_writer
from .exchange import COMBINE_WARPS, PUBLISH_WARPS, combine, publish, rows_of
from .gluon import async_load, fence_async_shared, gl, jit, mbarrier
from .launch import RingSplit, RingView
from .stress import crowded, fenced, late, spare

# PTX code of z/(1 + exp(-z)). The compiler's own code has one more instruction, which changes a sign. While memory
# delivers an element, there is time for only about thirty instructions.
SILU = gl.constexpr("""{
    .reg .f32 t;
    mul.ftz.f32 t, $1, 0fBFB8AA3B;
    ex2.approx.ftz.f32 t, t;
    add.ftz.f32 t, t, 0f3F800000;
    rcp.approx.ftz.f32 t, t;
    mul.ftz.f32 $0, $1, t;
}""")


class Work(NamedTuple):
    """The work of a program: the units team, team + teams, team + 2·teams, ... below `units`."""

    team: Any
    member: Any
    units: Any
    blocks: Any  # how many blocks of rows this member has in each tile of a unit
    again: Any  # how many blocks of a unit this member loads twice


@constexpr_function
def reduce_layout(columns, size, warps):
    """Return the layout of a block for sums over its rows. `size` is the size of an element in bytes.

    Each column stays within one warp, so warps do not wait for each other.
    """
    each = min(16 // size, columns // warps)
    wide = columns // each // warps
    return gl.BlockedLayout([1, each], [32 // wide, wide], [1, warps], [0, 1])


@constexpr_function
def apply_layout(columns, size, warps, at_once):
    """Return the layout of a block for storing it: neighbouring threads have neighbouring columns.

    A thread has 16 contiguous bytes of a row, or 8 if it holds two blocks at once. `size` is the bytes of an element.
    """
    each = min(16 // at_once // size, columns)
    wide = min(columns // each, 32)
    return gl.BlockedLayout([1, each], [32 // wide, wide], [warps, 1], [1, 0])


@jit
def ring_forward(
    x_desc, y_ptr, affine: Affine, stats: Statistics, exchange: Exchange, eps, total, view: RingView, maps: Maps, split: RingSplit,
    norm: gl.constexpr, mode: gl.constexpr,
):  # fmt: skip
    """Normalize `total` sets. `norm` is a Norm of device/groups.py, `mode` a RingMode of ring/launch.py."""
    SLOTS: gl.constexpr = mode.slots + mode.back
    MBARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    ring = Channel(
        buffer=gl.allocate_shared_memory(x_desc.dtype, [SLOTS + spare(mode.stress), mode.block_i, mode.block_j], x_desc.layout),
        full=gl.allocate_shared_memory(gl.int64, [SLOTS, 1], MBARRIER),
        empty=gl.allocate_shared_memory(gl.int64, [SLOTS, 1], MBARRIER),
    )
    moments = Channel(  # two slots, one tile each: the mean and M2 of its columns
        buffer=gl.allocate_shared_memory(gl.float32, [2 * 2, mode.block_j], PLAIN),
        full=gl.allocate_shared_memory(gl.int64, [2, 1], MBARRIER),
        empty=gl.allocate_shared_memory(gl.int64, [2, 1], MBARRIER),
    )
    lines = Channel(  # two slots, one unit each: the mean, rstd, gain and term of its columns
        buffer=gl.allocate_shared_memory(gl.float32, [2 * mode.tiles * 4, mode.block_j], PLAIN),
        full=gl.allocate_shared_memory(gl.int64, [2, 1], MBARRIER),
        empty=gl.allocate_shared_memory(gl.int64, [2, 1], MBARRIER),
    )
    for slot in gl.static_range(SLOTS):
        mbarrier.init(ring.full.index(slot), count=1)
        mbarrier.init(ring.empty.index(slot), count=1)
    for slot in gl.static_range(2):
        mbarrier.init(moments.full.index(slot), count=1)
        mbarrier.init(moments.empty.index(slot), count=1)
        mbarrier.init(lines.full.index(slot), count=1)
        mbarrier.init(lines.empty.index(slot), count=1)
    fence_async_shared()
    team, member = gl.program_id(0) // split.members, gl.program_id(0) % split.members
    units = total // view.sets * split.spans
    blocks = ((view.reps + mode.block_i - 1) // mode.block_i - member + split.members - 1) // split.members
    again = gl.maximum(mode.tiles * blocks - mode.keep, 0)
    work = Work(team=team, member=member, units=units, blocks=blocks, again=again)
    gl.warp_specialize(
        [
            (_apply, (ring, lines, y_ptr, work, view, split, norm, mode)),
            (_reduce, (ring, moments, work, view, split, norm, mode)),
            (publish, (moments, exchange, work, view, split, norm, mode)),
            (combine, (lines, affine, stats, exchange, eps, work, view, maps, split, norm, mode)),
            (_load, (x_desc, ring, work, view, split, mode)),
        ],
        [mode.warps, PUBLISH_WARPS, COMBINE_WARPS, 1],
        [96, 96, 96, 24],
    )


@jit
def _load(x_desc, ring, work, view, split, mode: gl.constexpr):
    """Load this member's blocks into the ring, in the order in which `_reduce` takes them.

    Between the blocks of a unit, load the dropped blocks of the previous unit again, into slots of their own.
    """
    at = 0
    again_at = 0
    for unit in range(work.team, work.units, split.teams):
        for block in range(mode.tiles * work.blocks):
            slot, phase = at % mode.slots, at // mode.slots & 1
            _load_block(x_desc, ring, slot, phase, unit, block, work, view, split, mode)
            at += 1
            if mode.back > 0:  # noqa: SIM102, the outer `if` is decided at compile time
                if (block < work.again) & (unit != work.team):  # blocks to load again, in reverse order
                    slot, phase = mode.slots + again_at % mode.back, again_at // mode.back & 1
                    _load_block(x_desc, ring, slot, phase, unit - split.teams, work.again - 1 - block, work, view, split, mode)
                    again_at += 1
    if mode.back > 0:
        last = work.team + (work.units - 1 - work.team) // split.teams * split.teams
        for block in range(work.again):
            slot, phase = mode.slots + again_at % mode.back, again_at // mode.back & 1
            _load_block(x_desc, ring, slot, phase, last, work.again - 1 - block, work, view, split, mode)
            again_at += 1


@jit
def _load_block(x_desc, ring, slot, phase, unit, block, work, view, split, mode: gl.constexpr):
    BYTES: gl.constexpr = mode.block_i * mode.block_j * x_desc.dtype.primitive_bitwidth // 8
    row = unit // split.spans * view.reps + (work.member + block % work.blocks * split.members) * mode.block_i
    column = (unit % split.spans * mode.tiles + block // work.blocks) * mode.block_j
    acquire_to_write(ring, slot, phase)
    # A group's loads from this slot may still be in flight. The copy by the tensor memory accelerator takes another path
    # (proxy) to shared memory, and barriers do not order the two. Without the fence, the copy may overwrite what a load has
    # not read yet: see docs/notes/ring-fence.md.
    if fenced(mode.stress, "load"):
        fence_async_shared()
    late(mode.stress, "load copy", 1)
    mbarrier.expect(ring.full.index(slot), BYTES)
    async_load(x_desc, [row, column], ring.full.index(slot), ring.buffer.index(slot))


@jit
def _reduce(ring, moments, work, view, split, norm: gl.constexpr, mode: gl.constexpr):
    """Compute the moments of each column, tile by tile, for `publish`. Release each block that will be loaded again."""
    BLOCK: gl.constexpr = reduce_layout(mode.block_j, ring.buffer.dtype.primitive_bitwidth // 8, mode.warps)
    i = gl.expand_dims(gl.arange(0, mode.block_i, gl.SliceLayout(1, BLOCK)), 1)
    last = (work.member + (work.blocks - 1) * split.members) * mode.block_i  # the first row of this member's last block
    rows = rows_of(work.member, split.members, view.reps, mode.block_i)
    at = 0
    turn = 0
    for _unit in range(work.team, work.units, split.teams):
        for tile in range(mode.tiles):
            mean = gl.zeros([mode.block_i, mode.block_j], gl.float32, BLOCK)
            m2 = gl.zeros([mode.block_i, mode.block_j], gl.float32, BLOCK)
            k = 0.0
            for block in range(work.blocks):
                slot = at % mode.slots
                acquire_to_read(ring, slot, at // mode.slots & 1)
                late(mode.stress, "reduce block", mode.warps)
                crowded(mode.stress, "reduce crowd", ring.buffer, mode.warps)
                x = ring.buffer.index(slot).load(BLOCK).to(gl.float32)
                if mode.back > 0:  # noqa: SIM102
                    if tile * work.blocks + block < work.again:
                        late(mode.stress, "reduce release", mode.warps)
                        _release_block(ring, slot, mode)
                k += 1.0
                inside = True
                if mode.ragged:
                    inside = (work.member + block * split.members) * mode.block_i + i < view.reps
                    x = gl.where(inside, x, 0.0)
                mean, m2 = update(mean, m2, k, x, inside, norm.centered)
                at += 1
            n = k
            if mode.ragged:
                n = gl.where(last + i < view.reps, k, k - 1.0)
            mean, m2 = merge(mean, m2, n, rows, 0, norm.centered)
            acquire_to_write(moments, turn % 2, turn // 2 & 1)
            late(mode.stress, "reduce moments", mode.warps)
            moments.buffer.index(turn % 2 * 2).store(gl.reshape(mean, [mode.block_j]))
            moments.buffer.index(turn % 2 * 2 + 1).store(gl.reshape(m2, [mode.block_j]))
            release_to_readers(moments, turn % 2)
            turn += 1


@jit
def _apply(ring, lines, y_ptr, work, view, split, norm: gl.constexpr, mode: gl.constexpr):
    """Compute and store y: first for the blocks that stayed in the ring, then for those that are loaded again."""
    BLOCK: gl.constexpr = apply_layout(mode.block_j, ring.buffer.dtype.primitive_bitwidth // 8, mode.warps, mode.at_once)
    i = gl.expand_dims(gl.arange(0, mode.block_i, gl.SliceLayout(1, BLOCK)), 1)
    j = gl.expand_dims(gl.arange(0, mode.block_j, gl.SliceLayout(0, BLOCK)), 0)
    here = mode.tiles * work.blocks
    at = 0
    again_at = 0
    turn = 0
    for unit in range(work.team, work.units, split.teams):
        o, column = unit // split.spans, unit % split.spans * (mode.tiles * mode.block_j)
        line_at = turn % 2 * (mode.tiles * 4)
        acquire_to_read(lines, turn % 2, turn // 2 & 1)
        late(mode.stress, "apply lines", mode.warps)
        mean, factor, term = _line(lines, line_at, BLOCK)
        for step in range(0, here, mode.at_once):
            x = _take(ring, step, here, work.again, at, again_at, BLOCK, mode)
            if mode.at_once == 2:  # load the second block while the first is applied
                following = _take(ring, step + 1, here, work.again, at, again_at, BLOCK, mode)
            for more in gl.static_range(mode.at_once):
                number = work.again + step + more
                block = gl.where(number < here, number, here - 1 - step - more)
                if mode.tiles > 1:
                    mean, factor, term = _line(lines, line_at + block // work.blocks * 4, BLOCK)
                y = _activate((x.to(gl.float32) - mean) * factor + term, norm.activation).to(y_ptr.dtype.element_ty)
                r = (work.member + block % work.blocks * split.members) * mode.block_i + i
                c = column + block // work.blocks * mode.block_j + j
                to = y_ptr + o.to(gl.int64) * view.y_o + r.to(gl.int64) * view.y_r + c
                if mode.ragged:
                    gl.store(to, y, mask=(r < view.reps) & (c < split.columns), cache_modifier=".cs")
                else:
                    gl.store(to, y, cache_modifier=".cs")
                if mode.at_once == 2:
                    x = following
        at += here
        again_at += work.again
        late(mode.stress, "apply used", mode.warps)
        release_to_writer(lines, turn % 2)
        turn += 1  # noqa: SIM113


@jit
def _activate(z, ACTIVATION: gl.constexpr):
    if ACTIVATION == "silu":
        z = gl.inline_asm_elementwise(SILU, "=f,f", [z], dtype=gl.float32, is_pure=True, pack=1)
    else:
        z = activate(z, ACTIVATION)
    return z


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
        _release_block(ring, slot, mode)
    late(mode.stress, "apply block", mode.warps)
    crowded(mode.stress, "apply crowd", ring.buffer, mode.warps)
    x = ring.buffer.index(slot).load(BLOCK)
    late(mode.stress, "apply release", mode.warps)
    if not fenced(mode.stress, "early"):
        _release_block(ring, slot, mode)
    return x


@jit
def _release_block(ring, slot, mode: gl.constexpr):
    """Allow the slot to be refilled, after this group has loaded the block in it."""
    if fenced(mode.stress, "readers"):
        fence_async_shared()
    release_to_writer(ring, slot)


@jit
def _line(lines, at, BLOCK: gl.constexpr):
    """Return mean, factor = rstd·gain and term of the columns of a block, each of shape [1, J]."""
    mean = lines.buffer.index(at).load(gl.SliceLayout(0, BLOCK))
    factor = lines.buffer.index(at + 1).load(gl.SliceLayout(0, BLOCK)) * lines.buffer.index(at + 2).load(gl.SliceLayout(0, BLOCK))
    term = lines.buffer.index(at + 3).load(gl.SliceLayout(0, BLOCK))
    return gl.expand_dims(mean, 0), gl.expand_dims(factor, 0), gl.expand_dims(term, 0)
