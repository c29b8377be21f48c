"""Norms over the last dimensions: layer_norm, rms_norm and layer_norm_out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, overload

import torch
from torch import Tensor

from onepass.check.arguments import as_float, as_shape
from onepass.check.extras import check_weight_offset
from onepass.check.norms import check_layer_norm, check_rms_norm
from onepass.check.out import check_layer_norm_out, require_no_gradient
from onepass.core import norms
from onepass.dispatch import call, route

from .extras import Modulation, Stats, normalize_with_extras, output_of, spec_fields
from .overrides import autocast, call_override, cuda_autocast, has_override


# fmt: off
@overload
def layer_norm(
    input: Tensor, normalized_shape: Sequence[int], weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5, *,
    activation: str | None = None, modulate: Modulation | None = None, weight_offset: float = 0.0, granularity: str = "element",
    save: str = "x", return_stats: Literal[False] = False, out: Tensor | None = None,
) -> Tensor: ...
@overload
def layer_norm(
    input: Tensor, normalized_shape: Sequence[int], weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5, *,
    activation: str | None = None, modulate: Modulation | None = None, weight_offset: float = 0.0, granularity: str = "element",
    save: str = "x", return_stats: Literal[True], out: Tensor | None = None,
) -> Stats: ...
# fmt: on
def layer_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    activation: str | None = None,
    modulate: Modulation | None = None,
    weight_offset: float = 0.0,
    granularity: str = "element",
    save: str = "x",
    return_stats: bool = False,
    out: Tensor | None = None,
) -> Any:
    """Return y = (x - mean)/sqrt(var + eps)·(weight + weight_offset) + bias.

    Mean and variance are taken over the last dimensions, whose sizes are `normalized_shape`. The first of these
    dimensions is called the channels. `granularity` chooses the shape of weight and bias: "element" for normalized_shape,
    "channel" for one value per channel, "global" for a scalar. `modulate` uses the same channels.

    Example: `layer_norm(torch.randn(2, 16, 64), (64,))`
    """
    if type(input) is not Tensor and has_override(input):
        return call_override(layer_norm, locals())
    shape = normalized_shape if is_tuple_of_ints(normalized_shape) else as_shape("layer_norm", normalized_shape)
    if type(eps) is not float:
        eps = as_float("layer_norm", "eps", 5, eps)
    if cuda_autocast():
        input, weight, bias = autocast(input, weight, bias)
    args = shape, eps, granularity, weight_offset, activation, modulate is not None, save
    if modulate is None and out is None and not return_stats:
        return call.normalize(define_layer_norm, args, input, weight, bias)
    if out is None and not return_stats and type(modulate) is tuple and len(modulate) == 2:
        known = call.normalize_known(define_layer_norm, args, input, weight, bias, None, *modulate)
        if known is not None:
            return known[0]
    extras = -len(shape), modulate, out, return_stats
    return output_of(normalize_with_extras(define_layer_norm, args, input, weight, bias, extras), return_stats)


# fmt: off
@overload
def rms_norm(
    input: Tensor, normalized_shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None, *,
    activation: str | None = None, modulate: Modulation | None = None, weight_offset: float = 0.0, save: str = "x",
    return_stats: Literal[False] = False, out: Tensor | None = None,
) -> Tensor: ...
@overload
def rms_norm(
    input: Tensor, normalized_shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None, *,
    activation: str | None = None, modulate: Modulation | None = None, weight_offset: float = 0.0, save: str = "x",
    return_stats: Literal[True], out: Tensor | None = None,
) -> Stats: ...
# fmt: on
def rms_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
    *,
    activation: str | None = None,
    modulate: Modulation | None = None,
    weight_offset: float = 0.0,
    save: str = "x",
    return_stats: bool = False,
    out: Tensor | None = None,
) -> Any:
    """Return y = x/sqrt(mean(x²) + eps)·(weight + weight_offset).

    The mean is taken over the last dimensions, whose sizes are `normalized_shape`. eps defaults to the machine epsilon of
    float32, or of float64 for a float64 input.

    Example: `rms_norm(torch.randn(2, 16, 64), (64,), eps=1e-6)`
    """
    if type(input) is not Tensor and has_override(input):
        return call_override(rms_norm, locals())
    shape = normalized_shape if is_tuple_of_ints(normalized_shape) else as_shape("rms_norm", normalized_shape)
    if type(eps) is not float and eps is not None:
        eps = as_float("rms_norm", "eps", 4, eps)
    args = shape, eps, weight_offset, activation, modulate is not None, save
    if modulate is None and out is None and not return_stats:
        return call.normalize(define_rms_norm, args, input, weight)
    if out is None and not return_stats and type(modulate) is tuple and len(modulate) == 2:
        known = call.normalize_known(define_rms_norm, args, input, weight, None, None, *modulate)
        if known is not None:
            return known[0]
    extras = -len(shape), modulate, out, return_stats
    return output_of(normalize_with_extras(define_rms_norm, args, input, weight, None, extras), return_stats)


def layer_norm_out(
    out: Tensor,
    input: Tensor,
    gamma: Tensor | None,
    beta: Tensor | None,
    num_tokens: int,
    hidden_size: int,
    epsilon: float = 1e-5,
) -> Tensor:
    """Write the LayerNorm of `num_tokens` rows of `hidden_size` contiguous elements to `out`, without gradients.

    Return `out`. The input can be any contiguous tensor with num_tokens·hidden_size elements: (tokens, hidden), or
    (N, C, H, W) as N·C rows of H·W. `out` can be `input` itself. `torch.ops.onepass.layer_norm_out` does the same, but
    returns nothing.

    Example: `layer_norm_out(torch.empty(8, 64), torch.randn(8, 64), torch.ones(64), torch.zeros(64), 8, 64)`
    """
    operands = out, input, gamma, beta
    require_no_gradient(*operands)
    function = torch.ops.onepass.layer_norm_out if route.route(*operands) is not route.DIRECT else _layer_norm_out
    function(*operands, num_tokens, hidden_size, epsilon)
    return out


def define_layer_norm(
    x: Tensor, weight, bias, normalized_shape: tuple[int, ...], eps: float, granularity, weight_offset, activation, modulated, save="x"
):
    check_layer_norm(x, normalized_shape, weight, bias, granularity)
    check_weight_offset(weight, weight_offset)
    fields = {"weight_offset": weight_offset, **spec_fields(activation, save)}
    return norms.layer_norm(len(normalized_shape), eps, granularity, modulated, **fields)


def define_rms_norm(
    x: Tensor, weight, bias: None, normalized_shape: tuple[int, ...], eps: float | None, weight_offset, activation, modulated, save="x"
):
    check_rms_norm(x, normalized_shape, weight)
    check_weight_offset(weight, weight_offset)
    if eps is None:
        eps = torch.finfo(torch.promote_types(x.dtype, torch.float32)).eps
    fields = {"weight_offset": weight_offset, **spec_fields(activation, save)}
    return norms.rms_norm(len(normalized_shape), eps, modulated, **fields)


def is_tuple_of_ints(sizes: Any) -> bool:
    """Return whether `sizes` is a tuple of ints, and not of floats or bools.

    `sizes` becomes part of a key in the cache of launchers, where (8.0,) would equal (8,) and (True,) would equal (1,).
    """
    if not isinstance(sizes, tuple):
        return False
    for n in sizes:  # noqa: SIM110, `all` of a generator takes longer than this loop
        if type(n) is not int:
            return False
    return True


def _layer_norm_out(
    out: Tensor, input: Tensor, gamma: Tensor | None, beta: Tensor | None, num_tokens: int, hidden_size: int, epsilon: float
) -> None:
    check_layer_norm_out(out, input, gamma, beta, num_tokens, hidden_size)
    gamma, beta = (None if param is None else param.reshape(hidden_size) for param in (gamma, beta))
    layer_norm(input.view(num_tokens, hidden_size), (hidden_size,), gamma, beta, epsilon, out=out.view(num_tokens, hidden_size))


_layer_norm_out_op = torch.library.custom_op("onepass::layer_norm_out", _layer_norm_out, mutates_args={"out"})


@_layer_norm_out_op.register_fake
def _(out, input, gamma, beta, num_tokens, hidden_size, epsilon) -> None:
    check_layer_norm_out(out, input, gamma, beta, num_tokens, hidden_size)
