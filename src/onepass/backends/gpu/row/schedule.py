"""The launches that compute a forward by the row walk, and their sizes, which were tuned on an H200.

The row walk reads each set along its runs. A set is the elements that share one mean and variance. A run is a stretch of
a set that is contiguous in memory, and a row is a set of one run. A part is the share of a set that one program works on.
"""

from __future__ import annotations

from dataclasses import replace
from math import ceil, gcd
from typing import NamedTuple

from onepass.backends.gpu.launches import (
    VECTOR_BYTES,
    ForwardLaunch,
    block_and_remainder,
    chained,
    loads_row_at_once,
    peel_of,
    power_of_two,
    stages_that_fit,
    warps_for,
)
from onepass.backends.gpu.partials.combine import Split, combine_launch
from onepass.backends.gpu.partials.parameters import per_element
from onepass.backends.gpu.walk import Walk, walk
from onepass.core.device import Device
from onepass.core.problem import NormProblem

from .launch import RowLaunch
from .schedule_peeled import in_one_block, peeled_launch, peels_rows

# Elements for each multiprocessor, from which rows of 2049 to 6144 elements are loaded ahead, and short rows get programs of one warp.
LEAST_AHEAD = 36000

# A launch with fewer elements for each multiprocessor gets more threads. With vectors of VECTOR_BYTES, and up to MOST_THREADS threads, 128
# rows of 4096 elements take 5.8 µs on an H200 instead of 7.2, and 500 rows of 2560 take 6.3 µs instead of 8.1 (2026-11-18).
FEW_ELEMENTS, MOST_THREADS = 12000, 512

FEW_LONG = 42000  # elements for each multiprocessor, up to which rows of 12288 to 16384 elements of float32 get twice as many threads
MANY_ELEMENTS = 72000  # elements for each multiprocessor, from which rows of 1025 to 2048 elements get half as many threads

LONGEST_ROW = 32768  # elements of the longest row that fits in the registers of one program

# A set of several runs, which one program gathers: the bytes of its shortest run, because memory is read in sectors of 32 bytes, and
# the most elements.
SHORTEST_GATHERED, MOST_GATHERED = 32, 8192


class _Rows(NamedTuple):
    """How programs hold rows, before the number of rows is known."""

    block_i: int
    per_thread: int  # elements
    split: bool = True  # a row may be held as two blocks
    stages: int = 1
    most_warps: int = 0  # of a multiprocessor, if stages > 1
    stripe: int = 0  # as in RowLaunch
    unaligned_per_thread: int = 16  # elements, at an odd address
    least_remainder: int = 0  # elements of the second of two blocks


def row_launches(problem: NormProblem, device: Device, invariant: bool) -> tuple[RowLaunch, ...]:
    """Return a tuple of one launch, whose programs keep whole rows in registers. A set of several runs counts as a row, too.

    A block has several rows of up to 1024 elements, or one or two longer rows. It has fewer rows if x has few.
    """
    if not invariant and peels_rows(problem, device):  # where a row begins would decide in which order its elements are added
        return (peeled_launch(problem, device),)
    w = walk(problem)
    n = w.reps * w.run
    rows = _rows(problem, device, invariant) if w.reps == 1 else _gathered(n)
    block_i, per_thread, stages = rows.block_i, rows.per_thread, rows.stages
    block_j, remainder = block_and_remainder(n) if rows.split else (power_of_two(n), 0)
    remainder = max(remainder, rows.least_remainder)
    length = block_j + remainder
    if not invariant:  # few rows: fewer in a block, so that all multiprocessors have work
        block_i = min(block_i, power_of_two(ceil(w.total / (4 * device.sms))))
    programs, stages = ceil(w.total / block_i), stages_that_fit(problem, device, length * block_i, stages)
    warps = warps_for(length * block_i // per_thread, device)
    if stages > 1:
        programs = min(programs, max(rows.most_warps // warps, 1) * device.sms)
    launch = RowLaunch(
        walk=w,
        programs=programs,
        warps=warps,
        unaligned_warps=warps_for(length * block_i // rows.unaligned_per_thread, device),
        block_i=block_i,
        block_j=block_j,
        remainder=remainder,
        stages=stages,
        stripe=rows.stripe,
        resident=True,
        reduce=True,
        apply=True,
    )
    return (launch,)


def why_not_gathered(problem: NormProblem) -> list[str]:
    """Return the reasons why a program cannot gather a set of several runs; an empty list if it can."""
    w, size = walk(problem), problem.dtype.itemsize
    if w.reps * w.run > MOST_GATHERED:
        return [f"a set of several runs has {w.reps * w.run} elements, more than {MOST_GATHERED}"]
    short = w.run * size < SHORTEST_GATHERED
    return [f"runs have {w.run * size} bytes, and less than {SHORTEST_GATHERED} would be read many times"] if short else []


def _gathered(n: int) -> _Rows:
    """Return how programs hold sets of n elements in several runs."""
    return _Rows(2 if n <= 512 else 1, 16 if n <= 4096 else 32, split=False)


def _rows(problem: NormProblem, device: Device, invariant: bool) -> _Rows:
    """Return how programs hold the rows of a problem. A row of up to 256 elements belongs to one warp, so its sums need no shared memory.

    docs/measured.md has the times ("Short rows, odd runs and evaluation").
    """
    w, size, modulated = walk(problem), problem.dtype.itemsize, bool(problem.scale or problem.shift)
    block_j, remainder = block_and_remainder(w.run)
    length, each = block_j + remainder, 0 if invariant else w.total * w.run / device.sms  # elements of a multiprocessor
    many = invariant or w.total * length >= LEAST_AHEAD * device.sms
    if 0 < each <= FEW_ELEMENTS and 512 < w.run <= 8192:  # the GPU is half empty, so all time is latency: many threads
        vectors = 1 if 2 * each <= FEW_ELEMENTS else 2
        return _Rows(1, max(VECTOR_BYTES // size * vectors, power_of_two(w.run) // MOST_THREADS), split=False)
    if not problem.aligned and size == 2 and w.run > 512 and (w.run <= 8192 or (w.run <= 16384 and problem.spec.centered)):
        # Loads ahead of single elements are slow: 5000 rows of 6144 elements took 84 µs, and take 43 (H200, 2026-11-19).
        per_thread = length // (32 if length <= 2048 else 128 if length <= 8192 else 256)
        return _Rows(1, per_thread, unaligned_per_thread=per_thread)
    if w.run > 2048 and length <= 20480 and size == 2 and w.run % 4:  # loads of 2 or 4 bytes: many threads, which load nothing ahead
        return _Rows(1, 20 if length <= 16384 else 40)
    if size == 4 and 12288 <= w.run <= 16384 and problem.spec.centered and (problem.addends or 0 < each <= FEW_LONG):
        return _Rows(1, 32, split=False)
    if loads_row_at_once(problem):
        return _Rows(1, length // (256 if problem.spec.centered else 512))
    if length > 8192:  # few such blocks fit on a multiprocessor, so each program loads ahead
        return _Rows(1, 48, stages=3, most_warps=1)
    if each > FEW_ELEMENTS and in_one_block(problem) and peel_of(problem, w):
        return _Rows(1, 64 if w.run > 4096 else 32, split=False)
    # A little more than a power of two: stripes would be half empty. One warp has several rows. Of a second block of 1 to 4 elements, most
    # threads would hold copies: 300000 rows of 131 elements would take 88 µs instead of 62 (H200, 2026-11-19).
    if each > FEW_ELEMENTS and 64 < w.run <= 256 and 0 < 8 * remainder <= block_j and _stripe(problem):
        return _Rows(512 // block_j, 64, least_remainder=8)
    if stripe := _stripe(problem):
        return _Rows(max(1024 // power_of_two(w.run), 16), 8, split=False, stripe=stripe)
    if 256 < w.run <= 512 and size == 4 and not modulated:
        return _Rows(1, 12) if "gelu" in problem.spec.activation else _Rows(4, 16, split=False)
    if 256 < w.run <= 512 and size == 2 and w.run % 2 and not modulated:  # loads of 2 bytes: two rows, in one warp if in two blocks
        return _Rows(2, length // 16 if remainder else 16)
    if 256 < w.run <= 384 and size == 2 and not modulated:
        ahead = problem.spec.centered and each >= LEAST_AHEAD
        return _Rows(4, 48, stages=3, most_warps=16) if ahead else _Rows(8, 12)
    if 256 < w.run <= 512 and size == 2 and not modulated:
        four = w.run == 512 or 0 < each < LEAST_AHEAD or not problem.spec.centered
        return _Rows(4 if four else 2, 32, split=False)
    if remainder and 2048 < length <= 6144 and problem.addends and problem.spec.centered:  # loads ahead would fetch the residual, too
        return _Rows(1, 32, split=False) if length <= 4096 else _Rows(1, 20)
    if many and _loads_ahead(problem, device, remainder, length):
        return _Rows(2, 40, stages=3, most_warps=16)
    if length <= 256:
        if remainder and size == 4:
            one_warp = problem.spec.centered and each > FEW_ELEMENTS and 4 * remainder >= block_j
            return _Rows(4, 24) if one_warp else _Rows(8, 10)
        if remainder:
            one_warp = problem.spec.centered and many and w.run % 2 == 0
            return _Rows(power_of_two(768 // length + 1) // 2, 24) if one_warp else _Rows(16, 12)
        if size == 2 and length == 256 and problem.spec.centered and not problem.aligned:
            return _Rows(2, 16)
        if size == 2:
            return _Rows(2048 // length, 8) if length <= 128 else _Rows(1024 // length, 32)
        if w.run * size % VECTOR_BYTES == 0:
            return _Rows(1024 // length, 32)
        return _Rows(1024 // length, 8) if length > 64 else _Rows(2048 // length, 16)
    if modulated:  # a row reads as many scales or shifts as elements of x
        return _Rows(1, 36, stages=3, most_warps=12)
    if remainder and length <= 1280 and size == 2 and not many:
        return _Rows(2, 40)
    if remainder:
        return _Rows(1, 36)
    if length <= 1024:
        return _Rows(2, 16)
    return _Rows(1, 32 if length > 2048 or each >= MANY_ELEMENTS else 16)


def _stripe(problem: NormProblem) -> int:
    """Return the elements of a stripe of a short row: eight or fewer stripes fill a row. 0 if whole rows are better.

    If threads load few bytes at a time, many threads share a row, and all of them must exchange their sums. With stripes, fewer threads
    share a row: 200000 rows of 45 elements of bfloat16 take 19.4 µs on an H200 instead of 42.6 (2026-11-18).
    """
    w, size = walk(problem), problem.dtype.itemsize
    loaded = gcd(w.run * size, VECTOR_BYTES)  # bytes at a time
    length = power_of_two(w.run)
    if problem.scale or problem.shift or not 32 <= length <= 256 or loaded > (8 if length <= 64 else 4):
        return 0
    if loaded > size and not problem.aligned:
        # Other threads would load x than those that store y: 21157 rows of 96 elements of bfloat16 took 32.5 µs with stripes, and
        # `row_reread` takes 9.8 (H200, 2026-11-19).
        return 0
    stripe = max(length // 8, 8) * (loaded // size)
    return stripe if stripe < length else 0


def _loads_ahead(problem: NormProblem, device: Device, remainder: int, length: int) -> bool:
    """Return whether programs with many rows load ahead: those that hold a row of these lengths as two blocks, and pass over it twice.

    These need many registers, so few of them fit on a multiprocessor. With loads ahead, 9000 rows of 2560 elements take 31 µs on an H200
    instead of 39 (2026-11-18).
    """
    some = 2048 < length <= 6144 and "gelu" not in problem.spec.activation
    return bool(remainder and problem.spec.centered and some and device.prefetches and not (problem.scale or problem.shift))


def row_reread_launches(problem: NormProblem, device: Device, invariant: bool) -> tuple[ForwardLaunch, ...]:
    """Return one launch that reduces and applies, or three: reduce parts of sets, combine the parts, apply.

    One launch is returned if sets are small, or if there are enough of them for all multiprocessors. With `invariant` (the
    result must not depend on the batch size), a mix of norms or a residual, there are always three launches.
    """
    w, flat = walk(problem, cut=True), walk(problem)
    size = w.reps * w.run
    peel = 0 if invariant else peel_of(problem, flat)
    vectors = flat.run < 1024 or flat.run * problem.dtype.itemsize % VECTOR_BYTES == 0  # whole vectors are loaded; or runs are short
    whole = _whole_set(problem, w, device, vectors)
    wide = problem.dtype.itemsize == 4
    if wide and flat.reps == 1 and problem.aligned and (whole.peel or vectors):
        enough = 10 * w.total >= 9 * device.sms or (vectors and size <= 2**16)  # 128 sets keep 132 multiprocessors busy enough
    elif whole.peel:
        enough = size <= 2**16 and w.total >= (device.sms if flat.reps > 1 else 4 * device.sms)
    elif vectors:
        enough = size <= 2**16 or w.total >= device.sms
    else:
        enough = size <= 2**12 or w.total >= (device.sms // 2 if size <= 2**14 else 8 * device.sms)
    if enough and not (invariant or problem.spec.mix or problem.addends):
        return (whole,)
    # `reduce` and `apply`: programs for each multiprocessor, elements of a block, threads of a program, stages (`reduce` only).
    ahead = wide and size >= 2**22 and w.total == 1 and not invariant  # loads of 4 bytes can be made ahead, which helps one long run
    one_by_one = not (vectors or peel or ahead)
    if one_by_one and w.reps == 1 and not wide and "gelu" in problem.spec.activation:
        reduce, apply = (4, 4096, 256, 1), (16, 2048, 128)
    elif one_by_one:  # loads of few bytes: many threads
        reduce, apply = (8, 1024, 128, 1), (32, 1024, 256) if w.reps == 1 or wide else (16, 1024, 128)
    elif flat.reps > 1:
        reduce, apply = (4, 2048, 128, 1), (16, 2048, 128)
    else:
        threads = 128 if device.chains else 256  # on sm_80 (A100, which does not chain), 128 threads spill registers
        reduce = 2, 4096, threads, stages_that_fit(problem, device, 4096, 3)
        apply = (16, 2048, 128) if whole.peel and not invariant else (8, 4096, 512)
    parts = ceil(reduce[0] * device.sms / w.total) if not invariant else ceil(flat.reps * flat.run / 32768)
    reduced = row_parts(flat, device, parts, *reduce[1:], reduce=True)
    applied = row_parts(w, device, ceil(apply[0] * device.sms / w.total), *apply[1:], apply=True)
    if not invariant:  # where a run begins would decide in which order its elements are added
        reduced, applied = replace(reduced, peel=peel), replace(applied, peel=whole.peel)
    return chained(device, (reduced, combine_launch(flat, reduced.parts, device), applied))


def _whole_set(problem: NormProblem, w: Walk, device: Device, vectors: bool) -> RowLaunch:
    """Return the launch whose programs reduce and apply one set each.

    Without `vectors`, threads load few bytes at a time, unless the ends of runs are peeled off.
    """
    peel = peel_of(problem, w)
    wide = problem.dtype.itemsize == 4
    if peel and wide:  # H200, 2026-11-19: docs/measured.md, "Runs of odd length"
        size, threads, stages = 16384 if w.reps * w.run > 2**16 and not per_element(problem) else 4096, 512, 1
    elif peel:
        size, threads, stages = (4096, 256, 1) if w.reps > 1 else (2048, 256, 1) if problem.spec.centered else (4096, 512, 1)
    elif not vectors:
        size, threads, stages = 2048, 512, 1
    elif w.reps > 1:
        size, threads, stages = (16384, 512, 1) if w.reps * w.run >= 2**17 else (8192, 256, 1)
    elif not problem.spec.centered:
        size, threads, stages = (8192, 1024, 1) if wide or w.run > 2**15 else (4096, 512, 1)
    elif w.run <= 2**17:
        # 512 threads are faster as long as all programs run at the same time.
        size, threads, stages = 4096, 1024 if wide else 256 if w.total >= 3 * device.sms else 512, 1
    else:
        size, threads, stages = 2048, 256, stages_that_fit(problem, device, 2048, 3)
    return replace(row_parts(w, device, 1, size, threads, stages, reduce=True, apply=True), peel=peel)


def row_parts(
    w: Walk,
    device: Device,
    parts: int,
    size: int,
    threads: int,
    stages: int = 1,
    widest: int = 2**20,
    reduce: bool = False,
    apply: bool = False,
) -> RowLaunch:
    """Return a launch that cuts each set into about `parts` parts, and each part into blocks of at most `size` elements.

    A block of `size` elements gets `threads` threads, and a smaller block fewer. A block has at most `widest` elements of a run.
    """
    block_j = min(power_of_two(w.run), size, widest)
    # A block has block_i runs of one set or, if each set is one run, block_i sets.
    block_i = min(size // block_j, power_of_two(w.reps)) if w.reps > 1 else size // block_j
    split = split_set(w, parts, block_i, block_j)
    sets = ceil(w.total / block_i) if w.reps == 1 else w.total
    return RowLaunch(
        walk=w,
        programs=sets * split.parts_r * split.parts_t,
        warps=warps_for(threads * block_i * block_j // size, device),
        unaligned_warps=warps_for(block_i * block_j // 4, device),
        block_i=block_i,
        block_j=block_j,
        split=split,
        stages=stages,
        reduce=reduce,
        apply=apply,
    )


def split_set(w: Walk, parts: int, block_i: int, block_j: int) -> Split:
    """Return the Split of a set into about `parts` parts of whole blocks. chunk_r counts runs, chunk_t counts blocks.

    The set is cut between its runs first, and along them only if that gives too few parts.
    """
    chunk_r = ceil(ceil(w.reps / block_i) / parts) * block_i
    parts_r = ceil(w.reps / chunk_r)
    steps = ceil(w.run / block_j)
    chunk_t = ceil(steps / ceil(parts / parts_r))
    return Split(parts_r, ceil(steps / chunk_t), chunk_r, chunk_t)
