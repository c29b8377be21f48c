"""Norms, modulation and activation as separate operations of torch, as users write them without onepass.

They are the second oracle of oracle.py.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor


def group_norm(x: Tensor, groups: int, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """Call torch's group_norm. If there is a bias but no weight, pass a weight of ones.

    Without the weight, torch 2.13 cannot compute the gradient of the bias. It raises "tensor does not have a device".
    """
    return F.group_norm(x, groups, torch.ones_like(bias) if weight is None and bias is not None else weight, bias, eps)


def layer_norm2d(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    return F.layer_norm(x.permute(0, 2, 3, 1), x.shape[1:2], weight, bias, eps).permute(0, 3, 1, 2)


def switchable_norm(
    x: Tensor,
    mean_weight: Tensor,
    var_weight: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
    using_bn: bool,
) -> Tensor:
    """Normalize by mixed statistics of InstanceNorm, LayerNorm and BatchNorm: equations (3)-(5) of Luo et al. 2018."""
    positions = tuple(range(2, x.dim()))
    sets = {"instance": positions, "layer": (1, *positions), "batch": (0, *positions)}
    names = [name for name in sets if (name != "instance" or positions) and (name != "batch" or using_bn)]
    var, mean = zip(*(torch.var_mean(x, sets[name], correction=0, keepdim=True) for name in names))
    if using_bn and running_mean is not None and running_var is not None:
        shape = [1, -1, *(1 for _ in positions)]
        if training:
            unbiased = torch.var(x.detach(), sets["batch"])
            running_mean.mul_(1 - momentum).add_(mean[-1].detach().flatten(), alpha=momentum)
            running_var.mul_(1 - momentum).add_(unbiased, alpha=momentum)
        else:
            mean, var = (*mean[:-1], running_mean.view(shape)), (*var[:-1], running_var.view(shape))
    mean_share, var_share = (logits[-len(names) :].softmax(0) for logits in (mean_weight, var_weight))
    mixed_mean = sum((s * p for s, p in zip(mean_share, mean)), torch.zeros_like(mean[0]))
    mixed_var = sum((s * p for s, p in zip(var_share, var)), torch.zeros_like(var[0]))
    u = (x - mixed_mean) / torch.sqrt(mixed_var + eps)
    weight, bias = (None if p is None else p.view(-1, *(1 for _ in positions)) for p in (weight, bias))
    u = u if weight is None else u * weight
    return u if bias is None else u + bias


def per_element(param: Tensor, granularity: str, normalized_shape: Sequence[int]) -> Tensor:
    """Expand a parameter with one value per channel, or a single value, to one value per element."""
    if granularity == "element":
        return param
    return param.reshape(-1, *(1 for _ in normalized_shape[1:])).expand(*normalized_shape)


def modulate_and_activate(u: Tensor, scale: Tensor | None, shift: Tensor | None, channel_dim: int, activation: str) -> Tensor:
    """Return act(u·(1 + scale) + shift). Scale and shift have one value per sample and channel."""
    shape = [n if dim in (0, channel_dim) else 1 for dim, n in enumerate(u.shape)]
    if scale is not None:
        u = u * (1 + scale.reshape(shape))
    if shift is not None:
        u = u + shift.reshape(shape)
    if activation == "gelu_tanh":
        return F.gelu(u, approximate="tanh")
    return getattr(F, activation)(u) if activation else u
