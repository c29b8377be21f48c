"""How sets are cut that programs take one at a time: how many threads share one, and how many programs. Pure numbers, as in `tiling`."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from math import ceil

from onepass.backends.gpu.launches import Pass, power_of_two, programs_of, quickest, warps_for
from onepass.backends.gpu.team.schedule import moving, rate_of, waiting
from onepass.backends.gpu.walk import WHOLE_SET, Walk, walk
from onepass.core.device import Device
from onepass.core.problem import NormProblem

LOAD = 16  # bytes that a thread reads at a time


LOADS = 20  # of a thread, at most; 10 of them where not all threads have as many, which takes registers


EACH, EACH_ON_AMD = (20, 40, 64), (16, 32)  # elements for a thread, to choose from; AMD's compiler spills with more


THREADS = 512  # that a multiprocessor has REGISTERS for: of one program, or of several beside each other


ALL = 2**20  # programs that need not run at the same time


# H200, 2026-11-16, in microseconds, in the scale of the other families' costs.
LAUNCH = 0.7  # less than that of `tile`, 3: 2x1280x8x8 takes 5.7 us, by `tile` 7.6


ELEMENT, MEMBER = 0.02, 0.1  # for each that a thread has, and that a team has


LONELY = 1.2  # more, where a multiprocessor has nothing to do while its one program waits: 2x1280x32x32 by teams of two, not of four


def whole_set_unsupported(problem: NormProblem, device: Device) -> list[str]:
    w = walk(problem)
    if w.reps == 1:
        return ["a set is one run, which `row` reads"]
    if w.total >= 2**30:
        return ["there are more sets than programs are counted"]
    if not any(_cuts(problem, w, device)):
        return [f"sets of {w.reps} x {w.run} are more than programs keep that share one" + (device.no_team and f": {device.no_team}")]
    return []


@lru_cache(256)  # asked for its cost, and for itself
def whole_set_launches(problem: NormProblem, device: Device, invariant: bool) -> tuple[Pass, ...]:
    return quickest(problem, device, invariant, _cuts, _time)


def whole_set_cost(problem: NormProblem, device: Device, invariant: bool) -> float:
    if device.kind == "cpu":  # Triton's interpreter, for tests: never but where it is pinned
        return float("inf")
    (step,) = whole_set_launches(problem, device, invariant)
    if invariant:  # the choice must not depend on how much there is
        return 1 / _rate(problem, step) / 1e3
    return _time(problem, step, device)


def _cuts(problem: NormProblem, w: Walk, device: Device) -> Iterator[Pass]:
    """Teams of several sizes, threads with few elements or many."""
    vector = min(w.run & -w.run, LOAD // problem.dtype.itemsize)
    most = 1 if device.kind == "cpu" or device.no_team else device.sms  # the interpreter runs programs one after another
    choice = EACH if device.prefetches else EACH_ON_AMD
    for members in sorted({most // teams for teams in range(1, most + 1)}):
        rows = ceil(w.reps / members)
        parts, vectors = ceil(w.reps / rows), rows * w.run // vector
        for each in choice:
            warps = warps_for(min(power_of_two(ceil(vectors * vector / each)), THREADS), device)
            threads = warps * device.warp
            tiles = ceil(vectors / threads)
            even = tiles * threads == vectors and parts * rows == w.reps
            if tiles * vector <= choice[-1] and tiles <= (LOADS if even or parts == 1 else LOADS // 2):
                beside = THREADS // threads if parts > 1 else ALL
                yield Pass(
                    *(WHOLE_SET, w, programs_of(w.total, parts, device, beside), warps, threads, vector, 1, 0, True, True, True),
                    *(parts, 1, rows, w.sets),
                    tiles=tiles,
                    beside=beside,
                )


def _time(problem: NormProblem, step: Pass, device: Device) -> float:
    at_once = max(device.sms * (THREADS // step.block_i) // step.parts_r, 1)  # teams
    rounds = ceil(step.units / min(step.teams, at_once))
    waits = waiting(step, rounds) + (LONELY if step.parts_r > 1 and step.beside == 1 else 0.0)
    waits += MEMBER * step.parts_r
    return LAUNCH + ELEMENT * step.tiles * step.block_j + waits + moving(problem, step, device, rounds) / _rate(problem, step)


def _rate(problem: NormProblem, step: Pass) -> float:
    return rate_of(step.walk.run * problem.dtype.itemsize)
