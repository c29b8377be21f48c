"""How the team family cuts a problem: which columns form a unit of work, and how many programs share its rows.

Memory is x[o, r, s, t]. A set is the elements of one o and s: `reps` runs of `run` contiguous elements. A unit of work is
one o and a block of columns (s, t), which holds whole sets. A team of programs, its members, shares the rows r of a unit.

A small model of the GPU gives the time of every candidate. The fastest candidate is the schedule. Its cost is that time,
corrected by factors that are fitted to sweeps.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache, partial
from math import ceil

from onepass.backends.gpu import constants
from onepass.backends.gpu.cost import FULL_RATE_WIDTH, copy_rate, product_of, share_in_l2, traffic_time
from onepass.backends.gpu.launches import fastest, power_of_two, team_programs, warps_for
from onepass.backends.gpu.walk import Walk, walk
from onepass.core.device import Device
from onepass.core.problem import NormProblem

from .launch import TeamLaunch

BLOCK = 8192  # elements of a block, if a program reads its rows twice, block by block

WIDEST = 256  # the most columns of a block; for longer runs, the family `row_reread` is as good

THREADS = 512  # threads of a program that reads its rows twice
RESIDENT_THREADS = 256  # threads of a program that keeps its rows in registers. With so few, each may have 255 registers

# The most columns of a block that stays in registers. On an H200, 2026-11-15, 2x320x64x64 takes 14.8 us with 64 columns and
# 19.3 us with 128.
RESIDENT_WIDTH = 64


def team_unsupported(problem: NormProblem, device: Device) -> list[str]:
    if device.no_team:
        return [device.no_team]
    w = walk(problem)
    if w.reps == 1:
        return ["a set is one run: there is nothing to share"]
    if w.run > WIDEST:
        return [f"a run of {w.run} is longer than the {WIDEST} columns of a block"]
    return []


@lru_cache(256)  # the planner needs the launches for the cost, and again for the plan
def team_launches(problem: NormProblem, device: Device, invariant: bool) -> tuple[TeamLaunch, ...]:
    return fastest(problem, device, invariant, candidates, partial(modelled_time, merge=constants.MERGE))


def team_cost(problem: NormProblem, device: Device, invariant: bool) -> float:
    if device.kind == "cpu":  # Triton's interpreter runs only if `onepass.force` asks for it
        return float("inf")
    (launch,) = team_launches(problem, device, invariant)
    if invariant:  # then the choice of a family must not depend on the batch size
        return (_reads(problem, device, replace(launch, programs=launch.members)) + 1) / 2 / _rate(problem, launch) / 1e3
    # The candidates are compared with MERGE, also where each column is a set: MERGE_COLUMNS was fitted to these launches.
    time = modelled_time(problem, launch, device, constants.MERGE if launch.walk.run > 1 else constants.MERGE_COLUMNS)
    if launch.resident:
        return time
    size = problem.dtype.itemsize
    rate = product_of(
        (
            (constants.TEAM_REREAD_GELU, "gelu" in problem.spec.activation),
            (constants.TEAM_REREAD_ODD[size], not problem.aligned),
        )
    )
    return constants.TEAM_START + constants.TEAM_SCALE * time / rate


def candidates(problem: NormProblem, w: Walk, device: Device) -> Iterator[TeamLaunch]:
    """Yield launches with blocks of several widths and teams of several sizes. Rows stay in registers if they fit."""
    most = 1 if device.kind == "cpu" else device.sms  # interpreted programs run one by one
    sizes = sorted({most // teams for teams in range(1, most + 1)})
    for sets in _sets_of_blocks(problem, w):
        threads, per_thread = (RESIDENT_THREADS, 128) if device.prefetches else (THREADS, 32)  # AMD's compiler spills beyond 32
        more_loads = sets * w.run * problem.dtype.itemsize % 16 or problem.dtype.itemsize > 2  # whose addresses take registers
        if more_loads or "gelu" in problem.spec.activation:  # gelu takes many registers, too
            per_thread //= 2
        block_j = power_of_two(sets * w.run)
        for size in sizes:
            rows = ceil(w.reps / size)
            resident = power_of_two(rows) * block_j <= threads * per_thread and block_j <= max(RESIDENT_WIDTH, power_of_two(w.run))
            block_i = power_of_two(rows) if resident else max(BLOCK // block_j, 1)
            rows = rows if resident else ceil(rows / block_i) * block_i
            nbytes = block_i * block_j * problem.dtype.itemsize * (2 if problem.addends else 1)
            members, blocks = ceil(w.reps / rows), ceil(w.sets / sets)
            yield TeamLaunch(
                walk=w,
                programs=team_programs(w.outer * blocks, members, device),
                warps=warps_for(min(block_i * block_j // 8, threads if resident else THREADS), device),
                block_i=block_i,
                block_j=block_j,
                members=members,
                rows=rows,
                blocks=blocks,
                sets=sets,
                block_run=w.run if power_of_two(w.run) == w.run and power_of_two(sets) == sets else 0,
                stages=1 if resident or not device.prefetches else max(min(4, device.shared // nbytes), 1),
                resident=resident,
            )


def _sets_of_blocks(problem: NormProblem, w: Walk) -> set[int]:
    """Return how many sets a block of a candidate may have: one or two numbers for each of four block widths.

    One is the largest number with which every block begins at a multiple of 16 bytes. The other is the largest such number
    that divides w.sets, so that all blocks are full. If there is none, it is as many sets as fit.
    """
    found = set()
    for block_j in (32, 64, 128, 256):
        most = min(max(block_j // w.run, 1), w.sets)
        aligned = [sets for sets in range(1, most + 1) if sets * w.run * problem.dtype.itemsize % 16 == 0]
        even = [sets for sets in aligned if w.sets % sets == 0]
        found |= {*aligned[-1:], *even[-1:]} or {most}
    return found


def modelled_time(problem: NormProblem, launch: TeamLaunch, device: Device, merge: float) -> float:
    """Return the modelled time of a launch, in microseconds. `merge` is the time to merge 128 parts."""
    rounds = ceil(launch.units / launch.teams)
    traffic = (_reads(problem, device, launch) + 1) / 2
    elements = launch.rows * launch.sets * launch.walk.run  # elements of a unit that a member has
    moved = traffic_time(problem, launch, device, rounds * elements, constants.BANDWIDTH * constants.SPEED["team"])
    return constants.START + constants.LAUNCH + _waits(launch, rounds, merge) + moved * traffic / _rate(problem, launch)


def _waits(launch: TeamLaunch, rounds: int, merge: float) -> float:
    """Return how long a team waits, in microseconds: for the moments of its members, and for the loads of each further unit."""
    if launch.members == 1:
        return (rounds - 1) * constants.REFILL
    parts = power_of_two(launch.members) * power_of_two(launch.sets)
    return (rounds - 1) * constants.STALL + constants.BARRIER + ceil(parts / 128) * merge


def _reads(problem: NormProblem, device: Device, launch: TeamLaunch) -> float:
    """Return how often x is read. A read from the L2 cache counts as TEAM_FROM_L2 of a read from memory."""
    if launch.resident:
        return 1.0
    w = launch.walk
    in_flight = min(launch.teams, launch.units) * launch.sets * w.run * w.reps * problem.dtype.itemsize  # bytes
    found = share_in_l2(in_flight, device)
    return 2.0 - found * (1.0 - constants.TEAM_FROM_L2)


def _rate(problem: NormProblem, launch: TeamLaunch) -> float:
    """Return the rate of copying rows as wide as a block, as a fraction of the full rate.

    If rows are read twice, it is divided by TEAM_REREAD.
    """
    sets = launch.sets if launch.walk.dense else 1
    contiguous = sets == launch.walk.sets
    rate = copy_rate(FULL_RATE_WIDTH if contiguous else sets * launch.walk.run * problem.dtype.itemsize)
    if not problem.aligned and problem.dtype.itemsize == 2:
        rate *= constants.TEAM_ODD
    return rate if launch.resident else rate / constants.TEAM_REREAD
