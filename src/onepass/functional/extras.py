"""Calls with extras: modulation, `out`, `return_stats`, a residual or running statistics.

Calls without extras do not use this file. They call `normalize` of dispatch/call.py directly.
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

    The shape of mean and rstd is

    - the shape of the input without `normalized_shape`, for layer_norm and rms_norm;
    - (N, groups) for group_norm;
    - (N, C) for instance_norm and switchable_norm;
    - (C,) for batch_norm, and for instance_norm with `use_input_stats=False`;
    - (N, H, W) for layer_norm2d.
    """

    output: Tensor
    mean: Tensor | None  # None for rms_norm, which subtracts no mean
    rstd: Tensor  # 1/sqrt(var + eps)


# (channel_dim, modulate, out, return_stats). channel_dim is the dimension of the channels that `modulate` scales and shifts.
# A plain tuple, because a NamedTuple takes longer to make.
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
    """Check the extras, normalize the input, and return the Result. If there is an `out`, write y to it.

    With `use_running`, normalize by the `running` statistics. Without it, `running` is only needed to check that `out`
    shares no memory with them. `track` and `update` are passed to `normalize_with` of dispatch/call.py.
    """
    channel_dim, modulate, out, stats = extras
    if modulate is not None:
        normalized = summed_like(input, optional.residual)
        try:
            scale, shift = as_scale_and_shift(normalized, modulate, channel_dim)
        except RuntimeError:
            define(normalized, weight, bias, *args)  # if another argument is wrong too, raise its error instead
            raise
        optional = optional._replace(scale=scale, shift=shift)
    if out is not None:
        check_out(out, input, weight, bias, *running, *optional)
    given = running if use_running else (None, None)
    result = call.normalize_with(define, args, input, weight, bias, *given, optional, track, stats, update)
    return result if out is None else result._replace(y=out.copy_(result.y))


def output_of(result: Result, return_stats: bool) -> Any:
    """Return y, or Stats(y, mean, rstd) with `return_stats`. The public functions declare both cases as overloads."""
    return Stats(result.y, result.mean, result.rstd) if return_stats else result.y


def spec_fields(activation: str | None, save: str) -> dict[str, Any]:
    """Return the fields of a NormSpec that follow from the arguments `activation` and `save`."""
    return {"activation": as_activation(activation), "from_y": saves_output(save, activation)}
