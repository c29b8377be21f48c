"""torch.nn.functional's norms, with its signatures and semantics: check, define, call. Only running statistics are computed here.

Two differences from torch, both deliberate: the output keeps the input's memory format, and double backward is right everywhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

from . import check, ops, spec

__all__ = ["batch_norm", "group_norm", "instance_norm", "layer_norm", "layer_norm2d", "rms_norm"]


def layer_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    """y = (x - mean)/sqrt(var + eps)·weight + bias over the last dimensions, `normalized_shape`.

    Example: `layer_norm(torch.randn(2, 16, 64), (64,))`
    """
    if type(input) is not Tensor and _overridden(input):
        return handle_torch_function(layer_norm, (input,), input, normalized_shape, weight, bias, eps)
    shape = normalized_shape if isinstance(normalized_shape, tuple) else check.shape_of("layer_norm", normalized_shape)
    if input.is_cuda:
        input, weight, bias = _autocast(input, weight, bias)
    return ops.norm(_layer_norm, (shape, eps), input, weight, bias)


def _layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, normalized_shape: tuple[int, ...], eps: float):
    check.layer_norm(x, normalized_shape, weight, bias)
    return spec.layer_norm(len(normalized_shape), eps)


def rms_norm(input: Tensor, normalized_shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None) -> Tensor:
    """y = x/sqrt(mean(x²) + eps)·weight over the last dimensions; eps defaults to the machine epsilon of the accumulator.

    Example: `rms_norm(torch.randn(2, 16, 64), (64,), eps=1e-6)`
    """
    if type(input) is not Tensor and _overridden(input):
        return handle_torch_function(rms_norm, (input,), input, normalized_shape, weight, eps)
    shape = normalized_shape if isinstance(normalized_shape, tuple) else check.shape_of("rms_norm", normalized_shape)
    return ops.norm(_rms_norm, (shape, eps), input, weight)


def _rms_norm(x: Tensor, weight: Tensor | None, bias: None, normalized_shape: tuple[int, ...], eps: float | None):
    check.rms_norm(x, normalized_shape, weight)
    if eps is None:
        eps = torch.finfo(torch.promote_types(x.dtype, torch.float32)).eps
    return spec.rms_norm(len(normalized_shape), eps)


def group_norm(input: Tensor, num_groups: int, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5) -> Tensor:
    """y = (x - mean)/sqrt(var + eps)·weight + bias over the C/num_groups channels of a group and all positions of (N, C, *).

    Example: `group_norm(torch.randn(2, 320, 8, 8), 32)`
    """
    if type(input) is not Tensor and _overridden(input):
        return handle_torch_function(group_norm, (input,), input, num_groups, weight, bias, eps)
    if type(num_groups) is not int:
        num_groups = check.whole("group_norm", "num_groups", num_groups)
    if input.is_cuda:
        input, weight, bias = _autocast(input, weight, bias)
    return ops.norm(_group_norm, (num_groups, eps), input, weight, bias)


def _group_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, num_groups: int, eps: float):
    check.group_norm(x, num_groups, weight, bias)
    return spec.group_norm(num_groups, eps)


def layer_norm2d(input: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-6) -> Tensor:
    """LayerNorm over C at each pixel of (N, C, H, W), without permuting copies: y = (x - mean)/sqrt(var + eps)·weight + bias.

    Example: `layer_norm2d(torch.randn(2, 96, 56, 56), torch.ones(96), torch.zeros(96))`
    """
    if type(input) is not Tensor and _overridden(input):
        return handle_torch_function(layer_norm2d, (input,), input, weight, bias, eps)
    if input.is_cuda:
        input, weight, bias = _autocast(input, weight, bias)
    return ops.norm(_layer_norm2d, (eps,), input, weight, bias)


def _layer_norm2d(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float):
    check.layer_norm2d(x, weight, bias)
    return spec.layer_norm2d(eps)


def instance_norm(
    input: Tensor,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """y = (x - mean)/sqrt(var + eps)·weight + bias over the positions of each channel of each sample of (N, C, *).

    The running statistics, if any, are updated in place by the batch average of the samples' own; with
    `use_input_stats=False` they are used instead.

    Example: `instance_norm(torch.randn(2, 64, 32, 32))`
    """
    if type(input) is not Tensor and _overridden(input):
        return handle_torch_function(
            instance_norm, (input,), input, running_mean, running_var, weight, bias, use_input_stats, momentum, eps
        )
    check.instance_norm(input, weight, bias, running_mean, running_var, use_input_stats)
    if not use_input_stats:
        return ops.norm(_batch_norm, (eps,), input, weight, bias, running_mean, running_var)
    if running_mean is None or running_var is None:
        return ops.norm(_instance_norm, (eps,), input, weight, bias)
    y, mean, var = ops.norm(_instance_norm, (eps,), input, weight, bias, None, None, True)
    if input.numel():
        _update(running_mean, mean.mean(0), momentum)
        _update(running_var, _unbiased(var, input).mean(0), momentum)
    return y


def _instance_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float):
    return spec.instance_norm(eps)


def batch_norm(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """y = (x - mean)/sqrt(var + eps)·weight + bias over the batch and the positions of each channel of (N, C, *).

    In training the batch's statistics are used and the running ones, if any, updated in place by
    `running = (1 - momentum)·running + momentum·batch`, with the unbiased variance; otherwise the running ones are used.

    Example: `batch_norm(torch.randn(8, 64, 32, 32), None, None, training=True)`
    """
    if type(input) is not Tensor and _overridden(input):
        return handle_torch_function(batch_norm, (input,), input, running_mean, running_var, weight, bias, training, momentum, eps)
    check.batch_norm(input, weight, bias, running_mean, running_var, training, momentum, eps)
    if input.dim() < 2:  # only an empty one passes the checks, and torch hands it back
        return input * 1 if weight is None else input * weight
    if not training:
        return ops.norm(_batch_norm, (eps,), input, weight, bias, running_mean, running_var)
    if running_mean is None or running_var is None:
        return ops.norm(_batch_norm, (eps,), input, weight, bias)
    y, mean, var = ops.norm(_batch_norm, (eps,), input, weight, bias, None, None, True)
    if input.numel():
        _update(running_mean, mean, momentum)
        _update(running_var, _unbiased(var, input), momentum)
    return y


def _batch_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float):
    return spec.batch_norm(eps)


def _overridden(input: Any) -> bool:
    """Whether input is of a type that wants to see the call itself, as a proxy of torch.fx does."""
    if has_torch_function((input,)):
        return True
    check.tensor(input)
    return False


def _unbiased(var: Tensor, input: Tensor) -> Tensor:
    """The variance with n/(n - 1), n the size of a set. (13)"""
    count = input.numel() // max(var.numel(), 1)
    return var * (count / max(count - 1, 1))


def _update(running: Tensor, batch: Tensor, momentum: float) -> None:
    """running = (1 - momentum)·running + momentum·batch, in the accumulator's dtype. (12)"""
    batch = batch.reshape(running.shape)
    if running.dtype == batch.dtype and not isinstance(momentum, Tensor):
        running.mul_(1 - momentum).add_(batch, alpha=momentum)
    else:
        running.copy_(running.to(batch.dtype) * (1 - momentum) + batch * momentum)


def _autocast(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Under CUDA autocast torch runs layer_norm and group_norm in float32; the others, and the CPU, it leaves alone."""
    if not torch.is_autocast_enabled("cuda") or x.dtype == torch.float64:
        return x, weight, bias
    return x.float(), None if weight is None else weight.float(), None if bias is None else bias.float()
