"""The backward kernel of ring, for Hopper GPUs: x and dy stay in a ring buffer in shared memory until the sums over sets are known.

The work is divided as in the forward (ring/kernel.py). Five groups of warps work side by side:

- `load` fills the ring, with a block of x and a block of dy in each slot;
- `reduce` computes sums over the elements that share their parameters;
- `publish` stores them as partial gradients of parameters (cells), and adds them up to sums over sets, which it stores for the team;
- `combine` waits for the sums of all members, and computes c1 and c2 of each set;
- `apply` computes dx and empties the ring.
"""

from onepass.backends.gpu.device.groups import Affine, Cells, Maps, SetValues
from onepass.backends.gpu.team.launch import Exchange

from .apply_backward import LINES, VALUES, apply
from .channel import Channel, acquire_to_write
from .exchange import COMBINE_WARPS, PUBLISH_WARPS
from .exchange_backward import combine, publish
from .gluon import async_load, fence_async_shared, gl, jit, mbarrier
from .known import BLOCKS, BLOCKS_OF_UNIT, COLUMNS, ELEMENTS, KNOWN, SET, corner_in_set
from .launch import RingView
from .launch_backward import RingBackwardSplit
from .parameters import keep
from .reduce_backward import reduce
from .work import Work, of_tile


@jit
def ring_backward(
    x_desc, dy_desc, dx_ptr, affine: Affine, exchange: Exchange, values: SetValues, cells: Cells, total, view: RingView, maps: Maps,
    split: RingBackwardSplit, norm: gl.constexpr, mode: gl.constexpr,
):  # fmt: skip
    """Compute dx and the cells of `total` sets. `norm` is a Norm of device/groups.py, `mode` a RingBackwardMode of launch_backward.py."""
    MBARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    ring = Channel(  # a slot is two blocks: x and dy
        buffer=gl.allocate_shared_memory(x_desc.dtype, [2 * mode.slots, mode.block_i, mode.block_j], x_desc.layout),
        full=gl.allocate_shared_memory(gl.int64, [mode.slots, 1], MBARRIER),
        empty=gl.allocate_shared_memory(gl.int64, [mode.slots, 1], MBARRIER),
    )
    sums = Channel(  # two slots, one message each: two sums for each column of a tile, for each warp, or for each block and warp
        buffer=_messages(mode),
        full=gl.allocate_shared_memory(gl.int64, [2, 1], MBARRIER),
        empty=gl.allocate_shared_memory(gl.int64, [2, 1], MBARRIER),
    )
    lines = Channel(  # two slots, one unit each: what `apply` must know
        buffer=gl.allocate_shared_memory(gl.float32, [2 * mode.tiles * (LINES if mode.kind == COLUMNS else VALUES), mode.block_j], PLAIN),
        full=gl.allocate_shared_memory(gl.int64, [2, 1], MBARRIER),
        empty=gl.allocate_shared_memory(gl.int64, [2, 1], MBARRIER),
    )
    for slot in gl.static_range(mode.slots):
        mbarrier.init(ring.full.index(slot), count=1)
        mbarrier.init(ring.empty.index(slot), count=1)
    for slot in gl.static_range(2):
        mbarrier.init(sums.full.index(slot), count=1)
        mbarrier.init(sums.empty.index(slot), count=1)
        mbarrier.init(lines.full.index(slot), count=1)
        mbarrier.init(lines.empty.index(slot), count=1)
    known, kept, ready = _known(sums, mode), keep(affine, ring, mode), _ready(ring, mode)
    fence_async_shared()
    team, member = gl.program_id(0) // split.members, gl.program_id(0) % split.members
    blocks = ((view.reps + mode.block_i - 1) // mode.block_i * mode.across - member + split.members - 1) // split.members
    work = Work(team=team, member=member, units=split.units, blocks=blocks, again=0)
    REDUCE: gl.constexpr = 136 if mode.kind == ELEMENTS else 104  # registers of a thread: sums of elements stay there
    OTHERS: gl.constexpr = 64 if mode.kind == ELEMENTS else 96
    gl.warp_specialize(
        [
            (apply, (ring, lines, kept, ready, dx_ptr, affine, values, work, total, view, maps, split, norm, mode)),
            (reduce, (ring, sums, known, kept, ready, affine, values, cells, work, total, view, maps, split, norm, mode)),
            (publish, (sums, known, exchange, affine, values, cells, work, total, view, maps, split, norm, mode)),
            (combine, (sums, lines, affine, values, cells, exchange, work, total, view, maps, split, norm, mode)),
            (_load, (x_desc, dy_desc, ring, work, view, split, mode)),
        ],
        [mode.warps, PUBLISH_WARPS, COMBINE_WARPS, 1],
        [REDUCE, OTHERS, OTHERS, 24],
    )


@jit
def _messages(mode: gl.constexpr):
    if mode.kind == BLOCKS:
        buffer = gl.allocate_shared_memory(gl.float32, [2 * 2, BLOCKS_OF_UNIT, mode.warps], gl.SwizzledSharedLayout(1, 1, 1, [0, 1]))
    else:
        sums: gl.constexpr = mode.block_j if mode.kind == COLUMNS else mode.warps
        buffer = gl.allocate_shared_memory(gl.float32, [2 * 2, sums], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    return buffer


@jit
def _known(sums, mode: gl.constexpr):
    """Return the channel for what `reduce` must know of its columns: two slots, one unit each. If columns do not differ, a placeholder.

    A barrier that nobody uses must not be initialized. The compiler would reuse its memory for something else, which PTX does not allow.
    """
    known = sums
    if mode.kind == COLUMNS:
        known = Channel(
            buffer=gl.allocate_shared_memory(gl.float32, [2 * mode.tiles * KNOWN, mode.block_j], gl.SwizzledSharedLayout(1, 1, 1, [0])),
            full=gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout()),
            empty=gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout()),
        )
        for slot in gl.static_range(2):
            mbarrier.init(known.full.index(slot), count=1)
            mbarrier.init(known.empty.index(slot), count=1)
    return known


@jit
def _ready(ring, mode: gl.constexpr):
    """Return a barrier: the parameters that `reduce` and `apply` share are in shared memory. If there are none, return a placeholder."""
    ready = ring.full
    if mode.kept > 0:
        ready = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
        mbarrier.init(ready.index(0), count=1)
    return ready


@jit
def _load(x_desc, dy_desc, ring, work, view, split, mode: gl.constexpr):
    """Load this member's blocks of x and dy into the ring, in the order in which `reduce` takes them."""
    BYTES: gl.constexpr = mode.block_i * mode.block_j * x_desc.dtype.primitive_bitwidth // 8
    at = 0
    for unit in range(work.team, work.units, split.teams):
        for number in range(mode.tiles * work.blocks):
            slot = at % mode.slots
            tile, block = of_tile(number, work, mode)
            o, column = unit // split.spans, unit % split.spans * split.span + tile * mode.block_j
            if mode.kind != COLUMNS and mode.kind != SET:
                o, column = unit * mode.tiles + tile, 0
            row = o * view.reps
            if mode.kind == SET:
                down, along = corner_in_set(block, work, split, mode)
                row, column = row + down, column + along
            else:
                row += (work.member + block * split.members) * mode.block_i
            acquire_to_write(ring, slot, at // mode.slots & 1)
            fence_async_shared()  # see `_load_block` of ring/kernel.py
            mbarrier.expect(ring.full.index(slot), 2 * BYTES)
            async_load(x_desc, [row, column], ring.full.index(slot), ring.buffer.index(2 * slot))
            async_load(dy_desc, [row, column], ring.full.index(slot), ring.buffer.index(2 * slot + 1))
            at += 1
