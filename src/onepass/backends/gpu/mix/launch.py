"""The launches of a mix of norms, whose statistics are weighted means of the statistics of several norms.

A set is the elements that share one mean and variance before the mix. A norm of the mix merges the sets of each of its groups: those of a
sample, for example. Sets and groups have one mean and variance each, far fewer numbers than x has elements. `with_mix` inserts the
launches between those that reduce x and those that apply the statistics. Numbers such as (24) are equations of docs/theory.md.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, prod
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from onepass.backends.family import BACKWARD, Direction, Launches
from onepass.backends.gpu.launch.fields import Count, Index, Length, Pointer, Real
from onepass.backends.gpu.launches import ChainedLaunch, ForwardLaunch, ForwardOptions, chained, power_of_two, warps_for
from onepass.backends.gpu.partials.gradient import BackwardLaunch, BackwardOptions
from onepass.backends.gpu.partials.sums import five_factors
from onepass.backends.gpu.walk import walk
from onepass.core.device import Device
from onepass.core.memory import require_memory
from onepass.core.mixing import MixOperands
from onepass.core.operands import Needs
from onepass.core.problem import NormProblem

TOO_MANY_NORMS = "a mix of more than one norm that merges no sets, or of more than two that do"

BLOCK = 1024  # sets for each program of `mix` and `mix_gradients`
WIDTH = 8  # groups for each program of `merge` and `merge_gradients`


class Own(NamedTuple):
    """The mean and variance of each set, before the mix."""

    mean_ptr: Pointer
    var_ptr: Pointer


class Weights(NamedTuple):
    """The weights of the means and of the variances, one for each norm."""

    mean_weight_ptr: Pointer
    var_weight_ptr: Pointer


class Given(NamedTuple):
    """The statistics of the last norm, if they are given."""

    running_mean_ptr: Pointer
    running_var_ptr: Pointer


class Mixed(NamedTuple):
    """What `mix` stores for each set. The backward does not need rstd again."""

    mixed_mean_ptr: Pointer
    rstd_ptr: Pointer


class SetGradients(NamedTuple):
    """What the backward knows of each set: rstd and the mean, after the mix, and the sums that give c1 and c2."""

    mixed_mean_ptr: Pointer
    rstd_ptr: Pointer
    c1_ptr: Pointer
    c2_ptr: Pointer


class MixedSums(NamedTuple):
    mixed_c1_ptr: Pointer
    mixed_c2_ptr: Pointer


class WeightGradients(NamedTuple):
    dmean_weight_ptr: Pointer
    dvar_weight_ptr: Pointer


class Groups(NamedTuple):
    """How a norm groups the sets, which lie in memory as [across, kept1, between, kept2, within].

    A group has the sets of one place along kept1 and kept2. Groups are stored with stride1 for kept1 and stride2 for kept2.
    """

    kept1: Index
    between: Index
    kept2: Index
    within: Index
    stride1: Index
    stride2: Index
    groups: Count
    merged: Count  # sets of a group
    at: Count  # the place of the first group among those of all norms
    programs: Count  # of `merge` and `merge_gradients`


NO_GROUPS = Groups(1, 1, 1, 1, 0, 0, 0, 0, 0, 0)


class BothGroups(NamedTuple):
    """The groups of the two norms that merge sets, or whose statistics are given."""

    first: Groups
    second: Groups


class MixSizes(NamedTuple):
    sets: Length
    groups: Count  # of all norms


class GradientSizes(NamedTuple):
    sets: Length
    groups: Count  # of all norms
    programs: Count  # of `mix_gradients`
    count: Real  # elements of a set


class MixMode(NamedTuple):
    own: int  # the number of the norm that merges no sets, -1 if there is none
    first: int  # the number of the first norm that merges sets, or whose statistics are given; -1 if there is none
    second: int
    first_given: bool
    second_given: bool
    block_i: int
    block_j: int
    pdl_trigger: bool
    pdl_wait: bool


@dataclass(frozen=True)
class Mix:
    """The norms of a mix, by their numbers."""

    own: int
    others: tuple[int, ...]  # those that merge sets, or whose statistics are given
    groups: tuple[Groups, ...]  # of the others
    given: bool  # the statistics of the last of the others are given

    @property
    def computed(self) -> tuple[Groups, ...]:
        """The groups whose moments have to be computed."""
        return self.groups[:-1] if self.given else self.groups


def mix_of(problem: NormProblem) -> Mix | None:
    """Return the Mix of a problem, or None if the kernels cannot compute it."""
    norms = problem.spec.mixed_dims(problem.shape)
    others = [k for k, dims in enumerate(norms) if dims or (problem.last_given and k == len(norms) - 1)]
    own = [k for k in range(len(norms)) if k not in others]
    if len(own) > 1 or len(others) > 2:
        return None
    found, at = list[Groups](), 0
    for k in others:
        of_norm = _groups(problem, norms[k], at)
        if of_norm is None:
            return None
        found.append(of_norm)
        at += of_norm.groups
    return Mix(own[0] if own else -1, tuple(others), tuple(found), problem.last_given)


def _groups(problem: NormProblem, merged: Sequence[int], at: int) -> Groups | None:
    """Return the groups of a norm that merges sets along the dimensions `merged` of the statistics; None if they have too many axes."""
    shape, strides, step = problem.stat_shape, dict[int, int](), 1
    for dim in reversed(range(len(shape))):
        strides[dim] = 0 if dim in merged else step
        step *= 1 if dim in merged else shape[dim]
    in_memory = sorted(range(len(shape)), key=lambda dim: (-problem.stat_stride[dim], dim))
    factors = five_factors([(shape[dim], strides[dim]) for dim in in_memory])
    if factors is None:
        return None
    (_, kept1, between, kept2, within), (stride1, stride2) = (size for size, _ in factors), (factors[1][1], factors[3][1])
    groups = kept1 * kept2
    return Groups(kept1, between, kept2, within, stride1, stride2, groups, prod(shape) // groups, at, ceil(groups / WIDTH))


MOST_SETS = 2**30


def why_no_mix(problem: NormProblem) -> list[str]:
    """Return a list with the reason why the kernels cannot mix the norms of a problem; empty if they can."""
    if not problem.spec.mix:
        return []
    if prod(problem.stat_shape) >= MOST_SETS:
        return ["there are 2**30 sets or more, and the kernels of a mix count them in 32 bits"]
    return [TOO_MANY_NORMS] if mix_of(problem) is None else []


FP32 = torch.float32
OWN = Own(FP32, FP32)
WEIGHTS = Weights(FP32, FP32)
SET_GRADIENTS = SetGradients(FP32, FP32, FP32, FP32)

OPERANDS = "mean_weight", "var_weight", "running_mean", "running_var"  # of a mix


def operand_names(problem: NormProblem) -> list[str]:
    """Return the names of the operands of the mix. Without a mix there are none."""
    return list(OPERANDS if problem.last_given else OPERANDS[:2]) if problem.spec.mix else []


def operands_of(problem: NormProblem, given: MixOperands) -> list[Tensor]:
    """Return the operands of the mix, in float32 and contiguous, as the kernels need them."""
    found = [getattr(given, name) for name in operand_names(problem)]
    if any(t.dtype != FP32 or not t.is_contiguous() for t in found):
        require_memory(operand_names(problem), found)
        found = [t.to(FP32).contiguous() for t in found]
    return found


def workspace_sizes(problem: NormProblem) -> dict[str, int]:
    """Return the sizes of the tensors that only the launches of a mix use."""
    mix = mix_of(problem) if problem.spec.mix else None
    if mix is None:
        return {}
    sets, groups = prod(problem.stat_shape), sum(groups.groups for groups in mix.groups)
    mixed = dict.fromkeys(("mixed_mean", "mixed_c1", "mixed_c2"), sets)
    return {"merged": max(2 * groups, 1), "shares": 4 * groups + 2 * ceil(sets / BLOCK), **mixed}


@dataclass(frozen=True, kw_only=True)
class MixingLaunch(ChainedLaunch, ForwardLaunch):
    """A launch on the statistics of sets, or on their gradients. It does not read x."""

    words: ClassVar[str]  # what the launch does
    on_gradients: ClassVar[bool] = False
    mix: Mix

    @property
    def what(self) -> str:
        return self.words

    @property
    def shape(self) -> str:
        return f"blocks of {self.block_i} x {self.block_j} sets" if self.block_i > 1 else f"blocks of {self.block_j} sets"

    @abstractmethod
    def operands(self, problem: NormProblem, needs: Needs) -> tuple[Any, ...]:
        """Return the arguments that other launches do not have."""

    def kernel(self, problem: NormProblem, options: ForwardOptions | BackwardOptions) -> Any:
        from onepass.backends.gpu.launch.kernel import Kernel

        from . import kernel, kernel_backward

        x, mix, sets = problem.x, self.mix, prod(problem.stat_shape)
        assert x is not None
        needs = options.needs if isinstance(options, BackwardOptions) else Needs()
        groups = sum(of.groups for of in mix.groups)
        first, second = (*mix.groups, NO_GROUPS, NO_GROUPS)[:2]
        numbers, last = (*mix.others, -1, -1)[:2], len(mix.groups) - 1
        arguments = (
            *self.operands(problem, needs),
            GradientSizes(sets, groups, ceil(sets / BLOCK), float(x.reps * x.run)) if self.on_gradients else MixSizes(sets, groups),
            BothGroups(first, second),
            MixMode(
                own=mix.own,
                first=numbers[0],
                second=numbers[1],
                first_given=mix.given and last == 0,
                second_given=mix.given and last == 1,
                block_i=self.block_i,
                block_j=self.block_j,
                pdl_trigger=self.pdl_trigger,
                pdl_wait=self.pdl_wait,
            ),
        )
        function = getattr(kernel_backward if self.on_gradients else kernel, self.name)
        return Kernel(function, arguments, self.programs, self.warps, pdl=self.pdl_wait)


def _given(problem: NormProblem) -> Given:
    return Given(FP32, FP32) if problem.last_given else Given(None, None)


class MergeLaunch(MixingLaunch):
    name: ClassVar[str] = "merge"
    words: ClassVar[str] = "merge the moments of sets"

    def operands(self, problem: NormProblem, needs: Needs) -> tuple[Any, ...]:
        return OWN, FP32


@dataclass(frozen=True, kw_only=True)
class MixLaunch(MixingLaunch):
    name: ClassVar[str] = "mix"
    words: ClassVar[str] = "mix the statistics of the norms"
    rstd: bool  # store rstd, too

    def operands(self, problem: NormProblem, needs: Needs) -> tuple[Any, ...]:
        return OWN, FP32, WEIGHTS, _given(problem), Mixed(FP32, FP32 if self.rstd else None), float(problem.spec.eps)


class MergeGradientsLaunch(MixingLaunch):
    name: ClassVar[str] = "merge_gradients"
    words: ClassVar[str] = "add up the gradients of the statistics of sets"
    on_gradients: ClassVar[bool] = True

    def operands(self, problem: NormProblem, needs: Needs) -> tuple[Any, ...]:
        return SET_GRADIENTS, FP32, _given(problem), FP32


class MixGradientsLaunch(MixingLaunch):
    name: ClassVar[str] = "mix_gradients"
    words: ClassVar[str] = "mix the gradients of the statistics"
    on_gradients: ClassVar[bool] = True

    def operands(self, problem: NormProblem, needs: Needs) -> tuple[Any, ...]:
        return OWN, SET_GRADIENTS, FP32, WEIGHTS, FP32, MixedSums(FP32, FP32)


class MixWeightsLaunch(MixingLaunch):
    name: ClassVar[str] = "mix_weights"
    words: ClassVar[str] = "add up the gradients of the weights"
    on_gradients: ClassVar[bool] = True

    def operands(self, problem: NormProblem, needs: Needs) -> tuple[Any, ...]:
        return FP32, WeightGradients(*(FP32 if needed else None for needed in (needs.mean_weight, needs.var_weight)))


def with_mix(problem: NormProblem, device: Device, direction: Direction, launches: Launches) -> Launches:
    """Return the launches of a norm. If it is a mix, insert the launches that mix statistics, and in a backward their gradients.

    In a backward, the first two compute the mixed means again, because the forward saves the means of sets.
    """
    if not problem.spec.mix:
        return launches
    mix = mix_of(problem)
    assert mix is not None
    shared: Any = {"walk": walk(problem), "mix": mix, "warps": warps_for(128, device)}
    longest = max((groups.merged for groups in mix.groups), default=1)
    merges: Any = shared | {"block_i": min(power_of_two(longest), 128), "block_j": WIDTH}
    mixes: Any = shared | {"block_i": 1, "block_j": BLOCK, "programs": ceil(prod(problem.stat_shape) / BLOCK)}
    computed, merging = (sum(groups.programs for groups in some) for some in (mix.computed, mix.groups))
    merge = [MergeLaunch(programs=computed, **merges)] if computed else []
    if direction == BACKWARD:
        at = next(at for at, launch in enumerate(launches) if isinstance(launch, BackwardLaunch) and launch.apply)
        gradients = [MergeGradientsLaunch(programs=merging, **merges)] if merging else []
        gradients = *gradients, MixGradientsLaunch(**mixes), MixWeightsLaunch(programs=1, block_i=1, block_j=1024, **shared)
        made = *merge, MixLaunch(rstd=False, **mixes), *launches[:at], *gradients, *launches[at:]
    else:
        at = next(at for at, launch in enumerate(launches) if launch.reads_statistics)
        made = *launches[:at], *merge, MixLaunch(rstd=True, **mixes), *launches[at:]
    return chained(device, made)
