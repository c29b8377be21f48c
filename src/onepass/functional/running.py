from __future__ import annotations

from typing import Any

from torch import Tensor

from onepass.check import arguments as check_arguments
from onepass.check import extras as check_extras
from onepass.check import norms as check_norms
from onepass.core import norms
from onepass.core.operands import Result
from onepass.dispatch import call

from .call import Modulation, common_clauses, defer, overridden, returned, run
from .statistics import unbiased, update_running


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
) -> Tensor:
    """y = (x - mean)/sqrt(var + eps)·weight + bias over the positions of each channel of each sample of (N, C, *).

    The running statistics, if any, are updated in place by the batch average of the samples' own; with
    `use_input_stats=False` they are used, and returned, instead. With `channel_dim=-1` the input is (N, *, C).

    Example: `instance_norm(torch.randn(2, 64, 32, 32))`
    """
    if type(input) is not Tensor and overridden(input):
        return defer(instance_norm, locals())
    if type(eps) is not float or type(momentum) is not float or type(use_input_stats) is not bool:
        check_arguments.flag("instance_norm", "use_input_stats", 6, use_input_stats)
        eps, momentum = check_arguments.real("instance_norm", "eps", 8, eps), check_arguments.momentum("instance_norm", 7, momentum)
    if channel_dim != 1:
        channel_dim = check_extras.channel_dim(input, channel_dim)
    check_norms.instance_norm(input, weight, bias, running_mean, running_var, use_input_stats, channel_dim)
    args, running = (eps, channel_dim, activation, modulate is not None, save), (running_mean, running_var)
    if not use_input_stats:
        return _evaluate(args, input, running, weight, bias, modulate, channel_dim, return_stats, out)
    track = running_mean is not None
    if not (track or return_stats) and modulate is None and out is None:
        return call.normalize(define_instance_norm, args, input, weight, bias)

    def update(result: Result) -> None:
        if input.numel():
            assert result.mean is not None
            update_running(running_mean, running_var, result.mean.mean(0), unbiased(result.var, input).mean(0), momentum)

    # torch updates these after its norm has saved its tensors, but before an activation or a modulation saves its own.
    early = update if track and (activation is not None or modulate is not None) else None
    extras: dict[str, Any] = {"track": track, "stats": return_stats, "update": early}
    result = run(define_instance_norm, args, input, weight, bias, modulate, channel_dim, out, running, **extras)
    if track and early is None:
        update(result)
    return returned(result, return_stats)


def define_instance_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, channel_dim: int, activation, modulated, save="x"
):
    return norms.instance_norm(eps, channel_dim, modulated, **common_clauses(activation, save))


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
) -> Tensor:
    """y = (x - mean)/sqrt(var + eps)·weight + bias over the batch and the positions of each channel of (N, C, *).

    In training the batch's statistics are used and the running ones, if any, updated in place by
    `running = (1 - momentum)·running + momentum·batch`, with the unbiased variance; otherwise the running ones are used, and returned. With
    `channel_dim=-1` the input is (N, *, C).

    Example: `batch_norm(torch.randn(8, 64, 32, 32), None, None, training=True)`
    """
    if type(input) is not Tensor and overridden(input):
        return defer(batch_norm, locals())
    if type(eps) is not float or type(momentum) is not float or type(training) is not bool:
        check_arguments.flag("batch_norm", "training", 6, training)
        eps, momentum = check_arguments.real("batch_norm", "eps", 8, eps), check_arguments.momentum("batch_norm", 7, momentum)
    if channel_dim != 1:
        channel_dim = check_extras.channel_dim(input, channel_dim)
    args, running = (eps, channel_dim, activation, modulate is not None, save), (running_mean, running_var)
    track, plain = training and running_mean is not None and running_var is not None, modulate is None and out is None and not return_stats
    operands = input, weight, bias, running_mean, running_var, momentum
    y = call.normalize_and_track(define_batch_norm, args, *operands) if plain and track else None  # pyright: ignore[reportArgumentType]
    if y is not None:
        return y

    def checked() -> None:
        check_norms.batch_norm(input, weight, bias, running_mean, running_var, training, eps, channel_dim)

    if plain and input.dim() > 1 and (running_mean is None and running_var is None if training else running_var is not None):
        return call.normalize(define_batch_norm, args, input, weight, bias, *((None, None) if training else running), check=checked)
    checked()
    if input.dim() < 2:  # only an empty one passes the checks, and torch hands it back
        return input * 1 if weight is None else input * weight
    if not training:
        return _evaluate(args, input, running, weight, bias, modulate, channel_dim, return_stats, out)
    if plain and track and call.may_track(define_batch_norm, args, *operands):
        y = call.normalize_and_track(define_batch_norm, args, *operands)  # pyright: ignore[reportArgumentType]
        if y is not None:
            return y

    def update(result: Result) -> None:
        update_running(running_mean, running_var, result.mean, unbiased(result.var, input), momentum)

    extras: dict[str, Any] = {"track": track, "stats": return_stats, "update": update if track and input.numel() else None}
    return returned(run(define_batch_norm, args, input, weight, bias, modulate, channel_dim, out, running, **extras), return_stats)


def define_batch_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, channel_dim: int, activation, modulated, save="x"):
    return norms.batch_norm(eps, channel_dim, modulated, **common_clauses(activation, save))


def _evaluate(
    args: tuple[Any, ...],
    input: Tensor,
    running: tuple[Tensor | None, Tensor | None],
    weight: Tensor | None,
    bias: Tensor | None,
    modulate: Modulation | None,
    channel_dim: int,
    return_stats: bool,
    out: Tensor | None,
) -> Tensor:
    """By running statistics, (C,): the sets of batch_norm."""
    if modulate is None and out is None and not return_stats:
        return call.normalize(define_batch_norm, args, input, weight, bias, *running)
    result = run(define_batch_norm, args, input, weight, bias, modulate, channel_dim, out, running, given=True, stats=return_stats)
    if not return_stats:
        return result.y
    assert running[0] is not None
    mean = running[0].detach().to(result.rstd.dtype, copy=True).view_as(result.rstd)
    return returned(result._replace(mean=mean), True)
