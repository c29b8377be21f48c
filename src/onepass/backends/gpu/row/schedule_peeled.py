"""The launch for rows that begin between multiples of 16 bytes, which programs keep in registers. Sizes were tuned on an H200.

Such a row is whole vectors of 16 bytes and, before and after them, its ends. Elements of the ends are loaded one by one. A program has a
block of whole vectors and a block of ends. docs/measured.md has the times ("Rows of odd length in row").
"""

from __future__ import annotations

from onepass.backends.gpu.launches import peel_of, power_of_two, stages_that_fit
from onepass.backends.gpu.partials.parameters import parameter_axes, per_element
from onepass.backends.gpu.walk import AXIS_T, Walk, needs_division, walk
from onepass.core.device import Device
from onepass.core.problem import NormProblem

from .launch import RowLaunch, in_vectors

LONGEST_PEELED = 9216  # elements of a row
# A multiprocessor needs at least so many elements. With fewer, the time is latency, and rows in one piece are as fast.
LEAST_EACH = 6000
LEAST_DIVIDED = 30000  # if each element finds its parameters by a division
# Short rows need more: 4184 rows of 325 elements of 16 bits take 9.3 µs on an H200 if peeled, and 7.9 in one piece. 8000 rows of 501 take
# 10.8 and 12.1 (2026-11-19).
SHORT, LEAST_OF_SHORT = 2048, 20000  # the most elements of a short row, and the least of a multiprocessor
REGISTERS = 65536  # of a multiprocessor
STAGES = 3  # of the loop over rows; with two, kernels were slower than with one


def peels_rows(problem: NormProblem, device: Device) -> bool:
    """Return whether programs that keep rows should load whole vectors and ends.

    A gelu with own parameters for each element would need too many registers.
    """
    w = walk(problem)
    fits = w.reps == 1 and w.run <= LONGEST_PEELED and not (problem.scale or problem.shift)
    heavy = "gelu" in problem.spec.activation and per_element(problem)
    least = LEAST_DIVIDED if needs_division(problem) else LEAST_OF_SHORT if w.run <= SHORT else LEAST_EACH
    enough = w.total * w.run >= least * device.sms
    return fits and enough and not (heavy or in_one_block(problem)) and peel_of(problem, w) > 0


def in_one_block(problem: NormProblem) -> bool:
    """Return whether long rows are faster in one block, without whole vectors: float32, and a row has one weight and one bias.

    6144 sets of 6966 elements take 89 µs instead of 103 (H200, 2026-11-19). Shorter sets were not tried.
    """
    w = walk(problem)
    axes = parameter_axes(problem, w)
    return problem.dtype.itemsize == 4 and w.run > SHORT and axes > 0 and not axes & AXIS_T


def peeled_launch(problem: NormProblem, device: Device) -> RowLaunch:
    """Return the launch. Its programs take rows in turn, and load the next ones while they work on one."""
    w = walk(problem)
    peel = peel_of(problem, w)
    block, ends = _blocks(w, peel)
    warps = max(block // 1024, 1)
    masked = block > in_vectors(w.run, peel)
    if (masked and 1024 < block <= 4096) or (block > 1024 and 4 * ends >= block):
        warps *= 2
    added = bool(problem.addends) and problem.spec.centered and block >= 4096
    if added and problem.dtype.itemsize == 4:
        warps = 16
    many = _warps_at_once(problem, block, (block + ends) // (device.warp * warps))
    held = (block + ends) * max(many // warps, 1)  # elements that a multiprocessor holds at the same time
    ahead = stages_that_fit(problem, device, held, STAGES, kept=not needs_division(problem)) == STAGES
    ahead = ahead and not (added and problem.dtype.itemsize == 2 and block > 4096)
    # A multiple of the vector, so that all rows of a program begin equally far from a multiple of 16 bytes. (Row n begins at n * w.run:
    # there are no gaps in y, and `peel_of` wants the same strides for x.)
    programs = max(many // warps * device.sms // peel, 1) * peel
    return RowLaunch(
        walk=w,
        programs=min(programs, w.total),
        warps=warps,
        block_i=1,
        block_j=block,
        remainder=ends,
        stages=STAGES if ahead else 1,
        peel=peel,
        max_registers=REGISTERS // (many * device.warp) // 8 * 8 if device.prefetches else 0,  # AMD's compiler knows no such limit
        resident=True,
        reduce=True,
        apply=True,
    )


def _blocks(w: Walk, peel: int) -> tuple[int, int]:
    """Return the sizes of the blocks of whole vectors and of ends: powers of two.

    If a full first block leaves at most half as many elements for the second, they are cut there. Otherwise the first block has room for
    all whole vectors, and the ends are fewer than two vectors.
    """
    block = power_of_two(in_vectors(w.run, peel))
    if block > in_vectors(w.run, peel) and w.run - block // 2 <= block // 4:
        return block // 2, max(power_of_two(w.run - block // 2), 2 * peel)
    return block, 2 * peel


def _warps_at_once(problem: NormProblem, block: int, per_thread: int) -> int:
    """Return how many warps run on a multiprocessor at the same time. `per_thread` is the elements of x that a thread has.

    They share its registers, and the compiler may give no thread more than its share. With one register more, fewer programs would fit at
    the same time, and the last ones would run alone.
    """
    if problem.addends and block >= 4096:
        return 16
    if per_thread <= 12 or (per_thread <= 24 and not problem.spec.centered):
        return 32
    return 12 if block == 1024 and problem.spec.centered and per_element(problem) else 16
