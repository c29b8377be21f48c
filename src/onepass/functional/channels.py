"""Norms for inputs (N, C, *) that normalize each sample by itself: group_norm and layer_norm2d."""

from __future__ import annotations

from typing import Any, Literal, overload

from torch import Tensor

from onepass.check.arguments import as_float, as_int
from onepass.check.extras import as_channel_dim
from onepass.check.norms import check_group_norm, check_layer_norm2d
from onepass.core import norms
from onepass.dispatch import call

from .extras import Modulation, Stats, normalize_with_extras, output_of, spec_fields
from .overrides import autocast, call_override, cuda_autocast, has_override


# fmt: off
@overload
def group_norm(
    input: Tensor, num_groups: int, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5, *,
    channel_dim: int = 1, activation: str | None = None, modulate: Modulation | None = None, save: str = "x",
    return_stats: Literal[False] = False, out: Tensor | None = None,
) -> Tensor: ...
@overload
def group_norm(
    input: Tensor, num_groups: int, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5, *,
    channel_dim: int = 1, activation: str | None = None, modulate: Modulation | None = None, save: str = "x",
    return_stats: Literal[True], out: Tensor | None = None,
) -> Stats: ...
# fmt: on
def group_norm(
    input: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    channel_dim: int = 1,
    activation: str | None = None,
    modulate: Modulation | None = None,
    save: str = "x",
    return_stats: bool = False,
    out: Tensor | None = None,
) -> Any:
    """Return y = (x - mean)/sqrt(var + eps)·weight + bias for an input (N, C, *).

    Each group of each sample has its own mean and variance, over C/num_groups channels and all positions. With
    `channel_dim=-1` the input is (N, *, C).

    Example: `group_norm(torch.randn(2, 320, 8, 8), 32, activation="silu")`
    """
    if type(input) is not Tensor and has_override(input):
        return call_override(group_norm, locals())
    if type(num_groups) is not int:
        num_groups = as_int("num_groups", num_groups, "group_norm(): argument 'num_groups' (position 2)")
    if type(eps) is not float:
        eps = as_float("group_norm", "eps", 5, eps)
    if channel_dim != 1:
        channel_dim = as_channel_dim(input, channel_dim)
    if cuda_autocast():
        input, weight, bias = autocast(input, weight, bias)
    args = num_groups, eps, channel_dim, activation, modulate is not None, save
    if modulate is None and out is None and not return_stats:
        return call.normalize(define_group_norm, args, input, weight, bias)
    extras = channel_dim, modulate, out, return_stats
    return output_of(normalize_with_extras(define_group_norm, args, input, weight, bias, extras), return_stats)


# fmt: off
@overload
def layer_norm2d(
    input: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-6, *, activation: str | None = None,
    modulate: Modulation | None = None, save: str = "x", return_stats: Literal[False] = False, out: Tensor | None = None,
) -> Tensor: ...
@overload
def layer_norm2d(
    input: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-6, *, activation: str | None = None,
    modulate: Modulation | None = None, save: str = "x", return_stats: Literal[True], out: Tensor | None = None,
) -> Stats: ...
# fmt: on
def layer_norm2d(
    input: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-6,
    *,
    activation: str | None = None,
    modulate: Modulation | None = None,
    save: str = "x",
    return_stats: bool = False,
    out: Tensor | None = None,
) -> Any:
    """Return y = (x - mean)/sqrt(var + eps)·weight + bias for an input (N, C, H, W).

    Each pixel of each sample has its own mean and variance, over the channels. The result is that of a permute to
    (N, H, W, C), layer_norm and a permute back, without the copies.

    Example: `layer_norm2d(torch.randn(2, 96, 56, 56), torch.ones(96), torch.zeros(96))`
    """
    if type(input) is not Tensor and has_override(input):
        return call_override(layer_norm2d, locals())
    if type(eps) is not float:
        eps = as_float("layer_norm2d", "eps", 4, eps)
    if cuda_autocast():
        input, weight, bias = autocast(input, weight, bias)
    args = eps, activation, modulate is not None, save
    if modulate is None and out is None and not return_stats:
        return call.normalize(define_layer_norm2d, args, input, weight, bias)
    extras = 1, modulate, out, return_stats
    return output_of(normalize_with_extras(define_layer_norm2d, args, input, weight, bias, extras), return_stats)


def define_group_norm(x: Tensor, weight, bias, num_groups: int, eps: float, channel_dim: int, activation, modulated, save="x"):
    check_group_norm(x, num_groups, weight, bias, channel_dim)
    return norms.group_norm(num_groups, eps, channel_dim, modulated, **spec_fields(activation, save))


def define_layer_norm2d(x: Tensor, weight, bias, eps: float, activation, modulated, save="x"):
    check_layer_norm2d(x, weight, bias)
    return norms.layer_norm2d(eps, modulated, **spec_fields(activation, save))
