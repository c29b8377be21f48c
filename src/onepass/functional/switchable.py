"""switchable_norm, a mix of InstanceNorm, LayerNorm and BatchNorm with learned weights."""

from __future__ import annotations

from typing import Any, Literal, overload

import torch
from torch import Tensor

from onepass.check.arguments import as_float, as_momentum, require_bool
from onepass.check.extras import as_activation, as_channel_dim
from onepass.check.norms import check_switchable_norm
from onepass.core import norms
from onepass.core.mixing import mix_statistics
from onepass.core.moments import Moments, merge_along
from onepass.core.operands import OptionalOperands, Result
from onepass.core.problem import accumulator

from .extras import Modulation, Stats, normalize_with_extras, output_of
from .overrides import call_override, has_override
from .statistics import unbiased, update_running


# fmt: off
@overload
def switchable_norm(
    input: Tensor, mean_weight: Tensor, var_weight: Tensor, running_mean: Tensor | None = None, running_var: Tensor | None = None,
    weight: Tensor | None = None, bias: Tensor | None = None, training: bool = False, momentum: float = 0.1, eps: float = 1e-5,
    using_bn: bool = True, *, channel_dim: int = 1, activation: str | None = None, modulate: Modulation | None = None,
    return_stats: Literal[False] = False, out: Tensor | None = None,
) -> Tensor: ...
@overload
def switchable_norm(
    input: Tensor, mean_weight: Tensor, var_weight: Tensor, running_mean: Tensor | None = None, running_var: Tensor | None = None,
    weight: Tensor | None = None, bias: Tensor | None = None, training: bool = False, momentum: float = 0.1, eps: float = 1e-5,
    using_bn: bool = True, *, channel_dim: int = 1, activation: str | None = None, modulate: Modulation | None = None,
    return_stats: Literal[True], out: Tensor | None = None,
) -> Stats: ...
# fmt: on
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
) -> Any:
    """Return y = (x - mean)/sqrt(var + eps)·weight + bias, with the mixed statistics of three norms (Luo et al., 2018).

    mean = Σ softmax(mean_weight)_k·mean_k and var = Σ softmax(var_weight)_k·var_k, where k runs over InstanceNorm,
    LayerNorm and BatchNorm of an input (N, C, *), in this order. `using_bn=False` leaves out BatchNorm. For an input (N, C),
    InstanceNorm is left out. The running statistics are those of BatchNorm, updated or used as in `batch_norm`. With
    `channel_dim=-1` the input is (N, *, C).

    Example: `switchable_norm(torch.randn(8, 64, 32, 32), torch.ones(3), torch.ones(3), training=True)`
    """
    if type(input) is not Tensor and has_override(input):
        return call_override(switchable_norm, locals())
    if type(eps) is not float or type(momentum) is not float or type(training) is not bool:
        require_bool("switchable_norm", "training", 8, training)
        eps, momentum = as_float("switchable_norm", "eps", 10, eps), as_momentum("switchable_norm", 9, momentum)
    if channel_dim != 1:
        channel_dim = as_channel_dim(input, channel_dim)
    running = running_mean, running_var
    check_switchable_norm(input, mean_weight, var_weight, *running, weight, bias, training, eps, using_bn, channel_dim)
    args = input.dim() > 2, using_bn, eps, channel_dim, activation, modulate is not None
    definition = define_switchable_norm(input, weight, bias, *args)
    num_norms, acc = len(definition.mix.split(",")), accumulator(input.dtype)
    mean_weight, var_weight = (torch.softmax(logits[-num_norms:].to(acc), 0) for logits in (mean_weight, var_weight))
    used = running if using_bn and not training else (None, None)
    optional = OptionalOperands(mean_weight=mean_weight, var_weight=var_weight, running_mean=used[0], running_var=used[1])

    def moments_of(result: Result) -> Moments:
        assert result.mean is not None and result.var is not None
        count = input.numel() // max(result.mean.numel(), 1)
        return Moments(count, result.mean, result.var * count)

    def update(result: Result) -> None:
        assert result.var is not None
        batch = merge_along(Moments(1, result.mean, result.var), [0])  # all sets have equally many elements, so one for each will do
        update_running(running_mean, running_var, batch.mean, unbiased(batch.var, input), momentum)

    updates = training and using_bn and running_mean is not None and input.numel()
    extras = channel_dim, modulate, out, False
    keywords: dict[str, Any] = {"running": running, "track": True, "update": update if updates else None}
    result = normalize_with_extras(define_switchable_norm, args, input, weight, bias, extras, optional, **keywords)
    if return_stats:
        result = result._replace(mean=mix_statistics(definition, input.shape, moments_of(result), optional).mean.detach().clone())
    return output_of(result, return_stats)


def define_switchable_norm(x: Tensor, weight, bias, positions: bool, using_bn: bool, eps: float, channel_dim: int, activation, modulated):
    return norms.switchable_norm(positions, using_bn, eps, channel_dim, modulated, activation=as_activation(activation))
