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

from typing import Any, NamedTuple

from onepass.backends.gpu.device.groups import Affine, Maps, Statistics
from onepass.backends.gpu.team.launch import Exchange

from .channel import Channel, acquire_to_read, acquire_to_write, release_block, release_to_writer
from .elements import activated, as_float32, beyond_reach
from .exchange import COMBINE_WARPS, PUBLISH_WARPS, combine, publish
from .gluon import async_load, fence_async_shared, gl, jit, mbarrier
from .launch import RingSplit, RingView
from .layouts import apply_layout
from .parameters import ELEMENT, ROW, fill, gain_and_term, keep
from .reduce import PARTS, reduce
from .runs import run_of, runs_of
from .stress import crowded, fenced, late, spare


class Work(NamedTuple):
    """The work of a program: the units team, team + teams, team + 2·teams, ... below `units`."""

    team: Any
    member: Any
    units: Any
    blocks: Any  # how many blocks of rows this member has in each tile of a unit
    again: Any  # how many blocks of a unit this member loads twice


@jit
def ring_forward(
    x_desc, x_ptr, y_ptr, affine: Affine, stats: Statistics, exchange: Exchange, eps, total, view: RingView, maps: Maps, split: RingSplit,
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
    # Two slots, one tile each: the mean and M2 of its columns, or what each warp sends in a folded walk.
    MOMENTS: gl.constexpr = [2 * PARTS, mode.warps] if mode.folded else [2 * 2, mode.block_j]
    moments = Channel(
        buffer=gl.allocate_shared_memory(gl.float32, MOMENTS, PLAIN),
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
    if mode.folded:  # some units may have fewer values of o
        units = split.units_of_phase * gl.minimum(mode.phases, total)
    blocks = ((view.reps + mode.block_i - 1) // mode.block_i - member + split.members - 1) // split.members
    again = gl.maximum(mode.tiles * blocks - mode.keep, 0)
    work = Work(team=team, member=member, units=units, blocks=blocks, again=again)
    gl.warp_specialize(
        [
            (_apply, (ring, lines, x_ptr, y_ptr, affine, keep(affine, ring, mode), work, total, view, maps, split, norm, mode)),
            (reduce, (ring, moments, x_ptr, work, total, view, split, norm, mode)),
            (publish, (moments, exchange, work, view, split, norm, mode)),
            (combine, (lines, affine, stats, exchange, eps, work, total, view, maps, split, norm, mode)),
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
        runs = runs_of(unit, view, split, mode)
        for block in range(mode.tiles * work.blocks):
            slot, phase = at % mode.slots, at // mode.slots & 1
            _load_block(x_desc, ring, slot, phase, unit, runs, block, work, view, split, mode)
            at += 1
            if mode.back > 0:  # noqa: SIM102, the outer `if` is decided at compile time
                if (block < work.again) & (unit != work.team):  # blocks to load again, in reverse order
                    slot, phase = mode.slots + again_at % mode.back, again_at // mode.back & 1
                    before = runs_of(unit - split.teams, view, split, mode)
                    _load_block(x_desc, ring, slot, phase, unit - split.teams, before, work.again - 1 - block, work, view, split, mode)
                    again_at += 1
    if mode.back > 0:
        last = work.team + (work.units - 1 - work.team) // split.teams * split.teams
        runs = runs_of(last, view, split, mode)
        for block in range(work.again):
            slot, phase = mode.slots + again_at % mode.back, again_at // mode.back & 1
            _load_block(x_desc, ring, slot, phase, last, runs, work.again - 1 - block, work, view, split, mode)
            again_at += 1


@jit
def _of_tile(block, work, mode: gl.constexpr):
    """Return the tile of a unit that a member's block belongs to, and the number of the block in that tile."""
    if mode.tiles == 1:
        tile, within = 0, block
    elif mode.blocks > 0:
        tile, within = block // mode.blocks, block % mode.blocks
    else:  # members have different numbers of blocks
        tile, within = block // work.blocks, block % work.blocks
    return tile, within


@jit
def _load_block(x_desc, ring, slot, phase, unit, runs, block, work, view, split, mode: gl.constexpr):
    BYTES: gl.constexpr = mode.block_i * mode.block_j * x_desc.dtype.primitive_bitwidth // 8
    tile, block = _of_tile(block, work, mode)
    o, column = unit // split.spans, (unit % split.spans * mode.tiles + tile) * mode.block_j
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


@jit
def _apply(ring, lines, x_ptr, y_ptr, affine, kept, work, total, view, maps, split, norm: gl.constexpr, mode: gl.constexpr):
    """Compute and store y: first for the blocks that stayed in the ring, then for those that are loaded again."""
    HALVES: gl.constexpr = 1 if mode.folded else mode.at_once
    BLOCK: gl.constexpr = apply_layout(mode.block_j, ring.buffer.dtype.primitive_bitwidth // 8, mode.warps, HALVES)
    i = gl.expand_dims(gl.arange(0, mode.block_i, gl.SliceLayout(1, BLOCK)), 1)
    j = gl.expand_dims(gl.arange(0, mode.block_j, gl.SliceLayout(0, BLOCK)), 0)
    here = mode.tiles * work.blocks
    runs = runs_of(work.team, view, split, mode)
    kept_phase = runs.phase
    if mode.kept > 0:
        fill(kept, kept_phase, affine, maps, work, view, split, norm, mode, BLOCK)
    gain, shift = _parameters(runs, 0, here, kept, affine, maps, work, view, split, norm, mode, BLOCK)
    at = 0
    again_at = 0
    turn = 0
    for unit in range(work.team, work.units, split.teams):
        o, column = unit // split.spans, unit % split.spans * (mode.tiles * mode.block_j)
        line_at = turn % 2 * (mode.tiles * 4)
        runs = runs_of(unit, view, split, mode)
        if mode.kept > 0 and mode.phases > 1:  # noqa: SIM102
            if runs.phase != kept_phase:
                fill(kept, runs.phase, affine, maps, work, view, split, norm, mode, BLOCK)
                kept_phase = runs.phase
        acquire_to_read(lines, turn % 2, turn // 2 & 1)
        late(mode.stress, "apply lines", mode.warps)
        mean, factor, term = _line(lines, line_at, BLOCK, mode)
        for step in range(0, here, mode.at_once):
            x = _take(ring, step, here, work.again, at, again_at, BLOCK, mode)
            if mode.at_once == 2:  # load the second block while the first is applied
                following = _take(ring, step + 1, here, work.again, at, again_at, BLOCK, mode)
            for more in gl.static_range(mode.at_once):
                tile, block = _of_step(step + more, here, work, mode)
                if mode.tiles > 1:
                    mean, factor, term = _line(lines, line_at + tile * 4, BLOCK, mode)
                first = (work.member + block * split.members) * mode.block_i
                if mode.folded:
                    run = run_of(runs, tile, view, mode)
                    number = i * mode.block_j + j  # of each element of the block
                    if mode.phased:  # noqa: SIM102
                        if run.end - first * mode.block_j < (mode.block_i + 2) * mode.block_j:  # the end of the run is near
                            x = beyond_reach(x, number, x_ptr, run, first * mode.block_j, total, view, split)
                    if mode.differ == ELEMENT:
                        each_gain, each_shift = gain_and_term(kept, affine, maps, run, first, block, view, split, norm, mode, BLOCK)
                        z = _centered(x, mean, norm) * (factor * each_gain) + each_shift
                    else:  # load those of the next block while this one is applied
                        is_last = step + more + 1 == here
                        next_runs = runs_of(gl.where(is_last, unit + split.teams, unit), view, split, mode)
                        next_step = gl.where(is_last, 0, step + more + 1)
                        next_gain, next_shift = _parameters(
                            next_runs, next_step, here, kept, affine, maps, work, view, split, norm, mode, BLOCK
                        )
                        z = _centered(x, mean, norm) * (factor * gain) + shift
                        gain, shift = next_gain, next_shift
                    y = activated(z, norm.activation).to(y_ptr.dtype.element_ty)
                    _store_run(y_ptr + run.start, y, number, first * mode.block_j, run, total, mode)
                else:
                    z = _centered(x, mean, norm) * factor + term
                    y = activated(z, norm.activation).to(y_ptr.dtype.element_ty)
                    r, c = first + i, column + tile * mode.block_j + j
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
def _of_step(step, here, work, mode: gl.constexpr):
    """Return tile and block of a step of `_apply`. The last blocks are those that are loaded again, in reverse order."""
    number = work.again + step
    return _of_tile(gl.where(number < here, number, here - 1 - step), work, mode)


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
    """Store a block of a run. `number` counts the elements of the block, and `first` is the number of its first element."""
    to = y_ptr + first + number
    if mode.ragged:
        if (first >= run.phase) & (first + mode.block_i * mode.block_j <= run.end) & (run.o < total):
            gl.store(to, y, cache_modifier=".cs")
        else:
            gl.store(to, y, mask=(first + number >= run.phase) & (first + number < run.end) & (run.o < total), cache_modifier=".cs")
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
def _line(lines, at, BLOCK: gl.constexpr, mode: gl.constexpr):
    """Return mean, factor = rstd·gain and term of the columns of a block, each of shape [1, J].

    In a folded walk, all columns have the same mean and rstd. Then the shapes are [1, 1], and factor is rstd.
    """
    WIDTH: gl.constexpr = 1 if mode.folded else mode.block_j
    mean = lines.buffer.index(at).slice(0, WIDTH).load(gl.SliceLayout(0, BLOCK))
    factor = lines.buffer.index(at + 1).slice(0, WIDTH).load(gl.SliceLayout(0, BLOCK))
    term = mean
    if not mode.folded:
        factor = factor * lines.buffer.index(at + 2).load(gl.SliceLayout(0, BLOCK))
        term = lines.buffer.index(at + 3).load(gl.SliceLayout(0, BLOCK))
    return gl.expand_dims(mean, 0), gl.expand_dims(factor, 0), gl.expand_dims(term, 0)
