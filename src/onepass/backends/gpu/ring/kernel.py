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

If a set is one long run, each tile is one run instead, in rows that follow one another (ring/runs.py). Then gain and term differ
within a column, and `apply` finds them itself (ring/parameters.py).

So the exchange of one unit's moments overlaps with the blocks of the next unit. If a member has more than `keep` blocks
of a unit, the first ones are reduced and dropped. They are loaded again after the others, in reverse order, because the
L2 cache may still hold the last of them.
"""

from onepass.backends.gpu.device.groups import Affine, Maps, Statistics
from onepass.backends.gpu.team.launch import Exchange

from .apply import apply
from .channel import Channel, acquire_to_write
from .exchange import COMBINE_WARPS, PUBLISH_WARPS, combine, publish
from .gluon import async_load, fence_async_shared, gl, jit, mbarrier
from .launch import RingSplit, RingView
from .parameters import keep
from .reduce import PARTS, reduce
from .runs import run_of, runs_of
from .stress import fenced, late, spare
from .work import Work, of_tile


@jit
def ring_forward(
    x_desc, x_ptr, y_ptr, affine: Affine, exchange: Exchange, stats: Statistics, eps, total, view: RingView, maps: Maps, split: RingSplit,
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
    # Two slots, one message each: the mean and M2 of a tile's columns, or what each warp sends if a tile or a unit is one set.
    MOMENTS: gl.constexpr = [2 * PARTS, mode.warps] if mode.folded or mode.single else [2 * 2, mode.block_j]
    moments = Channel(
        buffer=gl.allocate_shared_memory(gl.float32, MOMENTS, PLAIN),
        full=gl.allocate_shared_memory(gl.int64, [2, 1], MBARRIER),
        empty=gl.allocate_shared_memory(gl.int64, [2, 1], MBARRIER),
    )
    lines = Channel(  # two slots, one unit each: the mean, rstd, gain and term of its columns
        buffer=gl.allocate_shared_memory(gl.float32, [2 * mode.lines * 4, mode.block_j], PLAIN),
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
    if mode.folded:  # some units may have fewer values of o
        units = split.rounds * split.teams if mode.phases > 1 else split.units_of_phase
    blocks = ((view.reps + mode.block_i - 1) // mode.block_i - member + split.members - 1) // split.members
    again = gl.maximum(mode.tiles * blocks - mode.keep, 0)
    work = Work(team=team, member=member, units=units, blocks=blocks, again=again)
    gl.warp_specialize(
        [
            (apply, (ring, lines, x_ptr, y_ptr, affine, keep(affine, ring, mode), work, total, view, maps, split, norm, mode)),
            (reduce, (ring, moments, x_ptr, work, total, view, split, norm, mode)),
            (publish, (moments, exchange, work, view, split, norm, mode)),
            (combine, (moments, lines, x_ptr, y_ptr, affine, stats, exchange, eps, work, total, view, maps, split, norm, mode)),
            (_load, (x_desc, ring, work, total, view, split, mode)),
        ],
        [mode.warps, PUBLISH_WARPS, COMBINE_WARPS, 1],
        [96, 96, 96, 24],
    )


@jit
def _load(x_desc, ring, work, total, view, split, mode: gl.constexpr):
    """Load this member's blocks into the ring, in the order in which `reduce` takes them.

    Between the blocks of a unit, load the dropped blocks of the previous unit again, into slots of their own.
    """
    at = 0
    again_at = 0
    for unit in range(work.team, work.units, split.teams):
        runs = runs_of(unit, total, view, split, mode)
        for block in range(mode.tiles * work.blocks):
            slot, phase = at % mode.slots, at // mode.slots & 1
            _load_block(x_desc, ring, slot, phase, unit, runs, block, work, view, split, mode)
            at += 1
            if mode.back > 0:  # noqa: SIM102, the outer `if` is decided at compile time
                if (block < work.again) & (unit != work.team):  # blocks to load again, in reverse order
                    slot, phase = mode.slots + again_at % mode.back, again_at // mode.back & 1
                    before = runs_of(unit - split.teams, total, view, split, mode)
                    _load_block(x_desc, ring, slot, phase, unit - split.teams, before, work.again - 1 - block, work, view, split, mode)
                    again_at += 1
    if mode.back > 0:
        last = work.team + (work.units - 1 - work.team) // split.teams * split.teams
        runs = runs_of(last, total, view, split, mode)
        for block in range(work.again):
            slot, phase = mode.slots + again_at % mode.back, again_at // mode.back & 1
            _load_block(x_desc, ring, slot, phase, last, runs, work.again - 1 - block, work, view, split, mode)
            again_at += 1


@jit
def _load_block(x_desc, ring, slot, phase, unit, runs, block, work, view, split, mode: gl.constexpr):
    BYTES: gl.constexpr = mode.block_i * mode.block_j * x_desc.dtype.primitive_bitwidth // 8
    tile, block = of_tile(block, work, mode)
    o, column = unit // split.spans, unit % split.spans * split.span + tile * mode.block_j
    if mode.folded:
        o, column = unit * mode.tiles + tile, 0
    row = o * view.reps
    if mode.phased:  # rows overlap, so a column may be beyond the first block_j
        run = run_of(runs, tile, view, mode)
        row, column = (run.start // mode.block_j).to(gl.int32), (run.start % mode.block_j).to(gl.int32)
    row += (work.member + block * split.members) * mode.block_i
    acquire_to_write(ring, slot, phase)
    # A group's loads from this slot may still be in flight. The copy by the tensor memory accelerator takes another path
    # (proxy) to shared memory, and barriers do not order the two. Without the fence, the copy may overwrite what a load has
    # not read yet: see docs/notes/ring-fence.md.
    if fenced(mode.stress, "load"):
        fence_async_shared()
    late(mode.stress, "load copy", 1)
    mbarrier.expect(ring.full.index(slot), BYTES)
    async_load(x_desc, [row, column], ring.full.index(slot), ring.buffer.index(slot))
