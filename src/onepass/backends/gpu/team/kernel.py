"""The tile walk by teams: sets that are too large for one program are shared by several that run at the same time, in one launch.

A unit is one o and a block of columns, which are whole sets. Each member of a team takes the moments of its share of the rows, waits for
those of the others, merges them all in the same order, and applies the result to its rows.
"""

import triton
import triton.language as tl

from onepass.backends.gpu.device.affine import fold_affine
from onepass.backends.gpu.device.elements import load, program, store
from onepass.backends.gpu.device.moments import (
    DOWN,
    UP,
    inverse_deviation,
    join,
    lanes,
    merge,
    scaled_down,
    scaled_up,
    store_statistics,
    update,
)
from onepass.backends.gpu.tile.kernel import columns_at


@triton.jit
def team_forward(
    x_ptr, residual_ptr, sum_ptr, y_ptr, weight_ptr, bias_ptr, scale_ptr, shift_ptr, mean_ptr, rstd_ptr, var_ptr, parts_ptr, counters_ptr,
    eps, total, reps, sets, run, x_o, x_r, x_s, y_o, y_r, y_s,
    p_every, p_period, p_o, p_r, p_s, p_run, p_t, m_every, m_period, m_o, m_r, m_s, m_run, m_t,
    parts_r, parts_t, chunk_r, chunk_t, m2_at, columns, teams, units, each, width,
    PARAM: tl.constexpr, MODULATION: tl.constexpr, OFFSET: tl.constexpr, CENTERED: tl.constexpr, ACTIVATION: tl.constexpr,
    RESIDENT: tl.constexpr, WIDE: tl.constexpr, FLAT: tl.constexpr,
    BLOCK_I: tl.constexpr, BLOCK_J: tl.constexpr, BLOCK_RUN: tl.constexpr, STAGES: tl.constexpr, ALIKE: tl.constexpr, NEAR: tl.constexpr,
    EVEN: tl.constexpr, SETS: tl.constexpr, MEMBERS: tl.constexpr,
):  # fmt: skip
    """The arguments are the tile walk's. A set is in parts_r parts, one for each member; MEMBERS is the next power of two.

    A block has `each` whole sets, `width` columns that follow one another whatever the length of a run; SETS is the next power of two.
    BLOCK_RUN is the run where both that and `each` are powers of two, or 0. EVEN: no block of rows or columns ends past the last.

    A team of one has nobody to wait for: it needs neither counters nor parts.
    """
    x, operands, statistics = (x_ptr, residual_ptr, sum_ptr), (weight_ptr, bias_ptr, scale_ptr, shift_ptr), (mean_ptr, rstd_ptr, var_ptr)
    maps = (p_every, p_period, p_o, p_r, p_s, p_run, p_t), (m_every, m_period, m_o, m_r, m_s, m_run, m_t)
    if ALIKE:
        y_o, y_r, y_s = x_o, x_r, x_s
    strides = x_o, x_r, x_s, y_o, y_r, y_s
    pid = program(False, WIDE, False, False)
    team, member, start, end = pid, 0, 0, reps
    if MEMBERS > 1:
        team, member = pid // parts_r, pid % parts_r
        start = member * chunk_r
        end = tl.minimum(start + chunk_r, reps)
    count = (end - start) * 1.0 * run  # elements of a set that this member has
    EACH: tl.constexpr = (PARAM | MODULATION) & 2  # each row has parameters of its own
    i = tl.arange(0, BLOCK_I)[:, None]
    lane = tl.arange(0, BLOCK_J)[None, :]
    for unit in tl.range(team, units, teams, num_stages=1):
        o, block = unit // chunk_t, unit % chunk_t
        s0, parts = block * each, parts_ptr
        if MEMBERS > 1:
            parts = parts_ptr + o.to(tl.int64) * parts_r * sets
        column = block * width + lane
        if BLOCK_RUN:
            s, t = column // BLOCK_RUN, column % BLOCK_RUN
        else:
            s, t = column // run, column % run
        x_at, y_at, here = columns_at(o, s, t, column, sets, run, columns, strides, FLAT)
        here &= lane < width
        if EVEN:
            here = tl.full((1, BLOCK_J), True, tl.int1)
        if NEAR:
            x_at, y_at = x_at.to(tl.int32), y_at.to(tl.int32)
        if RESIDENT:
            r = start + i
            inside = r < end
            if EVEN:
                inside = tl.full((BLOCK_I, 1), True, tl.int1)
            kept = load(x, x_at + _index(r, NEAR) * x_r, inside & here, "")
            # What does not need the statistics is read while x is on its way.
            gain, term = fold_affine(1.0, operands, maps, (o, r, s, t), inside, here, OFFSET, PARAM, MODULATION, 2, 12)
            DTYPE: tl.constexpr = y_ptr.dtype.element_ty
            sums = tl.sum(scaled_down(kept, DTYPE), 0, keep_dims=True)
            own = scaled_up(_over_sets(sums, s - s0, BLOCK_J, BLOCK_RUN, SETS) / count, DTYPE)  # (2)
            if CENTERED:
                kept = tl.where(inside & here, kept - _in_columns(own, s - s0, BLOCK_J, BLOCK_RUN, SETS), 0.0)
            m2 = _over_sets(tl.sum(kept * kept, 0, keep_dims=True), s - s0, BLOCK_J, BLOCK_RUN, SETS)
        else:
            own, m2 = _reduce(x, x_at, start, end, x_r, run, s - s0, here, CENTERED, BLOCK_I, BLOCK_J, BLOCK_RUN, SETS, STAGES, NEAR)
        of = s0 + tl.arange(0, SETS)[:, None]  # [SETS, 1], as all that belongs to a set
        mean, teller = own, (of < sets) & (of - s0 < each)
        if MEMBERS > 1:
            if CENTERED:
                tl.store(parts + member * sets + of, own, mask=teller)
            tl.store(parts + m2_at + member * sets + of, m2, mask=teller)
            meet(counters_ptr + team, member, parts_r)
            mean, m2 = merged(parts, m2_at, s0, reps, sets, run, parts_r, chunk_r, CENTERED, SETS, MEMBERS)
            teller &= member == 0
        var = m2 / reps / run  # (3)
        rstd = inverse_deviation(var, eps)
        store_statistics(statistics, o * sets + of, mean, rstd, var, teller)
        if RESIDENT:
            factor = gain * _in_columns(rstd, s - s0, BLOCK_J, BLOCK_RUN, SETS)
            if CENTERED and MEMBERS > 1:  # from the member's own mean to that of all
                term += _in_columns(own - mean, s - s0, BLOCK_J, BLOCK_RUN, SETS) * factor
            store(y_ptr, y_at + _index(r, NEAR) * y_r, kept * factor + term, inside & here, ACTIVATION, "")
        else:
            mean, rstd = _in_columns(mean, s - s0, BLOCK_J, BLOCK_RUN, SETS), _in_columns(rstd, s - s0, BLOCK_J, BLOCK_RUN, SETS)
            source = x_ptr
            if residual_ptr is not None:
                source = sum_ptr
                if MEMBERS == 1:
                    tl.debug_barrier()  # a thread may read what another has summed
            if not EACH:
                factor, term = fold_affine(rstd, operands, maps, (o, 0, s, t), None, here, OFFSET, PARAM, MODULATION, 2, 12)
            last = start + (end - start - 1) // BLOCK_I * BLOCK_I  # what was read last comes first: it is still in the cache
            for back in tl.range(0, end - start, BLOCK_I, num_stages=STAGES):
                r = last - back + i
                inside = r < end
                again = load((source, None, None), x_at + _index(r, NEAR) * x_r, inside & here, "")
                if EACH:
                    factor, term = fold_affine(rstd, operands, maps, (o, r, s, t), inside, here, OFFSET, PARAM, MODULATION, 2, 12)
                if CENTERED:
                    again -= mean
                store(y_ptr, y_at + _index(r, NEAR) * y_r, again * factor + term, inside & here, ACTIVATION, "")


@triton.jit
def _index(r, NEAR: tl.constexpr):
    if NEAR:
        return r
    else:
        return r.to(tl.int64)


@triton.jit
def _reduce(
    x_ptrs, x_at, start, end, x_r, run, set_, here,
    CENTERED: tl.constexpr, BLOCK_I: tl.constexpr, BLOCK_J: tl.constexpr, BLOCK_RUN: tl.constexpr, SETS: tl.constexpr,
    STAGES: tl.constexpr, NEAR: tl.constexpr,
):  # fmt: skip
    """The mean and M2 of what rows from start to end have of each set. (14), (15)"""
    i = tl.arange(0, BLOCK_I)[:, None]
    mean, m2 = tl.zeros((BLOCK_I, BLOCK_J), tl.float32), tl.zeros((BLOCK_I, BLOCK_J), tl.float32)
    k = 0.0
    for r0 in tl.range(start, end, BLOCK_I, num_stages=STAGES):
        mask = (r0 + i < end) & here
        k += 1.0
        mean, m2 = update(mean, m2, k, load(x_ptrs, x_at + _index(r0 + i, NEAR) * x_r, mask, ""), mask, CENTERED)
    rows = (end - start) * 1.0
    mean, m2 = merge(mean, m2, lanes(start, end, BLOCK_I)[:, None], rows, 0, CENTERED)
    if CENTERED:
        of_set = _over_sets(mean * DOWN, set_, BLOCK_J, BLOCK_RUN, SETS) / run * UP
        delta = tl.where(here, mean - _in_columns(of_set, set_, BLOCK_J, BLOCK_RUN, SETS), 0.0)
        mean, m2 = of_set, m2 + delta * delta * rows
    else:
        mean = tl.zeros((SETS, 1), tl.float32)
    return mean, _over_sets(m2, set_, BLOCK_J, BLOCK_RUN, SETS)


@triton.jit
def merged(
    parts_ptr, m2_at, s0, reps, sets, run, parts_r, chunk_r, CENTERED: tl.constexpr, SETS: tl.constexpr, MEMBERS: tl.constexpr
):  # fmt: skip
    """The mean and M2 of the sets from s0 on, from those of all members. (14), (15)"""
    # Loads of as many elements as there are threads would impose their layout on all that follows, and send the rows through shared memory.
    BLOCK: tl.constexpr = min(MEMBERS, max(128 // SETS, 1))
    s = s0 + tl.arange(0, SETS)[None, :]
    n, mean, m2 = tl.zeros((BLOCK, SETS), tl.float32), tl.zeros((BLOCK, SETS), tl.float32), tl.zeros((BLOCK, SETS), tl.float32)
    for first in range(0, parts_r, BLOCK):
        part = first + tl.arange(0, BLOCK)[:, None]
        at, mask = parts_ptr + part * sets + s, (part < parts_r) & (s < sets)
        n_part = tl.where(mask, tl.minimum(reps - part * chunk_r, chunk_r) * 1.0 * run, 0.0)
        # Past the first cache, which belongs to one multiprocessor.
        m2_part = tl.load(at + m2_at, mask=mask, other=0.0, cache_modifier=".cg")
        mean_part = m2_part
        if CENTERED:
            mean_part = tl.load(at, mask=mask, other=0.0, cache_modifier=".cg")
        mean, m2, n = join(mean, m2, n, mean_part, m2_part, n_part, CENTERED)
    mean, m2 = merge(mean, m2, n, reps * 1.0 * run, 0, CENTERED)
    return tl.reshape(mean, (SETS, 1)), tl.reshape(m2, (SETS, 1))


@triton.jit
def _over_sets(sums, set_, BLOCK_J: tl.constexpr, BLOCK_RUN: tl.constexpr, SETS: tl.constexpr):
    """The sum over the columns of each set, [SETS, 1]."""
    if BLOCK_RUN:
        return tl.sum(tl.reshape(sums, (SETS, BLOCK_RUN)), 1, keep_dims=True)
    else:
        return tl.sum(tl.where(set_ == tl.arange(0, SETS)[:, None], sums, 0.0), 1, keep_dims=True)


@triton.jit
def _in_columns(each, set_, BLOCK_J: tl.constexpr, BLOCK_RUN: tl.constexpr, SETS: tl.constexpr):
    """What each of SETS sets has, [SETS, 1], in each of its columns, [1, BLOCK_J]."""
    if BLOCK_RUN:
        return tl.reshape(tl.broadcast_to(each, (SETS, BLOCK_RUN)), (1, BLOCK_J))
    else:
        return tl.sum(tl.where(set_ == tl.arange(0, SETS)[:, None], each, 0.0), 0, keep_dims=True)


@triton.jit
def meet(counter, member, members):
    """Wait until all members have come; what each stored before is then there for all.

    Together they add 2³¹, which turns the counter's sign and leaves the rest of it 0, ready for the next time: nobody resets it, and who is
    early the next time cannot turn the sign again before the last has seen it.
    """
    tl.debug_barrier()  # what all threads stored comes before the word that it is there
    step = tl.where(member == 0, 2147483647 - (members - 2), 1).to(tl.int32)
    before = tl.atomic_add(counter, step, sem="acq_rel", scope="gpu")
    now = before + step
    while (before ^ now) >= 0:
        now = tl.atomic_add(counter, 0, sem="acquire", scope="gpu")
