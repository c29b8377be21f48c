"""How the team family cuts a problem: which columns form a unit of work, and how many programs share its rows.

A small model of the GPU gives the time of every candidate. The schedule is the fastest one, and its time is the cost.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from math import ceil

from onepass.backends.gpu.cost import FULL_RATE_WIDTH, LAUNCH_US, copy_rate, round_time, traffic_time
from onepass.backends.gpu.launches import fastest, power_of_two, team_programs, warps_for
from onepass.backends.gpu.walk import Walk, walk
from onepass.core.device import Device
from onepass.core.problem import NormProblem

from .launch import TeamLaunch

BLOCK = 8192  # elements of a block, where a program reads its rows block by block

WIDEST = 256  # columns of a block; for longer runs the row walk is as good

THREADS = 512  # of a program that reads its rows again
RESIDENT_THREADS = 256  # of a program that keeps its rows: 255 registers per thread. Fewer threads leave more registers for the rows.

RESIDENT_WIDTH = 64  # columns of a block that is kept. H200, 2026-11-15: 2x320x64x64 takes 14.8 us with 64, 19.3 us with 128

# H200, 2026-11-16, 32 of 34 shapes: a team that reads rows again takes this many times as long as three launches, whose
# many small programs hide latencies better.
REREAD = 2.0

FROM_L2 = 0.35  # the time of a read from the L2 cache, as a fraction of a read from memory; assumed, not measured

SHARE_OF_L2 = 0.4  # of the L2 cache that x may fill and still be found there, because y passes through it too


def team_unsupported(problem: NormProblem, device: Device) -> list[str]:
    if device.no_team:
        return [device.no_team]
    w = walk(problem)
    if w.reps == 1:
        return ["a set is one run: there is nothing to share"]
    if w.run > WIDEST:
        return [f"a run of {w.run} is longer than the {WIDEST} columns of a block"]
    return []


@lru_cache(256)  # the planner needs it for the cost and for the plan
def team_launches(problem: NormProblem, device: Device, invariant: bool) -> tuple[TeamLaunch, ...]:
    return fastest(problem, device, invariant, _candidates, _time)


def team_cost(problem: NormProblem, device: Device, invariant: bool) -> float:
    if device.kind == "cpu":  # Triton's interpreter runs only where `force` asks for it
        return float("inf")
    (launch,) = team_launches(problem, device, invariant)
    if invariant:  # the choice must not depend on the size of the batch
        return (_reads(problem, device, replace(launch, programs=launch.members)) + 1) / 2 / _rate(problem, launch) / 1e3
    return _time(problem, launch, device)


def _candidates(problem: NormProblem, w: Walk, device: Device) -> Iterator[TeamLaunch]:
    """Blocks of several widths, by teams of several sizes. Rows stay in registers if they fit."""
    most = 1 if device.kind == "cpu" else device.sms  # the interpreter runs programs one after another
    sizes = sorted({most // teams for teams in range(1, most + 1)})
    for sets in _sets_of_blocks(problem, w):
        threads, per_thread = (RESIDENT_THREADS, 128) if device.prefetches else (THREADS, 32)  # AMD's compiler spills with more
        if sets * w.run * problem.dtype.itemsize % 16 or problem.dtype.itemsize > 2:  # more loads, whose addresses take registers
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
    """How many sets a block may have.

    For each width, the most with which every block begins at a multiple of 16 bytes, and the most of these that divide
    the sets evenly. As many as fit if there are none.
    """
    found = set()
    for block_j in (32, 64, 128, 256):
        most = min(max(block_j // w.run, 1), w.sets)
        aligned = [sets for sets in range(1, most + 1) if sets * w.run * problem.dtype.itemsize % 16 == 0]
        even = [sets for sets in aligned if w.sets % sets == 0]
        found |= {*aligned[-1:], *even[-1:]} or {most}
    return found


def _time(problem: NormProblem, launch: TeamLaunch, device: Device) -> float:
    """Microseconds."""
    rounds = ceil(launch.units / launch.teams)
    traffic = (_reads(problem, device, launch) + 1) / 2
    elements = launch.rows * launch.sets * launch.walk.run  # of a unit, for a member
    moved = traffic_time(problem, launch, device, rounds * elements)
    return LAUNCH_US + round_time(launch, rounds, power_of_two(launch.sets)) + moved * traffic / _rate(problem, launch)


def _reads(problem: NormProblem, device: Device, launch: TeamLaunch) -> float:
    """How often x is read, counted in reads from memory."""
    if launch.resident:
        return 1.0
    w = launch.walk
    in_flight = min(launch.teams, launch.units) * launch.sets * w.run * w.reps * problem.dtype.itemsize  # bytes
    found = min(SHARE_OF_L2 * device.l2 / in_flight, 1.0)
    return 2.0 - found * (1.0 - FROM_L2)


def _rate(problem: NormProblem, launch: TeamLaunch) -> float:
    """The rate of copying chunks as wide as a block, as a fraction of the full rate."""
    sets = launch.sets if launch.walk.dense else 1
    contiguous = sets == launch.walk.sets
    rate = copy_rate(FULL_RATE_WIDTH if contiguous else sets * launch.walk.run * problem.dtype.itemsize)
    return rate if launch.resident else rate / REREAD
