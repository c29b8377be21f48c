"""How the ring family cuts a problem into blocks in shared memory, and what that costs.

Memory is x[o, r, s, t]. A set is the elements of one o and s: `reps` runs of `run` contiguous elements. A unit of work is
one o and the fewest tiles of block_j columns (s, t) that hold whole sets. A team of programs, its members, shares a unit
in blocks of block_i rows r. A slot of the ring holds one block.

A small model of the pipeline gives the time of every candidate. The fastest candidate is the schedule, and its time is
the cost. So a change of a constant below changes both: compare not only which families are chosen, but also the launches
of the whole benchmark suite.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from itertools import product
from math import ceil, gcd, lcm

from onepass.backends.gpu import constants
from onepass.backends.gpu.cost import copy_cost, parameter_bytes, product_of
from onepass.backends.gpu.launches import block_and_remainder, fastest, power_of_two, team_programs
from onepass.backends.gpu.partials.parameters import channel_of
from onepass.backends.gpu.walk import AXIS_O, AXIS_R, AXIS_S, AXIS_T, Walk, axis_mask, fold, walk
from onepass.core.device import Device
from onepass.core.problem import NormProblem

from .launch import RingLaunch

ALIGNMENT = 16  # bytes: copies by descriptor need rows that begin at multiples of this

WARPS = 8  # warps of the group `reduce`, and of the group `apply` (ring/kernel.py). On an H200, 2026-11-15, 4 were too slow

SLOT = 16384  # bytes of the largest blocks

RESERVED = 10240  # bytes of shared memory for barriers, moments and the compiler. The rest is for the ring and for `lines`

# If a unit does not fit into the ring: slots for blocks that are loaded again, and for blocks that are dropped after `reduce`.
BACK, SPARE = 3, 4

MOST_SETS = 32  # the most sets of several columns in a unit. Only two warps combine their moments: 64 sets take 17 us on an H200

MOST_MASKED = 4096  # the most elements of a block that needs masks. With 8192, `reduce` has too few registers, and takes twice as long

LEAST_USED = 0.75  # the least fraction of the columns of a unit's tiles that belong to the unit

# If a set is one run, the walk is folded: the run is read as rows that follow one another.
SHORTEST = 8193  # elements of the shortest run that is folded: `row` keeps shorter ones in registers
ROWS_IN_ONE = 16384  # the same, for runs that `row` loads in vectors, as one block
FOLDS = 64, 32, 16  # elements of a row: the first that fits. Rows of 128 are slower by a twentieth (H200, 2026-11-14)
MOST_ROWS = 256  # rows of a block: a descriptor cannot copy more at a time
OUTERS = 1, 2, 4, 8  # values of o in a unit: one exchange serves them all


def ring_unsupported(problem: NormProblem, device: Device) -> list[str]:
    if device.no_team or device.no_ring:
        return [device.no_team or device.no_ring]
    w, size = walk(problem), problem.dtype.itemsize
    reasons = []
    if w.reps == 1:
        if w.run < SHORTEST or (w.run <= ROWS_IN_ONE and not block_and_remainder(w.run)[1] and w.run * size % 8 == 0):
            return ["a set is one short run, which `row` keeps in registers"]
        as_rows = folded(problem, w)
        if as_rows is None:
            return [f"a set is one run, whose channels cannot be read as rows of {FOLDS[-1]} elements or more"]
        w = as_rows
    if not w.dense or (w.outer > 1 and w.x[0] != (w.folded or w.reps * w.x[1])) or (w.folded and w.y[0] != w.x[0]):
        reasons.append("one descriptor cannot describe x: its rows are not evenly spaced, or its columns not contiguous")
    if w.x[1] < w.columns:
        reasons.append("one descriptor cannot describe x: its rows overlap")
    if w.x[1] * size % ALIGNMENT:
        reasons.append(f"rows are {w.x[1] * size} bytes apart, and copies by descriptor begin at multiples of {ALIGNMENT}")
    if max(w.outer * w.reps, w.total) >= 2**31 or w.columns >= 2**20:
        reasons.append("there are more rows or columns than a descriptor can count")
    if problem.addends:
        reasons.append("it cannot add a residual: blocks go straight to shared memory")
    axes = axis_mask(w.param, w) | axis_mask(w.modulation, w)
    if axes & AXIS_R and axes & (AXIS_S | AXIS_T):
        reasons.append("each row has its own parameters, which differ from column to column")
    if not reasons and not any(candidates(problem, w, device)):
        reasons.append(f"more than {MOST_SETS} sets of {w.run} columns would be combined at a time")
    return reasons


@lru_cache(256)  # the planner needs the launches for the cost, and again for the plan
def ring_launches(problem: NormProblem, device: Device, invariant: bool) -> tuple[RingLaunch, ...]:
    return fastest(problem, device, invariant, candidates, modelled_time)


def ring_cost(problem: NormProblem, device: Device, invariant: bool) -> float:
    (launch,) = launches = ring_launches(problem, device, invariant)
    if invariant:  # then the choice of a family must not depend on the batch size
        if launch.phases > 1:
            return float("inf")  # the order of sums depends on where a run begins
        again = 1 - min(launch.keep / launch.blocks, 1)
        return (1 + constants.RING_AGAIN * again) / 1e3
    again = not (launch.resident or launch.single)
    scale = 1.0 if launch.walk.folded else constants.RING_SCALE_AGAIN if again else constants.RING_SCALE
    return copy_cost(problem, launches) + constants.RING_START + scale * modelled_time(problem, launch, device)


def candidates(problem: NormProblem, w: Walk, device: Device) -> Iterator[RingLaunch]:
    """Yield launches with blocks of several sizes and teams of several sizes."""
    if w.reps == 1:
        w = folded(problem, w) or w
    if w.folded:
        yield from _folded_candidates(problem, w, device)
        return
    size = problem.dtype.itemsize
    aligned = w.run * size % ALIGNMENT == 0
    per_column = (axis_mask(w.param, w) | axis_mask(w.modulation, w)) & AXIS_T
    for block_j, tiles, sets in cuts(w, size):
        lines = tiles if sets > 1 or per_column else 1
        for slot in (SLOT, SLOT // 2):
            block_i = slot // (block_j * size)
            slots = min((device.shared - RESERVED - lines * 32 * block_j) // slot, 32)
            ragged = w.reps % block_i or (w.columns % (tiles * block_j) and sets > 1)
            if slots < BACK + SPARE + 2 or (ragged and block_i * block_j > MOST_MASKED and (sets > 1 or w.run == 1)):
                continue
            rows = ceil(w.reps / block_i)  # rows of blocks
            for members in sorted({even(rows, device.sms // teams) for teams in range(1, device.sms + 1)}):
                spans, fits = ceil(w.columns / (w.run if sets == 1 else tiles * block_j)), tiles * ceil(rows / members) <= slots
                programs = team_programs(w.outer * spans, members, device)
                spare = SPARE if w.outer * spans * members > programs else 0  # with one unit for each team, nothing follows
                yield RingLaunch(
                    walk=w,
                    programs=programs,
                    warps=WARPS,
                    block_i=block_i,
                    block_j=block_j,
                    members=members,
                    spans=spans,
                    tiles=tiles,
                    sets=sets,
                    sets_per_block=sets_per_block(w, block_j, tiles, sets),
                    slots=slots if fits else slots - BACK,
                    keep=slots if fits else slots - BACK - spare,
                    back=0 if fits else BACK,
                    vector=ALIGNMENT // size if aligned else 1,
                )


def cuts(w: Walk, size: int) -> Iterator[tuple[int, int, int]]:
    """Yield ways to cut columns into units: the columns of a tile, the tiles of a unit and the sets of a unit.

    A unit is the fewest tiles that hold whole sets. Or it is one set, and columns of the next set fill its last tile.
    """
    for block_j in (32, 64, 128):
        if not min(128, w.columns * size) <= block_j * size <= 256:
            continue
        span = min(lcm(block_j, w.run), ceil(w.columns / block_j) * block_j)
        sets = min(ceil(span / w.run), w.sets)
        if sets <= MOST_SETS or w.run == 1:
            yield block_j, span // block_j, sets
        tiles = ceil(w.run / block_j)
        if sets > 1 and w.run * size % ALIGNMENT == 0 and w.run > LEAST_USED * tiles * block_j:
            yield block_j, tiles, 1


def folded(problem: NormProblem, w: Walk) -> Walk | None:
    """Return the folded walk of sets that are one run each, or None if there is none.

    A channel must begin at the start of a row, so that elements need no division to find their parameters.
    """
    channel = channel_of(problem, w)
    width = FOLDS[0] if channel in (1, w.run) else next((width for width in FOLDS if channel and channel % width == 0), 0)
    vector = ALIGNMENT // problem.dtype.itemsize
    before = vector - gcd(vector, w.run)  # runs are read from multiples of 16 bytes
    return fold(w, width, before) if width and w.sets == 1 and w.run < 2**20 * width else None


def _folded_candidates(problem: NormProblem, w: Walk, device: Device) -> Iterator[RingLaunch]:
    """Yield launches whose units are one or more values of o, with or without parameters in shared memory."""
    all_o = walk(problem)  # w may have only one o
    size, axes, channel = problem.dtype.itemsize, axis_mask(all_o.param, all_o), channel_of(problem, all_o)
    shared = channel == 1 and axes & (AXIS_O | AXIS_T) == AXIS_T  # each element has its own weight and bias, and all o share them
    parameters = sum(dtype.itemsize for dtype in (problem.weight, problem.bias) if dtype) if shared else 0
    for slot in (SLOT, SLOT // 2):
        block_i = min(slot // (w.run * size), MOST_ROWS)
        block = block_i * w.run  # elements
        rows = ceil(w.reps / block_i)  # rows of blocks
        sizes = {even(rows, device.sms // teams) for teams in range(1, device.sms + 1)}
        for members, tiles, kept in product(sizes, OUTERS, (True, False)):
            blocks = ceil(rows / members)
            reserved = RESERVED + tiles * 32 * w.run + kept * blocks * block * parameters
            slots = min((device.shared - reserved) // (block * size), 32)
            fits, unaligned = tiles * blocks <= slots, bool(all_o.run % w.run)
            ragged = w.reps % block_i or all_o.outer % tiles
            if block > MOST_MASKED and (unaligned or (ragged and shared and problem.spec.centered)):
                continue
            if slots < BACK + SPARE + 2 or (tiles > 1 and not fits) or (kept and not parameters):
                continue
            programs = team_programs(ceil(w.outer / tiles), members, device)
            spare = SPARE if ceil(w.outer / tiles) * members > programs else 0
            yield RingLaunch(
                walk=w,
                programs=programs,
                warps=WARPS,
                block_i=block_i,
                block_j=w.run,
                members=members,
                spans=1,
                tiles=tiles,
                sets=tiles,
                sets_per_block=2,
                slots=slots if fits else slots - BACK,
                keep=slots if fits else slots - BACK - spare,
                back=0 if fits else BACK,
                channel_rows=ceil(channel / w.run) if channel > 1 else 0,
                vector=ALIGNMENT // size,
                kept=kept,
            )


def even(rows: int, most: int) -> int:
    """Return the smallest size of a team whose busiest member has no more rows of blocks than in a team of `most` members.

    Example: `even(10, 6)` is 5, because with 5 or 6 members the busiest has 2 of 10 rows.
    """
    return ceil(rows / ceil(rows / most))


def sets_per_block(w: Walk, block_j: int, tiles: int, sets: int) -> int:
    """Return how many sets a tile of block_j columns overlaps at most, rounded up to a power of two; at least 2."""
    return max(power_of_two(sets if tiles == 1 else min((block_j - 2) // w.run + 2, sets)), 2)


def modelled_time(problem: NormProblem, launch: RingLaunch, device: Device) -> float:
    """Return the modelled time of a launch, in microseconds.

    The ring holds several units, so the exchange of one unit overlaps with the blocks of the others.
    """
    if launch.walk.folded:
        return _folded_time(problem, launch, device)
    blocks = launch.blocks
    size = launch.block_i * launch.block_j * problem.dtype.itemsize / SLOT
    block = constants.RING_BLOCK * size * max(0.5 + 0.5 * launch.programs / device.sms, 0.6)
    if launch.block_j * problem.dtype.itemsize < 256 and launch.teams == 1:
        block *= constants.RING_NARROW
    block *= 1 + constants.RING_CROWDED * min(blocks, launch.keep) / launch.slots
    again = max(blocks - launch.keep, 0)
    factors = (
        (constants.RING_UNEVEN, launch.tiles > 1 and not launch.even),
        (constants.RING_UNPAIRED, not launch.pairs),
        (constants.RING_TALL, launch.block_i > 64 and not launch.by_row),
        (constants.RING_FLAT, launch.block_i < 64),
    )
    applied = (blocks * block + constants.RING_MERGE * (1 if launch.single else launch.tiles)) * product_of(factors)
    each = constants.RING_WIDE_COLUMNS if problem.dtype.itemsize == 4 else constants.RING_COLUMNS
    sets = each * launch.members if launch.by_column else constants.RING_SET * launch.sets
    direct = 1.0 if launch.cooperative else constants.DIRECT
    exchanged = direct * constants.RING_UNIT + constants.RING_TILE * launch.lines + sets
    busy = (max(applied, exchanged) + again * constants.RING_AGAIN * block) * (constants.RING_PARTIAL if again else 1.0)
    exchange = direct * constants.RING_EXCHANGE
    return _total(launch, busy, blocks * block / 2, exchange, exchange)


def _total(launch: RingLaunch, busy: float, load: float, first: float, exchange: float) -> float:
    """Return the time of all rounds. The blocks of a unit take the time `busy`, and `load` of it to load them.

    An exchange takes the time `exchange`, and overlaps with the next unit as far as slots of the ring are free: a block holds its slot
    during the exchange, too. The first exchange adds the time `first`, because nothing overlaps with it.
    """
    if launch.rounds == 1:
        return constants.LAUNCH + busy + constants.RING_EXCHANGE * (1.0 if launch.cooperative else constants.DIRECT)
    held = min(launch.blocks, launch.keep)
    limit = exchange * held / max(launch.slots - held, 1)  # the time of a unit if slots are the limit
    added = min(max(limit - busy, 0.0), exchange)
    return constants.LAUNCH + launch.rounds * (busy + added) + max(first + load - added, 0.0)


def _folded_time(problem: NormProblem, launch: RingLaunch, device: Device) -> float:
    """Return the modelled time of a folded launch: the memory limits all members together, arithmetic the busiest one."""
    rounds, blocks, elements = launch.rounds, launch.blocks, launch.block_i * launch.block_j
    own = launch.differ == "element" and problem.affine and not launch.kept  # each element loads parameters of its own
    activation = problem.spec.activation
    factors = (
        (constants.RUN_GELU[problem.dtype.itemsize], "gelu" in activation),
        (constants.RUN_ACTIVATION, activation != "" and "gelu" not in activation),
        (constants.RUN_UNALIGNED, launch.phases > 1),
        (constants.RUN_ONE_BY_ONE, launch.phases > 1 and own),
    )
    compute = constants.RUN_ANY_BLOCK + constants.RUN_COMPUTE * elements / 8192 * product_of(factors)
    load = constants.RUN_BLOCK * elements * problem.dtype.itemsize / SLOT * max(0.5 + 0.5 * launch.programs / device.sms, 0.6)
    if own:
        load *= constants.RUN_FROM_L2 if rounds > 1 else constants.RUN_FROM_L2_ONCE
    again = max(blocks - launch.keep, 0)
    average = launch.tiles * launch.walk.reps / launch.block_i / launch.members  # blocks of a member
    reload = load * (constants.RUN_AGAIN if rounds > 1 else 1.0)  # with several rounds, the L2 cache and the next unit hide a part of it
    direct = 1.0 if launch.cooperative else constants.DIRECT
    load *= 1 + direct * constants.RUN_CROWDED * min(blocks, launch.keep) / launch.slots
    combine = launch.tiles * (direct * constants.RUN_COMBINE + constants.RUN_COMBINE_MEMBER * launch.members)
    busy = max(constants.RUN_UNIT + average * load + again * reload, constants.RUN_APPLY + blocks * compute)
    first = constants.RUN_FIRST if launch.cooperative else constants.RUN_FIRST_DIRECT
    exchange = direct * constants.RUN_EXCHANGE
    parameters = constants.RUN_PARAMETERS * parameter_bytes(problem)
    return _total(launch, max(busy, combine), average * load / 2, first, exchange) + parameters
