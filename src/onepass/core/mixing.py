"""The statistics of a mix of norms, as in SwitchableNorm: weighted means of the norms' statistics. Also their gradients.

A *set* is the elements that share one mean and variance. Numbers in parentheses are equations of docs/theory.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .moments import Moments, average, merge_along, total
from .operands import OptionalOperands, SavedTensors
from .spec import NormSpec

MixOperands = OptionalOperands | SavedTensors  # both have mean_weight, var_weight, running_mean and running_var


@dataclass(frozen=True)
class MixedStatistics:
    """The weighted mean of the statistics of several norms, all computed from the moments of the same sets.

    `over` has one entry per norm: the dimensions along which the norm merges the sets, or None if its statistics were given.
    It is [[], [1], [0]] for InstanceNorm, LayerNorm and BatchNorm, with sets (n, c).
    `means` and `variances` also have one entry per norm, a tensor with size 1 along the merged dimensions.
    """

    sets: Moments
    over: list[list[int] | None]
    means: list[Tensor]
    variances: list[Tensor]
    mean_weight: Tensor
    var_weight: Tensor

    @staticmethod
    def of(sets: Moments, over: Sequence[list[int]], weights: tuple[Tensor, Tensor], last: tuple[Tensor, Tensor] | None) -> MixedStatistics:
        """Compute the statistics of each norm from the moments of the sets.

        `last` is the given (mean, variance) of the last norm, such as running statistics, or None to compute them, too.
        `weights` is (mean_weight, var_weight), each with one weight per norm.
        """
        computed = [merge_along(sets, dims) for dims in (over if last is None else over[:-1])]
        means, variances = [p.mean for p in computed if p.mean is not None], [p.var for p in computed]
        dims: list[list[int] | None] = [*over]
        if last is not None:
            shape = [1 if dim in over[-1] else n for dim, n in enumerate(sets.m2.shape)]
            dims[-1] = None
            means.append(last[0].to(sets.m2.dtype).reshape(shape))
            variances.append(last[1].to(sets.m2.dtype).reshape(shape))
        return MixedStatistics(sets, dims, means, variances, *weights)

    @property
    def mean(self) -> Tensor:
        """The mixed mean of each set, equation (24)."""
        return _weighted(self.mean_weight, self.means).expand(self.sets.m2.shape)

    @property
    def var(self) -> Tensor:
        """The mixed variance of each set, equation (25)."""
        return _weighted(self.var_weight, self.variances).expand(self.sets.m2.shape)

    def gradient(self, c1: Tensor, c2: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return (c1', c2', dmean_weight, dvar_weight), by equations (26)-(30).

        `c1` and `c2` are the averages (6) and (7) over each set. c1' and c2' take their place in dx, equation (8).
        """
        assert self.sets.mean is not None
        dmean, dvar = -rstd * c1, -0.5 * rstd.square() * c2  # equation (26)
        to_mean, to_var = torch.zeros_like(dmean), torch.zeros_like(dvar)
        for i, dims in enumerate(self.over):
            if dims is not None:
                shared = self.var_weight[i] * average(dvar, dims)
                to_mean = to_mean + self.mean_weight[i] * average(dmean, dims) + 2 * shared * (self.sets.mean - self.means[i])  # (27)
                to_var = to_var + shared  # equation (28)
        mixed_c1 = -(to_mean + 2 * to_var * (self.mean - self.sets.mean)) / rstd  # equation (29)
        mixed_c2 = -2 * to_var / rstd.square()
        if not self.sets.count:  # without elements the moments are NaN, and nothing depends on the weights
            return mixed_c1, mixed_c2, torch.zeros_like(self.mean_weight), torch.zeros_like(self.var_weight)
        dmean_weight, dvar_weight = (
            torch.stack([total(d * part, range(d.dim())).sum(-1).sum() * self.sets.count for part in parts]).to(weight.dtype)  # (30)
            for d, parts, weight in ((dmean, self.means, self.mean_weight), (dvar, self.variances, self.var_weight))
        )
        return mixed_c1, mixed_c2, dmean_weight, dvar_weight


def _weighted(weights: Tensor, parts: Sequence[Tensor]) -> Tensor:
    mixed = weights[0] * parts[0]
    for i in range(1, len(parts)):
        mixed = mixed + weights[i] * parts[i]
    return mixed


def mix_statistics(spec: NormSpec, shape: Sequence[int], sets: Moments, operands: MixOperands) -> MixedStatistics:
    """Return the mixed statistics of a spec with `mix`. `shape` is the shape of x, and `sets` holds the moments of each set."""
    assert operands.mean_weight is not None and operands.var_weight is not None
    last = None if operands.running_mean is None or operands.running_var is None else (operands.running_mean, operands.running_var)
    return MixedStatistics.of(sets, spec.mixed_dims(shape), (operands.mean_weight, operands.var_weight), last)
