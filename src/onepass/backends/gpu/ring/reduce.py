"""The group `reduce` of the ring kernel: the moments (mean and M2) of the blocks in the ring, tile by tile, for `publish`.

Memory is x[o, r, s, t]. A tile is some columns (s, t) of one o, in blocks of rows r. Usually several sets share a tile, so each
column gets moments of its own. In a folded walk (gpu/walk.py) a tile is one set, and in other walks a whole unit may be one set. Then
all elements can be merged: a lane, which is a thread, sums up its own elements, whatever their columns. Warps merge their lanes once
for each set, and `publish` (ring/exchange.py) merges the warps. Numbers such as (14) are equations of docs/theory.md.
"""

from onepass.backends.gpu.device.moments import DOWN, UP, join, merge, update

from .channel import acquire_to_read, acquire_to_write, release_block, release_to_readers
from .elements import as_float32, beyond_reach
from .gluon import gl, jit
from .layouts import apply_layout, column_layout, lane_layout, lanes_of_row, reduce_layout, rows_at_a_time, steps_layout
from .runs import run_of, runs_of
from .stress import crowded, late

PARTS = gl.constexpr(3)  # what a warp sends to `publish` for each tile of a folded walk: the mean, M2 and number of its elements


@jit
def reduce(ring, moments, x_ptr, work, total, view, split, norm: gl.constexpr, mode: gl.constexpr):
    """Compute the moments of each tile, for `publish`. Release each block that will be loaded again."""
    if mode.folded:
        _reduce_runs(ring, moments, x_ptr, work, total, view, split, norm, mode)
    elif mode.single:
        _reduce_single(ring, moments, work, view, split, norm, mode)
    else:
        _reduce_columns(ring, moments, work, view, split, norm, mode)


@jit
def _reduce_columns(ring, moments, work, view, split, norm: gl.constexpr, mode: gl.constexpr):
    """Compute the mean and M2 of each column."""
    BLOCK: gl.constexpr = reduce_layout(mode.block_j, ring.buffer.dtype.primitive_bitwidth // 8, mode.warps)
    i = gl.expand_dims(gl.arange(0, mode.block_i, gl.SliceLayout(1, BLOCK)), 1)
    last = (work.member + (work.blocks - 1) * split.members) * mode.block_i  # the first row of this member's last block
    rows = share_of(work.member, split.members, view.reps, mode.block_i)
    at = 0
    turn = 0
    for _unit in range(work.team, work.units, split.teams):
        for tile in range(mode.tiles):
            mean = gl.zeros([mode.block_i, mode.block_j], gl.float32, BLOCK)
            m2 = gl.zeros([mode.block_i, mode.block_j], gl.float32, BLOCK)
            k = 0.0
            for block in range(work.blocks):
                x = _take(ring, at, tile * work.blocks + block < work.again, BLOCK, mode)
                k += 1.0
                first = (work.member + block * split.members) * mode.block_i
                if mode.ragged:
                    if first + mode.block_i > view.reps:  # only the last block of a tile needs a mask
                        inside = first + i < view.reps
                        mean, m2 = update(mean, m2, k, gl.where(inside, x, 0.0), inside, norm.centered)
                    else:
                        mean, m2 = update(mean, m2, k, x, True, norm.centered)
                else:
                    mean, m2 = update(mean, m2, k, x, True, norm.centered)
                at += 1
            mean, m2 = _merge_rows(mean, m2, k, view.reps - last, rows, ring.buffer.dtype.primitive_bitwidth // 8, norm, mode)
            _acquire(moments, turn, mode)
            moments.buffer.index(turn % 2 * 2).store(gl.reshape(mean, [mode.block_j]))
            moments.buffer.index(turn % 2 * 2 + 1).store(gl.reshape(m2, [mode.block_j]))
            release_to_readers(moments, turn % 2)
            turn += 1


@jit
def _merge_rows(mean, m2, k, left, rows, SIZE: gl.constexpr, norm: gl.constexpr, mode: gl.constexpr):
    """Merge the moments of the rows of a block. Return mean and M2 of each column, of shape [1, J]. (14), (15)

    Each lane has k elements, but lanes from row `left` have k - 1. Together they have `rows` elements of a column.

    First each thread merges its own rows. Then the threads of a warp swap values, so that each has several rows of one column. With
    a plain sum, each column would take five shuffles.
    """
    HIGH: gl.constexpr = rows_at_a_time(mode.block_j, SIZE, mode.warps)
    STEPS: gl.constexpr = mode.block_i // HIGH
    OWN: gl.constexpr = steps_layout(mode.block_j, SIZE, mode.warps)
    SWAPPED: gl.constexpr = column_layout(HIGH, mode.block_j, mode.warps)
    mean = gl.convert_layout(gl.reshape(mean, [STEPS, HIGH, mode.block_j]), OWN)
    m2 = gl.convert_layout(gl.reshape(m2, [STEPS, HIGH, mode.block_j]), OWN)
    n = k
    own = k * STEPS
    swapped = k * STEPS
    if mode.ragged:
        LANE: gl.constexpr = gl.SliceLayout(2, OWN)
        step = gl.expand_dims(gl.arange(0, STEPS, gl.SliceLayout(1, LANE)), 1)
        lane = gl.expand_dims(gl.arange(0, HIGH, gl.SliceLayout(0, LANE)), 0)
        n = gl.expand_dims(gl.where(step * HIGH + lane < left, k, k - 1.0), 2)
        own = gl.expand_dims(_of_lane(lane, k, left, HIGH, STEPS), 2)
        swapped = gl.expand_dims(_of_lane(gl.arange(0, HIGH, gl.SliceLayout(1, SWAPPED)), k, left, HIGH, STEPS), 1)
    mean, m2 = merge(mean, m2, n, gl.maximum(own, 1.0), 0, norm.centered)
    mean = gl.convert_layout(gl.reshape(mean, [HIGH, mode.block_j]), SWAPPED)
    m2 = gl.convert_layout(gl.reshape(m2, [HIGH, mode.block_j]), SWAPPED)
    return merge(mean, m2, swapped, rows, 0, norm.centered)


@jit
def _of_lane(lane, k, left, HIGH: gl.constexpr, STEPS: gl.constexpr):
    """Return how many elements of a column the rows lane, lane + HIGH, ... of a block have, STEPS rows in all."""
    more = gl.minimum(gl.maximum((left - lane + HIGH - 1) // HIGH, 0), STEPS)
    return (k - 1.0) * STEPS + more.to(gl.float32)


@jit
def _reduce_single(ring, moments, work, view, split, norm: gl.constexpr, mode: gl.constexpr):
    """Compute mean, M2 and number of the elements that each warp has of a unit, which is one set."""
    SIZE: gl.constexpr = ring.buffer.dtype.primitive_bitwidth // 8
    BLOCK: gl.constexpr = apply_layout(mode.block_j, SIZE, mode.warps, 1)
    LANES: gl.constexpr = lane_layout(mode.block_j, SIZE, mode.warps)
    WIDE: gl.constexpr = lanes_of_row(mode.block_j, SIZE)
    HIGH: gl.constexpr = 32 * mode.warps // WIDE  # rows that all lanes together have at a time
    ELEMENTS: gl.constexpr = mode.block_i * mode.block_j // (32 * mode.warps)  # of a lane
    LANE: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(3, LANES))
    i = gl.expand_dims(gl.arange(0, mode.block_i, gl.SliceLayout(1, BLOCK)), 1)
    j = gl.expand_dims(gl.arange(0, mode.block_j, gl.SliceLayout(0, BLOCK)), 0)
    at = 0
    turn = 0
    for _unit in range(work.team, work.units, split.teams):
        mean = gl.zeros([HIGH, WIDE], gl.float32, LANE)
        m2 = mean
        n = mean
        for tile in range(mode.tiles):
            for block in range(work.blocks):
                x = _take(ring, at, tile * work.blocks + block < work.again, BLOCK, mode)
                x = by_lanes(x, HIGH, WIDE, LANES)
                first, column = (work.member + block * split.members) * mode.block_i, tile * mode.block_j
                more = gl.full([HIGH, WIDE], ELEMENTS, gl.float32, LANE)
                lane_mean = mean
                if mode.ragged:
                    if (first + mode.block_i > view.reps) | (column + mode.block_j > view.run):  # a part of the block is not of this set
                        inside = (first + i < view.reps) & (column + j < view.run)
                        inside = by_lanes(inside, HIGH, WIDE, LANES)
                        x, lane_mean, more = _some(x, inside, norm)
                    else:
                        x, lane_mean = _centered(x, more, norm, mean)
                else:
                    x, lane_mean = _centered(x, more, norm, mean)
                mean, m2, n = join(mean, m2, n, lane_mean, lane_sums(x * x), more, norm.centered)
                at += 1
        _send(moments, turn, mean, m2, n, norm, mode)
        turn += 1  # noqa: SIM113


@jit
def _reduce_runs(ring, moments, x_ptr, work, total, view, split, norm: gl.constexpr, mode: gl.constexpr):
    """Compute mean, M2 and number of the elements that each warp has of a tile."""
    SIZE: gl.constexpr = ring.buffer.dtype.primitive_bitwidth // 8
    BLOCK: gl.constexpr = apply_layout(mode.block_j, SIZE, mode.warps, 1)
    LANES: gl.constexpr = lane_layout(mode.block_j, SIZE, mode.warps)
    WIDE: gl.constexpr = lanes_of_row(mode.block_j, SIZE)
    HIGH: gl.constexpr = 32 * mode.warps // WIDE  # rows that all lanes together have at a time
    ELEMENTS: gl.constexpr = mode.block_i * mode.block_j // (32 * mode.warps)  # of a lane
    LANE: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(3, LANES))
    i = gl.expand_dims(gl.arange(0, mode.block_i, gl.SliceLayout(1, BLOCK)), 1)
    j = gl.expand_dims(gl.arange(0, mode.block_j, gl.SliceLayout(0, BLOCK)), 0)
    at = 0
    turn = 0
    for unit in range(work.team, work.units, split.teams):
        runs = runs_of(unit, total, view, split, mode)
        for tile in range(mode.tiles):
            run = run_of(runs, tile, view, mode)
            mean = gl.zeros([HIGH, WIDE], gl.float32, LANE)
            m2 = mean
            n = mean
            for block in range(work.blocks):
                x = _take(ring, at, tile * work.blocks + block < work.again, BLOCK, mode)
                x = by_lanes(x, HIGH, WIDE, LANES)
                first = (work.member + block * split.members) * (mode.block_i * mode.block_j)
                more = gl.full([HIGH, WIDE], ELEMENTS, gl.float32, LANE)
                lane_mean = mean
                if mode.ragged:
                    if (first < run.phase) | (run.end - first < (mode.block_i + 2) * mode.block_j):  # the start or end of a run is near
                        number = by_lanes(i * mode.block_j + j, HIGH, WIDE, LANES)
                        if mode.phased:
                            x = beyond_reach(x, number, x_ptr, run, first, total, view, split)
                        x, lane_mean, more = _some(x, (first + number >= run.phase) & (first + number < run.end), norm)
                    else:
                        x, lane_mean = _centered(x, more, norm, mean)
                else:
                    x, lane_mean = _centered(x, more, norm, mean)
                mean, m2, n = join(mean, m2, n, lane_mean, lane_sums(x * x), more, norm.centered)
                at += 1
            _send(moments, turn, mean, m2, n, norm, mode)
            turn += 1


@jit
def _send(moments, turn, mean, m2, n, norm: gl.constexpr, mode: gl.constexpr):
    """Merge the moments of the lanes of each warp, and send them to `publish`. Lanes have n elements."""
    mean, m2, n = by_warps(mean, mode.warps), by_warps(m2, mode.warps), by_warps(n, mode.warps)
    count = gl.sum(n, 1, keep_dims=True)
    mean, m2 = merge(mean, m2, n, gl.maximum(count, 1.0), 1, norm.centered)
    _acquire(moments, turn, mode)
    part = turn % 2 * PARTS
    moments.buffer.index(part).store(gl.reshape(mean, [mode.warps]))
    moments.buffer.index(part + 1).store(gl.reshape(m2, [mode.warps]))
    moments.buffer.index(part + 2).store(gl.reshape(count, [mode.warps]))
    release_to_readers(moments, turn % 2)


@jit
def merge_warps(moments, first, norm: gl.constexpr, WARPS: gl.constexpr):
    """Merge what the warps sent for a tile, at `first` of the channel. Return mean and M2 of this member's part of the set. (14), (15)

    The caller has WARPS warps. All of them compute the same.
    """
    WARP: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    mean, m2 = moments.buffer.index(first).load(WARP), moments.buffer.index(first + 1).load(WARP)
    n = moments.buffer.index(first + 2).load(WARP)
    return merge(mean, m2, n, gl.maximum(gl.sum(n, 0), 1.0), None, norm.centered)  # a member may have no element of a run


@jit
def _take(ring, at, dropped, BLOCK: gl.constexpr, mode: gl.constexpr):
    """Return this member's next block, in registers. Release its slot of the ring if the block is `dropped`."""
    slot = at % mode.slots
    acquire_to_read(ring, slot, at // mode.slots & 1)
    late(mode.stress, "reduce block", mode.warps)
    crowded(mode.stress, "reduce crowd", ring.buffer, mode.warps)
    x = as_float32(ring.buffer.index(slot).load(BLOCK))
    if mode.back > 0:  # noqa: SIM102, the outer `if` is decided at compile time
        if dropped:
            late(mode.stress, "reduce release", mode.warps)
            release_block(ring, slot, mode)
    return x


@jit
def _acquire(moments, turn, mode: gl.constexpr):
    """Wait until the channel has room for the moments of a tile."""
    acquire_to_write(moments, turn % 2, turn // 2 & 1)
    late(mode.stress, "reduce moments", mode.warps)


@jit
def by_lanes(x, HIGH: gl.constexpr, WIDE: gl.constexpr, LANES: gl.constexpr):
    """Return a block in the shape [rows of a lane, rows at a time, lanes of a row, elements of a lane]. No element moves."""
    return gl.convert_layout(gl.reshape(x, [x.shape[0] // HIGH, HIGH, WIDE, x.shape[1] // WIDE]), LANES)


@jit
def lane_sums(x):
    """Sum up the elements of each lane."""
    return gl.sum(gl.sum(x, 3), 0)


@jit
def _centered(x, n, norm: gl.constexpr, mean):
    """Return x minus the mean of its lane, and that mean; without `centered`, x and `mean`. Each lane has n elements."""
    if norm.centered:
        mean = lane_sums(x * DOWN) / n * UP
        x = x - gl.expand_dims(gl.expand_dims(mean, 0), 3)
    return x, mean


@jit
def _some(x, inside, norm: gl.constexpr):
    """Do what `_centered` does, for the elements that are `inside` the set. Also return how many each lane has."""
    n = lane_sums(gl.where(inside, 1.0, 0.0))
    x, mean = _centered(gl.where(inside, x, 0.0), gl.maximum(n, 1.0), norm, n)
    return gl.where(inside, x, 0.0), mean, n


@jit
def by_warps(lanes, WARPS: gl.constexpr):
    """Return the values of all lanes as a matrix with a row for each warp."""
    return gl.reshape(lanes, [WARPS, 32])


@jit
def share_of(member, members, n, BLOCK: gl.constexpr):
    """Return how many of n rows or elements a member has; 0 if there is no such member.

    Members take blocks of BLOCK rows or elements in turn. Only the last block may have fewer.
    """
    blocks = (n + BLOCK - 1) // BLOCK
    mine = blocks // members + gl.where(member < blocks % members, 1, 0)
    missing = gl.where(member == (blocks - 1) % members, blocks * BLOCK - n, 0)
    return gl.where(member < members, mine * BLOCK - missing, 0).to(gl.float32)


@jit
def elements_of(member, members, phase, view, mode: gl.constexpr):
    """Return how many elements of a set a member has. A folded set is read from `phase` elements before it."""
    if mode.folded:
        n = share_of(member, members, view.length + phase, mode.block_i * mode.block_j) - gl.where(member == 0, phase, 0).to(gl.float32)
    else:
        n = share_of(member, members, view.reps, mode.block_i) * view.run
    return n
