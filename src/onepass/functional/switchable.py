from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from onepass.check import arguments as check_arguments
from onepass.check import extras as check_extras
from onepass.check import norms as check_norms
from onepass.core import norms
from onepass.core.mixing import mix_statistics
from onepass.core.moments import Moments, merge_along
from onepass.core.operands import OptionalOperands, Result
from onepass.core.problem import accumulator

from .call import Modulation, defer, overridden, returned, run
from .statistics import unbiased, update_running


def switchable_norm(
    input: Tensor,
    mean_weight: Tensor,
    var_weight: Tensor,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
    using_bn: bool = True,
    *,
    channel_dim: int = 1,
    activation: str | None = None,
    modulate: Modulation | None = None,
    return_stats: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """y = (x - mean)/sqrt(var + eps)·weight + bias with mean = Σ softmax(mean_weight)_k·mean_k and var = Σ softmax(var_weight)_k·var_k over
    k = InstanceNorm, LayerNorm, BatchNorm of (N, C, *), in this order (Luo et al., 2018).

    `using_bn=False` leaves BatchNorm out, an input (N, C) InstanceNorm. BatchNorm's running statistics are updated in training and used
    otherwise, as in `batch_norm`. With `channel_dim=-1` the input is (N, *, C).

    Example: `switchable_norm(torch.randn(8, 64, 32, 32), torch.ones(3), torch.ones(3), training=True)`
    """
    if type(input) is not Tensor and overridden(input):
        return defer(switchable_norm, locals())
    if type(eps) is not float or type(momentum) is not float or type(training) is not bool:
        check_arguments.flag("switchable_norm", "training", 8, training)
        eps, momentum = check_arguments.real("switchable_norm", "eps", 10, eps), check_arguments.momentum("switchable_norm", 9, momentum)
    if channel_dim != 1:
        channel_dim = check_extras.channel_dim(input, channel_dim)
    running = running_mean, running_var
    check_norms.switchable_norm(input, mean_weight, var_weight, *running, weight, bias, training, eps, using_bn, channel_dim)
    args = input.dim() > 2, using_bn, eps, channel_dim, activation, modulate is not None
    definition = define_switchable_norm(input, weight, bias, *args)
    norms, acc = len(definition.mix.split(",")), accumulator(input.dtype)
    mean_weight, var_weight = (torch.softmax(logits[-norms:].to(acc), 0) for logits in (mean_weight, var_weight))
    last = running if using_bn and not training else (None, None)
    extras = OptionalOperands(mean_weight=mean_weight, var_weight=var_weight, running_mean=last[0], running_var=last[1])

    def sets(result: Result) -> Moments:
        assert result.mean is not None and result.var is not None
        count = input.numel() // max(result.mean.numel(), 1)
        return Moments(count, result.mean, result.var * count)

    def update(result: Result) -> None:
        batch = merge_along(sets(result), [0])
        update_running(running_mean, running_var, batch.mean, unbiased(batch.var, input), momentum)

    updates = training and using_bn and running_mean is not None and input.numel()
    also: dict[str, Any] = {"track": True, "extras": extras, "update": update if updates else None}
    result = run(define_switchable_norm, args, input, weight, bias, modulate, channel_dim, out, running, **also)
    if return_stats:
        result = result._replace(mean=mix_statistics(definition, input.shape, sets(result), extras).mean.detach().clone())
    return returned(result, return_stats)


def define_switchable_norm(x: Tensor, weight, bias, positions: bool, using_bn: bool, eps: float, channel_dim: int, activation, modulated):
    return norms.switchable_norm(positions, using_bn, eps, channel_dim, modulated, activation=check_extras.activation(activation))
