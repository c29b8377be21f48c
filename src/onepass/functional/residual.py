from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from onepass.check import arguments as check_arguments
from onepass.check import extras as check_extras
from onepass.core.operands import OptionalOperands, Result

from .call import Modulation, autocasts, defer, overridden, run
from .channels import define_group_norm, group_norm
from .rows import define_layer_norm, define_rms_norm, layer_norm


def add_layer_norm(
    input: Tensor,
    residual: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    activation: str | None = None,
    modulate: Modulation | None = None,
    weight_offset: float = 0.0,
    granularity: str = "element",
) -> tuple[Tensor, Tensor]:
    """`sum = input + residual` and `layer_norm(sum, ...)`, returned as (y, sum). The sum is rounded to its dtype before it is normalized.

    Example: `y, x = add_layer_norm(branch, x, (64,))`
    """
    if type(input) is not Tensor and overridden(input):
        return defer(add_layer_norm, locals())
    if type(eps) is not float:
        eps = check_arguments.real("add_layer_norm", "eps", 6, eps)
    check_extras.residual(input, residual)
    if autocasts(input):  # the sum keeps its dtype, the norm is taken in float32
        total = input + residual
        extras = {"activation": activation, "modulate": modulate, "weight_offset": weight_offset, "granularity": granularity}
        return layer_norm(total, normalized_shape, weight, bias, eps, **extras), total
    shape = check_arguments.shape_of("add_layer_norm", normalized_shape)
    args = shape, eps, granularity, weight_offset, activation, modulate is not None
    return _added(run(define_layer_norm, args, input, weight, bias, modulate, -len(shape), extras=OptionalOperands(residual)))


def add_rms_norm(
    input: Tensor,
    residual: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
    *,
    activation: str | None = None,
    modulate: Modulation | None = None,
    weight_offset: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """`sum = input + residual` and `rms_norm(sum, ...)`, returned as (y, sum). The sum is rounded to its dtype before it is normalized.

    Example: `y, x = add_rms_norm(branch, x, (64,), eps=1e-6)`
    """
    if type(input) is not Tensor and overridden(input):
        return defer(add_rms_norm, locals())
    if type(eps) is not float and eps is not None:
        eps = check_arguments.real("add_rms_norm", "eps", 5, eps)
    check_extras.residual(input, residual)
    shape = check_arguments.shape_of("add_rms_norm", normalized_shape)
    args = shape, eps, weight_offset, activation, modulate is not None
    return _added(run(define_rms_norm, args, input, weight, None, modulate, -len(shape), extras=OptionalOperands(residual)))


def add_group_norm(
    input: Tensor,
    residual: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    channel_dim: int = 1,
    activation: str | None = None,
    modulate: Modulation | None = None,
) -> tuple[Tensor, Tensor]:
    """`sum = input + residual` and `group_norm(sum, ...)`, returned as (y, sum). The sum is rounded to its dtype before it is normalized.

    Example: `y, x = add_group_norm(branch, x, 32, activation="silu")`
    """
    if type(input) is not Tensor and overridden(input):
        return defer(add_group_norm, locals())
    if type(eps) is not float:
        eps = check_arguments.real("add_group_norm", "eps", 6, eps)
    check_extras.residual(input, residual)
    if channel_dim != 1:
        channel_dim = check_extras.channel_dim(input, channel_dim)
    if autocasts(input):  # the sum keeps its dtype, the norm is taken in float32
        total = input + residual
        extras = {"channel_dim": channel_dim, "activation": activation, "modulate": modulate}
        return group_norm(total, num_groups, weight, bias, eps, **extras), total
    args = check_arguments.whole("num_groups", num_groups), eps, channel_dim, activation, modulate is not None
    return _added(run(define_group_norm, args, input, weight, bias, modulate, channel_dim, extras=OptionalOperands(residual)))


def _added(result: Result) -> tuple[Tensor, Tensor]:
    assert result.sum is not None
    return result.y, result.sum
