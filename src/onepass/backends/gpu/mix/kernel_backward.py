"""The kernels that take the gradients of mixed statistics back to sets, and to the weights of the mix.

`shares` holds four numbers for each group, each kind for all norms one after the other: the averages of dmean and dvar (26) over the sets
of the group, and the sums of dmean·mean and dvar·var (30), with the mean and variance of the group. Then follow these two sums over the
sets of each program of `mix_gradients`, with the mean and variance of each set.
"""

import triton
import triton.language as tl

from onepass.backends.gpu.device.elements import program

from .kernel import columns, group_of, number_of, sets_of, statistics_of, weights_of
from .launch import BothGroups, Given, GradientSizes, MixedSums, Own, SetGradients, WeightGradients, Weights


@triton.jit
def merge_gradients(
    gradients: SetGradients, merged_ptr, given: Given, shares_ptr, sizes: GradientSizes, groups: BothGroups, mode: tl.constexpr
):
    """Store the `shares` of each group of each norm."""
    pid = program(False, False, mode.pdl_trigger, mode.pdl_wait)
    if mode.second < 0:
        _merge_gradients(pid, gradients, merged_ptr, given, shares_ptr, sizes, groups.first, mode.first_given, mode)
    else:
        if pid < groups.first.programs:
            _merge_gradients(pid, gradients, merged_ptr, given, shares_ptr, sizes, groups.first, mode.first_given, mode)
        else:
            _merge_gradients(
                pid - groups.first.programs, gradients, merged_ptr, given, shares_ptr, sizes, groups.second, mode.second_given, mode
            )


@triton.jit
def _merge_gradients(pid, gradients, merged_ptr, given, shares_ptr, sizes, of, GIVEN: tl.constexpr, mode: tl.constexpr):
    k, here, i = columns(pid, of, mode)
    dmean = tl.zeros((mode.block_i, mode.block_j), tl.float32)
    dvar = tl.zeros((mode.block_i, mode.block_j), tl.float32)
    for n in range(0, of.merged, mode.block_i):
        at, inside = sets_of(k, here, n + i, of)
        _, dmean_set, dvar_set = _of_sets(gradients, at, inside, sizes)
        dmean += dmean_set
        dvar += dvar_set
    dmean, dvar = tl.sum(dmean, 0, keep_dims=True), tl.sum(dvar, 0, keep_dims=True)
    number = number_of(k, of)
    mean, var = statistics_of(number, here, merged_ptr, given, sizes.groups, of, GIVEN)
    to = shares_ptr + of.at + number
    tl.store(to, dmean / of.merged, mask=here)
    tl.store(to + sizes.groups, dvar / of.merged, mask=here)
    tl.store(to + 2 * sizes.groups, dmean * mean, mask=here)
    tl.store(to + 3 * sizes.groups, dvar * var, mask=here)


@triton.jit
def _of_sets(gradients, at, inside, sizes):
    """Return rstd, dmean and dvar of sets. (26)"""
    rstd = tl.load(gradients.rstd_ptr + at, mask=inside, other=1.0)  # it divides
    c1 = tl.load(gradients.c1_ptr + at, mask=inside, other=0.0) / sizes.count
    c2 = tl.load(gradients.c2_ptr + at, mask=inside, other=0.0) / sizes.count
    return rstd, -rstd * c1, -0.5 * (rstd * rstd * c2)


@triton.jit
def mix_gradients(
    own: Own, gradients: SetGradients, merged_ptr, weights: Weights, shares_ptr, sums: MixedSums, sizes: GradientSizes,
    groups: BothGroups, mode: tl.constexpr,
):  # fmt: skip
    """Store the sums that give c1' and c2' of each set (29), and this program's last two `shares`."""
    pid = program(False, False, mode.pdl_trigger, mode.pdl_wait)
    set_ = pid * mode.block_j + tl.arange(0, mode.block_j)
    here = set_ < sizes.sets
    mean = tl.load(own.mean_ptr + set_, mask=here, other=0.0)
    rstd, dmean, dvar = _of_sets(gradients, set_, here, sizes)
    to_mean = tl.zeros((mode.block_j,), tl.float32)
    to_var = tl.zeros((mode.block_j,), tl.float32)
    if mode.own >= 0:
        a, b = weights_of(weights, mode.own)
        to_mean += a * dmean
        to_var += b * dvar
        to = shares_ptr + 4 * sizes.groups + pid
        tl.store(to, tl.sum(dmean * mean, 0))
        tl.store(to + sizes.programs, tl.sum(dvar * tl.load(own.var_ptr + set_, mask=here, other=0.0), 0))
    if mode.first >= 0 and not mode.first_given:
        more_mean, more_var = _from_group(set_, here, mean, merged_ptr, weights, shares_ptr, sizes, groups.first, mode.first)
        to_mean += more_mean
        to_var += more_var
    if mode.second >= 0 and not mode.second_given:
        more_mean, more_var = _from_group(set_, here, mean, merged_ptr, weights, shares_ptr, sizes, groups.second, mode.second)
        to_mean += more_mean
        to_var += more_var
    away = tl.load(gradients.mixed_mean_ptr + set_, mask=here, other=0.0) - mean
    tl.store(sums.mixed_c1_ptr + set_, -(to_mean + 2.0 * to_var * away) / rstd * sizes.count, mask=here)
    tl.store(sums.mixed_c2_ptr + set_, -2.0 * to_var / rstd / rstd * sizes.count, mask=here)


@triton.jit
def _from_group(set_, here, mean, merged_ptr, weights, shares_ptr, sizes, of, NUMBER: tl.constexpr):
    """Return what one norm adds to the gradients of the mean (27) and of the variance (28) of sets."""
    a, b = weights_of(weights, NUMBER)
    number = group_of(set_, of)
    mean_k = tl.load(merged_ptr + of.at + number, mask=here, other=0.0)
    at = shares_ptr + of.at + number
    dmean = tl.load(at, mask=here, other=0.0)
    shared = b * tl.load(at + sizes.groups, mask=here, other=0.0)
    return a * dmean + 2.0 * shared * (mean - mean_k), shared


@triton.jit
def mix_weights(shares_ptr, to: WeightGradients, sizes: GradientSizes, groups: BothGroups, mode: tl.constexpr):
    """Store the gradients of the weights: sums of the `shares`. (30)"""
    program(False, False, mode.pdl_trigger, mode.pdl_wait)
    if mode.own >= 0:
        at = shares_ptr + 4 * sizes.groups
        _store_total(at, at + sizes.programs, sizes.programs, to, sizes, mode.own, mode)
    if mode.first >= 0:
        at = shares_ptr + 2 * sizes.groups + groups.first.at
        _store_total(at, at + sizes.groups, groups.first.groups, to, sizes, mode.first, mode)
    if mode.second >= 0:
        at = shares_ptr + 2 * sizes.groups + groups.second.at
        _store_total(at, at + sizes.groups, groups.second.groups, to, sizes, mode.second, mode)


@triton.jit
def _store_total(mean_at, var_at, n, to, sizes, NUMBER: tl.constexpr, mode: tl.constexpr):
    if to.dmean_weight_ptr is not None:
        tl.store(to.dmean_weight_ptr + NUMBER, _total(mean_at, n, mode) * sizes.count)
    if to.dvar_weight_ptr is not None:
        tl.store(to.dvar_weight_ptr + NUMBER, _total(var_at, n, mode) * sizes.count)


@triton.jit
def _total(ptr, n, mode: tl.constexpr):
    """Return the sum of n numbers."""
    lane = tl.arange(0, mode.block_j)
    total = tl.zeros((mode.block_j,), tl.float32)
    for start in range(0, n, mode.block_j):
        total += tl.load(ptr + start + lane, mask=start + lane < n, other=0.0)
    return tl.sum(total, 0)
