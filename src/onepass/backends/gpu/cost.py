"""The costs of the families whose time follows from the bytes they move, and what the models of the others share.

constants.py has the measured constants. All times are in microseconds.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from math import ceil, gcd, prod, sqrt

from onepass.backends.family import FORWARD, Direction, Launches
from onepass.core.device import Device
from onepass.core.problem import NormProblem

from . import constants
from .launches import SharedSetLaunch, block_and_remainder, loads_row_at_once
from .partials.parameters import parameter_axes, per_element
from .walk import AXIS_R, TILE, needs_division, used_fraction, walk

PROGRAMS_AT_ONCE = 4  # of `row_reread` on a multiprocessor, about
SHORT_ROW = 2**17  # bytes of the longest row that counts as short: its program has all loads under way at once
SHORT_ODD_ROW = 2**15  # the same, at an odd address
FULL_RATE_WIDTH = max(constants.RATES)  # bytes: the model copies chunks that are at least this wide at the full rate


def traffic_cost(
    family: str,
    problem: NormProblem,
    device: Device,
    direction: Direction,
    batch_invariant: bool,
    launches: Launches,
    walks: tuple[str, ...],
) -> float:
    """Return the modelled time of the launches, in microseconds, from the bytes that they move.

    x (in a backward, x and dy) is read in whole cache lines, and one tensor is written. With `batch_invariant`, the size of
    x in the model is fixed.
    """
    if device.kind == "cpu":  # Triton's interpreter runs only if `onepass.force` asks for it
        return float("inf")
    forward, tensors = direction == FORWARD, 1 if direction == FORWARD else 2
    reads: float = sum(launch.reads for launch in launches)
    used = max(used_fraction(problem, way) for way in walks)
    used *= _forward_rate(family, problem, device, launches) if forward else _backward_rate(family, problem)
    if batch_invariant:  # then the choice of a family must not depend on the batch size
        return (tensors * reads + 1) / (tensors + 1) / used / 1e3
    if reads > 1:
        from_l2 = constants.FROM_L2 if launches[1:] else constants.FROM_L2_AT_ONCE
        reads -= (reads - 1) * _in_cache(problem, device, launches, tensors) * (1.0 - from_l2)
    traffic = (tensors * reads + 1) / (tensors + 1) / used
    many_loads = family == "row" and forward and _short(problem) and not needs_division(problem)  # all loads of a row are under way
    bandwidth = constants.BANDWIDTH * (constants.SPEED.get(family, 1.0) if forward else 1.0)
    if TILE not in walks or (forward and launches[0].resident):  # few programs leave multiprocessors idle
        few = constants.FEW_SHORT if many_loads else constants.FEW_PROGRAMS
        bandwidth *= min(few * max(launch.programs for launch in launches) / device.sms, 1.0)
    parameters, parts = (parameter_bytes(problem), sum(launch.partial_moments for launch in launches)) if forward else (0, 0)
    moved = (problem.min_bytes(direction) - parameters) * traffic + parameters  # parameters are read once
    copy = copy_cost(problem, launches) if forward else 0.0
    start = copy + (constants.ROW_START if many_loads else constants.START)
    return start + constants.LAUNCH * sum(launch.needed for launch in launches) + constants.PART * parts + moved / bandwidth


def _short(problem: NormProblem) -> bool:
    """Return whether a program of `row` has all loads of a set under way at once."""
    w = walk(problem)
    return w.reps * w.run <= 8192 or (w.reps == 1 and w.run * problem.dtype.itemsize <= (SHORT_ROW if problem.aligned else SHORT_ODD_ROW))


def _forward_rate(family: str, problem: NormProblem, device: Device, launches: Launches) -> float:
    """Return the rate at which the launches of a forward read x, as a fraction of the family's usual rate."""
    w, first, rate = walk(problem), launches[0], 1.0
    if first.resident:
        peeled = family == "row" and first.peel > 0
        rate *= first.used_lanes * _row_rate(problem, peeled)
        narrow = family == "tile" and first.block_j * problem.dtype.itemsize < 64
        rate *= constants.NARROW_COLUMNS if narrow else 1.0
        one_by_one = family == "row" and w.reps > 1 and problem.dtype.itemsize == 2 and w.run % 4
        rate *= constants.GATHERED_ONE_BY_ONE if one_by_one else 1.0
    if family == "tile_reread":
        rate *= min(first.rows / first.block_i, 1.0)  # few rows leave a part of each block empty
        rate *= sqrt(first.columns / first.block_j / ceil(first.columns / first.block_j))  # so do few columns, but these cost less
        rate *= constants.TILE_BY_ROW if parameter_axes(problem, w) & AXIS_R else 1.0
        rate *= constants.NARROW_TILE if first.columns * problem.dtype.itemsize < 16 else 1.0
        side_by_side = first.columns > w.columns and problem.dtype.itemsize == 2 and problem.aligned
        rate *= constants.WIDENED_TILE if side_by_side else 1.0
        rate *= constants.TILE_GELU if _half_gelu(problem) else 1.0
    if family == "row_reread":
        rate *= _reread_rate(problem, device, launches)
    in_place = not (problem.aligned or first.needs_aligned_x(problem))  # x is at an odd address, and is not copied
    short = family == "row_reread" and (w.reps > 1 or _short_odd_runs(problem))  # these have factors of their own
    rows_anywhere = family == "tile_reread" and gcd(first.columns, w.columns * w.reps if w.outer > 1 else 0, 8) == 1
    if rows_anywhere or (in_place and not short):
        rate *= constants.ODD_SPEED.get(family, {}).get(problem.dtype.itemsize, 1.0)
    return rate


def _backward_rate(family: str, problem: NormProblem) -> float:
    """Return the rate at which the launches of a backward read x and dy, as a fraction of the usual rate."""
    size, activation, run = problem.dtype.itemsize, problem.spec.activation, walk(problem, cut=True).run
    row = walk(problem).run
    odd = run * size % 8 > 0 and run <= 1024
    reread = family == "row_reread"
    return product_of(
        (
            (constants.BACK_TILE_WALK, family == "tile" and size == 2 and row > 1),
            (constants.BACK_ROW_IN_TWO, family == "row" and row > 8192 and problem.spec.centered),
            (constants.BACK_UNALIGNED.get(family, {}).get(size, 1.0), not problem.aligned),
            (constants.BACK_ODD_RUNS.get(family, 1.0), odd),
            (constants.BACK_REREAD_GELU, reread and "gelu" in activation and size == 2),
            (constants.BACK_UNALIGNED_GELU, reread and "gelu" in activation and size == 2 and not problem.aligned),
        )
    )


def _reread_rate(problem: NormProblem, device: Device, launches: Launches) -> float:
    """Return the rate of `row_reread`. If one launch reduces and applies, its programs wait in between."""
    w, size, activation = walk(problem), problem.dtype.itemsize, problem.spec.activation
    peeled = launches[0].peel > 0
    short_odd = _short_odd_runs(problem)
    rate = product_of(
        (
            (constants.REREAD_ACTIVATION, activation != "" and size == 2),
            (
                constants.REREAD_CHANNELS if problem.aligned else constants.REREAD_ODD_CHANNELS,
                _odd_channels(problem) and not launches[-1].peel,
            ),
            (constants.REREAD_RUNS, w.reps > 1),
            (constants.REREAD_SHORT_RUNS, w.reps > 1 and w.run * size < 16),
            (constants.REREAD_PEELED, peeled and per_element(problem)),
            (constants.UNALIGNED_REREAD.get(_bytes_loaded(problem), 1.0), w.run > 1024 and not peeled and not short_odd),
            (constants.REREAD_GELU, "gelu" in activation and w.run > 1024 and _bytes_loaded(problem) == 2 and not peeled),
            (constants.REREAD_GELU_RUNS, w.reps > 1 and _half_gelu(problem)),
            (constants.REREAD_ODD_RUNS.get(size, 1.0), short_odd or (size == 4 and w.reps > 1 and not problem.aligned)),
        )
    )
    if len(launches) == 1 and w.reps == 1:  # while the L2 cache holds x, waiting costs nothing
        in_cache = share_in_l2(prod(problem.shape) * size, device) if w.run > 8192 else 0.0
        rate *= 1.0 - (1.0 - constants.REREAD_AT_ONCE[size]) * (1.0 - in_cache)
    return rate


def _short_odd_runs(problem: NormProblem) -> bool:
    """Return whether `row_reread` reads short runs of 16-bit elements at an odd address, one element at a time."""
    return walk(problem, cut=True).run <= 1024 and problem.dtype.itemsize == 2 and not problem.aligned


def _half_gelu(problem: NormProblem) -> bool:
    return "gelu" in problem.spec.activation and problem.dtype.itemsize == 2 and problem.aligned


def _bytes_loaded(problem: NormProblem) -> int:
    """Return how many bytes of a run a thread can load at a time, up to 8."""
    size = problem.dtype.itemsize
    return gcd(walk(problem).run * size, 8) if problem.aligned else size


def _odd_channels(problem: NormProblem) -> bool:
    """Return whether `row_reread` reads channel by channel, and channels do not begin at multiples of 16 bytes."""
    flat, cut = walk(problem), walk(problem, cut=True)
    return cut.reps > flat.reps and cut.run * problem.dtype.itemsize % 16 > 0


def copy_cost(problem: NormProblem, launches: Launches) -> float:
    """Return the microseconds to copy an x at an odd address first, if the launches need that; else 0."""
    return unaligned_cost(problem) if launches[0].needs_aligned_x(problem) else 0.0


def unaligned_cost(problem: NormProblem) -> float:
    """Return the microseconds to copy x if it is at an odd address; else 0."""
    if problem.aligned:
        return 0.0
    size = problem.dtype.itemsize
    return constants.COPY_START + prod(problem.shape) * size / constants.COPY_RATE[size]


def _in_cache(problem: NormProblem, device: Device, launches: Launches, tensors: int) -> float:
    """Return which part of x, or of x and dy if `tensors` is 2, the L2 cache still holds when it is read again.

    A single launch reads each set again at once. Several launches read all sets first.
    """
    w = walk(problem)
    sets = min(w.total, PROGRAMS_AT_ONCE * device.sms) if len(launches) == 1 else w.total
    return share_in_l2(tensors * sets * w.reps * w.run * problem.dtype.itemsize, device)


def share_in_l2(nbytes: int, device: Device) -> float:
    """Return which part of x the L2 cache holds, if it has `nbytes` bytes."""
    return min(constants.SHARE_OF_L2 * device.l2 / nbytes, 1.0)


def _row_rate(problem: NormProblem, peeled: bool) -> float:
    """Return the rate at which one program reads a row that it keeps in registers. If `peeled`, it loads whole vectors and ends.

    With a mean it passes over the row twice, and few programs with long rows fit on the GPU.
    """
    w = walk(problem)
    run, (block, remainder) = w.run, block_and_remainder(w.run)
    if needs_division(problem) and not peeled:
        return constants.DIVISION[problem.dtype.itemsize] if problem.aligned else constants.DIVISION_ODD
    if w.reps > 1:
        return 1.0
    if peeled:
        return constants.LONG_ROW_PEELED if run > 8192 else 1.0
    if run > 8192 and problem.dtype.itemsize == 2 and (run % 4 or not problem.aligned):
        return constants.UNALIGNED_LONG_ROW
    mean, in_two = problem.spec.centered, bool(remainder)
    if run > 16384:
        rate = constants.LONG_ROW_ACTIVATION if problem.spec.activation else 1.0
        used = run / (block + remainder) * (constants.LONG_ROW_IN_TWO if in_two else 1.0)
        return rate * (constants.LONG_ROW * used if mean else constants.LONG_ROW_WITHOUT_MEAN)
    if loads_row_at_once(problem):
        return 1.0 if mean else constants.AT_ONCE_WITHOUT_MEAN
    if mean and run > 4096 and problem.dtype.itemsize == 4:
        return constants.WIDE_ROW
    if mean:
        return constants.LONG_ROW_IN_TWO if run > 8192 and in_two else 1.0
    return 1.0 if in_two else constants.ROW_WITHOUT_MEAN


def traffic_time(
    problem: NormProblem, launch: SharedSetLaunch, device: Device, busiest: float, bandwidth: float, few: float = constants.FEW_PROGRAMS
) -> float:
    """Return the microseconds to read x, the residual and the parameters, and to write y and the sum.

    The busiest multiprocessor has `busiest` elements. `bandwidth` is in bytes per microsecond. If some multiprocessors are idle, the
    others read up to `few` times as fast.
    """
    w = launch.walk
    elements = w.total * w.reps * w.run
    over_share = busiest * device.sms / elements
    idle = max(device.sms / launch.programs, 1.0)
    moved = elements * _element_bytes(problem) + parameter_bytes(problem)
    return moved / bandwidth * max(over_share / min(idle, few), 1.0)


def _element_bytes(problem: NormProblem) -> int:
    """Return the bytes of x, y, the residual and the sum, for each element."""
    return 2 * problem.dtype.itemsize + sum(dtype.itemsize for dtype in problem.addends or ())


def parameter_bytes(problem: NormProblem) -> int:
    """Return the bytes of weight, bias, scale, shift and statistics: all that a forward moves, without x, y, the residual and the sum."""
    return problem.min_bytes(FORWARD) - prod(problem.shape) * _element_bytes(problem)


def product_of(factors: Iterable[tuple[float, bool]]) -> float:
    """Return the product of those factors whose condition holds."""
    return prod(factor for factor, holds in factors if holds)


def copy_rate(width: int) -> float:
    """Return the rate of copying chunks of `width` bytes, as a fraction of the full rate."""
    width = min(width, FULL_RATE_WIDTH)
    (low, slow), (high, fast) = next(pair for pair in pairwise(constants.RATES.items()) if width <= pair[1][0])
    return (slow + (fast - slow) * (width - low) / (high - low)) / max(constants.RATES.values())
