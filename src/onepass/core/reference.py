"""All norms in plain PyTorch, computed by definition on the axes that a spec names.

Every step can be differentiated any number of times, also by functorch and by forward-mode automatic differentiation. So this
code serves as the oracle of tests, for double backward, for functorch transforms, and for memory without a four-axis view.

A *set* is the elements that share one mean and variance. Numbers in parentheses are equations of docs/theory.md.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .arithmetic import PostAffine, affine, affine_inverse, input_gradient, normalize
from .mixing import MixedStatistics, MixOperands, mix_statistics
from .moments import Moments, average, inverse_deviation, moments
from .operands import NO_OPTIONAL, Gradients, Needs, OptionalOperands, Result, SavedTensors
from .problem import accumulator
from .spec import NormSpec


class _Stored:
    """How a parameter that varies along some axes of x is stored.

    `spread` reshapes the parameter so that it broadcasts with x. `sum` computes its gradient.
    """

    def __init__(self, sizes: list[int], strides: list[int], acc: torch.dtype) -> None:
        self.acc = acc
        self.shape = [size if stride else 1 for size, stride in zip(sizes, strides)]
        self.shared = [i for i, stride in enumerate(strides) if not stride]  # the axes along which elements share a parameter
        varying = [i for i, stride in enumerate(strides) if stride]
        stored = sorted(varying, key=lambda i: -strides[i])  # the varying axes, in the order in which the parameter stores them
        self.stored_shape = [sizes[i] for i in stored]
        self.from_stored = [stored.index(i) for i in varying]
        self.to_stored = [varying.index(i) for i in stored]

    def spread(self, param: Tensor | None, offset: float = 0.0) -> Tensor | None:
        if param is None:
            return None
        param = param.to(self.acc)
        param = param + offset if offset else param
        return param.reshape(self.stored_shape).permute(self.from_stored).reshape(self.shape)

    def sum(self, terms: Tensor, like: Tensor) -> Tensor:
        """Sum `terms` over the elements that share a parameter. The result has the shape and dtype of `like`."""
        total = terms.sum(self.shared) if self.shared else terms
        return total.permute(self.to_stored).reshape(like.shape).to(like.dtype)


class Axes:
    """Shapes with one dimension per axis of the spec, and methods that reshape the tensors of a call to them."""

    def __init__(self, spec: NormSpec, x: Tensor) -> None:
        axes = spec.factor(x.shape)
        self.spec, self.acc = spec, accumulator(x.dtype)
        self.x_shape, self.shape = x.shape, [axis.size for axis in axes]
        self.dims = [i for i, axis in enumerate(axes) if axis.reduced]
        self.stat_shape = [1 if axis.reduced else axis.size for axis in axes]
        self.kept_shape = [axis.size for axis in axes if not axis.reduced]
        self.params = _Stored(self.shape, [axis.param for axis in axes], self.acc)
        self.modulation = _Stored(self.shape, [axis.modulation for axis in axes], self.acc)

    def x(self, x: Tensor) -> Tensor:
        return x.to(self.acc).reshape(self.shape)

    def stat(self, stat: Tensor | None) -> Tensor | None:
        return None if stat is None else stat.to(self.acc).reshape(self.stat_shape)

    def kept(self, stat: Tensor | None) -> Tensor | None:
        return None if stat is None else stat.reshape(self.kept_shape)

    def weight(self, weight: Tensor | None) -> Tensor | None:
        return self.params.spread(weight, self.spec.weight_offset)

    def bias(self, bias: Tensor | None) -> Tensor | None:
        return self.params.spread(bias)

    def post_affine(self, scale: Tensor | None, shift: Tensor | None) -> PostAffine:
        return PostAffine(self.modulation.spread(scale, 1.0), self.modulation.spread(shift), self.spec.activation)


def _statistics(axes: Axes, x: Tensor, operands: MixOperands) -> tuple[Moments, Tensor | None, Tensor, MixedStatistics | None]:
    """Return (moments of the sets, mean to apply, variance to apply, MixedStatistics or None).

    x has one dimension per axis of the spec.
    """
    taken = moments(x, axes.dims, axes.spec.centered)
    if not axes.spec.mix:
        return taken, taken.center, taken.var, None
    mixed = mix_statistics(
        axes.spec, axes.x_shape, Moments(taken.count, axes.kept(taken.mean), taken.m2.reshape(axes.kept_shape)), operands
    )
    return taken, axes.stat(mixed.mean), mixed.var.reshape(axes.stat_shape), mixed


def forward(
    spec: NormSpec,
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    mean: Tensor | None = None,
    var: Tensor | None = None,
    optional: OptionalOperands = NO_OPTIONAL,
) -> Result:
    """Normalize x with `mean` and `var` if they are given, otherwise with its own statistics.

    Example: `forward(norms.layer_norm(1), x.double(), weight.double()).y` is the fp64 oracle of a LayerNorm.
    """
    total = x if optional.residual is None else x + optional.residual
    axes = Axes(spec, total)
    x_ = axes.x(total)
    if var is not None:
        own_mean, own_var = mean_, var_ = axes.stat(mean), var.to(axes.acc).reshape(axes.stat_shape)
    else:
        taken, mean_, var_, _ = _statistics(axes, x_, optional)
        own_mean, own_var = taken.mean, taken.var
    rstd = torch.rsqrt(var_ + spec.eps) if var is not None or spec.mix else inverse_deviation(var_, spec.eps)
    u = affine(normalize(x_, mean_, rstd), axes.weight(weight), axes.bias(bias))
    y = axes.post_affine(optional.scale, optional.shift)(u).reshape(total.shape).to(total.dtype)
    summed = None if optional.residual is None else total
    return Result(y, axes.kept(own_mean), rstd.reshape(axes.kept_shape), axes.kept(own_var), summed)


def backward(
    spec: NormSpec,
    dy: Tensor,
    dsum: Tensor | None,
    saved: SavedTensors,
    needs: Sequence[bool] = (True,) * len(Needs._fields),
    given: bool = False,
) -> Gradients:
    """Return the gradients, by equations (6)-(11) and (26)-(35). They can be differentiated again.

    Mean and rstd are computed again from x, unless the statistics were `given`. With `from_y` in the spec, `saved.x` is y.
    Then the gradients must not be differentiated again, since autograd does not know how y and rstd depend on x.
    """
    x, weight, bias = saved.x, saved.weight, saved.bias
    axes, needs = Axes(spec, x), Needs(*needs)
    x_, dy_ = axes.x(x), axes.x(dy)
    weight_, bias_, post, mixed = axes.weight(weight), axes.bias(bias), axes.post_affine(saved.scale, saved.shift), None
    if spec.from_y:
        rstd, u = saved.rstd.to(axes.acc).reshape(axes.stat_shape), post.inverse(x_)
        x_hat = affine_inverse(u, weight_, bias_)
    else:
        if given:
            mean, rstd = axes.stat(saved.mean), saved.rstd.to(axes.acc).reshape(axes.stat_shape)
        else:
            _, mean, var, mixed = _statistics(axes, x_, saved)
            rstd = torch.rsqrt(var + spec.eps) if spec.mix else inverse_deviation(var, spec.eps)
        x_hat = normalize(x_, mean, rstd)
        u = affine(x_hat, weight_, bias_)
    dz, du = post.backward(dy_, u)
    wdy = affine(du, weight_, None)
    c1 = average(wdy, axes.dims) if not given and spec.centered else None  # equation (6)
    c2 = average(wdy * x_hat, axes.dims) if not given else None  # equation (7)
    dmean_weight = dvar_weight = None
    if mixed is not None and c1 is not None and c2 is not None:
        kept = (stat.reshape(axes.kept_shape) for stat in (c1, c2, rstd))
        *cs, dmean_weight, dvar_weight = mixed.gradient(*kept)
        c1, c2 = (axes.stat(c) for c in cs)
    params, modulation = axes.params, axes.modulation
    return Gradients(
        _plus(input_gradient(wdy, x_hat, rstd, c1, c2).reshape(x.shape), dsum).to(x.dtype) if needs.x else None,
        params.sum(du * x_hat, weight) if weight is not None and needs.weight else None,  # equation (10)
        params.sum(du, bias) if bias is not None and needs.bias else None,  # equation (11)
        modulation.sum(dz * u, saved.scale) if saved.scale is not None and needs.scale else None,  # equation (34)
        modulation.sum(dz, saved.shift) if saved.shift is not None and needs.shift else None,  # equation (35)
        dmean_weight,
        dvar_weight,
    )


def _plus(dx: Tensor, dsum: Tensor | None) -> Tensor:
    return dx if dsum is None else dx + dsum
