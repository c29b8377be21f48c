from __future__ import annotations

from torch import Tensor

from onepass.check import arguments as check_arguments
from onepass.check import extras as check_extras
from onepass.check import norms as check_norms
from onepass.core import norms
from onepass.dispatch import call

from .call import Modulation, autocast, common_clauses, defer, overridden, returned, run


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
) -> Tensor:
    """y = (x - mean)/sqrt(var + eps)·weight + bias over the C/num_groups channels of a group and all positions of (N, C, *).

    With `channel_dim=-1` the input is (N, *, C).

    Example: `group_norm(torch.randn(2, 320, 8, 8), 32, activation="silu")`
    """
    if type(input) is not Tensor and overridden(input):
        return defer(group_norm, locals())
    if type(num_groups) is not int:
        num_groups = check_arguments.whole("num_groups", num_groups, "group_norm(): argument 'num_groups' (position 2)")
    if type(eps) is not float:
        eps = check_arguments.real("group_norm", "eps", 5, eps)
    if channel_dim != 1:
        channel_dim = check_extras.channel_dim(input, channel_dim)
    if input.is_cuda:
        input, weight, bias = autocast(input, weight, bias)
    args = num_groups, eps, channel_dim, activation, modulate is not None, save
    if modulate is None and out is None and not return_stats:
        return call.normalize(define_group_norm, args, input, weight, bias)
    return returned(run(define_group_norm, args, input, weight, bias, modulate, channel_dim, out, stats=return_stats), return_stats)


def define_group_norm(x: Tensor, weight, bias, num_groups: int, eps: float, channel_dim: int, activation, modulated, save="x"):
    check_norms.group_norm(x, num_groups, weight, bias, channel_dim)
    return norms.group_norm(num_groups, eps, channel_dim, modulated, **common_clauses(activation, save))


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
) -> Tensor:
    """LayerNorm over C at each pixel of (N, C, H, W), without permuting copies: y = (x - mean)/sqrt(var + eps)·weight + bias.

    Example: `layer_norm2d(torch.randn(2, 96, 56, 56), torch.ones(96), torch.zeros(96))`
    """
    if type(input) is not Tensor and overridden(input):
        return defer(layer_norm2d, locals())
    if type(eps) is not float:
        eps = check_arguments.real("layer_norm2d", "eps", 4, eps)
    if input.is_cuda:
        input, weight, bias = autocast(input, weight, bias)
    args = eps, activation, modulate is not None, save
    if modulate is None and out is None and not return_stats:
        return call.normalize(define_layer_norm2d, args, input, weight, bias)
    return returned(run(define_layer_norm2d, args, input, weight, bias, modulate, 1, out, stats=return_stats), return_stats)


def define_layer_norm2d(x: Tensor, weight, bias, eps: float, activation, modulated, save="x"):
    check_norms.layer_norm2d(x, weight, bias)
    return norms.layer_norm2d(eps, modulated, **common_clauses(activation, save))
