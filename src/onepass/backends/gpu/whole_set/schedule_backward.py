"""How the whole_set family cuts a backward whose sets are one run each: how many programs share a set, and their threads.

A channel is the elements of a set that share their parameters. A stretch is some neighbouring elements of a channel.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from itertools import product
from math import ceil

from onepass.backends.gpu.launches import VECTOR_BYTES
from onepass.backends.gpu.partials.parameters import channel_of
from onepass.backends.gpu.partials.sums import TOO_MANY_AXES, Step, parameter_sums
from onepass.backends.gpu.resident_backward import THREADS, fastest, many_cells, with_registers
from onepass.backends.gpu.walk import Walk, walk
from onepass.core.device import NO_TEAM_ON_AMD, Device
from onepass.core.problem import NormProblem

from .launch_backward import WholeSetBackwardLaunch

LEAST_STRETCH = 32  # elements of the shortest stretch: with fewer, its sums take longer than its elements
WARP = 32  # threads: a stretch has at most as many vectors, so that its sums stay within a warp


def whole_set_backward_unsupported(problem: NormProblem, device: Device) -> list[str]:
    w = walk(problem)
    if device.no_team == NO_TEAM_ON_AMD:
        return ["its backward has instructions that AMD GPUs do not have"]
    if w.reps > 1:
        return ["a set is several runs: in a backward, the family `team` keeps such sets in registers"]
    channel = channel_of(problem, w)
    if stretch_of(problem, channel) < LEAST_STRETCH:
        return [f"parameters differ from element to element, or a channel has fewer than {LEAST_STRETCH} elements without a gap"]
    if not any(candidates(problem, w, device)):
        reason = f"x and dy of a set of {w.run} elements are too large for the registers of one team, or need too many partial sums"
        return [reason + (device.no_team and f": {device.no_team}")]
    return [] if whole_set_backward_launches(problem, device, False) else [TOO_MANY_AXES]


def stretch_of(problem: NormProblem, channel: int) -> int:
    """Return the number of elements of a stretch: the largest power of two that divides a channel, up to what a warp loads at a time."""
    return min(channel & -channel, WARP * VECTOR_BYTES // problem.dtype.itemsize)


@lru_cache(256)  # the planner asks whether there are launches, and then for the launches
def whole_set_backward_launches(problem: NormProblem, device: Device, invariant: bool) -> tuple[Step, ...]:
    return fastest(problem, device, invariant, candidates, with_sums)


def with_sums(problem: NormProblem, main: WholeSetBackwardLaunch, device: Device) -> tuple[Step, ...]:
    """Return the launch, and the launches that add up its cells."""
    w, each = main.walk, main.channel // main.block_j
    w = replace(w, param=replace(w.param, channel_run=each), modulation=replace(w.modulation, channel_run=each))  # maps count stretches
    return main, *parameter_sums(problem, [("o", w.outer), ("s", w.sets), ("t", main.stretches)], w, 1, device)


def candidates(problem: NormProblem, w: Walk, device: Device) -> Iterator[WholeSetBackwardLaunch]:
    """Yield launches with teams of several sizes and programs of several sizes."""
    channel = channel_of(problem, w)
    width = stretch_of(problem, channel)
    if width < LEAST_STRETCH or many_cells(problem, w, width):
        return
    most = 1 if device.kind == "cpu" or device.no_team else device.sms  # interpreted programs run one by one
    for threads, size in product(THREADS, sorted({most // teams for teams in range(1, most + 1)})):
        block_i = threads * VECTOR_BYTES // problem.dtype.itemsize // width
        steps = ceil(w.run / width / block_i)  # of a set
        members = ceil(steps / ceil(steps / size))
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
        yield from with_registers(problem, w, launch, device)
