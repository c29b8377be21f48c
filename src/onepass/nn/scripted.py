"""What torch.jit.script compiles in the place of our modules' forwards. TorchScript cannot call onepass, so torch's kernels run.

A forward with the decorator `scripted_by(function)` has the source of `function` in the eyes of TorchScript. That function may name
only what the file of the forward has. So it calls the functions below, which get the attributes of the module as arguments.
TorchScript reads these functions, too: it knows only part of Python, and needs `Optional`, `List` and `Tuple`.
"""

from collections.abc import Callable
from typing import Any, List, Optional, Tuple, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

Forward = TypeVar("Forward", bound=Callable[..., Any])


def scripted_by(function: Callable[..., Any]) -> Callable[[Forward], Forward]:
    """Return a decorator for a forward. TorchScript compiles the source of `function` instead of it."""

    def mark(forward: Forward) -> Forward:
        forward.__wrapped__ = function  # pyright: ignore[reportFunctionMemberAccess], `inspect.getsource` follows this attribute
        return forward

    return mark


def layer_norm(
    x: Tensor,
    shape: List[int],
    weight: Optional[Tensor],
    bias: Optional[Tensor],
    eps: float,
    offset: float,
    granularity: str,
    modulate: Optional[Tuple[Tensor, Tensor]],
    activation: Optional[str],
) -> Tensor:
    if weight is not None and offset != 0.0:
        weight = weight + offset
    if granularity == "element":
        y = F.layer_norm(x, shape, weight, bias, eps)
    else:
        y = F.layer_norm(x, shape, None, None, eps)
        ones = [1 for _ in shape]
        if granularity == "channel":
            ones[0] = shape[0]
        if weight is not None:
            y = y * weight.reshape(ones)
        if bias is not None:
            y = y + bias.reshape(ones)
    return modulated_rows(y, len(shape), modulate, activation)


def rms_norm(
    x: Tensor,
    shape: List[int],
    weight: Optional[Tensor],
    eps: Optional[float],
    offset: float,
    modulate: Optional[Tuple[Tensor, Tensor]],
    activation: Optional[str],
) -> Tensor:
    if weight is not None and offset != 0.0:
        weight = weight + offset
    return modulated_rows(torch.rms_norm(x, shape, weight, eps), len(shape), modulate, activation)


def modulated_rows(
    y: Tensor,
    rank: int,
    modulate: Optional[Tuple[Tensor, Tensor]],
    activation: Optional[str],
) -> Tensor:
    """Apply a scale and a shift for each sample and channel to y = (N, *, C, ...), where C is the first of the last `rank` dimensions."""
    if modulate is not None:
        sizes = [y.size(0)] + [1 for _ in range(y.dim() - 1)]
        sizes[y.dim() - rank] = y.size(y.dim() - rank)
        y = y * (1 + modulate[0].reshape(sizes)) + modulate[1].reshape(sizes)
    return activated(y, activation)


def modulated_channels(
    y: Tensor,
    modulate: Optional[Tuple[Tensor, Tensor]],
    activation: Optional[str],
) -> Tensor:
    """Apply a scale and a shift for each sample and channel to y = (N, C, *)."""
    if modulate is not None:
        sizes = [y.size(0), y.size(1)] + [1 for _ in range(y.dim() - 2)]
        y = y * (1 + modulate[0].reshape(sizes)) + modulate[1].reshape(sizes)
    return activated(y, activation)


def activated(y: Tensor, activation: Optional[str]) -> Tensor:
    if activation is None:
        return y
    if activation == "silu":
        return F.silu(y)
    if activation == "relu":
        return F.relu(y)
    if activation == "gelu":
        return F.gelu(y)
    return F.gelu(y, approximate="tanh")


def channels_second(x: Tensor, channel_dim: int) -> Tensor:
    return x if channel_dim == 1 else x.movedim(-1, 1)


def channels_back(y: Tensor, channel_dim: int) -> Tensor:
    return y if channel_dim == 1 else y.movedim(1, -1)


def layer_norm2d(
    x: Tensor,
    shape: List[int],
    weight: Optional[Tensor],
    bias: Optional[Tensor],
    eps: float,
) -> Tensor:
    return F.layer_norm(x.movedim(1, -1), shape, weight, bias, eps).movedim(-1, 1)


def switchable_norm(
    x: Tensor,
    mean_weight: Tensor,
    var_weight: Tensor,
    running_mean: Optional[Tensor],
    running_var: Optional[Tensor],
    weight: Optional[Tensor],
    bias: Optional[Tensor],
    training: bool,
    momentum: float,
    eps: float,
    using_bn: bool,
) -> Tensor:
    """Normalize x = (N, C, *), as `onepass.functional.switchable_norm` does."""
    rows = x.flatten(2) if x.dim() > 2 else x.unsqueeze(2)
    var, mean = torch.var_mean(rows, [2], correction=0)
    across_var, across_mean = torch.var_mean(mean, [1], correction=0, keepdim=True)
    means, variances = [mean, across_mean.expand_as(mean)], [var, (var.mean([1], keepdim=True) + across_var).expand_as(var)]
    if using_bn:
        if running_mean is not None and running_var is not None and not training:
            means.append(running_mean.expand_as(mean).to(mean.dtype))
            variances.append(running_var.expand_as(var).to(var.dtype))
        else:
            batch_var, batch_mean = torch.var_mean(mean, [0], correction=0)
            batch_var = batch_var + var.mean([0])
            means.append(batch_mean.expand_as(mean))
            variances.append(batch_var.expand_as(var))
            if running_mean is not None and running_var is not None:
                count = x.numel() // x.size(1)
                running_mean.copy_(running_mean * (1 - momentum) + batch_mean.detach() * momentum)
                running_var.copy_(running_var * (1 - momentum) + batch_var.detach() * (momentum * count / (count - 1)))
    if x.dim() == 2:  # without positions, InstanceNorm takes no part
        means, variances = means[1:], variances[1:]
    weights_mean = torch.softmax(mean_weight[mean_weight.size(0) - len(means) :], 0).to(x.dtype)
    weights_var = torch.softmax(var_weight[var_weight.size(0) - len(means) :], 0).to(x.dtype)
    mean, var = (torch.stack(means, 2) * weights_mean).sum(2), (torch.stack(variances, 2) * weights_var).sum(2)
    sizes = [x.size(0), x.size(1)] + [1 for _ in range(x.dim() - 2)]
    y = (x - mean.reshape(sizes)) * torch.rsqrt(var + eps).reshape(sizes)
    sizes[0] = 1
    if weight is not None:
        y = y * weight.reshape(sizes)
    if bias is not None:
        y = y + bias.reshape(sizes)
    return y
