"""What the functions of this package share: extras, autocast, subclasses, and the call itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

from onepass.check import arguments as check_arguments
from onepass.check import extras as check_extras
from onepass.check import out as check_out
from onepass.core.operands import NO_OPTIONAL, OptionalOperands, Result
from onepass.core.problem import summed_like
from onepass.dispatch import autograd, call

Modulation = tuple[Tensor | None, Tensor | None]


class Stats(NamedTuple):
    """What `return_stats=True` returns. The statistics have the shape of the sets: the leading dimensions for layer_norm and rms_norm,
    (N, groups) for group_norm, (N, C) for instance_norm and switchable_norm, (C,) for batch_norm and by running statistics, (N, H, W) for
    layer_norm2d. No gradient flows through them."""

    output: Tensor
    mean: Tensor | None  # None where no mean is subtracted
    rstd: Tensor  # 1/sqrt(var + eps)


def common_clauses(activation: str | None, save: str) -> dict[str, Any]:
    return {"activation": check_extras.activation(activation), "from_y": check_extras.from_y(save, activation)}


def overridden(input: Any) -> bool:
    """Whether input is of a type that wants to see the call itself, as a proxy of torch.fx does."""
    if has_torch_function((input,)):
        return True
    check_arguments.tensor(input)
    return False


def defer(function: Callable[..., Any], arguments: dict[str, Any]) -> Any:
    return handle_torch_function(function, (arguments["input"],), **arguments)


def run(
    define: call.Define,
    args: tuple[Any, ...],
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    modulate: Modulation | None,
    channel_dim: int,
    out: Tensor | None = None,
    running: tuple[Tensor | None, Tensor | None] = (None, None),
    given: bool = False,
    track: bool = False,
    extras: OptionalOperands = NO_OPTIONAL,
    stats: bool = False,
    update: autograd.Update | None = None,
) -> Result:
    """The call with everything; `running` statistics are used if they are `given`."""
    if modulate is not None:
        like = summed_like(input, extras.residual)
        try:
            scale, shift = check_extras.modulation(like, modulate, channel_dim)
        except RuntimeError:
            define(like, weight, bias, *args)  # a call that is wrong beside its modulation hears of that first
            raise
        extras = extras._replace(scale=scale, shift=shift)
    if out is not None:
        check_out.out(out, input, weight, bias, *running, *extras)
    result = call.normalize_with(define, args, input, weight, bias, *(running if given else (None, None)), extras, track, stats, update)
    return result if out is None else result._replace(y=out.copy_(result.y))


def returned(result: Result, return_stats: bool) -> Any:
    """Stats, if they were asked for; functions are typed as what all other calls get, a Tensor."""
    return Stats(result.y, result.mean, result.rstd) if return_stats else result.y


def autocasts(x: Tensor) -> bool:
    """Whether torch would run layer_norm and group_norm in float32 now: under CUDA autocast. The others, and the CPU, it leaves alone."""
    return x.is_cuda and torch.is_autocast_enabled("cuda") and x.dtype != torch.float64


def autocast(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> tuple[Tensor, Tensor | None, Tensor | None]:
    if not autocasts(x):
        return x, weight, bias
    return x.float(), None if weight is None else weight.float(), None if bias is None else bias.float()
