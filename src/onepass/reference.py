"""The definition in plain PyTorch, on the logical axes of a spec.

Every step is differentiable any number of times and understood by functorch and forward-mode AD, so this is the oracle, the path for
transforms, the double backward, and what runs where no four-axis view of the memory exists. Equations cite docs/theory.md.

`normalize`, `affine` and `input_gradient` do the arithmetic for any arrangement of x; `cpu/formula.py` calls them on the view of memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .moments import average, moments
from .problem import accumulator
from .spec import NormSpec


class Result(NamedTuple):
    """What a forward returns. Statistics have the kept axes' shape and the accumulator's dtype; what was not computed is None."""

    y: Tensor
    mean: Tensor | None
    rstd: Tensor
    var: Tensor | None


Gradients = tuple[Tensor | None, Tensor | None, Tensor | None]  # dx, dweight, dbias


def normalize(x: Tensor, mean: Tensor | None, rstd: Tensor) -> Tensor:
    """x_hat = (x - mean)·rstd. (4)"""
    return (x if mean is None else x - mean) * rstd


def affine(x_hat: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    """y = x_hat·weight + bias. (5)"""
    if weight is None:
        return x_hat if bias is None else x_hat + bias
    return x_hat * weight if bias is None else torch.addcmul(bias, x_hat, weight)


def input_gradient(wdy: Tensor, x_hat: Tensor, rstd: Tensor, c1: Tensor | None, c2: Tensor | None) -> Tensor:
    """dx = (wdy - c1 - x_hat·c2)·rstd; c1 is None without a mean, both are None where the statistics were given. (8), (9)"""
    if c2 is None:
        return wdy * rstd
    return torch.addcmul(wdy if c1 is None else wdy - c1, x_hat, c2, value=-1) * rstd


class Axes:
    """x with one dimension per axis of the spec."""

    def __init__(self, spec: NormSpec, x: Tensor) -> None:
        axes = spec.factor(x.shape)
        self.acc = accumulator(x.dtype)
        self.shape = [axis.size for axis in axes]
        self.dims = [i for i, axis in enumerate(axes) if axis.reduced]
        self.stat_shape = [1 if axis.reduced else axis.size for axis in axes]
        self.param_shape = [axis.size if axis.param else 1 for axis in axes]
        self.shared = [i for i, axis in enumerate(axes) if not axis.param]  # along these, elements share a parameter
        varying = [i for i, axis in enumerate(axes) if axis.param]
        stored = sorted(varying, key=lambda i: -axes[i].param)  # the order in which a parameter is stored
        self.stored_shape = [axes[i].size for i in stored]
        self.from_stored = [stored.index(i) for i in varying]
        self.to_stored = [varying.index(i) for i in stored]

    def x(self, x: Tensor) -> Tensor:
        return x.to(self.acc).reshape(self.shape)

    def stat(self, stat: Tensor | None) -> Tensor | None:
        return None if stat is None else stat.to(self.acc).reshape(self.stat_shape)

    def param(self, param: Tensor | None) -> Tensor | None:
        if param is None:
            return None
        return param.to(self.acc).reshape(self.stored_shape).permute(self.from_stored).reshape(self.param_shape)

    def param_sum(self, terms: Tensor, like: Tensor) -> Tensor:
        """Sum over the elements that share a parameter. (10), (11)"""
        total = terms.sum(self.shared) if self.shared else terms
        return total.permute(self.to_stored).reshape(like.shape).to(like.dtype)


def forward(
    spec: NormSpec,
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    mean: Tensor | None = None,
    var: Tensor | None = None,
) -> Result:
    """Normalize x; by `mean` and `var` where they are given.

    Example: `forward(spec.layer_norm(1), x.double(), weight.double()).y` is the fp64 oracle of a LayerNorm.
    """
    axes = Axes(spec, x)
    x_ = axes.x(x)
    mean_, var_ = axes.stat(mean), axes.stat(var)
    if var_ is None:
        taken = moments(x_, axes.dims, spec.centered)
        mean_, var_ = taken.mean, taken.var
    rstd = torch.rsqrt(var_ + spec.eps)
    y = affine(normalize(x_, mean_, rstd), axes.param(weight), axes.param(bias)).reshape(x.shape).to(x.dtype)
    kept = spec.kept_shape(x.shape)
    return Result(y, None if mean_ is None else mean_.reshape(kept), rstd.reshape(kept), var_.reshape(kept))


def backward(
    spec: NormSpec,
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    given: tuple[Tensor | None, Tensor] | None = None,
    needs: Sequence[bool] = (True, True, True),
) -> Gradients:
    """dx, dweight, dbias, themselves differentiable: mean and rstd are taken from x again unless `given`. (6)-(11)"""
    axes = Axes(spec, x)
    x_, dy_ = axes.x(x), axes.x(dy)
    if given is not None:
        mean, rstd = axes.stat(given[0]), given[1].to(axes.acc).reshape(axes.stat_shape)
    else:
        taken = moments(x_, axes.dims, spec.centered)
        mean, rstd = taken.mean, torch.rsqrt(taken.var + spec.eps)
    x_hat = normalize(x_, mean, rstd)
    wdy = affine(dy_, axes.param(weight), None)
    c1 = average(wdy, axes.dims) if given is None and spec.centered else None  # (6)
    c2 = average(wdy * x_hat, axes.dims) if given is None else None  # (7)
    return (
        input_gradient(wdy, x_hat, rstd, c1, c2).reshape(x.shape).to(x.dtype) if needs[0] else None,
        axes.param_sum(dy_ * x_hat, weight) if needs[1] and weight is not None else None,
        axes.param_sum(dy_, bias) if needs[2] and bias is not None else None,
    )
