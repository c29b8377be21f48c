"""The kernels that mix the mean and variance of sets with those of groups of sets.

mix/launch.py says what sets, groups and norms are. All sets have the same number of elements. Statistics of groups are stored one norm
after the other, first all means, then all variances. `of` is the Groups of one norm. Numbers such as (24) are equations of docs/theory.md.
"""

import triton
import triton.language as tl

from onepass.backends.gpu.device.elements import program
from onepass.backends.gpu.device.moments import DOWN, UP, inverse_deviation

from .launch import BothGroups, Given, Mixed, MixSizes, Own, Weights


@triton.jit
def merge(own: Own, merged_ptr, sizes: MixSizes, groups: BothGroups, mode: tl.constexpr):
    """Store the mean and variance of each group of each norm whose statistics are not given."""
    pid = program(False, False, mode.pdl_trigger, mode.pdl_wait)
    if mode.second < 0 or mode.second_given:
        _merge(pid, own, merged_ptr, sizes, groups.first, mode)
    else:
        if pid < groups.first.programs:
            _merge(pid, own, merged_ptr, sizes, groups.first, mode)
        else:
            _merge(pid - groups.first.programs, own, merged_ptr, sizes, groups.second, mode)


@triton.jit
def _merge(pid, own, merged_ptr, sizes, of, mode: tl.constexpr):
    """Store the moments of some groups of one norm: of equal sets, the mean of means, and of variances plus their distances. (14), (15)"""
    k, here, i = columns(pid, of, mode)
    total = tl.zeros((mode.block_i, mode.block_j), tl.float32)
    for n in range(0, of.merged, mode.block_i):
        at, inside = sets_of(k, here, n + i, of)
        total += tl.load(own.mean_ptr + at, mask=inside, other=0.0) * DOWN
    mean = tl.sum(total, 0, keep_dims=True) / of.merged * UP
    total = tl.zeros((mode.block_i, mode.block_j), tl.float32)
    for n in range(0, of.merged, mode.block_i):
        at, inside = sets_of(k, here, n + i, of)
        delta = tl.load(own.mean_ptr + at, mask=inside, other=0.0) - mean
        total += tl.where(inside, tl.load(own.var_ptr + at, mask=inside, other=0.0) + delta * delta, 0.0)
    var = tl.sum(total, 0, keep_dims=True) / of.merged
    to = merged_ptr + of.at + number_of(k, of)
    tl.store(to, mean, mask=here)
    tl.store(to + sizes.groups, var, mask=here)


@triton.jit
def columns(pid, of, mode: tl.constexpr):
    """Return the groups of a program, of shape [1, J], which of them exist, and the numbers of sets [I, 1] in a group."""
    k = pid * mode.block_j + tl.arange(0, mode.block_j)[None, :]
    return k, k < of.groups, tl.arange(0, mode.block_i)[:, None]


@triton.jit
def sets_of(k, here, n, of):
    """Return where the n-th set of each group k lies, and whether it exists."""
    k1, k2 = k // of.kept2, k % of.kept2
    outer, inner = n // of.within, n % of.within
    across, between = outer // of.between, outer % of.between
    at = (((across * of.kept1 + k1) * of.between + between) * of.kept2 + k2) * of.within + inner
    return at, here & (n < of.merged)


@triton.jit
def number_of(k, of):
    """Return the place of each group k among those of its norm."""
    return k // of.kept2 * of.stride1 + k % of.kept2 * of.stride2


@triton.jit
def group_of(set_, of):
    """Return the place of the group of each set among those of its norm."""
    k2 = set_ // of.within % of.kept2
    k1 = set_ // of.within // of.kept2 // of.between % of.kept1
    return k1 * of.stride1 + k2 * of.stride2


@triton.jit
def statistics_of(number, here, merged_ptr, given, groups, of, GIVEN: tl.constexpr):
    """Return the mean and variance of groups, by their places. All norms together have `groups` groups."""
    if GIVEN:
        mean = tl.load(given.running_mean_ptr + number, mask=here, other=0.0)
        var = tl.load(given.running_var_ptr + number, mask=here, other=0.0)
    else:
        mean = tl.load(merged_ptr + of.at + number, mask=here, other=0.0)
        var = tl.load(merged_ptr + groups + of.at + number, mask=here, other=0.0)
    return mean, var


@triton.jit
def weights_of(weights, NUMBER: tl.constexpr):
    """Return the weights of the mean and of the variance of a norm."""
    return tl.load(weights.mean_weight_ptr + NUMBER), tl.load(weights.var_weight_ptr + NUMBER)


@triton.jit
def mix(
    own: Own, merged_ptr, weights: Weights, given: Given, mixed: Mixed, eps, sizes: MixSizes, groups: BothGroups, mode: tl.constexpr
):  # fmt: skip
    """Store the mixed mean of each set (24), and the rstd of the mixed variance (25)."""
    pid = program(False, False, mode.pdl_trigger, mode.pdl_wait)
    set_ = pid * mode.block_j + tl.arange(0, mode.block_j)
    here = set_ < sizes.sets
    mean = tl.zeros((mode.block_j,), tl.float32)
    var = tl.zeros((mode.block_j,), tl.float32)
    if mode.own >= 0:
        a, b = weights_of(weights, mode.own)
        mean += a * tl.load(own.mean_ptr + set_, mask=here, other=0.0)
        var += b * tl.load(own.var_ptr + set_, mask=here, other=0.0)
    if mode.first >= 0:
        a, b = weights_of(weights, mode.first)
        number = group_of(set_, groups.first)
        mean_k, var_k = statistics_of(number, here, merged_ptr, given, sizes.groups, groups.first, mode.first_given)
        mean += a * mean_k
        var += b * var_k
    if mode.second >= 0:
        a, b = weights_of(weights, mode.second)
        number = group_of(set_, groups.second)
        mean_k, var_k = statistics_of(number, here, merged_ptr, given, sizes.groups, groups.second, mode.second_given)
        mean += a * mean_k
        var += b * var_k
    tl.store(mixed.mixed_mean_ptr + set_, mean, mask=here)
    if mixed.rstd_ptr is not None:
        tl.store(mixed.rstd_ptr + set_, inverse_deviation(var, eps), mask=here)
