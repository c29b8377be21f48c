from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from onepass.check import arguments as check_arguments
from onepass.check import extras as check_extras
from onepass.check import norms as check_norms
from onepass.check import out as check_out
from onepass.core import norms
from onepass.dispatch import call, route

from .call import Modulation, autocast, common_clauses, defer, overridden, returned, run


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
) -> Tensor:
    """y = (x - mean)/sqrt(var + eps)·(weight + weight_offset) + bias over the last dimensions, `normalized_shape`.

    `granularity` says what weight and bias belong to: each "element" of normalized_shape, each "channel" (its first dimension, for an
    input (N, C, H, W) and normalized_shape (C, H, W)), or "global", one of each. `modulate` is per sample and channel.

    Example: `layer_norm(torch.randn(2, 16, 64), (64,))`
    """
    if type(input) is not Tensor and overridden(input):
        return defer(layer_norm, locals())
    shape = normalized_shape if is_shape(normalized_shape) else check_arguments.shape_of("layer_norm", normalized_shape)
    if type(eps) is not float:
        eps = check_arguments.real("layer_norm", "eps", 5, eps)
    if input.is_cuda:
        input, weight, bias = autocast(input, weight, bias)
    args = shape, eps, granularity, weight_offset, activation, modulate is not None, save
    if modulate is None and out is None and not return_stats:
        return call.normalize(define_layer_norm, args, input, weight, bias)
    return returned(run(define_layer_norm, args, input, weight, bias, modulate, -len(shape), out, stats=return_stats), return_stats)


def define_layer_norm(
    x: Tensor, weight, bias, normalized_shape: tuple[int, ...], eps: float, granularity, weight_offset, activation, modulated, save="x"
):
    check_norms.layer_norm(x, normalized_shape, weight, bias, granularity)
    check_extras.weight_offset(weight, weight_offset)
    clauses = {"weight_offset": weight_offset, **common_clauses(activation, save)}
    return norms.layer_norm(len(normalized_shape), eps, granularity, modulated, **clauses)


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
) -> Tensor:
    """y = x/sqrt(mean(x²) + eps)·(weight + weight_offset) over the last dimensions; eps defaults to the machine epsilon of the accumulator.

    Example: `rms_norm(torch.randn(2, 16, 64), (64,), eps=1e-6)`
    """
    if type(input) is not Tensor and overridden(input):
        return defer(rms_norm, locals())
    shape = normalized_shape if is_shape(normalized_shape) else check_arguments.shape_of("rms_norm", normalized_shape)
    if type(eps) is not float and eps is not None:
        eps = check_arguments.real("rms_norm", "eps", 4, eps)
    args = shape, eps, weight_offset, activation, modulate is not None, save
    if modulate is None and out is None and not return_stats:
        return call.normalize(define_rms_norm, args, input, weight)
    return returned(run(define_rms_norm, args, input, weight, None, modulate, -len(shape), out, stats=return_stats), return_stats)


def define_rms_norm(
    x: Tensor, weight, bias: None, normalized_shape: tuple[int, ...], eps: float | None, weight_offset, activation, modulated, save="x"
):
    check_norms.rms_norm(x, normalized_shape, weight)
    check_extras.weight_offset(weight, weight_offset)
    if eps is None:
        eps = torch.finfo(torch.promote_types(x.dtype, torch.float32)).eps
    clauses = {"weight_offset": weight_offset, **common_clauses(activation, save)}
    return norms.rms_norm(len(normalized_shape), eps, modulated, **clauses)


def layer_norm_out(
    out: Tensor,
    input: Tensor,
    gamma: Tensor | None,
    beta: Tensor | None,
    num_tokens: int,
    hidden_size: int,
    epsilon: float = 1e-5,
) -> Tensor:
    """The plain operator: out = LayerNorm of each of `num_tokens` rows of `hidden_size` contiguous elements, without gradients.

    Any contiguous input of that many elements is seen as rows: (tokens, hidden), or (N, C, H, W) with N·C tokens of H·W. `out` may be
    `input`. Also `torch.ops.onepass.layer_norm_out`, which returns nothing.

    Example: `layer_norm_out(torch.empty(8, 64), torch.randn(8, 64), torch.ones(64), torch.zeros(64), 8, 64)`
    """
    operands = out, input, gamma, beta
    check_out.no_gradient(*operands)
    run = torch.ops.onepass.layer_norm_out if route.route(*operands) is not route.DIRECT else _rows_into
    run(*operands, num_tokens, hidden_size, epsilon)
    return out


def _rows_into(
    out: Tensor, input: Tensor, gamma: Tensor | None, beta: Tensor | None, num_tokens: int, hidden_size: int, epsilon: float
) -> None:
    check_out.rows(out, input, gamma, beta, num_tokens, hidden_size)
    gamma, beta = (None if param is None else param.reshape(hidden_size) for param in (gamma, beta))
    layer_norm(input.view(num_tokens, hidden_size), (hidden_size,), gamma, beta, epsilon, out=out.view(num_tokens, hidden_size))


_layer_norm_out_op = torch.library.custom_op("onepass::layer_norm_out", _rows_into, mutates_args={"out"})


@_layer_norm_out_op.register_fake
def _(out, input, gamma, beta, num_tokens, hidden_size, epsilon) -> None:
    check_out.rows(out, input, gamma, beta, num_tokens, hidden_size)


def is_shape(sizes: Any) -> bool:
    """Whether `sizes` is a tuple of ints. It becomes part of a key, and (8.0,) or (True,) would find what (8,) or (1,) left there."""
    if not isinstance(sizes, tuple):
        return False
    for n in sizes:  # noqa: SIM110, a generator costs more than the loop
        if type(n) is not int:
            return False
    return True
