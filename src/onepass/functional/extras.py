"""Calls with extras: modulation, `out`, returned statistics, a residual, running statistics.

Plain calls do not pass through here: they call `normalize` of `onepass.dispatch.call` directly.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from onepass.check.extras import as_activation, as_scale_and_shift, saves_output
from onepass.check.out import check_out
from onepass.core.operands import NO_OPTIONAL, OptionalOperands, Result
from onepass.core.problem import summed_like
from onepass.dispatch import autograd, call

Modulation = tuple[Tensor | None, Tensor | None]
RunningStatistics = tuple[Tensor | None, Tensor | None]  # running_mean, running_var


class Stats(NamedTuple):
    """The result of a call with `return_stats=True`. No gradient flows through mean and rstd.

    Their shape is

    - the leading dimensions for layer_norm and rms_norm;
    - (N, groups) for group_norm;
    - (N, C) for instance_norm and switchable_norm;
    - (C,) for batch_norm, and for instance_norm with running statistics;
    - (N, H, W) for layer_norm2d.
    """

    output: Tensor
    mean: Tensor | None  # None for rms_norm, which subtracts no mean
    rstd: Tensor  # 1/sqrt(var + eps)


# (channel_dim, modulate, out, return_stats): the extras that are not arguments of a definition. `modulate` needs channel_dim.
# This is a plain tuple because a NamedTuple takes longer to make.
Extras = tuple[int, Modulation | None, Tensor | None, bool]


def normalize_with_extras(
    define: call.Define,
    args: tuple[Any, ...],
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    extras: Extras,
    optional: OptionalOperands = NO_OPTIONAL,
    running: RunningStatistics = (None, None),
    use_running: bool = False,
    track: bool = False,
    update: autograd.Update | None = None,
) -> Result:
    """Check the extras, normalize, and write to `out`.

    With `use_running`, the call normalizes by the `running` statistics. Without it, they are only compared with `out`.
    `track` and `update` are those of `call.normalize_with`.
    """
    channel_dim, modulate, out, stats = extras
    if modulate is not None:
        normalized = summed_like(input, optional.residual)
        try:
            scale, shift = as_scale_and_shift(normalized, modulate, channel_dim)
        except RuntimeError:
            define(normalized, weight, bias, *args)  # report other errors before modulation errors
            raise
        optional = optional._replace(scale=scale, shift=shift)
    if out is not None:
        check_out(out, input, weight, bias, *running, *optional)
    given = running if use_running else (None, None)
    result = call.normalize_with(define, args, input, weight, bias, *given, optional, track, stats, update)
    return result if out is None else result._replace(y=out.copy_(result.y))


def output_of(result: Result, return_stats: bool) -> Any:
    """The output, or `Stats` if the caller asked for them. The public functions declare a Tensor, the usual case."""
    return Stats(result.y, result.mean, result.rstd) if return_stats else result.y


def spec_fields(activation: str | None, save: str) -> dict[str, Any]:
    """The fields of a NormSpec that all norms with `activation` and `save` share."""
    return {"activation": as_activation(activation), "from_y": saves_output(save, activation)}
