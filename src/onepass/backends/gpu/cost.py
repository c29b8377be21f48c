"""Measured constants that several families share, and the cost functions that use them.

The cost of `row`, `tile`, `apply` and the reread families follows from the bytes they move. The families whose programs
share sets have their own models in their schedules. All times are in microseconds, and about 4/3 of the times that are
measured on an H200: only their order matters.
"""

from __future__ import annotations

from itertools import pairwise
from math import ceil

from onepass.backends.family import BACKWARD, Direction, Launches
from onepass.core.device import Device
from onepass.core.problem import NormProblem

from .launches import SharedSetLaunch, power_of_two
from .walk import needs_division, used_fraction

LAUNCH_US = 3.0
BANDWIDTH = 3e6  # bytes in a microsecond

# H200, 2026-11-15: the copy rate in TB/s, by the width in bytes of the chunk that is copied of each row. Wider chunks
# gain little: 256 bytes reach 4.00 TB/s.
RATES = {0: 0.0, 32: 2.5, 64: 3.0, 128: 3.71}
FULL_RATE_WIDTH = max(RATES)  # bytes

# H200, 2026-11-16: waiting and merging take 1.8 us for four members (2x1280x32x32 against 8x1280x16x16, by
# `whole_set`).
BARRIER = 2.0
MERGE = 0.7  # for every 128 parts, which are read at a time
# H200, 2026-11-15, two probes: with x kept, and with x read again.
STALL = 8.0  # until the next unit's loads arrive, if members wait for each other
REFILL = 3.0  # the same for a program that waits for no other; assumed, not measured

FEW_PROGRAMS = 1.1  # how much faster one multiprocessor reads than its share of the bandwidth, if others are idle


def traffic_cost(
    problem: NormProblem, device: Device, direction: Direction, batch_invariant: bool, launches: Launches, walks: tuple[str, ...]
) -> float:
    """The cost of moving bytes.

    Each launch reads x (and dy in a backward) in whole cache lines. One tensor is written.
    """
    if device.kind == "cpu":  # Triton's interpreter runs only where `force` asks for it
        return float("inf")
    tensors = 2 if direction == BACKWARD else 1
    reads = sum(launch.reads for launch in launches)
    used = max(used_fraction(problem, walk) for walk in walks)
    if direction != BACKWARD and launches[0].resident:
        used *= launches[0].used_lanes * (0.5 if needs_division(problem) else 1.0)
    traffic = (tensors * reads + 1) / (tensors + 1) / used
    if batch_invariant:  # the choice must not depend on the size of the batch
        return traffic / 1e3
    return LAUNCH_US * sum(launch.needed for launch in launches) + problem.min_bytes(direction) * traffic / BANDWIDTH


def round_time(launch: SharedSetLaunch, rounds: int, sets: int = 1) -> float:
    """How long teams wait: for their members, and between rounds. A unit has `sets` sets, a power of two."""
    if launch.members == 1:
        return (rounds - 1) * REFILL
    return (rounds - 1) * STALL + (BARRIER + ceil(power_of_two(launch.members) * sets / 128) * MERGE)


def traffic_time(problem: NormProblem, launch: SharedSetLaunch, device: Device, busiest: int) -> float:
    """The time of reading and writing everything once. `busiest` is the number of elements of the busiest program."""
    w = launch.walk
    elements = w.total * w.reps * w.run
    over_share = busiest * device.sms / elements
    idle = max(device.sms / launch.programs, 1.0)
    element = 2 * problem.dtype.itemsize + sum(dtype.itemsize for dtype in problem.addends or ())  # bytes
    return elements * element / BANDWIDTH * max(over_share / min(idle, FEW_PROGRAMS), 1.0)


def copy_rate(width: int) -> float:
    """The rate of copying chunks of `width` bytes, as a fraction of the full rate."""
    width = min(width, FULL_RATE_WIDTH)
    (low, slow), (high, fast) = next(pair for pair in pairwise(RATES.items()) if width <= pair[1][0])
    return (slow + (fast - slow) * (width - low) / (high - low)) / max(RATES.values())
