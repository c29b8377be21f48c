"""How the whole_set family cuts a backward whose sets are one run each: how many programs share a set, their threads, and what that costs.

A channel is the elements of a set that share their parameters. A stretch is some neighbouring elements of a channel. A cell is the
partial sum of a stretch for the gradient of a parameter.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from math import ceil

from onepass.backends.gpu import constants
from onepass.backends.gpu.launches import VECTOR_BYTES, chained, fastest, team_programs
from onepass.backends.gpu.partials.gradient import MOST_MEMORY, SMALL
from onepass.backends.gpu.partials.parameters import channel_of, maps
from onepass.backends.gpu.partials.sums import TOO_MANY_AXES, Step, parameter_sums
from onepass.backends.gpu.walk import Walk, walk
from onepass.core.device import NO_TEAM_ON_AMD, Device
from onepass.core.problem import NormProblem

from .launch_backward import WholeSetBackwardLaunch

LEAST_STRETCH = 32  # elements of the shortest stretch: with fewer, its sums take longer than its elements
WARP = 32  # threads: a stretch has at most as many vectors, so that its sums stay within a warp

THREADS = 128, 256, 512  # of a program

PER_THREAD = 40  # the most elements of x that a thread keeps, with as many of dy

# Of a multiprocessor; of a thread, besides those for x and dy; and more of a thread, for masks, and for gelu.
REGISTERS, OTHER_REGISTERS, MORE_REGISTERS = 65536, 80, 24


def whole_set_backward_unsupported(problem: NormProblem, device: Device) -> list[str]:
    w = walk(problem)
    if device.no_team == NO_TEAM_ON_AMD:
        return ["its backward has instructions that AMD GPUs do not have"]
    if w.reps > 1:
        return ["a set is several runs"]
    if stretch_of(problem, channel_of(problem, w)) < LEAST_STRETCH:
        return [f"parameters differ from element to element, or a channel has fewer than {LEAST_STRETCH} elements without a gap"]
    if not any(candidates(problem, w, device)):
        reason = f"x and dy of a set of {w.run} elements are too large for the registers of one team"
        return [reason + (device.no_team and f": {device.no_team}")]
    return [] if len(whole_set_backward_launches(problem, device, False)) == 1 + len(list(maps(problem, w))) else [TOO_MANY_AXES]


def stretch_of(problem: NormProblem, channel: int) -> int:
    """Return the number of elements of a stretch: the largest power of two that divides a channel, up to what a warp loads at a time."""
    return min(channel & -channel, WARP * VECTOR_BYTES // problem.dtype.itemsize)


@lru_cache(256)  # the planner needs the launches for the cost, and again for the plan
def whole_set_backward_launches(problem: NormProblem, device: Device, invariant: bool) -> tuple[Step, ...]:
    (main,) = fastest(problem, device, invariant, candidates, modelled_time)
    return with_sums(problem, _at_work(main, device), device)


def whole_set_backward_cost(problem: NormProblem, device: Device, invariant: bool) -> float:
    if device.kind == "cpu":  # Triton's interpreter runs only if `onepass.force` asks for it
        return float("inf")
    main, *sums = whole_set_backward_launches(problem, device, invariant)
    assert isinstance(main, WholeSetBackwardLaunch)
    if _many_cells(problem, main, invariant):
        return float("inf")
    if invariant:  # then the choice of a family must not depend on the batch size
        return 1.001 / 1e3  # `ring` is faster where both can run large sets
    time = modelled_time(problem, main, device) * (1.0 if problem.aligned else constants.WHOLE_BACK_UNALIGNED)
    return constants.WHOLE_BACK_SCALE * time + constants.LAUNCH * sum(launch.needed for launch in sums)


def with_sums(problem: NormProblem, main: WholeSetBackwardLaunch, device: Device) -> tuple[Step, ...]:
    """Return the launch, and the launches that add up its cells."""
    w, each = main.walk, main.channel // main.block_j
    w = replace(w, param=replace(w.param, channel_run=each), modulation=replace(w.modulation, channel_run=each))  # maps count stretches
    return chained(device, (main, *parameter_sums(problem, [("o", w.outer), ("s", w.sets), ("t", main.stretches)], w, 1, device)))


def candidates(problem: NormProblem, w: Walk, device: Device) -> Iterator[WholeSetBackwardLaunch]:
    """Yield launches with teams of several sizes and programs of several sizes, if x and dy fit into their registers.

    Each has as many programs as can run at the same time, and a limit of registers for that.
    """
    channel = channel_of(problem, w)
    width, size = stretch_of(problem, channel), problem.dtype.itemsize
    if width < LEAST_STRETCH:
        return
    most = 1 if device.kind == "cpu" or device.no_team else device.sms  # interpreted programs run one by one
    sizes = {most // teams for teams in range(1, most + 1)}
    for threads in THREADS:
        block_i = threads * VECTOR_BYTES // size // width
        steps = ceil(w.run / width / block_i)  # of a set
        for members in sorted({ceil(steps / ceil(steps / team)) for team in sizes}):
            launch = WholeSetBackwardLaunch(
                walk=w,
                programs=members,
                warps=threads // WARP,
                block_i=block_i,
                block_j=width,
                resident=True,
                reduce=True,
                apply=True,
                members=members,
                channel=channel,
            )
            kept = ceil(launch.elements / threads)
            more = MORE_REGISTERS * ((not launch.full) + ("gelu" in problem.spec.activation))
            registers = min(OTHER_REGISTERS + more + ceil(2 * kept * size / 4), 255)  # of a thread
            at_once = REGISTERS // (registers * threads)  # programs of a multiprocessor
            if kept <= PER_THREAD and at_once:
                limit = min(REGISTERS // (at_once * threads) // 8 * 8, 255)
                yield _at_work(replace(launch, programs_per_sm=at_once, max_registers=limit), device)


def _at_work(launch: WholeSetBackwardLaunch, device: Device) -> WholeSetBackwardLaunch:
    """Return the launch, with a program for each set; or, if programs wait for each other, with as many as can run at the same time."""
    at_once = team_programs(launch.units, launch.members, device, launch.programs_per_sm)
    return replace(launch, programs=at_once if launch.cooperative else launch.units)


def _many_cells(problem: NormProblem, launch: WholeSetBackwardLaunch, invariant: bool) -> bool:
    """Return whether cells take much memory, for a large x. With `invariant`, every x counts as large."""
    size, elements = problem.dtype.itemsize, launch.walk.total * launch.walk.run
    many = any(maps(problem, launch.walk)) and MOST_MEMORY * launch.block_j * size < 8
    return many and (invariant or elements * size > SMALL)


def modelled_time(problem: NormProblem, launch: WholeSetBackwardLaunch, device: Device) -> float:
    """Return the modelled time of a launch, in microseconds.

    Programs of teams wait for each other, and take one set after another. Other programs take one set each, and start as soon as
    another one ends.
    """
    activation = problem.spec.activation
    rounds = ceil(launch.units / launch.teams)
    elements = min(launch.elements, launch.walk.run) * ceil(launch.programs / device.sms)  # of the busiest multiprocessor, in a round
    arithmetic = constants.WHOLE_BACK_SILU if activation == "silu" else constants.WHOLE_BACK_GELU if "gelu" in activation else 0.0
    moved = elements * device.sms * 3 * problem.dtype.itemsize / constants.WHOLE_BACK_BANDWIDTH
    time = constants.WHOLE_BACK_FIRST + rounds * (moved + arithmetic * elements / 8192)
    if launch.cooperative:
        stall = constants.WHOLE_BACK_STALL + constants.WHOLE_BACK_ALONE * (launch.programs_per_sm == 1)
        return time + constants.WHOLE_BACK_EXCHANGE + (rounds - 1) * stall + rounds * constants.WHOLE_BACK_MEMBER * launch.members
    turns = max(launch.programs / (device.sms * launch.programs_per_sm), 1.0)
    return time + (turns - 1) / launch.programs_per_sm * constants.WHOLE_BACK_REFILL
