"""Norms for inputs (N, C, *) that can keep running statistics: instance_norm and batch_norm."""

from __future__ import annotations

from typing import Any, Literal, overload

from torch import Tensor

from onepass.check.arguments import as_float, as_momentum, require_bool
from onepass.check.extras import as_channel_dim
from onepass.check.norms import check_batch_norm, check_instance_norm
from onepass.core import norms
from onepass.core.operands import Result
from onepass.dispatch import call, tracking

from .extras import Extras, Modulation, RunningStatistics, Stats, normalize_with_extras, output_of, spec_fields
from .overrides import call_override, has_override
from .statistics import unbiased, update_running


# fmt: off
@overload
def instance_norm(
    input: Tensor, running_mean: Tensor | None = None, running_var: Tensor | None = None, weight: Tensor | None = None,
    bias: Tensor | None = None, use_input_stats: bool = True, momentum: float = 0.1, eps: float = 1e-5, *, channel_dim: int = 1,
    activation: str | None = None, modulate: Modulation | None = None, save: str = "x", return_stats: Literal[False] = False,
    out: Tensor | None = None,
) -> Tensor: ...
@overload
def instance_norm(
    input: Tensor, running_mean: Tensor | None = None, running_var: Tensor | None = None, weight: Tensor | None = None,
    bias: Tensor | None = None, use_input_stats: bool = True, momentum: float = 0.1, eps: float = 1e-5, *, channel_dim: int = 1,
    activation: str | None = None, modulate: Modulation | None = None, save: str = "x", return_stats: Literal[True],
    out: Tensor | None = None,
) -> Stats: ...
# fmt: on
def instance_norm(
    input: Tensor,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
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

    Each channel of each sample has its own mean and variance, over all positions. If running statistics are given, they
    are updated in place with mean and variance averaged over the samples. With `use_input_stats=False`, the running statistics
    take the place of mean and variance, and `return_stats` returns them. With `channel_dim=-1` the input is (N, *, C).

    Example: `instance_norm(torch.randn(2, 64, 32, 32))`
    """
    if type(input) is not Tensor and has_override(input):
        return call_override(instance_norm, locals())
    if type(eps) is not float or type(momentum) is not float or type(use_input_stats) is not bool:
        require_bool("instance_norm", "use_input_stats", 6, use_input_stats)
        eps, momentum = as_float("instance_norm", "eps", 8, eps), as_momentum("instance_norm", 7, momentum)
    if channel_dim != 1:
        channel_dim = as_channel_dim(input, channel_dim)
    check_instance_norm(input, weight, bias, running_mean, running_var, use_input_stats, channel_dim)
    args, running = (eps, channel_dim, activation, modulate is not None, save), (running_mean, running_var)
    plain, track = modulate is None and out is None and not return_stats, use_input_stats and running_mean is not None
    if plain and not use_input_stats:
        return call.normalize(define_batch_norm, args, input, weight, bias, running_mean, running_var)
    if plain and not track:
        return call.normalize(define_instance_norm, args, input, weight, bias)
    extras = channel_dim, modulate, out, return_stats
    if not use_input_stats:
        return _evaluate(args, input, running, weight, bias, extras)

    def update(result: Result) -> None:
        if input.numel():
            assert result.mean is not None
            update_running(running_mean, running_var, result.mean.mean(0), unbiased(result.var, input).mean(0), momentum)

    # Update after the norm has saved its tensors, as torch does. Checkpointing stops its recomputation at the last saved tensor,
    # and so skips a later update. But with an activation or a modulation, update before: torch would save their tensors last.
    early = update if track and (activation is not None or modulate is not None) else None
    keywords: dict[str, Any] = {"running": running, "track": track, "update": early}
    result = normalize_with_extras(define_instance_norm, args, input, weight, bias, extras, **keywords)
    if track and early is None:
        update(result)
    return output_of(result, return_stats)


# fmt: off
@overload
def batch_norm(
    input: Tensor, running_mean: Tensor | None, running_var: Tensor | None, weight: Tensor | None = None,
    bias: Tensor | None = None, training: bool = False, momentum: float = 0.1, eps: float = 1e-5, *, channel_dim: int = 1,
    activation: str | None = None, modulate: Modulation | None = None, save: str = "x", return_stats: Literal[False] = False,
    out: Tensor | None = None,
) -> Tensor: ...
@overload
def batch_norm(
    input: Tensor, running_mean: Tensor | None, running_var: Tensor | None, weight: Tensor | None = None,
    bias: Tensor | None = None, training: bool = False, momentum: float = 0.1, eps: float = 1e-5, *, channel_dim: int = 1,
    activation: str | None = None, modulate: Modulation | None = None, save: str = "x", return_stats: Literal[True],
    out: Tensor | None = None,
) -> Stats: ...
# fmt: on
def batch_norm(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
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

    With `training=True`, each channel has its own mean and variance, over the batch and all positions. If running
    statistics are given, they are updated in place: `running = (1 - momentum)·running + momentum·batch`, with the unbiased
    variance. With `training=False`, the running statistics take the place of mean and variance, and `return_stats`
    returns them. With `channel_dim=-1` the input is (N, *, C).

    Example: `batch_norm(torch.randn(8, 64, 32, 32), None, None, training=True)`
    """
    if type(input) is not Tensor and has_override(input):
        return call_override(batch_norm, locals())
    if type(eps) is not float or type(momentum) is not float or type(training) is not bool:
        require_bool("batch_norm", "training", 6, training)
        eps, momentum = as_float("batch_norm", "eps", 8, eps), as_momentum("batch_norm", 7, momentum)
    if channel_dim != 1:
        channel_dim = as_channel_dim(input, channel_dim)
    args, running = (eps, channel_dim, activation, modulate is not None, save), (running_mean, running_var)
    track, plain = training and running_mean is not None and running_var is not None, modulate is None and out is None and not return_stats

    def update(result: Result) -> None:
        update_running(running_mean, running_var, result.mean, unbiased(result.var, input), momentum)

    operands = input, weight, bias, running_mean, running_var, momentum
    y = tracking.normalize_and_track(define_batch_norm, args, *operands, update) if plain and track else None  # pyright: ignore[reportArgumentType]
    if y is not None:
        return y

    def check() -> None:
        check_batch_norm(input, weight, bias, running_mean, running_var, training, eps, channel_dim)

    if plain and input.dim() > 1 and (running_mean is None and running_var is None if training else running_var is not None):
        return call.normalize(define_batch_norm, args, input, weight, bias, *((None, None) if training else running), check=check)
    check()
    if input.dim() < 2:  # the checks let only empty tensors through, for which torch returns an empty tensor
        return input * 1 if weight is None else input * weight
    extras = channel_dim, modulate, out, return_stats
    if not training:
        return _evaluate(args, input, running, weight, bias, extras)
    if plain and track and tracking.may_track(define_batch_norm, args, *operands):
        y = tracking.normalize_and_track(define_batch_norm, args, *operands, update)  # pyright: ignore[reportArgumentType]
        if y is not None:
            return y
    keywords: dict[str, Any] = {"running": running, "track": track, "update": update if track and input.numel() else None}
    return output_of(normalize_with_extras(define_batch_norm, args, input, weight, bias, extras, **keywords), return_stats)


def define_instance_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, channel_dim: int, activation, modulated, save="x"
):
    return norms.instance_norm(eps, channel_dim, modulated, **spec_fields(activation, save))


def define_batch_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, channel_dim: int, activation, modulated, save="x"):
    return norms.batch_norm(eps, channel_dim, modulated, **spec_fields(activation, save))


def _evaluate(
    args: tuple[Any, ...],
    input: Tensor,
    running: RunningStatistics,
    weight: Tensor | None,
    bias: Tensor | None,
    extras: Extras,
) -> Tensor:
    """Normalize by running statistics, and return y, or Stats with return_stats.

    Running statistics have one value per channel, so this is a batch_norm even if instance_norm was called.
    """
    result = normalize_with_extras(define_batch_norm, args, input, weight, bias, extras, running=running, use_running=True)
    *_, return_stats = extras
    if not return_stats:
        return result.y
    assert running[0] is not None
    mean = running[0].detach().to(result.rstd.dtype, copy=True).view_as(result.rstd)
    return output_of(result._replace(mean=mean), True)
