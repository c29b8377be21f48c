"""A set by itself: its elements in the order in which they lie in memory, row after row, as many of them at a time as one load takes.

However short a row is and however many columns it has, no thread is without work, and sums need not tell columns apart. What lies between
the rows belongs to other sets, whose programs read it at the same time. A set that is too large for one program is shared by a team.
"""

import triton
import triton.language as tl

from onepass.backends.gpu.device.affine import fold_affine
from onepass.backends.gpu.device.elements import load, store
from onepass.backends.gpu.device.moments import inverse_deviation, scaled_down, scaled_up, store_statistics
from onepass.backends.gpu.team.kernel import meet, merged


@triton.jit
def whole_set_forward(
    x_ptr, residual_ptr, sum_ptr, y_ptr, weight_ptr, bias_ptr, scale_ptr, shift_ptr, mean_ptr, rstd_ptr, var_ptr, parts_ptr, counters_ptr,
    eps, total, reps, sets, run, x_o, x_r, x_s, y_o, y_r, y_s,
    p_every, p_period, p_o, p_r, p_s, p_run, p_t, m_every, m_period, m_o, m_r, m_s, m_run, m_t,
    parts_r, parts_t, chunk_r, chunk_t, m2_at, columns, teams,
    PARAM: tl.constexpr, MODULATION: tl.constexpr, OFFSET: tl.constexpr, CENTERED: tl.constexpr, ACTIVATION: tl.constexpr,
    FLAT: tl.constexpr, BLOCK_I: tl.constexpr, BLOCK_J: tl.constexpr, RUN: tl.constexpr, TILES: tl.constexpr,
    ALIKE: tl.constexpr, NEAR: tl.constexpr, EVEN: tl.constexpr, MEMBERS: tl.constexpr,
):  # fmt: skip
    """The arguments are a team's, whose unit is one set. A member has TILES times BLOCK_I vectors of BLOCK_J, or fewer: not EVEN."""
    x, operands, statistics = (x_ptr, residual_ptr, sum_ptr), (weight_ptr, bias_ptr, scale_ptr, shift_ptr), (mean_ptr, rstd_ptr, var_ptr)
    maps = (p_every, p_period, p_o, p_r, p_s, p_run, p_t), (m_every, m_period, m_o, m_r, m_s, m_run, m_t)
    if FLAT:
        x_s, y_s = run, run
    if ALIKE:
        y_o, y_r, y_s = x_o, x_r, x_s
    team, member = tl.program_id(0) // parts_r, tl.program_id(0) % parts_r
    start = member * chunk_r
    end = tl.minimum(start + chunk_r, reps)
    count = (end - start) * 1.0 * run  # elements of a set that this member has
    here = tl.full((1, BLOCK_J), True, tl.int1)
    for set_ in tl.range(team, total, teams, num_stages=1):
        o, s = set_ // sets, set_ % sets
        DTYPE: tl.constexpr = y_ptr.dtype.element_ty
        kept = ()
        sums = tl.zeros((BLOCK_I, BLOCK_J), tl.float32)
        for tile in tl.static_range(TILES):
            r, t, inside = _vectors(tile, start, end, BLOCK_I, BLOCK_J, RUN, EVEN)
            kept += (load(x, _at(o, s, r, t, x_o, x_r, x_s, NEAR), inside, ""),)
            sums += scaled_down(kept[tile], DTYPE)
        own = scaled_up(tl.div_rn(tl.sum(sums), count), DTYPE)  # (2); by `/` it would be rounded otherwise where nobody stores it
        centered = ()
        sums = tl.zeros((BLOCK_I, BLOCK_J), tl.float32)
        for tile in tl.static_range(TILES):
            away = kept[tile]
            if CENTERED:
                _, _, inside = _vectors(tile, start, end, BLOCK_I, BLOCK_J, RUN, EVEN)
                away = tl.where(inside, away - own, 0.0)
            centered += (away,)
            sums += away * away
        mean, m2 = own, tl.sum(sums)
        if MEMBERS > 1:
            parts = parts_ptr + o.to(tl.int64) * parts_r * sets
            if CENTERED:
                tl.store(parts + member * sets + s, own)
            tl.store(parts + m2_at + member * sets + s, m2)
            meet(counters_ptr + team, member, parts_r)
            mean, m2 = merged(parts, m2_at, s, reps, sets, run, parts_r, chunk_r, CENTERED, 1, MEMBERS)
            mean, m2 = tl.sum(mean), tl.sum(m2)  # from [1, 1] to numbers
        var = m2 / reps / run  # (3)
        rstd = inverse_deviation(var, eps)
        store_statistics(statistics, set_, mean, rstd, var, member == 0)
        for tile in tl.static_range(TILES):
            r, t, inside = _vectors(tile, start, end, BLOCK_I, BLOCK_J, RUN, EVEN)
            factor, term = fold_affine(rstd, operands, maps, (o, r, s, t), inside, here, OFFSET, PARAM, MODULATION, 10, 8)
            if CENTERED and MEMBERS > 1:  # from the member's own mean to that of all
                term += (own - mean) * factor
            store(y_ptr, _at(o, s, r, t, y_o, y_r, y_s, NEAR), centered[tile] * factor + term, inside, ACTIVATION, "")


@triton.jit
def _vectors(tile, start, end, BLOCK_I: tl.constexpr, BLOCK_J: tl.constexpr, RUN: tl.constexpr, EVEN: tl.constexpr):
    """The rows and columns of a tile's vectors, [BLOCK_I, 1] and [BLOCK_I, BLOCK_J], and whether they are this member's."""
    vector = tile * BLOCK_I + tl.arange(0, BLOCK_I)[:, None]
    r = start + vector // (RUN // BLOCK_J)
    t = vector % (RUN // BLOCK_J) * BLOCK_J + tl.arange(0, BLOCK_J)[None, :]
    inside = r < end
    if EVEN:
        inside = tl.full((BLOCK_I, 1), True, tl.int1)
    return r, t, inside


@triton.jit
def _at(o, s, r, t, step_o, step_r, step_s, NEAR: tl.constexpr):
    first = o.to(tl.int64) * step_o + s.to(tl.int64) * step_s
    if NEAR:
        return first.to(tl.int32) + r * step_r + t
    else:
        return first + r.to(tl.int64) * step_r + t
