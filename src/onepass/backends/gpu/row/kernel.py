"""The forward kernel of the row walk, which reads each set along its runs.

A set is the elements that share one mean and variance. It has one or several runs, each contiguous in memory. In
`x[o, r, s, t]` a set is one (o, s), r numbers its runs, and t goes along a run. A part is the share of a set that one
program works on. A block has I x J elements, and J goes along a run.
"""

import triton
import triton.language as tl

from onepass.backends.gpu.device.affine import fold_affine
from onepass.backends.gpu.device.axes import AXIS_O, AXIS_R, AXIS_S, AXIS_T
from onepass.backends.gpu.device.elements import load, load_x, program, store
from onepass.backends.gpu.device.groups import Affine, Maps, Place, Statistics, Tensors, View
from onepass.backends.gpu.device.moments import (
    inverse_deviation,
    join,
    known_rstd,
    lanes,
    load_statistics,
    mean_of,
    merge,
    scaled_down,
    store_statistics,
    update,
)
from onepass.backends.gpu.partials.combine import PartArguments

RUNS_OF_ENDS = tl.constexpr(16)  # if a set has several runs, the ends of this many are taken at a time


@triton.jit
def row_forward(
    io: Tensors, affine: Affine, stats: Statistics, parts_ptr, eps, inverse_n, total, view: View, maps: Maps, split: PartArguments,
    norm: tl.constexpr, block: tl.constexpr, mode: tl.constexpr,
):  # fmt: skip
    """Compute the moments of parts of `total` sets, or y, or both, as `mode` says.

    `norm` is a Norm of device/groups.py. `block` is a RowBlock and `mode` a RowMode of row/launch.py.
    """
    pid = program(not mode.reduce, mode.wide, mode.pdl_trigger, mode.pdl_wait)
    if mode.resident and mode.peel:
        _peeled_rows(io, affine, stats, eps, inverse_n, pid, total, view, maps, norm, block, mode)
    elif mode.resident:
        step = tl.num_programs(0) * block.i
        if block.stages > 1:  # a program takes blocks in turn, and loads the next ones while it works on one
            for first in tl.range(pid * block.i, total, step, num_stages=block.stages):
                _resident(io, affine, stats, eps, inverse_n, first, total, view, maps, norm, block, mode)
        else:
            _resident(io, affine, stats, eps, inverse_n, pid * block.i, total, view, maps, norm, block, mode)
    else:
        _part(io, affine, stats, parts_ptr, eps, pid, total, view, maps, split, norm, block, mode)


@triton.jit
def _resident(
    io, affine, stats, eps, inverse_n, first, total, view, maps, norm: tl.constexpr, block: tl.constexpr, mode: tl.constexpr
):  # fmt: skip
    """Compute the statistics and y of block.i whole sets, from set `first` on. Each set is read once, its runs one after another.

    If block.remainder is not 0, a set is held as two blocks, of block.j and block.remainder elements. If mode.stripe is not 0, the block
    is [block.i, block.j // mode.stripe, mode.stripe]: the compiler lays threads along stripes and I, so a thread has an element of each
    stripe, and sums need fewer exchanges between threads.
    """
    n = view.run if mode.flat else view.reps * view.run
    if mode.stripe:
        set_ = first + tl.arange(0, block.i)[:, None, None]
        j = tl.arange(0, block.j // mode.stripe)[None, :, None] * mode.stripe + tl.arange(0, mode.stripe)[None, None, :]
    else:
        set_, j = first + tl.arange(0, block.i)[:, None], tl.arange(0, block.j)[None, :]
    o, s = set_ // view.sets, set_ % view.sets
    if not mode.int32_offsets:
        o, s = o.to(tl.int64), s.to(tl.int64)
    # Sums of 32-bit integers may wrap around, so the compiler could not add the j of each element to a common address.
    x_at, y_at = (o * view.x_o + s * view.x_s).to(tl.int64), (o * view.y_o + s * view.y_s).to(tl.int64)
    here, inside = set_ < total, j < n
    if mode.exact:
        inside = tl.full(j.shape, True, tl.int1)
    r, t = _run_and_place(j, view, mode)
    x = load(io, x_at + (r * view.x_r + t), here & inside, "")
    DTYPE: tl.constexpr = io.y_ptr.dtype.element_ty
    place = Place(o=o, r=r, s=s, t=t, i_inside=here, j_inside=inside)
    if mode.early:  # so that these loads overlap with those of x; NVIDIA's compiler moves them behind the first sums
        gain, term = fold_affine(1.0, affine, maps, place, norm, AXIS_O | AXIS_S, AXIS_R | AXIS_T)
    mean = _sum_of_sets(scaled_down(x, DTYPE), mode)
    if block.remainder:
        j_rest = block.j + tl.arange(0, block.remainder)[None, :]
        inside_rest = j_rest < n
        if mode.exact:
            inside_rest = tl.full((1, block.remainder), True, tl.int1)
        r_rest, t_rest = _run_and_place(j_rest, view, mode)
        x_rest = load(io, x_at + (r_rest * view.x_r + t_rest), here & inside_rest, "")
        place_rest = Place(o=o, r=r_rest, s=s, t=t_rest, i_inside=here, j_inside=inside_rest)
        if mode.early:
            gain_rest, term_rest = fold_affine(1.0, affine, maps, place_rest, norm, AXIS_O | AXIS_S, AXIS_R | AXIS_T)
        mean += tl.sum(scaled_down(x_rest, DTYPE), 1, keep_dims=True)
    mean = mean_of(mean, n * 1.0, inverse_n, DTYPE)
    if norm.centered:
        x -= mean
        if not mode.exact:
            x = tl.where(here & inside, x, 0.0)
    var = _sum_of_sets(x * x, mode)
    if block.remainder:
        if norm.centered:
            x_rest -= mean
            if not mode.exact:
                x_rest = tl.where(here & inside_rest, x_rest, 0.0)
        var += tl.sum(x_rest * x_rest, 1, keep_dims=True)
    var = var * inverse_n  # (3) of docs/theory.md
    rstd = inverse_deviation(var, eps, mode.tiny_eps)
    store_statistics(stats, set_, mean, rstd, var, here)
    if mode.early:
        factor = gain * rstd
    else:
        factor, term = fold_affine(rstd, affine, maps, place, norm, AXIS_O | AXIS_S, AXIS_R | AXIS_T)
    store(io.y_ptr, y_at + (r * view.y_r + t), x * factor + term, here & inside, norm.activation, "")
    if block.remainder:
        if mode.early:
            factor_rest = gain_rest * rstd
        else:
            factor_rest, term_rest = fold_affine(rstd, affine, maps, place_rest, norm, AXIS_O | AXIS_S, AXIS_R | AXIS_T)
        y_rest = y_at + (r_rest * view.y_r + t_rest)
        store(io.y_ptr, y_rest, x_rest * factor_rest + term_rest, here & inside_rest, norm.activation, "")


@triton.jit
def _peeled_rows(io, affine, stats, eps, inverse_n, pid, total, view, maps, norm: tl.constexpr, block: tl.constexpr, mode: tl.constexpr):
    """Compute the statistics and y of every num_programs-th row, from row `pid` on. Each row is read once.

    A row is held as two blocks: block.j elements in whole vectors of mode.peel elements, and block.remainder elements, the ends of the
    row before and after them, which are loaded one by one.

    The number of programs is a multiple of mode.peel, unless each has one row. So all rows of a program begin equally far from a multiple
    of mode.peel, and an element of a thread has the same place in each row. Parameters that all rows share are loaded once.
    """
    PEEL: tl.constexpr = mode.peel
    SHARED: tl.constexpr = not ((norm.param_axes | norm.modulation_axes) & (AXIS_O | AXIS_S))
    DTYPE: tl.constexpr = io.y_ptr.dtype.element_ty
    n = view.run
    start = (pid // view.sets).to(tl.int64) * view.x_o + (pid % view.sets).to(tl.int64) * view.x_s
    before = (first_vector(start, PEEL) - start).to(tl.int32)
    j = tl.arange(0, block.j)[None, :]
    if mode.exact:
        n_whole, inside = block.j, tl.full((1, block.j), True, tl.int1)
    else:
        n_whole = in_vectors(n, PEEL)
        inside = j < n_whole
    t = before + j
    t_end, is_end = ends_of(before, n, n_whole, block.remainder)
    if SHARED:
        place = Place(o=0, r=0, s=0, t=t, i_inside=True, j_inside=inside)
        gain, term = fold_affine(1.0, affine, maps, place, norm, 0, AXIS_T)
        place = Place(o=0, r=0, s=0, t=t_end, i_inside=True, j_inside=is_end)
        gain_end, term_end = fold_affine(1.0, affine, maps, place, norm, 0, AXIS_T)
    for set_ in tl.range(pid, total, tl.num_programs(0), num_stages=block.stages):
        o, s = set_ // view.sets, set_ % view.sets
        x_at = o.to(tl.int64) * view.x_o + s.to(tl.int64) * view.x_s
        y_at = o.to(tl.int64) * view.y_o + s.to(tl.int64) * view.y_s
        x = load(io, first_vector(x_at, PEEL) + j, inside, "")
        x_end = load(io, x_at + t_end, is_end, "")
        mean = tl.sum(scaled_down(x, DTYPE), 1, keep_dims=True) + tl.sum(scaled_down(x_end, DTYPE), 1, keep_dims=True)
        mean = mean_of(mean, n * 1.0, inverse_n, DTYPE)
        if norm.centered:
            x -= mean
            if not mode.exact:
                x = tl.where(inside, x, 0.0)
            x_end = tl.where(is_end, x_end - mean, 0.0)
        var = tl.sum(x * x, 1, keep_dims=True) + tl.sum(x_end * x_end, 1, keep_dims=True)
        var = var * inverse_n  # (3) of docs/theory.md
        rstd = inverse_deviation(var, eps, mode.tiny_eps)
        at = set_ + tl.zeros((1, 1), tl.int32)
        store_statistics(stats, at, mean, rstd, var, at < total)
        if SHARED:
            factor, factor_end = gain * rstd, gain_end * rstd
        else:
            place = Place(o=o, r=0, s=s, t=t, i_inside=True, j_inside=inside)
            factor, term = fold_affine(rstd, affine, maps, place, norm, 0, AXIS_T)
            place = Place(o=o, r=0, s=s, t=t_end, i_inside=True, j_inside=is_end)
            factor_end, term_end = fold_affine(rstd, affine, maps, place, norm, 0, AXIS_T)
        store(io.y_ptr, first_vector(y_at, PEEL) + j, x * factor + term, inside, norm.activation, "")
        store(io.y_ptr, y_at + t_end, x_end * factor_end + term_end, is_end, norm.activation, "")


@triton.jit
def _sum_of_sets(x, mode: tl.constexpr):
    if mode.stripe:
        return tl.sum(tl.sum(x, 1, keep_dims=True), 2, keep_dims=True)
    else:
        return tl.sum(x, 1, keep_dims=True)


@triton.jit
def _run_and_place(j, view, mode: tl.constexpr):
    """Return r and t of the elements j of a set, whose runs are counted one after another."""
    if mode.flat:
        return 0, j
    else:
        r = j // view.run
        return r if mode.int32_offsets else r.to(tl.int64), j % view.run


@triton.jit
def _part(
    io, affine, stats, parts_ptr, eps, pid, total, view, maps, split, norm: tl.constexpr, block: tl.constexpr, mode: tl.constexpr
):  # fmt: skip
    """Compute the moments of one part of a set, or its y, block by block.

    If `mode` asks for both, the part is the whole set. With mode.flat a set is one run, and the program works on the same
    part of block.i sets.

    If mode.peel is not 0, blocks hold only whole vectors: mode.peel elements, beginning at a multiple of mode.peel. What remains before
    and after them are the ends of the run. All runs have equally many of these.
    """
    i = tl.arange(0, block.i)[:, None]
    set_, part = pid // (split.parts_r * split.parts_t), pid % (split.parts_r * split.parts_t)
    part_r, part_t = part // split.parts_t, part % split.parts_t
    r_start = part_r * split.chunk_r
    r_end = tl.minimum(r_start + split.chunk_r, view.reps)
    if block.run_fits:
        t_start, n = 0, view.run
    else:
        t_start = part_t * split.chunk_t * block.j
        n = tl.minimum(split.chunk_t * block.j, view.run - t_start)
    here = None
    if mode.flat:
        set_ = set_ * block.i + i
        here = set_ < total
    o, s = set_ // view.sets, set_ % view.sets
    x_at = o.to(tl.int64) * view.x_o + s.to(tl.int64) * view.x_s + t_start
    y_at = o.to(tl.int64) * view.y_o + s.to(tl.int64) * view.y_s + t_start
    if mode.reduce:
        if mode.flat:
            mean, m2 = _moments_of_run(io, x_at, n, here, norm, block, mode)
        else:
            mean, m2 = _moments_of_runs(io, x_at, view, r_start, r_end, n, norm, block, mode)
        if not norm.centered:
            mean = 0.0  # a sum of zeros otherwise, which the compiler would move through shared memory, as a block
        if mode.apply:
            var = m2 / view.reps / view.run
            spread = inverse_deviation(var, eps, mode.tiny_eps)
            store_statistics(stats, set_, mean, spread, var, here)
        else:
            at = ((o.to(tl.int64) * split.parts_r + part_r) * view.sets + s) * split.parts_t + part_t
            tl.store(parts_ptr + at, mean, mask=here)
            tl.store(parts_ptr + split.m2_offset + at, m2, mask=here)
    else:
        mean, spread = load_statistics(stats, s if mode.by_s else set_, here)
    if mode.apply:
        # Blocks are taken backwards: the last one was read last, and may still be cached.
        PEEL: tl.constexpr = mode.peel
        n_whole = in_vectors(n, PEEL)
        steps = 1 if block.run_fits and not PEEL else tl.cdiv(n_whole, block.j)
        j = tl.arange(0, block.j)[None, :]
        if mode.flat:
            first, y_first = first_vector(x_at, PEEL), first_vector(y_at, PEEL)  # y_first, too: the compiler must see a multiple
            for step in tl.range(0, steps, num_stages=block.stages):
                at = (steps - 1 - step) * block.j + j
                t = t_start + at
                if PEEL:
                    t += (first - x_at).to(tl.int32)
                place = Place(o=o, r=0, s=s, t=t, i_inside=here, j_inside=at < n_whole)
                _apply(io, affine, stats, maps, first + at, y_first + at, place, mean, spread, eps, norm, mode)
            if PEEL:
                at, is_end = ends_of(first - x_at, n, n_whole, 2 * PEEL)
                place = Place(o=o, r=0, s=s, t=t_start + at, i_inside=here, j_inside=is_end)
                _apply(io, affine, stats, maps, x_at + at, y_at + at, place, mean, spread, eps, norm, mode)
        else:
            steps_r = tl.cdiv(r_end - r_start, block.i)
            for step in range(steps):
                at = (steps - 1 - step) * block.j + j
                for step_r in tl.range(0, steps_r, num_stages=block.stages):
                    r = r_start + (steps_r - 1 - step_r) * block.i + i
                    run_at, y_run_at = x_at + r.to(tl.int64) * view.x_r, y_at + r.to(tl.int64) * view.y_r
                    first = first_vector(run_at, PEEL)
                    t = t_start + at
                    if PEEL:
                        t += (first - run_at).to(tl.int32)
                    place = Place(o=o, r=r, s=s, t=t, i_inside=r < r_end, j_inside=at < n_whole)
                    _apply(io, affine, stats, maps, first + at, first_vector(y_run_at, PEEL) + at, place, mean, spread, eps, norm, mode)
            if PEEL:
                for r0 in range(r_start, r_end, RUNS_OF_ENDS):
                    r = r0 + tl.arange(0, RUNS_OF_ENDS)[:, None]
                    run_at, y_run_at = x_at + r.to(tl.int64) * view.x_r, y_at + r.to(tl.int64) * view.y_r
                    at, is_end = ends_of(first_vector(run_at, PEEL) - run_at, n, n_whole, 2 * PEEL)
                    place = Place(o=o, r=r, s=s, t=t_start + at, i_inside=r < r_end, j_inside=is_end)
                    _apply(io, affine, stats, maps, run_at + at, y_run_at + at, place, mean, spread, eps, norm, mode)


@triton.jit
def _moments_of_run(io, x_at, n, here, norm: tl.constexpr, block: tl.constexpr, mode: tl.constexpr):
    """Return mean and M2 of n elements from x_at on, for each of block.i sets."""
    KEEP: tl.constexpr = "evict_last" if mode.apply else ""
    PEEL: tl.constexpr = mode.peel
    j = tl.arange(0, block.j)[None, :]
    first, n_whole = first_vector(x_at, PEEL), in_vectors(n, PEEL)
    mean, m2, k = tl.zeros((block.i, block.j), tl.float32), tl.zeros((block.i, block.j), tl.float32), 0.0
    for t0 in tl.range(0, n_whole, block.j, num_stages=block.stages):
        mask = here & (t0 + j < n_whole)
        k += 1.0
        mean, m2 = update(mean, m2, k, load(io, first + (t0 + j), mask, KEEP), mask, norm.centered)
    mean, m2 = merge(mean, m2, lanes(0, n_whole, j, block.j), _divisor(n_whole, PEEL), 1, norm.centered)
    if PEEL:
        at, is_end = ends_of(first - x_at, n, n_whole, 2 * PEEL)
        mask, n_ends = here & is_end, 1.0 * (n - n_whole)
        x = load(io, x_at + at, mask, KEEP)
        other_mean, other_m2 = merge(x, 0.0 if norm.centered else x * x, mask.to(tl.float32), n_ends, 1, norm.centered)
        mean, m2, _ = join(mean, m2, 1.0 * n_whole, other_mean, other_m2, n_ends, norm.centered)
    return mean, m2


@triton.jit
def _moments_of_runs(io, x_at, view, r_start, r_end, n, norm: tl.constexpr, block: tl.constexpr, mode: tl.constexpr):
    """Return mean and M2 of the runs from r_start to r_end, of n elements each. x_at is where the run 0 begins."""
    KEEP: tl.constexpr = "evict_last" if mode.apply else ""
    PEEL: tl.constexpr = mode.peel
    i, j = tl.arange(0, block.i)[:, None], tl.arange(0, block.j)[None, :]
    n_whole, runs = in_vectors(n, PEEL), (r_end - r_start) * 1.0
    mean, m2, k = tl.zeros((block.i, block.j), tl.float32), tl.zeros((block.i, block.j), tl.float32), 0.0
    # `update` (device/moments.py) takes one element count k for all lanes. So a lane that had no element in one step
    # must have none in later steps. That holds, because there is only one step along t, or block.i is 1.
    for step in range(1 if block.run_fits and not PEEL else tl.cdiv(n_whole, block.j)):
        at = step * block.j + j
        for r0 in tl.range(r_start, r_end, block.i, num_stages=block.stages):
            mask = (r0 + i < r_end) & (at < n_whole)
            k += 1.0
            first = first_vector(x_at + (r0 + i).to(tl.int64) * view.x_r, PEEL)
            mean, m2 = update(mean, m2, k, load(io, first + at, mask, KEEP), mask, norm.centered)
    in_lane = lanes(0, n_whole, j, block.j) * lanes(r_start, r_end, i, block.i)
    mean, m2 = merge(mean, m2, in_lane, runs * _divisor(n_whole, PEEL), None, norm.centered)
    if PEEL:
        i_end = tl.arange(0, RUNS_OF_ENDS)[:, None]
        end_mean, end_m2, k = tl.zeros((RUNS_OF_ENDS, 2 * PEEL), tl.float32), tl.zeros((RUNS_OF_ENDS, 2 * PEEL), tl.float32), 0.0
        for r0 in range(r_start, r_end, RUNS_OF_ENDS):
            run_at = x_at + (r0 + i_end).to(tl.int64) * view.x_r
            at, is_end = ends_of(first_vector(run_at, PEEL) - run_at, n, n_whole, 2 * PEEL)
            mask = (r0 + i_end < r_end) & is_end
            k += 1.0
            end_mean, end_m2 = update(end_mean, end_m2, k, load(io, run_at + at, mask, KEEP), mask, norm.centered)
        n_ends = runs * (n - n_whole)
        in_lane = lanes(r_start, r_end, i_end, RUNS_OF_ENDS) * (tl.arange(0, 2 * PEEL)[None, :] < n - n_whole).to(tl.float32)
        other_mean, other_m2 = merge(end_mean, end_m2, in_lane, n_ends, None, norm.centered)
        mean, m2, _ = join(mean, m2, runs * n_whole, other_mean, other_m2, n_ends, norm.centered)
    return mean, m2


@triton.jit
def _apply(io, affine, stats, maps, x_at, y_at, place, mean, spread, eps, norm: tl.constexpr, mode: tl.constexpr):
    """Store y of the elements of a block. `spread` is what `load_statistics` returned, or rstd if this program has computed it."""
    DROP: tl.constexpr = "evict_first" if mode.reduce else ""
    inside = place.i_inside & place.j_inside
    x = load_x(io.x_ptr, x_at, inside, DROP)
    # Compute rstd here, not before the loop: it waits for `spread`, and the load of x should start first.
    rstd = spread if mode.reduce else known_rstd(stats, spread, eps)
    ALONG_I: tl.constexpr = AXIS_O | AXIS_S if mode.flat else AXIS_R
    factor, term = fold_affine(rstd, affine, maps, place, norm, ALONG_I, AXIS_T)
    store(io.y_ptr, y_at, (x - mean) * factor + term, inside, norm.activation, DROP)


@triton.jit
def in_vectors(n, PEEL: tl.constexpr):
    """Return how many of n elements are in whole vectors of PEEL elements, wherever the n begin. It is n if PEEL is 0."""
    if PEEL:
        return tl.maximum(n - (PEEL - 1), 0) // PEEL * PEEL
    else:
        return n


@triton.jit
def first_vector(at, PEEL: tl.constexpr):
    """Return the first multiple of PEEL from `at` on. It is `at` if PEEL is 0."""
    if PEEL:
        return (at + (PEEL - 1)) // PEEL * PEEL
    else:
        return at


@triton.jit
def ends_of(before, n, n_whole, COUNT: tl.constexpr):
    """Return where the ends of n elements are, and a mask of the ends that exist: up to COUNT elements.

    The ends are the `before` first elements, and those that follow the next n_whole elements.
    """
    end = tl.arange(0, COUNT)[None, :]
    return tl.where(end < before, end, end + n_whole), end < n - n_whole


@triton.jit
def _divisor(n, PEEL: tl.constexpr):
    """Return n as a number to divide by. With PEEL, there may be no whole vector, and n is 0."""
    return 1.0 * tl.maximum(n, 1) if PEEL else 1.0 * n
