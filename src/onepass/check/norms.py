"""Check the tensors that are passed to each norm. extras.py checks the arguments that torch's norms do not have."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from torch import Tensor

from onepass.core.memory import require_memory_if_shown
from onepass.core.spec import GRANULARITIES

from .tensors import (
    FLOATS,
    NameAndTensor,
    channel_dim_hint,
    check_channel_parameters,
    position_sizes,
    require_at_least_2d,
    require_both_or_neither,
    require_device_and_dtype,
    require_floating,
    require_more_than_one_value,
    require_one_per_channel,
    require_same_device,
    require_tensors,
    require_updatable,
)


def check_layer_norm(
    x: Tensor, normalized_shape: Sequence[int], weight: Tensor | None, bias: Tensor | None, granularity: str = "element"
) -> None:
    require_floating(x, "LayerNormKernelImpl")
    _require_last_dimensions(x, normalized_shape, "*, ")
    params = ("weight", weight), ("bias", bias)
    require_tensors(*params)
    if granularity == "element":
        _require_normalized_shape(normalized_shape, *params)
    else:
        _require_parameter_shape(granularity, normalized_shape, *params)
    require_device_and_dtype(x, *params)


def check_rms_norm(x: Tensor, normalized_shape: Sequence[int], weight: Tensor | None) -> None:
    require_floating(x, "rms_norm")
    _require_last_dimensions(x, normalized_shape, "*")
    require_tensors(("weight", weight))
    _require_normalized_shape(normalized_shape, ("weight", weight))
    require_same_device(x, ("weight", weight))


def check_group_norm(x: Tensor, num_groups: int, weight: Tensor | None, bias: Tensor | None, channel_dim: int = 1) -> None:
    require_floating(x, "GroupNormKernelImpl")
    if x.dim() < 2:
        raise RuntimeError(
            f"Expected at least 2 dimensions for input tensor but received {x.dim()}; group_norm takes (N, C, *), "
            f"input has shape {list(x.shape)}: add a batch dimension with input.unsqueeze(0)"
        )
    channels = x.shape[channel_dim]
    if num_groups == 0:
        raise ZeroDivisionError(f"integer division or modulo by zero; num_groups=0, expected a divisor of the {channels} channels of input")
    if num_groups < 0:
        raise RuntimeError(
            f"Expected num groups to be greater than 0, got {num_groups}; expected a divisor of the {channels} channels of input"
        )
    if channels % num_groups:
        raise RuntimeError(
            f"Expected number of channels in input to be divisible by num_groups, but got input of shape {list(x.shape)} "
            f"and num_groups={num_groups}; {_nearest_divisors(channels, num_groups)}{channel_dim_hint(x, weight, channel_dim)}"
        )
    sizes = [x.shape[0] * channels // num_groups, num_groups, *position_sizes(x, channel_dim)]
    require_more_than_one_value(sizes, f"each of the {num_groups} groups holds one value: use fewer groups or larger input")
    params = ("weight", weight), ("bias", bias)
    require_tensors(*params)
    for name, param in params:
        if param is not None and tuple(param.shape) != (channels,):
            raise RuntimeError(
                f"Expected {name} to be a vector of size equal to the number of channels in input, but got {name} of shape "
                f"{list(param.shape)} and input of shape {list(x.shape)}; expected shape [{channels}]"
                f"{channel_dim_hint(x, param, channel_dim)}"
            )
    require_device_and_dtype(x, *params)


def check_layer_norm2d(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> None:
    require_floating(x, "LayerNormKernelImpl")
    if x.dim() != 4:
        raise RuntimeError(
            f"expected 4D input (got {x.dim()}D input); layer_norm2d takes (N, C, H, W), input has shape {list(x.shape)}: "
            "for (N, L, C) use layer_norm"
        )
    params = ("weight", weight), ("bias", bias)
    require_tensors(*params)
    for name, param in params:
        if param is not None and tuple(param.shape) != (x.shape[1],):
            raise RuntimeError(
                f"Expected {name} to be of same shape as normalized_shape, but got {name} of shape {list(param.shape)} and "
                f"normalized_shape = [{x.shape[1]}], the channels of input of shape {list(x.shape)}{channel_dim_hint(x, param)}"
            )
    require_device_and_dtype(x, *params)


def check_num_channels(x: Tensor, channels: int) -> None:
    """Raise if the input of a LayerNorm2d module does not have the number of channels that the module expects."""
    if x.dim() == 4 and x.shape[1] != channels:
        raise RuntimeError(
            f"Given normalized_shape=[{channels}], expected input with {channels} channels, but got input of size{list(x.shape)}; "
            "LayerNorm2d takes (N, C, H, W): for (N, H, W, C) use LayerNorm"
        )


def parameter_shape(granularity: str, normalized_shape: Sequence[int]) -> tuple[int, ...]:
    """Return the shape that weight and bias of layer_norm must have with this granularity."""
    if granularity not in GRANULARITIES:
        raise ValueError(f"granularity={granularity!r} is unknown; expected one of {', '.join(GRANULARITIES)}")
    return tuple(normalized_shape[: {"element": len(normalized_shape), "channel": 1, "global": 0}[granularity]])


def check_instance_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    use_input_stats: bool,
    channel_dim: int = 1,
) -> None:
    if use_input_stats and prod(position_sizes(x, channel_dim)) == 1:
        raise ValueError(
            f"Expected more than 1 spatial element when training, got input size {x.shape}; instance_norm takes (N, C, L, ...) and one "
            "element has no variance: pass use_input_stats=False with running statistics, or use group_norm or layer_norm"
        )
    require_at_least_2d(x)
    require_floating(x, "batch_norm")
    running = ("running_mean", running_mean), ("running_var", running_var)
    if not use_input_stats and (running_mean is None or running_var is None):
        raise RuntimeError(
            "Expected running_mean and running_var to be defined when use_input_stats is false; got "
            + " and ".join(f"{name}={'None' if stat is None else 'a tensor'}" for name, stat in running)
            + ": pass both, or use_input_stats=True"
        )
    require_both_or_neither(*running)
    if use_input_stats:
        require_updatable(x, *running)
    params = ("weight", weight), ("bias", bias)
    require_tensors(*params)
    for named in (*params, *running):
        require_one_per_channel(x, named, x.shape[0], channel_dim)
    require_device_and_dtype(x, *params)
    require_device_and_dtype(x, *running)


def check_batch_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    training: bool,
    eps: float,
    channel_dim: int = 1,
) -> None:
    running = ("running_mean", running_mean), ("running_var", running_var)
    if training:
        if x.numel():
            require_at_least_2d(x)
        hint = "one value has no variance: use a larger batch, or training=False with running statistics"
        require_more_than_one_value(x.shape if channel_dim == 1 else x.movedim(-1, 1).shape, hint)
        require_both_or_neither(*running)
        require_updatable(x, *running)
    if eps < 0 or (training and eps == 0):
        wanted = "positive during training" if training else "non-negative"
        raise ValueError(f"batch_norm eps must be {wanted}, but got {eps}; eps prevents a division by zero: try 1e-5")
    for name, stat in running:
        if stat is None and not training:
            raise RuntimeError(
                f"{name} must be defined in evaluation mode; got {name}=None: pass running statistics, or training=True to use the batch's"
            )
    check_channel_parameters(x, channel_dim, *running, ("weight", weight), ("bias", bias))


def check_switchable_norm(
    x: Tensor,
    mean_weight: Tensor,
    var_weight: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    training: bool,
    eps: float,
    using_bn: bool,
    channel_dim: int,
) -> None:
    require_at_least_2d(x)
    if not using_bn and (running_mean is not None or running_var is not None):
        raise ValueError("running_mean and running_var belong to BatchNorm, which using_bn=False leaves out: pass None, or using_bn=True")
    if using_bn:
        check_batch_norm(x, weight, bias, running_mean, running_var, training, eps, channel_dim)
    else:
        check_channel_parameters(x, channel_dim, ("weight", weight), ("bias", bias))
    logits = ("mean_weight", mean_weight), ("var_weight", var_weight)
    require_tensors(*logits)
    names = "mean_weight", "var_weight", "running_mean", "running_var"
    require_memory_if_shown(names, (mean_weight, var_weight, running_mean, running_var))
    require_same_device(x, *logits)
    for name, logit in logits:
        if logit is not None and logit.dtype not in FLOATS:
            raise RuntimeError(f"{name} has dtype {logit.dtype}, expected a floating-point dtype: convert it with {name}.float()")
    norms = ["InstanceNorm", "LayerNorm", "BatchNorm"][: 3 if using_bn else 2]
    for name, logit in logits:
        if logit is None or not (logit.shape == (len(norms),) or (x.dim() == 2 and logit.shape == (len(norms) - 1,))):
            raise RuntimeError(
                f"Expected {name} to have {len(norms)} elements, for {', '.join(norms)}, but got "
                f"{'None' if logit is None else list(logit.shape)}; using_bn={using_bn}: start from torch.ones({len(norms)})"
            )


def _require_last_dimensions(x: Tensor, normalized_shape: Sequence[int], star: str) -> None:
    """Raise unless the last dimensions of x are normalized_shape. `star` stands for the dimensions before them in the message."""
    shape = list(normalized_shape)
    if not shape:
        raise RuntimeError(
            "Expected normalized_shape to be at least 1-dimensional, i.e., containing at least one element, but got normalized_shape = []; "
            f"expected the last dimensions of input, for example {list(x.shape[-1:])}"
        )
    if x.dim() < len(shape) or list(x.shape[x.dim() - len(shape) :]) != shape:
        last = list(x.shape[max(x.dim() - len(shape), 0) :])
        raise RuntimeError(
            f"Given normalized_shape={shape}, expected input with shape [{star}{', '.join(map(str, shape))}], but got input of size"
            f"{list(x.shape)}; the last dimensions of input are {last}: pass normalized_shape={last}, or "
            "move the normalized dimensions to the end"
        )


def _require_normalized_shape(normalized_shape: Sequence[int], *params: NameAndTensor) -> None:
    """Raise unless all `params` that are not None have the shape normalized_shape."""
    for name, param in params:
        if param is not None and tuple(param.shape) != tuple(normalized_shape):
            raise RuntimeError(
                f"Expected {name} to be of same shape as normalized_shape, but got {name} of shape {list(param.shape)} and "
                f"normalized_shape = {list(normalized_shape)}; {_shape_fix(name, param, list(normalized_shape))}"
            )


def _require_parameter_shape(granularity: str, normalized_shape: Sequence[int], *params: NameAndTensor) -> None:
    """Raise unless weight and bias have the shape that the granularity, "channel" or "global", requires."""
    channel, expected = granularity == "channel", list(parameter_shape(granularity, normalized_shape))
    for name, param in params:
        if param is not None and not (list(param.shape) == expected or (not channel and list(param.shape) == [1])):
            wanted = f"{expected}, one per channel" if channel else "[] or [1], one for all elements"
            raise RuntimeError(
                f"Expected {name} to be of shape {wanted}, for normalized_shape = {list(normalized_shape)}, but got {name} of shape "
                f"{list(param.shape)}; granularity is {granularity!r}: choose one of {', '.join(GRANULARITIES)}"
            )


def _nearest_divisors(channels: int, num_groups: int) -> str:
    divisors = [d for d in range(1, channels + 1) if channels % d == 0]
    below, above = [d for d in divisors if d < num_groups][-1:], [d for d in divisors if d > num_groups][:1]
    return f"nearest divisors of {channels}: {', '.join(map(str, below + above))}"


def _shape_fix(name: str, param: Tensor, normalized_shape: list[int]) -> str:
    if param.numel() == prod(normalized_shape):
        return f"reshape it with {name}.reshape({normalized_shape})"
    per_channel = "; for one per channel pass granularity='channel'" if list(param.shape) == normalized_shape[:1] else ""
    return f"expected one {name} per normalized element{per_channel}"
