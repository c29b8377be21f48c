from __future__ import annotations

from math import ceil

from onepass.backends.gpu.launches import Pass, chained, head_and_tail, power_of_two, stages_that_fit, warps_for
from onepass.backends.gpu.partials.schedule import combine_launch
from onepass.backends.gpu.walk import ROW, Walk, walk
from onepass.core.device import Device
from onepass.core.problem import NormProblem

LONGEST_ROW = 32768  # elements that one program can keep in registers


def row_launches(problem: NormProblem, device: Device, invariant: bool) -> tuple[Pass, ...]:
    """Whole rows in registers, `each` elements for a thread: short rows 32 to a program, long ones alone."""
    w = walk(problem)
    block_j, tail = head_and_tail(w.run)
    length, stages, most = block_j + tail, 1, 0
    block_i, each = 1, 36 if tail else 16 if length <= 2048 else 32
    if length > 8192:  # too few blocks fit on a multiprocessor to hide one's loads behind another's work
        each, stages, most = 48, 3, 1
    elif length <= 256:
        block_i = max(32, 2048 // length)
    elif problem.scale or problem.shift:  # read with each row, as much as x
        each, stages, most = 36, 3, 12
    elif 2048 < length <= 4096 or (length <= 1024 and not tail):
        block_i = 2
    if not invariant:  # few rows: some for each multiprocessor
        block_i = min(block_i, power_of_two(ceil(w.total / (4 * device.sms))))
    programs, stages = ceil(w.total / block_i), stages_that_fit(problem, device, length, stages)
    warps = warps_for(length * block_i // each, device)
    if stages > 1:
        programs = min(programs, max(most // warps, 1) * device.sms)
    return (Pass(ROW, w, programs, warps, block_i, block_j, 1, tail, True, True, True, stages=stages),)


def row_reread_launches(problem: NormProblem, device: Device, invariant: bool) -> tuple[Pass, ...]:
    """One kernel where there are sets for every multiprocessor, or small ones; else parts of sets, and their moments combined."""
    w, flat = walk(problem, cut=True), walk(problem)
    whole = w.total >= device.sms or w.reps * w.run <= 2**16
    if whole and not (invariant or problem.spec.mix or problem.addends):
        if w.reps > 1:
            return (row_parts(w, device, 1, *((16384, 512) if w.reps * w.run >= 2**17 else (8192, 256)), reduce=True, apply=True),)
        if not problem.spec.centered:
            return (row_parts(w, device, 1, 8192, 1024, reduce=True, apply=True),)
        if w.run <= 2**17:
            return (row_parts(w, device, 1, 4096, 512, reduce=True, apply=True),)
        return (row_parts(w, device, 1, 2048, 256, stages_that_fit(problem, device, 2048, 3), reduce=True, apply=True),)
    if flat.reps > 1:
        reduce, apply = (4, 2048, 128, 1), (16, 2048, 128)
    else:
        threads = 128 if device.chains else 256  # fewer spill on sm_80
        reduce, apply = (2, 4096, threads, stages_that_fit(problem, device, 4096, 3)), (8, 4096, 512)
    parts = ceil(reduce[0] * device.sms / w.total) if not invariant else ceil(flat.reps * flat.run / 32768)
    taken = row_parts(flat, device, parts, *reduce[1:], reduce=True)
    applied = row_parts(w, device, ceil(apply[0] * device.sms / w.total), *apply[1:], apply=True)
    return chained(device, (taken, combine_launch(flat, taken, device), applied))


def row_parts(
    w: Walk, device: Device, parts: int, size: int, threads: int, stages: int = 1, reduce: bool = False, apply: bool = False
) -> Pass:
    """Each set in about so many parts, in blocks of `size` elements."""
    block_j = min(power_of_two(w.run), size)
    block_i = min(size // block_j, power_of_two(w.reps)) if w.reps > 1 else size // block_j  # runs of a set, or sets of one run
    chunk_r = ceil(ceil(w.reps / block_i) / parts) * block_i
    parts_r = ceil(w.reps / chunk_r)
    steps = ceil(w.run / block_j)
    chunk_t = ceil(steps / ceil(parts / parts_r))
    parts_t = ceil(steps / chunk_t)
    warps = warps_for(threads * block_i * block_j // size, device)
    sets = ceil(w.total / block_i) if w.reps == 1 else w.total
    return Pass(
        *(ROW, w, sets * parts_r * parts_t, warps, block_i, block_j, 1, 0, False, reduce, apply),
        *(parts_r, parts_t, chunk_r, chunk_t, stages),
    )
