"""Measured constants that several families share, and the cost functions that use them.

The cost of `row`, `tile`, `apply`, `row_reread` and `tile_reread` follows from the bytes they move. The families `team`,
`ring` and `whole_set` have models of their own in their schedule.py: their programs form teams, whose members share a
unit of work, one or more sets. All times are in microseconds, and about 4/3 of the times that are measured on an H200.
That does no harm, because only the order of the costs matters.
"""

from __future__ import annotations

from itertools import pairwise
from math import ceil, prod

from onepass.backends.family import BACKWARD, FORWARD, Direction, Launches
from onepass.core.device import Device
from onepass.core.problem import NormProblem

from .launches import SharedSetLaunch, power_of_two
from .walk import TILE, needs_division, used_fraction, walk

LAUNCH_US = 3.0
BANDWIDTH = 3e6  # bytes per microsecond

# Copy rates in TB/s, by the width in bytes of the chunk that is copied of each row. Measured on an H200, 2026-11-15. Wider
# chunks gain little: 256 bytes reach 4.00 TB/s.
RATES = {0: 0.0, 32: 2.5, 64: 3.0, 128: 3.71}
FULL_RATE_WIDTH = max(RATES)  # bytes: the model copies chunks that are at least this wide at the full rate

# The wait until all members of a team have stored their moments. On an H200, 2026-11-16, `whole_set` takes 1.8 us longer for
# 2x1280x32x32, where teams of four wait and merge, than for 8x1280x16x16, where no team is needed.
BARRIER = 2.0
MERGE = 0.7  # to merge 128 parts, which are read together. A part is the moments that one member has of one set
# STALL is from two trials on an H200, 2026-11-15: one with x kept in registers, one with x read twice.
STALL = 8.0  # the wait for the loads of a team's next unit of work, if the team has several members
REFILL = 3.0  # the same wait, if the team has one member; assumed, not measured

ONE_BY_ONE = 0.6  # the speed of long rows whose elements are loaded one by one, because they are no multiple of 8 bytes

FEW_PROGRAMS = 1.1  # a multiprocessor reads this many times as fast as its share of the bandwidth if others are idle


def traffic_cost(
    problem: NormProblem, device: Device, direction: Direction, batch_invariant: bool, launches: Launches, walks: tuple[str, ...]
) -> float:
    """Return the modelled time of the launches, in microseconds, from the bytes that they move.

    x (in a backward, x and dy) is read in whole cache lines, and one tensor is written. With `batch_invariant`, the size of
    x in the model is fixed.
    """
    if device.kind == "cpu":  # Triton's interpreter runs only if `onepass.force` asks for it
        return float("inf")
    tensors = 2 if direction == BACKWARD else 1
    reads = sum(launch.reads for launch in launches)
    used = max(used_fraction(problem, walk) for walk in walks)
    if direction != BACKWARD and launches[0].resident:
        used *= launches[0].used_lanes * (0.5 if needs_division(problem) else 1.0)
    w = walk(problem)
    if direction != BACKWARD and w.reps == 1 and w.run > 1024 and w.run * problem.dtype.itemsize % 8:
        used *= ONE_BY_ONE
    traffic = (tensors * reads + 1) / (tensors + 1) / used
    if batch_invariant:  # then the choice of a family must not depend on the batch size
        return traffic / 1e3
    bandwidth = BANDWIDTH
    if TILE not in walks:  # few long rows leave multiprocessors idle
        bandwidth *= min(FEW_PROGRAMS * max(launch.programs for launch in launches) / device.sms, 1.0)
    return LAUNCH_US * sum(launch.needed for launch in launches) + problem.min_bytes(direction) * traffic / bandwidth


def round_time(launch: SharedSetLaunch, rounds: int, sets: int = 1) -> float:
    """Return how long a team waits, in microseconds: for the moments of its members, and for loads between rounds.

    In each round, a team takes one unit of work: `sets` sets, a power of two.
    """
    if launch.members == 1:
        return (rounds - 1) * REFILL
    return (rounds - 1) * STALL + (BARRIER + ceil(power_of_two(launch.members) * sets / 128) * MERGE)


def traffic_time(problem: NormProblem, launch: SharedSetLaunch, device: Device, busiest: int) -> float:
    """Return the microseconds to read x, the residual and the parameters, and to write y and the sum.

    The busiest program has `busiest` elements.
    """
    w = launch.walk
    elements = w.total * w.reps * w.run
    over_share = busiest * device.sms / elements
    idle = max(device.sms / launch.programs, 1.0)
    element = 2 * problem.dtype.itemsize + sum(dtype.itemsize for dtype in problem.addends or ())  # bytes
    parameters = problem.min_bytes(FORWARD) - prod(problem.shape) * element
    return (elements * element + parameters) / BANDWIDTH * max(over_share / min(idle, FEW_PROGRAMS), 1.0)


def copy_rate(width: int) -> float:
    """Return the rate of copying chunks of `width` bytes, as a fraction of the full rate."""
    width = min(width, FULL_RATE_WIDTH)
    (low, slow), (high, fast) = next(pair for pair in pairwise(RATES.items()) if width <= pair[1][0])
    return (slow + (fast - slow) * (width - low) / (high - low)) / max(RATES.values())
