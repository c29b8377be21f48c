"""Functions that add a residual and normalize the sum: add_layer_norm, add_rms_norm and add_group_norm."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from onepass.check.arguments import as_float, as_int, as_shape
from onepass.check.extras import as_channel_dim, check_residual
from onepass.core.operands import OptionalOperands, Result
from onepass.dispatch import call

from .channels import define_group_norm, group_norm
from .extras import Modulation, normalize_with_extras
from .overrides import autocasts_to_float32, call_override, cuda_autocast, has_override
from .rows import define_layer_norm, define_rms_norm, is_tuple_of_ints, layer_norm


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
    """Return (y, sum) with `sum = input + residual` and `y = layer_norm(sum, ...)`.

    The sum is rounded to its dtype before it is normalized.

    Example: `y, x = add_layer_norm(branch, x, (64,))`
    """
    if type(input) is not Tensor and has_override(input):
        return call_override(add_layer_norm, locals())
    if type(eps) is not float:
        eps = as_float("add_layer_norm", "eps", 6, eps)
    if modulate is None and is_tuple_of_ints(normalized_shape) and not cuda_autocast():
        args = normalized_shape, eps, granularity, weight_offset, activation, False
        known = call.normalize_known(define_layer_norm, args, input, weight, bias, residual)
        if known is not None:
            return known  # pyright: ignore[reportReturnType]
    check_residual(input, residual)
    if autocasts_to_float32(input):  # add in the dtypes given, then run the norm in float32
        total = input + residual
        keywords = {"activation": activation, "modulate": modulate, "weight_offset": weight_offset, "granularity": granularity}
        return layer_norm(total, normalized_shape, weight, bias, eps, **keywords), total
    shape = as_shape("add_layer_norm", normalized_shape)
    args = shape, eps, granularity, weight_offset, activation, modulate is not None
    result = normalize_with_extras(
        define_layer_norm, args, input, weight, bias, (-len(shape), modulate, None, False), OptionalOperands(residual)
    )
    return _output_and_sum(result)


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
    """Return (y, sum) with `sum = input + residual` and `y = rms_norm(sum, ...)`.

    The sum is rounded to its dtype before it is normalized.

    Example: `y, x = add_rms_norm(branch, x, (64,), eps=1e-6)`
    """
    if type(input) is not Tensor and has_override(input):
        return call_override(add_rms_norm, locals())
    if type(eps) is not float and eps is not None:
        eps = as_float("add_rms_norm", "eps", 5, eps)
    if modulate is None and is_tuple_of_ints(normalized_shape):
        args = normalized_shape, eps, weight_offset, activation, False
        known = call.normalize_known(define_rms_norm, args, input, weight, None, residual)
        if known is not None:
            return known  # pyright: ignore[reportReturnType]
    check_residual(input, residual)
    shape = as_shape("add_rms_norm", normalized_shape)
    args = shape, eps, weight_offset, activation, modulate is not None
    result = normalize_with_extras(
        define_rms_norm, args, input, weight, None, (-len(shape), modulate, None, False), OptionalOperands(residual)
    )
    return _output_and_sum(result)


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
    """Return (y, sum) with `sum = input + residual` and `y = group_norm(sum, ...)`.

    The sum is rounded to its dtype before it is normalized.

    Example: `y, x = add_group_norm(branch, x, 32, activation="silu")`
    """
    if type(input) is not Tensor and has_override(input):
        return call_override(add_group_norm, locals())
    if type(eps) is not float:
        eps = as_float("add_group_norm", "eps", 6, eps)
    if modulate is None and type(num_groups) is int and channel_dim == 1 and not cuda_autocast():
        args = num_groups, eps, 1, activation, False
        known = call.normalize_known(define_group_norm, args, input, weight, bias, residual)
        if known is not None:
            return known  # pyright: ignore[reportReturnType]
    check_residual(input, residual)
    if channel_dim != 1:
        channel_dim = as_channel_dim(input, channel_dim)
    if autocasts_to_float32(input):  # add in the dtypes given, then run the norm in float32
        total = input + residual
        keywords = {"channel_dim": channel_dim, "activation": activation, "modulate": modulate}
        return group_norm(total, num_groups, weight, bias, eps, **keywords), total
    args = as_int("num_groups", num_groups), eps, channel_dim, activation, modulate is not None
    result = normalize_with_extras(
        define_group_norm, args, input, weight, bias, (channel_dim, modulate, None, False), OptionalOperands(residual)
    )
    return _output_and_sum(result)


def _output_and_sum(result: Result) -> tuple[Tensor, Tensor]:
    assert result.sum is not None
    return result.y, result.sum
