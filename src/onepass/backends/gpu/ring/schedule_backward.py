"""How the ring family cuts a backward into blocks in shared memory, and what that costs.

Units, tiles and blocks are those of the forward (ring/schedule.py). A slot of the ring holds a block of x and one of dy, so a ring holds
half as many elements as in the forward. launch_backward.py has the kinds of launches.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import product
from math import ceil, prod

from onepass.backends.gpu import constants
from onepass.backends.gpu.cost import unaligned_cost
from onepass.backends.gpu.launches import fastest, team_programs
from onepass.backends.gpu.partials.gradient import MOST_MEMORY, SMALL
from onepass.backends.gpu.partials.parameters import channel_of, maps, parameter_axes, varying_axes
from onepass.backends.gpu.partials.sums import TOO_MANY_AXES, Axis, Step, parameter_sums
from onepass.backends.gpu.walk import AXIS_O, AXIS_R, AXIS_T, Walk, walk
from onepass.core.device import Device
from onepass.core.problem import NormProblem

from .launch_backward import BLOCKS, COLUMNS, ELEMENTS, LINES_OF_COLUMN, SET, RingBackwardLaunch
from .schedule import ALIGNMENT, LEAST_USED, MOST_MASKED, MOST_SETS, RESERVED, WARPS, cuts, even, folded, sets_per_block

SLOTS = 16384, 8192  # bytes of a block: there is one of x and one of dy in each slot
SLOTS_OF_SETS = 16384, 8192, 4096  # the same for SET, which may have few rows

LEAST_SLOTS = 4

OUTERS = 1, 2, 4, 8  # values of o in a unit of long runs: one exchange serves them all

LARGEST_OF_ELEMENTS, MOST_ELEMENTS = 4096, 8192  # ELEMENTS: elements of a block, and of a run for each member: registers hold their sums

SHORTEST = 16384  # elements of the shortest run: `row` keeps shorter ones in registers


def ring_backward_unsupported(problem: NormProblem, device: Device) -> list[str]:
    if device.no_team or device.no_ring:
        return [device.no_team or device.no_ring]
    w, size = walk(problem), problem.dtype.itemsize
    reasons = []
    if w.reps == 1:
        found = folded(problem, w)
        if w.run < SHORTEST:
            return ["a set is one short run, which `row` keeps in registers"]
        if found is None or w.run % found.run:
            return ["a set is one run, which cannot be read as rows of 16 elements or more that begin where a channel begins"]
        w = found
    if problem.addends:
        reasons.append("it cannot add the gradient of a sum: blocks go straight to shared memory")
    length = w.folded or w.reps * w.x[1]
    if not w.dense or (w.outer > 1 and (w.x[0] != length or w.y[0] != (w.folded or w.reps * w.y[1]))):
        reasons.append("one descriptor cannot describe x: its rows are not evenly spaced, or its columns not contiguous")
    if min(w.x[1], w.y[1]) < w.columns:
        reasons.append("one descriptor cannot describe x: its rows overlap")
    if any(steps[1] * size % ALIGNMENT for steps in (w.x, w.y)):
        reasons.append(f"rows are {w.x[1] * size} bytes apart, and copies by descriptor begin at multiples of {ALIGNMENT}")
    if max(w.outer * w.reps, w.total) >= 2**31 or w.columns >= 2**20:
        reasons.append("there are more rows or columns than a descriptor can count")
    if parameter_axes(problem, w) & AXIS_R:
        reasons.append("parameters differ from row to row: too many sums for one program")
    if reasons:
        return reasons
    if not any(candidates(problem, w, device)):
        if w.run > 1 and w.run * size % ALIGNMENT and not parameter_axes(problem, w) & AXIS_T:
            return [f"sets begin {w.run * size} bytes apart, and copies by descriptor begin at multiples of {ALIGNMENT}"]
        return ["a unit of x and dy, or the sums of its parameters, are too large for the shared memory of one team"]
    return [] if len(ring_backward_launches(problem, device, False)) == 1 + len(list(maps(problem, w))) else [TOO_MANY_AXES]


@lru_cache(256)  # the planner needs the launches for the cost, and again for the plan
def ring_backward_launches(problem: NormProblem, device: Device, invariant: bool) -> tuple[Step, ...]:
    (main,) = fastest(problem, device, invariant, _light_candidates, modelled_time)
    return with_sums(problem, main, device)


def _light_candidates(problem: NormProblem, w: Walk, device: Device) -> list[RingBackwardLaunch]:
    """Return the candidates that need little memory besides the gradients, or all if there are none."""
    found = list(candidates(problem, w, device))
    return [launch for launch in found if not _heavy(problem, launch)] or found


def _heavy(problem: NormProblem, launch: RingBackwardLaunch) -> bool:
    """Return whether cells, and the sums that members exchange, take much memory, for a large x."""
    w, operands = launch.walk, (problem.weight, problem.bias, problem.scale, problem.shift)
    size = w.total * (w.folded or w.reps * w.run) * problem.dtype.itemsize
    cells = prod(size for _, size in _axes(launch)) * sum(operand is not None for operand in operands)
    return size > SMALL and 4 * (cells + launch.partial_sums) > MOST_MEMORY * size


def ring_backward_cost(problem: NormProblem, device: Device, invariant: bool) -> float:
    if invariant:  # then the choice of a family must not depend on the batch size
        return 1 / 1e3
    main = ring_backward_launches(problem, device, invariant)[0]
    assert isinstance(main, RingBackwardLaunch)
    scale = constants.BACK_SCALE_ELEMENTS if main.kind == ELEMENTS else constants.BACK_SCALE
    return scale * modelled_time(problem, main, device) + unaligned_cost(problem)


def with_sums(problem: NormProblem, main: RingBackwardLaunch, device: Device) -> tuple[Step, ...]:
    """Return the launch, and the launches that add up its cells."""
    w = main.walk
    if main.kind == BLOCKS:  # a cell is a block, so the maps count blocks
        blocks = max(main.channel_rows // main.block_i, 1)
        w = replace(w, param=replace(w.param, channel_run=blocks), modulation=replace(w.modulation, channel_run=blocks))
    return main, *parameter_sums(problem, _axes(main), w, 1, device)


def _axes(launch: RingBackwardLaunch) -> Sequence[Axis]:
    """Return the axes of the launch's cells."""
    w = launch.walk
    axes: dict[str, Sequence[Axis]] = {
        COLUMNS: [("o", w.outer), ("part", launch.members), ("s", w.sets), ("t", w.run)],
        BLOCKS: [("o", w.outer), ("t", ceil(w.reps / launch.block_i))],
        SET: [("o", w.outer), ("part", launch.members), ("s", w.sets)],
        ELEMENTS: [("part", launch.teams), ("t", w.folded)],
    }
    return axes[launch.kind]


def candidates(problem: NormProblem, w: Walk, device: Device) -> Iterator[RingBackwardLaunch]:
    """Yield launches with blocks of several sizes and teams of several sizes, in which a unit fits into the ring."""
    if w.reps == 1:
        w = folded(problem, w) or w
    if w.folded:
        yield from _of_runs(problem, w, device)
        return
    size = problem.dtype.itemsize
    yield from _of_sets(problem, w, device)
    for (block_j, tiles, sets), slot in product((*cuts(w, size), *_more_cuts(w, size)), SLOTS):
        if sets == 1 and w.run > 1:
            continue
        block_i = slot // (block_j * size)
        slots = min((device.shared - RESERVED - 4 * 2 * tiles * LINES_OF_COLUMN * block_j) // (2 * slot), 32)
        ragged = w.reps % block_i or sets * w.run % (tiles * block_j) or w.sets % sets
        rows, spans = ceil(w.reps / block_i), ceil(w.sets / sets)
        if slots < LEAST_SLOTS or (block_i * block_j > MOST_MASKED and ragged):
            continue
        for members in sorted({even(rows, device.sms // teams) for teams in range(1, device.sms + 1)}):
            if tiles * ceil(rows / members) <= slots:
                yield RingBackwardLaunch(
                    walk=w,
                    programs=team_programs(w.outer * spans, members, device),
                    warps=WARPS,
                    block_i=block_i,
                    block_j=block_j,
                    kind=COLUMNS,
                    members=members,
                    spans=spans,
                    tiles=tiles,
                    sets=sets,
                    sets_per_block=sets_per_block(w, block_j, tiles, sets),
                    slots=slots,
                )


def _more_cuts(w: Walk, size: int) -> Iterator[tuple[int, int, int]]:
    """Yield cuts into units of one tile, which only a backward needs, because x and dy fill the ring.

    A unit is as many whole sets as fit, if the next unit then begins at a multiple of 16 bytes.
    """
    if w.run == 1:
        return
    for block_j in (128 // size, 256 // size):
        found = [sets for sets in range(1, min(block_j // w.run, w.sets - 1, MOST_SETS) + 1) if sets * w.run * size % ALIGNMENT == 0]
        if found and LEAST_USED * block_j <= found[-1] * w.run < block_j:
            yield block_j, 1, found[-1]


def _of_sets(problem: NormProblem, w: Walk, device: Device) -> Iterator[RingBackwardLaunch]:
    """Yield launches whose units are one set each, of elements that share their parameters."""
    size = problem.dtype.itemsize
    if w.run == 1 or w.run * size % ALIGNMENT or parameter_axes(problem, w) & AXIS_T:
        return
    widths = [width for width in (32, 64, 128, 256) if min(128, w.columns * size) <= width * size <= (256 if w.reps > 8 else 512)]
    for block_j, slot in product(widths, SLOTS_OF_SETS):
        block_i, across = slot // (block_j * size), ceil(w.run / block_j)
        blocks = ceil(w.reps / block_i) * across
        slots = min((device.shared - RESERVED - 4 * 4 * block_j) // (2 * slot), 32)
        ragged = w.reps % block_i or w.run % block_j
        if slots < LEAST_SLOTS or (block_i * block_j > MOST_MASKED and ragged):
            continue
        for members in sorted({even(blocks, device.sms // teams) for teams in range(1, device.sms + 1)}):
            if ceil(blocks / members) <= slots:
                yield RingBackwardLaunch(
                    walk=w,
                    programs=team_programs(w.total, members, device),
                    warps=WARPS,
                    block_i=block_i,
                    block_j=block_j,
                    kind=SET,
                    members=members,
                    spans=w.sets,
                    tiles=1,
                    across=across,
                    sets=1,
                    sets_per_block=2,
                    slots=slots,
                )


def _of_runs(problem: NormProblem, w: Walk, device: Device) -> Iterator[RingBackwardLaunch]:
    """Yield launches whose units are one or more long runs."""
    flat = walk(problem)
    size, channel, (axes, modulation) = problem.dtype.itemsize, channel_of(problem, flat), varying_axes(problem, flat)
    elements = channel == 1
    if elements and (axes & AXIS_O or modulation):
        return  # a member cannot keep the sums of each element
    each = sum(dtype.itemsize for dtype in (problem.weight, problem.bias) if dtype) if elements else 0  # bytes for each element
    for slot in SLOTS:
        block_i = slot // (w.run * size)
        rows, channel_rows = ceil(w.reps / block_i), 0 if elements else channel // w.run
        if not elements and channel_rows % block_i and channel_rows != w.reps:
            continue
        for members, tiles in product({even(rows, device.sms // teams) for teams in range(1, device.sms + 1)}, OUTERS):
            blocks = ceil(rows / members)
            reserved = RESERVED + 4 * 4 * tiles * w.run + blocks * block_i * w.run * each
            slots = min((device.shared - reserved) // (2 * slot), 32)
            ragged = w.reps % block_i or w.outer % tiles
            if slots < LEAST_SLOTS or tiles * blocks > slots or (ragged and block_i * w.run > MOST_MASKED):
                continue
            if elements and (block_i * w.run > LARGEST_OF_ELEMENTS or blocks * block_i * w.run > MOST_ELEMENTS):
                continue
            yield RingBackwardLaunch(
                walk=w,
                programs=team_programs(ceil(w.outer / tiles), members, device),
                warps=WARPS,
                block_i=block_i,
                block_j=w.run,
                kind=ELEMENTS if elements else BLOCKS,
                members=members,
                spans=1,
                tiles=tiles,
                sets=tiles,
                sets_per_block=2,
                slots=slots,
                channel_rows=channel_rows,
            )


def modelled_time(problem: NormProblem, launch: RingBackwardLaunch, device: Device) -> float:
    """Return the modelled time of a launch in microseconds. It includes the time to add up the launch's cells.

    A team works on one unit after the other. A unit takes the time for its blocks, and some more for its sums.
    """
    if launch.kind == SET:
        return _time_of_sets(problem, launch, device)
    w, kind = launch.walk, launch.kind
    rounds = ceil(launch.units / launch.teams)
    blocks = launch.tiles * launch.blocks_of_tile  # of a member, in a unit
    elements = launch.block_i * launch.block_j
    size = elements * problem.dtype.itemsize / 16384
    arithmetic = _arithmetic(problem, launch)
    crowded = constants.BACK_CROWDED[kind] * max(blocks / launch.slots - 0.5, 0.0)
    block = size * (constants.BACK_BYTES[kind] + crowded) + constants.BACK_BLOCK[kind] + arithmetic
    unit, last = constants.BACK_UNIT[kind], 0.0
    if launch.by_column:
        unit += constants.BACK_COLUMNS * launch.members * launch.block_j / 1024
    elif kind == COLUMNS:
        unit = constants.BACK_SET * launch.sets + constants.BACK_MEMBER * launch.members
        unit += constants.BACK_TILE * launch.tiles if launch.tiles > 1 else 0.0
        unit += constants.BACK_MANY_SETS if launch.sets_per_block > 8 else 0.0
        block += constants.BACK_WIDE * size if launch.block_j * problem.dtype.itemsize > 128 else 0.0
    else:
        unit += constants.BACK_RUN * launch.tiles
    if kind == ELEMENTS:
        sums = 2 if problem.spec.centered else 1
        last = constants.BACK_CELLS * sums * launch.teams * w.folded / 1e6
        block += constants.BACK_MANY_SUMS * size * (sums == 2 and launch.blocks_of_tile * elements > MOST_ELEMENTS // 2)
    alone = constants.BACK_ALONE * (launch.members == 1)
    return constants.BACK_FIRST[kind] - alone + rounds * (blocks * block + unit) + last


def _time_of_sets(problem: NormProblem, launch: RingBackwardLaunch, device: Device) -> float:
    """Return the modelled time of a launch of the kind SET. The memory limits all members together, the rest the busiest one."""
    w, kind, blocks = launch.walk, launch.kind, launch.blocks_of_tile
    size = launch.block_i * launch.block_j * problem.dtype.itemsize / 16384
    crowded = constants.BACK_CROWDED[kind] * max(blocks / launch.slots - 0.5, 0.0)
    loaded = w.reps / launch.block_i * launch.across / launch.members  # blocks of a member, without the rows that do not exist
    memory = loaded * size * (constants.BACK_BYTES[kind] + crowded) * max(0.5 + 0.5 * launch.programs / device.sms, 0.6)
    unit = memory + blocks * (constants.BACK_BLOCK[kind] + _arithmetic(problem, launch)) + constants.BACK_UNIT[kind]
    alone = launch.members == 1
    least = constants.BACK_EXCHANGE * (constants.DIRECT if alone else 1.0)
    return constants.BACK_FIRST[kind] - constants.BACK_ALONE * alone + ceil(launch.units / launch.teams) * max(unit, least)


def _arithmetic(problem: NormProblem, launch: RingBackwardLaunch) -> float:
    """Return the time that a block's activation takes."""
    activation, kind = problem.spec.activation, launch.kind
    each = constants.BACK_SILU[kind] if activation == "silu" else constants.BACK_GELU[kind] if "gelu" in activation else 0.0
    return each * launch.block_i * launch.block_j / 8192
