"""torch.nn.functional's norms, with its signatures and semantics, and more: check, define, call. Only running statistics are computed here.

Two differences from torch, both deliberate: the output keeps the input's memory format, and double backward is right everywhere.

Every norm takes these beside torch's arguments:

- `activation`: "silu" (or "swish"), "relu", "gelu" or "gelu_tanh", applied last;
- `modulate=(scale, shift)`: y = affine(x_hat)·(1 + scale) + shift with a scale and shift per sample and channel, both (N, C), either None;
- `return_stats=True`: `Stats(output, mean, rstd)` instead of the output; the statistics are float32 (float64 for float64) constants;
- `out`: a tensor for the output, where no gradient is needed; it may be the input itself.

All but switchable_norm and the add_ functions also take

- `save`: "x", or "y" to keep the output instead of the input for the backward, where the output lives on anyway. Without activation; where
  weight or 1 + scale is zero, gradients that need the input are NaN; the backward cannot be differentiated again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

from . import check, check_extras, ops, spec
from .moments import Moments, together
from .problem import NONE, Extras, accumulator, summed_like
from .reference import Result, mix

__all__ = [
    "Stats", "add_group_norm", "add_layer_norm", "add_rms_norm", "batch_norm", "group_norm", "instance_norm", "layer_norm", "layer_norm2d",
    "layer_norm_out", "rms_norm", "switchable_norm",
]  # fmt: skip

Modulation = tuple[Tensor | None, Tensor | None]


class Stats(NamedTuple):
    """What `return_stats=True` returns. The statistics have the shape of the sets: the leading dimensions for layer_norm and rms_norm,
    (N, groups) for group_norm, (N, C) for instance_norm and switchable_norm, (C,) for batch_norm and by running statistics, (N, H, W) for
    layer_norm2d. No gradient flows through them."""

    output: Tensor
    mean: Tensor | None  # None where no mean is subtracted
    rstd: Tensor  # 1/sqrt(var + eps)


def layer_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    activation: str | None = None,
    modulate: Modulation | None = None,
    weight_offset: float = 0.0,
    granularity: str = "element",
    save: str = "x",
    return_stats: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """y = (x - mean)/sqrt(var + eps)·(weight + weight_offset) + bias over the last dimensions, `normalized_shape`.

    `granularity` says what weight and bias belong to: each "element" of normalized_shape, each "channel" (its first dimension, for an
    input (N, C, H, W) and normalized_shape (C, H, W)), or "global", one of each. `modulate` is per sample and channel.

    Example: `layer_norm(torch.randn(2, 16, 64), (64,))`
    """
    if type(input) is not Tensor and _overridden(input):
        return _defer(layer_norm, locals())
    shape = normalized_shape if _is_shape(normalized_shape) else check.shape_of("layer_norm", normalized_shape)
    if type(eps) is not float:
        eps = check.real("layer_norm", "eps", 5, eps)
    if input.is_cuda:
        input, weight, bias = _autocast(input, weight, bias)
    args = shape, eps, granularity, weight_offset, activation, modulate is not None, save
    if modulate is None and out is None and not return_stats:
        return ops.norm(_layer_norm, args, input, weight, bias)
    return _returned(_run(_layer_norm, args, input, weight, bias, modulate, -len(shape), out, stats=return_stats), return_stats)


def _layer_norm(
    x: Tensor, weight, bias, normalized_shape: tuple[int, ...], eps: float, granularity, weight_offset, activation, modulated, save="x"
):
    check.layer_norm(x, normalized_shape, weight, bias, granularity)
    check_extras.weight_offset(weight, weight_offset)
    clauses = {"weight_offset": weight_offset, **_clauses(activation, save)}
    return spec.layer_norm(len(normalized_shape), eps, granularity, modulated, **clauses)


def rms_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
    *,
    activation: str | None = None,
    modulate: Modulation | None = None,
    weight_offset: float = 0.0,
    save: str = "x",
    return_stats: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """y = x/sqrt(mean(x²) + eps)·(weight + weight_offset) over the last dimensions; eps defaults to the machine epsilon of the accumulator.

    Example: `rms_norm(torch.randn(2, 16, 64), (64,), eps=1e-6)`
    """
    if type(input) is not Tensor and _overridden(input):
        return _defer(rms_norm, locals())
    shape = normalized_shape if _is_shape(normalized_shape) else check.shape_of("rms_norm", normalized_shape)
    if type(eps) is not float and eps is not None:
        eps = check.real("rms_norm", "eps", 4, eps)
    args = shape, eps, weight_offset, activation, modulate is not None, save
    if modulate is None and out is None and not return_stats:
        return ops.norm(_rms_norm, args, input, weight)
    return _returned(_run(_rms_norm, args, input, weight, None, modulate, -len(shape), out, stats=return_stats), return_stats)


def _rms_norm(
    x: Tensor, weight, bias: None, normalized_shape: tuple[int, ...], eps: float | None, weight_offset, activation, modulated, save="x"
):
    check.rms_norm(x, normalized_shape, weight)
    check_extras.weight_offset(weight, weight_offset)
    if eps is None:
        eps = torch.finfo(torch.promote_types(x.dtype, torch.float32)).eps
    clauses = {"weight_offset": weight_offset, **_clauses(activation, save)}
    return spec.rms_norm(len(normalized_shape), eps, modulated, **clauses)


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
    if type(input) is not Tensor and _overridden(input):
        return _defer(group_norm, locals())
    if type(num_groups) is not int:
        num_groups = check.whole("num_groups", num_groups, "group_norm(): argument 'num_groups' (position 2)")
    if type(eps) is not float:
        eps = check.real("group_norm", "eps", 5, eps)
    if channel_dim != 1:
        channel_dim = check_extras.channel_dim(input, channel_dim)
    if input.is_cuda:
        input, weight, bias = _autocast(input, weight, bias)
    args = num_groups, eps, channel_dim, activation, modulate is not None, save
    if modulate is None and out is None and not return_stats:
        return ops.norm(_group_norm, args, input, weight, bias)
    return _returned(_run(_group_norm, args, input, weight, bias, modulate, channel_dim, out, stats=return_stats), return_stats)


def _group_norm(x: Tensor, weight, bias, num_groups: int, eps: float, channel_dim: int, activation, modulated, save="x"):
    check.group_norm(x, num_groups, weight, bias, channel_dim)
    return spec.group_norm(num_groups, eps, channel_dim, modulated, **_clauses(activation, save))


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
    if type(input) is not Tensor and _overridden(input):
        return _defer(layer_norm2d, locals())
    if type(eps) is not float:
        eps = check.real("layer_norm2d", "eps", 4, eps)
    if input.is_cuda:
        input, weight, bias = _autocast(input, weight, bias)
    args = eps, activation, modulate is not None, save
    if modulate is None and out is None and not return_stats:
        return ops.norm(_layer_norm2d, args, input, weight, bias)
    return _returned(_run(_layer_norm2d, args, input, weight, bias, modulate, 1, out, stats=return_stats), return_stats)


def _layer_norm2d(x: Tensor, weight, bias, eps: float, activation, modulated, save="x"):
    check.layer_norm2d(x, weight, bias)
    return spec.layer_norm2d(eps, modulated, **_clauses(activation, save))


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
    if type(input) is not Tensor and _overridden(input):
        return _defer(instance_norm, locals())
    if type(eps) is not float or type(momentum) is not float or type(use_input_stats) is not bool:
        check.flag("instance_norm", "use_input_stats", 6, use_input_stats)
        eps, momentum = check.real("instance_norm", "eps", 8, eps), check.momentum("instance_norm", 7, momentum)
    if channel_dim != 1:
        channel_dim = check_extras.channel_dim(input, channel_dim)
    check.instance_norm(input, weight, bias, running_mean, running_var, use_input_stats, channel_dim)
    args, running = (eps, channel_dim, activation, modulate is not None, save), (running_mean, running_var)
    if not use_input_stats:
        return _evaluate(args, input, running, weight, bias, modulate, channel_dim, return_stats, out)
    track = running_mean is not None
    if not (track or return_stats) and modulate is None and out is None:
        return ops.norm(_instance_norm, args, input, weight, bias)

    def update(result: Result) -> None:
        if input.numel():
            assert result.mean is not None
            _update(running_mean, running_var, result.mean.mean(0), _unbiased(result.var, input).mean(0), momentum)

    # torch updates these after its norm has saved its tensors, but before an activation or a modulation saves its own.
    early = update if track and (activation is not None or modulate is not None) else None
    extras: dict[str, Any] = {"track": track, "stats": return_stats, "update": early}
    result = _run(_instance_norm, args, input, weight, bias, modulate, channel_dim, out, running, **extras)
    if track and early is None:
        update(result)
    return _returned(result, return_stats)


def _instance_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, channel_dim: int, activation, modulated, save="x"):
    return spec.instance_norm(eps, channel_dim, modulated, **_clauses(activation, save))


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
    if type(input) is not Tensor and _overridden(input):
        return _defer(batch_norm, locals())
    if type(eps) is not float or type(momentum) is not float or type(training) is not bool:
        check.flag("batch_norm", "training", 6, training)
        eps, momentum = check.real("batch_norm", "eps", 8, eps), check.momentum("batch_norm", 7, momentum)
    if channel_dim != 1:
        channel_dim = check_extras.channel_dim(input, channel_dim)
    args, running = (eps, channel_dim, activation, modulate is not None, save), (running_mean, running_var)
    track, plain = training and running_mean is not None and running_var is not None, modulate is None and out is None and not return_stats
    operands = input, weight, bias, running_mean, running_var, momentum
    y = ops.tracked(_batch_norm, args, *operands) if plain and track else None  # pyright: ignore[reportArgumentType]
    if y is not None:
        return y

    def checked() -> None:
        check.batch_norm(input, weight, bias, running_mean, running_var, training, eps, channel_dim)

    if plain and input.dim() > 1 and (running_mean is None and running_var is None if training else running_var is not None):
        return ops.norm(_batch_norm, args, input, weight, bias, *((None, None) if training else running), check=checked)
    checked()
    if input.dim() < 2:  # only an empty one passes the checks, and torch hands it back
        return input * 1 if weight is None else input * weight
    if not training:
        return _evaluate(args, input, running, weight, bias, modulate, channel_dim, return_stats, out)
    if plain and track and ops.may_track(_batch_norm, args, *operands):
        y = ops.tracked(_batch_norm, args, *operands)  # pyright: ignore[reportArgumentType]
        if y is not None:
            return y

    def update(result: Result) -> None:
        _update(running_mean, running_var, result.mean, _unbiased(result.var, input), momentum)

    extras: dict[str, Any] = {"track": track, "stats": return_stats, "update": update if track and input.numel() else None}
    return _returned(_run(_batch_norm, args, input, weight, bias, modulate, channel_dim, out, running, **extras), return_stats)


def _batch_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, channel_dim: int, activation, modulated, save="x"):
    return spec.batch_norm(eps, channel_dim, modulated, **_clauses(activation, save))


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
    if type(input) is not Tensor and _overridden(input):
        return _defer(switchable_norm, locals())
    if type(eps) is not float or type(momentum) is not float or type(training) is not bool:
        check.flag("switchable_norm", "training", 8, training)
        eps, momentum = check.real("switchable_norm", "eps", 10, eps), check.momentum("switchable_norm", 9, momentum)
    if channel_dim != 1:
        channel_dim = check_extras.channel_dim(input, channel_dim)
    running = running_mean, running_var
    check.switchable_norm(input, mean_weight, var_weight, *running, weight, bias, training, eps, using_bn, channel_dim)
    args = input.dim() > 2, using_bn, eps, channel_dim, activation, modulate is not None
    definition = _switchable_norm(input, weight, bias, *args)
    norms, acc = len(definition.mix.split(",")), accumulator(input.dtype)
    mean_weight, var_weight = (torch.softmax(logits[-norms:].to(acc), 0) for logits in (mean_weight, var_weight))
    last = running if using_bn and not training else (None, None)
    extras = Extras(mean_weight=mean_weight, var_weight=var_weight, running_mean=last[0], running_var=last[1])

    def sets(result: Result) -> Moments:
        assert result.mean is not None and result.var is not None
        count = input.numel() // max(result.mean.numel(), 1)
        return Moments(count, result.mean, result.var * count)

    def update(result: Result) -> None:
        batch = together(sets(result), [0])
        _update(running_mean, running_var, batch.mean, _unbiased(batch.var, input), momentum)

    updates = training and using_bn and running_mean is not None and input.numel()
    also: dict[str, Any] = {"track": True, "extras": extras, "update": update if updates else None}
    result = _run(_switchable_norm, args, input, weight, bias, modulate, channel_dim, out, running, **also)
    if return_stats:
        result = result._replace(mean=mix(definition, input.shape, sets(result), extras).mean.detach().clone())
    return _returned(result, return_stats)


def _switchable_norm(x: Tensor, weight, bias, positions: bool, using_bn: bool, eps: float, channel_dim: int, activation, modulated):
    return spec.switchable_norm(positions, using_bn, eps, channel_dim, modulated, activation=check_extras.activation(activation))


def add_layer_norm(
    input: Tensor,
    residual: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    activation: str | None = None,
    modulate: Modulation | None = None,
    weight_offset: float = 0.0,
    granularity: str = "element",
) -> tuple[Tensor, Tensor]:
    """`sum = input + residual` and `layer_norm(sum, ...)`, returned as (y, sum). The sum is rounded to its dtype before it is normalized.

    Example: `y, x = add_layer_norm(branch, x, (64,))`
    """
    if type(input) is not Tensor and _overridden(input):
        return _defer(add_layer_norm, locals())
    if type(eps) is not float:
        eps = check.real("add_layer_norm", "eps", 6, eps)
    check_extras.residual(input, residual)
    if _autocasts(input):  # the sum keeps its dtype, the norm is taken in float32
        total = input + residual
        extras = {"activation": activation, "modulate": modulate, "weight_offset": weight_offset, "granularity": granularity}
        return layer_norm(total, normalized_shape, weight, bias, eps, **extras), total
    shape = check.shape_of("add_layer_norm", normalized_shape)
    args = shape, eps, granularity, weight_offset, activation, modulate is not None
    return _added(_run(_layer_norm, args, input, weight, bias, modulate, -len(shape), extras=Extras(residual)))


def add_rms_norm(
    input: Tensor,
    residual: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
    *,
    activation: str | None = None,
    modulate: Modulation | None = None,
    weight_offset: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """`sum = input + residual` and `rms_norm(sum, ...)`, returned as (y, sum). The sum is rounded to its dtype before it is normalized.

    Example: `y, x = add_rms_norm(branch, x, (64,), eps=1e-6)`
    """
    if type(input) is not Tensor and _overridden(input):
        return _defer(add_rms_norm, locals())
    if type(eps) is not float and eps is not None:
        eps = check.real("add_rms_norm", "eps", 5, eps)
    check_extras.residual(input, residual)
    shape = check.shape_of("add_rms_norm", normalized_shape)
    args = shape, eps, weight_offset, activation, modulate is not None
    return _added(_run(_rms_norm, args, input, weight, None, modulate, -len(shape), extras=Extras(residual)))


def add_group_norm(
    input: Tensor,
    residual: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    channel_dim: int = 1,
    activation: str | None = None,
    modulate: Modulation | None = None,
) -> tuple[Tensor, Tensor]:
    """`sum = input + residual` and `group_norm(sum, ...)`, returned as (y, sum). The sum is rounded to its dtype before it is normalized.

    Example: `y, x = add_group_norm(branch, x, 32, activation="silu")`
    """
    if type(input) is not Tensor and _overridden(input):
        return _defer(add_group_norm, locals())
    if type(eps) is not float:
        eps = check.real("add_group_norm", "eps", 6, eps)
    check_extras.residual(input, residual)
    if channel_dim != 1:
        channel_dim = check_extras.channel_dim(input, channel_dim)
    if _autocasts(input):  # the sum keeps its dtype, the norm is taken in float32
        total = input + residual
        extras = {"channel_dim": channel_dim, "activation": activation, "modulate": modulate}
        return group_norm(total, num_groups, weight, bias, eps, **extras), total
    args = check.whole("num_groups", num_groups), eps, channel_dim, activation, modulate is not None
    return _added(_run(_group_norm, args, input, weight, bias, modulate, channel_dim, extras=Extras(residual)))


def layer_norm_out(
    out: Tensor,
    input: Tensor,
    gamma: Tensor | None,
    beta: Tensor | None,
    num_tokens: int,
    hidden_size: int,
    epsilon: float = 1e-5,
) -> Tensor:
    """The plain operator: out = LayerNorm of each of `num_tokens` rows of `hidden_size` contiguous elements, without gradients.

    Any contiguous input of that many elements is seen as rows: (tokens, hidden), or (N, C, H, W) with N·C tokens of H·W. `out` may be
    `input`. Also `torch.ops.onepass.layer_norm_out`, which returns nothing.

    Example: `layer_norm_out(torch.empty(8, 64), torch.randn(8, 64), torch.ones(64), torch.zeros(64), 8, 64)`
    """
    operands = out, input, gamma, beta
    check_extras.no_gradient(*operands)
    run = torch.ops.onepass.layer_norm_out if ops.route(*operands) is not ops.DIRECT else _rows_into
    run(*operands, num_tokens, hidden_size, epsilon)
    return out


def _rows_into(
    out: Tensor, input: Tensor, gamma: Tensor | None, beta: Tensor | None, num_tokens: int, hidden_size: int, epsilon: float
) -> None:
    check_extras.rows(out, input, gamma, beta, num_tokens, hidden_size)
    gamma, beta = (None if param is None else param.reshape(hidden_size) for param in (gamma, beta))
    layer_norm(input.view(num_tokens, hidden_size), (hidden_size,), gamma, beta, epsilon, out=out.view(num_tokens, hidden_size))


_layer_norm_out_op = torch.library.custom_op("onepass::layer_norm_out", _rows_into, mutates_args={"out"})


@_layer_norm_out_op.register_fake
def _(out, input, gamma, beta, num_tokens, hidden_size, epsilon) -> None:
    check_extras.rows(out, input, gamma, beta, num_tokens, hidden_size)


def _is_shape(sizes: Any) -> bool:
    """Whether `sizes` is a tuple of ints. It becomes part of a key, and (8.0,) or (True,) would find what (8,) or (1,) left there."""
    if not isinstance(sizes, tuple):
        return False
    for n in sizes:  # noqa: SIM110, a generator costs more than the loop
        if type(n) is not int:
            return False
    return True


def _clauses(activation: str | None, save: str) -> dict[str, Any]:
    return {"activation": check_extras.activation(activation), "from_y": check_extras.from_y(save, activation)}


def _overridden(input: Any) -> bool:
    """Whether input is of a type that wants to see the call itself, as a proxy of torch.fx does."""
    if has_torch_function((input,)):
        return True
    check.tensor(input)
    return False


def _defer(function: Callable[..., Any], arguments: dict[str, Any]) -> Any:
    return handle_torch_function(function, (arguments["input"],), **arguments)


def _run(
    define: ops.Define,
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
    extras: Extras = NONE,
    stats: bool = False,
    update: ops.Update | None = None,
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
        check_extras.out(out, input, weight, bias, *running, *extras)
    result = ops.full(define, args, input, weight, bias, *(running if given else (None, None)), extras, track, stats, update)
    return result if out is None else result._replace(y=out.copy_(result.y))


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
        return ops.norm(_batch_norm, args, input, weight, bias, *running)
    result = _run(_batch_norm, args, input, weight, bias, modulate, channel_dim, out, running, given=True, stats=return_stats)
    if not return_stats:
        return result.y
    assert running[0] is not None
    mean = running[0].detach().to(result.rstd.dtype, copy=True).view_as(result.rstd)
    return _returned(result._replace(mean=mean), True)


def _added(result: Result) -> tuple[Tensor, Tensor]:
    assert result.sum is not None
    return result.y, result.sum


def _returned(result: Result, return_stats: bool) -> Any:
    """Stats, if they were asked for; functions are typed as what all other calls get, a Tensor."""
    return Stats(result.y, result.mean, result.rstd) if return_stats else result.y


def _unbiased(var: Tensor | None, input: Tensor) -> Tensor:
    """The variance with n/(n - 1), n the size of a set. (13)"""
    assert var is not None
    count = input.numel() // max(var.numel(), 1)
    return var * (count / max(count - 1, 1))


def _update(running_mean: Tensor | None, running_var: Tensor | None, mean: Tensor | None, var: Tensor, momentum: float) -> None:
    """running = (1 - momentum)·running + momentum·batch, in the accumulator's dtype. (12)"""
    for running, batch in ((running_mean, mean), (running_var, var)):
        assert running is not None and batch is not None
        batch = batch.reshape(running.shape)
        if running.dtype == batch.dtype and not isinstance(momentum, Tensor):
            running.lerp_(batch, momentum)
        else:
            running.copy_(running.to(batch.dtype) * (1 - momentum) + batch * momentum)


def _autocasts(x: Tensor) -> bool:
    """Whether torch would run layer_norm and group_norm in float32 now: under CUDA autocast. The others, and the CPU, it leaves alone."""
    return x.is_cuda and torch.is_autocast_enabled("cuda") and x.dtype != torch.float64


def _autocast(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> tuple[Tensor, Tensor | None, Tensor | None]:
    if not _autocasts(x):
        return x, weight, bias
    return x.float(), None if weight is None else weight.float(), None if bias is None else bias.float()
