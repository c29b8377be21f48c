"""How teams cut a problem: which columns make a unit, and how many programs share its rows. Pure numbers, as in `tiling`.

Of all ways to cut, the one that takes the least time by a small model of the GPU; `team_cost` is that time.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from itertools import pairwise
from math import ceil

from onepass.backends.gpu.launches import Pass, power_of_two, programs_of, quickest, warps_for
from onepass.backends.gpu.walk import TEAM, Walk, walk
from onepass.core.device import Device
from onepass.core.problem import NormProblem

LOOPED = 8192  # of a block that is one of many


WIDEST = 256  # columns of a block; sets of longer runs are as well read along them


THREADS = 512  # of a program that reads again


KEEPING = 256  # of one that keeps its rows: 255 registers for each thread, of which the fewer threads the fewer are not of the rows


KEPT_WIDTH = 64  # columns of a block that is kept. H200, 2026-11-15: 2x320x64x64 takes 14.8 us by 64, 19.3 by 128


# H200, 2026-11-15: a copy by chunks of so many bytes of each row, in TB/s; by wider ones it is hardly faster (4.00 by 256).
RATES = {0: 0.0, 32: 2.5, 64: 3.0, 128: 3.71}


# Microseconds. H200, 2026-11-16: barrier and merge of four members take 1.8 (2x1280x32x32 against 8x1280x16x16, by `alone`).
LAUNCH, BARRIER = 3.0, 2.0


MERGE = 0.7  # for 128 parts, which are read at a time


REFILL = 3.0  # until the loads of a next unit arrive, for which nothing was asked while the last one was stored; assumed


STALL = 8.0  # the same, for members that wait for the last of them. H200, 2026-11-15: in two probes, kept in registers and read again


LOOP = 2.0  # against three launches of many small programs, which hide their latencies better. H200, 2026-11-16: 32 of 34 shapes


FROM_L2 = 0.35  # of the time that a read from memory takes; assumed


SHARE_OF_L2 = 0.4  # that units in flight may fill with x and still be found there: y passes through it too


FEW = 1.1  # how much faster than its share of memory's rate one multiprocessor reads, where others are idle


def team_unsupported(problem: NormProblem, device: Device) -> list[str]:
    if device.no_team:
        return [device.no_team]
    w = walk(problem)
    if w.reps == 1:
        return ["a set is one run: there is nothing to share"]
    if w.run > WIDEST:
        return [f"a run of {w.run} is longer than the {WIDEST} columns that a block has"]
    return []


@lru_cache(256)  # asked for its cost, and for itself
def team_launches(problem: NormProblem, device: Device, invariant: bool) -> tuple[Pass, ...]:
    return quickest(problem, device, invariant, _cuts, _time)


def team_cost(problem: NormProblem, device: Device, invariant: bool) -> float:
    if device.kind == "cpu":  # Triton's interpreter, for tests: never but where it is pinned
        return float("inf")
    (step,) = team_launches(problem, device, invariant)
    if invariant:  # the choice must not depend on how much there is
        return (_reads(problem, device, replace(step, programs=step.parts_r)) + 1) / 2 / _rate(problem, step) / 1e3
    return _time(problem, step, device)


def _cuts(problem: NormProblem, w: Walk, device: Device) -> Iterator[Pass]:
    """Blocks of several widths, by teams of several sizes; kept in registers where a member's rows fit."""
    most = 1 if device.kind == "cpu" else device.sms  # the interpreter runs programs one after another
    sizes = sorted({most // teams for teams in range(1, most + 1)})
    for sets in _blocks(problem, w):
        # Threads, and lanes of each; AMD's compiler spills with more.
        keeping, kept = (KEEPING, 128) if device.prefetches else (THREADS, 32)
        if sets * w.run * problem.dtype.itemsize % 16 or problem.dtype.itemsize > 2:  # more loads, and as many addresses
            kept //= 2
        block_j = power_of_two(sets * w.run)
        for members in sizes:
            rows = ceil(w.reps / members)
            resident = power_of_two(rows) * block_j <= keeping * kept and block_j <= max(KEPT_WIDTH, power_of_two(w.run))
            block_i = power_of_two(rows) if resident else max(LOOPED // block_j, 1)
            chunk_r = rows if resident else ceil(rows / block_i) * block_i
            warps = warps_for(min(block_i * block_j // 8, keeping if resident else THREADS), device)
            size = block_i * block_j * problem.dtype.itemsize * (2 if problem.addends else 1)
            stages = 1 if resident or not device.prefetches else max(min(4, device.shared // size), 1)
            whole = w.run if power_of_two(w.run) == w.run and power_of_two(sets) == sets else 0
            parts, blocks = ceil(w.reps / chunk_r), ceil(w.sets / sets)
            yield Pass(
                *(TEAM, w, programs_of(w.outer * blocks, parts, device), warps, block_i, block_j, whole, 0, resident, True, True),
                *(parts, 1, chunk_r, blocks, stages),
                sets=sets,
            )


def _blocks(problem: NormProblem, w: Walk) -> set[int]:
    """How many sets a block may have: what fills a power of two of columns, and less, so that a block begins where wide loads do."""
    found = set()
    for block_j in (32, 64, 128, 256):
        most = min(max(block_j // w.run, 1), w.sets)
        aligned = [sets for sets in range(1, most + 1) if sets * w.run * problem.dtype.itemsize % 16 == 0]
        even = [sets for sets in aligned if w.sets % sets == 0]
        found |= {*aligned[-1:], *even[-1:]} or {most}
    return found


def _time(problem: NormProblem, step: Pass, device: Device) -> float:
    """Microseconds, in the scale of the other families' costs."""
    rounds = ceil(step.units / step.teams)
    traffic = (_reads(problem, device, step) + 1) / 2
    return LAUNCH + waiting(step, rounds) + moving(problem, step, device, rounds) * traffic / _rate(problem, step)


def waiting(step: Pass, rounds: int) -> float:
    """For others, and from one round to the next."""
    waits = (rounds - 1) * (STALL if step.parts_r > 1 else REFILL)
    if step.parts_r > 1:
        waits += BARRIER + ceil(power_of_two(step.parts_r) * power_of_two(step.sets) / 128) * MERGE
    return waits


def moving(problem: NormProblem, step: Pass, device: Device, rounds: int) -> float:
    """What must be read and written, at the pace of the busiest multiprocessor."""
    w = step.walk
    busiest = rounds * step.chunk_r * step.sets * w.run * device.sms / (w.total * w.reps * w.run)  # over a fair share
    idle = max(device.sms / step.programs, 1.0)
    element = 2 * problem.dtype.itemsize + sum(dtype.itemsize for dtype in problem.addends or ())
    return w.total * w.reps * w.run * element / 3e6 * max(busiest / min(idle, FEW), 1.0)


def _reads(problem: NormProblem, device: Device, step: Pass) -> float:
    """How often x is read, in reads from memory."""
    if step.resident:
        return 1.0
    w = step.walk
    flying = min(step.teams, step.units) * step.sets * w.run * w.reps * problem.dtype.itemsize
    found = min(SHARE_OF_L2 * device.l2 / flying, 1.0)
    return 2.0 - found * (1.0 - FROM_L2)


def _rate(problem: NormProblem, step: Pass) -> float:
    """Of copying chunks as wide as a block."""
    sets = step.sets if step.walk.dense else 1
    rate = rate_of(max(RATES) if sets == step.walk.sets else sets * step.walk.run * problem.dtype.itemsize)  # all sets: one after another
    return rate if step.resident else rate / LOOP


def rate_of(width: int) -> float:
    """Of copying chunks of so many bytes, against those of a line of memory."""
    width = min(width, max(RATES))
    (low, slow), (high, fast) = next(pair for pair in pairwise(RATES.items()) if width <= pair[1][0])
    return (slow + (fast - slow) * (width - low) / (high - low)) / max(RATES.values())
