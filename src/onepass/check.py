"""Every validation of what users pass to a norm, and its message. (What the extras take is in `check_extras.py`.)

A message begins with torch's own phrase, under torch's own exception type, and goes on with what was found, what was expected and the
likely fix. Nothing is touched before its checks have passed.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from contextlib import suppress
from math import prod
from typing import Any

import torch
from torch import Tensor

from .memory import require_memory_if_shown
from .spec import GRANULARITIES

FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
HALVES = (torch.bfloat16, torch.float16)
SCALAR = {
    torch.float64: "Double", torch.float32: "Float", torch.bfloat16: "BFloat16", torch.float16: "Half", torch.bool: "Bool",
    torch.uint8: "Byte", torch.int8: "Char", torch.int16: "Short", torch.int32: "Int", torch.int64: "Long",
    torch.complex64: "ComplexFloat", torch.complex128: "ComplexDouble",
}  # fmt: skip

Named = tuple[str, Tensor | None]


def layer_norm(
    x: Tensor, normalized_shape: Sequence[int], weight: Tensor | None, bias: Tensor | None, granularity: str = "element"
) -> None:
    floating(x, "LayerNormKernelImpl")
    _trailing(x, normalized_shape, "*, ")
    params = ("weight", weight), ("bias", bias)
    are_tensors(*params)
    if granularity == "element":
        _shaped_like(normalized_shape, *params)
    else:
        _granular(granularity, normalized_shape, *params)
    alike(x, *params)


def rms_norm(x: Tensor, normalized_shape: Sequence[int], weight: Tensor | None) -> None:
    floating(x, "rms_norm")
    _trailing(x, normalized_shape, "*")
    are_tensors(("weight", weight))
    _shaped_like(normalized_shape, ("weight", weight))
    one_device(x, ("weight", weight))


def group_norm(x: Tensor, num_groups: int, weight: Tensor | None, bias: Tensor | None, channel_dim: int = 1) -> None:
    floating(x, "GroupNormKernelImpl")
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
            f"and num_groups={num_groups}; {_nearest(channels, num_groups)}{_moved(x, weight, channel_dim)}"
        )
    sizes = [x.shape[0] * channels // num_groups, num_groups, *_positions(x, channel_dim)]
    _more_than_one(sizes, f"each of the {num_groups} groups holds one value: use fewer groups or larger input")
    params = ("weight", weight), ("bias", bias)
    are_tensors(*params)
    for name, param in params:
        if param is not None and tuple(param.shape) != (channels,):
            raise RuntimeError(
                f"Expected {name} to be a vector of size equal to the number of channels in input, but got {name} of shape "
                f"{list(param.shape)} and input of shape {list(x.shape)}; expected shape [{channels}]{_moved(x, param, channel_dim)}"
            )
    alike(x, *params)


def layer_norm2d(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> None:
    floating(x, "LayerNormKernelImpl")
    if x.dim() != 4:
        raise RuntimeError(
            f"expected 4D input (got {x.dim()}D input); layer_norm2d takes (N, C, H, W), input has shape {list(x.shape)}: "
            "for (N, L, C) use layer_norm"
        )
    params = ("weight", weight), ("bias", bias)
    are_tensors(*params)
    for name, param in params:
        if param is not None and tuple(param.shape) != (x.shape[1],):
            raise RuntimeError(
                f"Expected {name} to be of same shape as normalized_shape, but got {name} of shape {list(param.shape)} and "
                f"normalized_shape = [{x.shape[1]}], the channels of input of shape {list(x.shape)}{_moved(x, param)}"
            )
    alike(x, *params)


def num_channels(x: Tensor, channels: int) -> None:
    if x.dim() == 4 and x.shape[1] != channels:
        raise RuntimeError(
            f"Given normalized_shape=[{channels}], expected input with {channels} channels, but got input of size{list(x.shape)}; "
            "LayerNorm2d takes (N, C, H, W): for (N, H, W, C) use LayerNorm"
        )


def instance_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    use_input_stats: bool,
    channel_dim: int = 1,
) -> None:
    if use_input_stats and prod(_positions(x, channel_dim)) == 1:
        raise ValueError(
            f"Expected more than 1 spatial element when training, got input size {x.shape}; instance_norm takes (N, C, L, ...) and one "
            "element has no variance: pass use_input_stats=False with running statistics, or use group_norm or layer_norm"
        )
    _at_least_2d(x)
    floating(x, "batch_norm")
    running = ("running_mean", running_mean), ("running_var", running_var)
    if not use_input_stats and (running_mean is None or running_var is None):
        raise RuntimeError(
            "Expected running_mean and running_var to be defined when use_input_stats is false; got "
            + " and ".join(f"{name}={'None' if stat is None else 'a tensor'}" for name, stat in running)
            + ": pass both, or use_input_stats=True"
        )
    _both_or_neither(*running)
    if use_input_stats:
        _updatable(x, *running)
    params = ("weight", weight), ("bias", bias)
    are_tensors(*params)
    for named in (*params, *running):
        _per_channel(x, named, x.shape[0], channel_dim)
    alike(x, *params)
    alike(x, *running)


def batch_norm(
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
            _at_least_2d(x)
        hint = "one value has no variance: use a larger batch, or training=False with running statistics"
        _more_than_one(x.shape if channel_dim == 1 else x.movedim(-1, 1).shape, hint)
        _both_or_neither(*running)
        _updatable(x, *running)
    if eps < 0 or (training and eps == 0):
        wanted = "positive during training" if training else "non-negative"
        raise ValueError(f"batch_norm eps must be {wanted}, but got {eps}; it keeps a channel of equal values finite: try 1e-5")
    for name, stat in running:
        if stat is None and not training:
            raise RuntimeError(
                f"{name} must be defined in evaluation mode; got {name}=None: pass running statistics, or training=True to use the batch's"
            )
    _channelwise(x, channel_dim, *running, ("weight", weight), ("bias", bias))


def switchable_norm(
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
    _at_least_2d(x)
    if not using_bn and (running_mean is not None or running_var is not None):
        raise ValueError("running_mean and running_var belong to BatchNorm, which using_bn=False leaves out: pass None, or using_bn=True")
    if using_bn:
        batch_norm(x, weight, bias, running_mean, running_var, training, eps, channel_dim)
    else:
        _channelwise(x, channel_dim, ("weight", weight), ("bias", bias))
    logits = ("mean_weight", mean_weight), ("var_weight", var_weight)
    are_tensors(*logits)
    names = "mean_weight", "var_weight", "running_mean", "running_var"
    require_memory_if_shown(names, (mean_weight, var_weight, running_mean, running_var))
    one_device(x, *logits)
    for name, logit in logits:
        if logit is not None and logit.dtype not in FLOATS:
            raise RuntimeError(f"{name} has dtype {logit.dtype}, expected a floating one: convert it with {name}.float()")
    norms = ["InstanceNorm", "LayerNorm", "BatchNorm"][: 3 if using_bn else 2]
    for name, logit in logits:
        if logit is None or not (logit.shape == (len(norms),) or (x.dim() == 2 and logit.shape == (len(norms) - 1,))):
            raise RuntimeError(
                f"Expected {name} to have {len(norms)} elements, for {', '.join(norms)}, but got "
                f"{'None' if logit is None else list(logit.shape)}; using_bn={using_bn}: start from torch.ones({len(norms)})"
            )


def tensor(x: Any) -> None:
    if not isinstance(x, Tensor):
        raise TypeError(f"input must be Tensor, not {type(x).__name__}; got {x!r}: convert it with torch.as_tensor")


def whole(name: str, value: Any, place: str = "") -> int:
    """A number of something, as an int. torch takes no bool for one."""
    try:
        if type(value) is not bool:
            return operator.index(value)
    except TypeError:
        pass
    raise TypeError(f"{place or f'argument {name!r}'} must be int, not {type(value).__name__}; got {name}={value!r}")


def real(function: str, name: str, position: int, value: Any) -> float:
    """A number as a float. torch takes no Fraction for one."""
    if isinstance(value, (float, int, torch.SymFloat)):
        return value  # pyright: ignore[reportReturnType], a symbol stays one
    scalar = isinstance(value, Tensor) and value.numel() == 1 and not value.is_complex()
    if scalar or type(value).__module__ == "numpy":
        with suppress(TypeError, ValueError):
            return float(value)
    raise TypeError(
        f"{function}(): argument '{name}' (position {position}) must be float, not {type(value).__name__}; got {name}={value!r}"
    )


def momentum(function: str, position: int, value: Any) -> Any:
    """A number, or a tensor of one, as modules that count their batches have."""
    if value is None:
        raise TypeError(
            f"{function}(): argument 'momentum' (position {position}) must be float, not NoneType; momentum=None, a cumulative average, "
            "belongs to the modules onepass.nn.BatchNorm1d, 2d and 3d, which count their batches"
        )
    return value if isinstance(value, Tensor) and value.numel() == 1 else real(function, "momentum", position, value)


def flag(function: str, name: str, position: int, value: Any) -> None:
    if not isinstance(value, (bool, torch.SymBool)):
        raise TypeError(
            f"{function}(): argument '{name}' (position {position}) must be bool, not {type(value).__name__}; got {name}={value!r}"
        )


def shape_of(function: str, normalized_shape: Any) -> tuple[int, ...]:
    """normalized_shape as a tuple of ints."""
    place = f"{function}(): argument 'normalized_shape' (position 2)"
    if isinstance(normalized_shape, (str, Tensor)):
        raise TypeError(f"{place} must be tuple of ints, not {type(normalized_shape).__name__}; got {normalized_shape!r}")
    try:
        sizes = tuple(normalized_shape)
    except TypeError:
        raise TypeError(
            f"{place} must be tuple of ints, not {type(normalized_shape).__name__}; got {normalized_shape!r}, did you mean "
            f"({normalized_shape!r},)?"
        ) from None
    for i, n in enumerate(sizes):
        if isinstance(n, bool) or not (hasattr(n, "__index__") or isinstance(n, torch.SymInt)):
            raise TypeError(f"{place} must be tuple of ints, but found element of type {type(n).__name__} at pos {i}; got {sizes}")
    return tuple([n if isinstance(n, torch.SymInt) else operator.index(n) for n in sizes])  # pyright: ignore[reportReturnType]


def floating(x: Tensor, kernel: str, name: str = "input") -> None:
    if x.layout != torch.strided:
        raise NotImplementedError(
            f'"{kernel}" not implemented for layout {x.layout}; expected a dense, strided input: convert it with input.to_dense(), or '
            "normalize the values of a jagged one"
        )
    if x.dtype not in FLOATS:
        scalar = SCALAR.get(x.dtype, str(x.dtype).removeprefix("torch.").capitalize())
        raise NotImplementedError(
            f"\"{kernel}\" not implemented for '{scalar}'; {name} has dtype {x.dtype}, expected float64, float32, bfloat16 or float16: "
            f"convert it with {name}.float()"
        )


def _trailing(x: Tensor, normalized_shape: Sequence[int], star: str) -> None:
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
            f"{list(x.shape)}; the last dimensions of input are {last}: pass normalized_shape={last}, or move the axis to the end"
        )


def _shaped_like(normalized_shape: Sequence[int], *params: Named) -> None:
    for name, param in params:
        if param is not None and tuple(param.shape) != tuple(normalized_shape):
            raise RuntimeError(
                f"Expected {name} to be of same shape as normalized_shape, but got {name} of shape {list(param.shape)} and "
                f"normalized_shape = {list(normalized_shape)}; "
                + (
                    f"reshape it with {name}.reshape({list(normalized_shape)})"
                    if param.numel() == prod(normalized_shape)
                    else f"expected one {name} per normalized element"
                    + (", for one per channel pass granularity='channel'" if list(param.shape) == list(normalized_shape[:1]) else "")
                )
            )


def granular_shape(granularity: str, normalized_shape: Sequence[int]) -> tuple[int, ...]:
    """The shape of weight and bias."""
    if granularity not in GRANULARITIES:
        raise ValueError(f"granularity={granularity!r} is unknown; expected one of {', '.join(GRANULARITIES)}")
    return tuple(normalized_shape[: {"element": len(normalized_shape), "channel": 1, "global": 0}[granularity]])


def _granular(granularity: str, normalized_shape: Sequence[int], *params: Named) -> None:
    channel, expected = granularity == "channel", list(granular_shape(granularity, normalized_shape))
    for name, param in params:
        if param is not None and not (list(param.shape) == expected or (not channel and list(param.shape) == [1])):
            wanted = f"{expected}, one per channel, the first of" if channel else "[] or [1], one for all of"
            raise RuntimeError(
                f"Expected {name} to be of shape {wanted} normalized_shape = {list(normalized_shape)}, but got {name} of shape "
                f"{list(param.shape)}; granularity={granularity!r}: choose among {', '.join(GRANULARITIES)}"
            )


def _channelwise(x: Tensor, channel_dim: int, *params: Named) -> None:
    """Parameters with a value per channel."""
    are_tensors(*params)
    for named in params:
        _per_channel(x, named, 1, channel_dim)
    floating(x, "batch_norm")
    alike(x, *params)


def _positions(x: Tensor, channel_dim: int) -> Sequence[int]:
    """The sizes beside samples and channels."""
    return x.shape[2:] if channel_dim == 1 else x.shape[1:-1]


def alike(x: Tensor, *params: Named) -> None:
    """Parameters share x's device, and one dtype: x's, or float32 beside a half type."""
    one_device(x, *params)
    named = [(name, param) for name, param in params if param is not None]
    if not named or all(param.dtype == x.dtype for _, param in named):
        return
    if x.dtype in HALVES and all(param.dtype == torch.float32 for _, param in named):
        return
    if named[0][1].dtype == x.dtype:
        odd = next((n, p) for n, p in named if p.dtype != x.dtype)
        phrase = f"expected scalar type {SCALAR[x.dtype]} but found {SCALAR.get(odd[1].dtype, odd[1].dtype)}"
    elif any(param.dtype != torch.float32 for _, param in named):
        odd = next((n, p) for n, p in named if p.dtype != torch.float32)
        phrase = "mixed dtype (CPU): expect parameter to have scalar type of Float"
    else:
        odd = named[0]
        phrase = "mixed dtype (CPU): all inputs must share same datatype."
    expected = f"{x.dtype} or torch.float32, all of them alike" if x.dtype in HALVES else f"{x.dtype}"
    raise RuntimeError(
        f"{phrase}; {odd[0]} has dtype {odd[1].dtype} and input {x.dtype}, parameters must be {expected}: "
        f"convert with {odd[0]}.to({x.dtype})"
    )


def are_tensors(*params: Named) -> None:
    for name, param in params:
        if param is not None and not isinstance(param, Tensor):
            raise TypeError(f"argument '{name}' must be Tensor, not {type(param).__name__}; convert it with torch.as_tensor")


def one_device(x: Tensor, *params: Named) -> None:
    for name, param in params:
        if param is not None and param.device != x.device:
            raise RuntimeError(
                f"Tensor on device {param.device} is not on the expected device {x.device}!; {name} is on {param.device} and input on "
                f"{x.device}: move it with {name}.to({str(x.device)!r})"
            )


def _at_least_2d(x: Tensor) -> None:
    if x.dim() < 2:
        raise IndexError(
            f"Dimension out of range (expected to be in range of [{-max(x.dim(), 1)}, {max(x.dim(), 1) - 1}], but got 1); expected input "
            f"of shape (N, C, *), got {list(x.shape)}: add a batch dimension with input.unsqueeze(0)"
        )


def _both_or_neither(*running: Named) -> None:
    missing = [name for name, stat in running if stat is None]
    if len(missing) == 1:
        raise ValueError(
            f"running_mean and running_var must either both be None or neither be None; {missing[0]} is None: pass both or none"
        )


def _updatable(x: Tensor, *running: Named) -> None:
    """Running statistics that a batch is to be mixed into."""
    require_memory_if_shown(*zip(*running))
    for name, stat in running:
        if stat is None:
            continue
        if any(n > 1 and stride == 0 for n, stride in zip(stat.shape, stat.stride())):
            raise RuntimeError(
                f"unsupported operation: more than one element of the written-to tensor refers to a single memory location; {name} has "
                f"strides {stat.stride()} for shape {list(stat.shape)}: pass {name}.clone()"
            )
        if stat.requires_grad and torch.is_grad_enabled():
            raise RuntimeError(f"{name} requires grad, and is updated in place; expected a buffer: pass {name}.detach()")
        if torch._C._are_functorch_transforms_active() and _batched(x) and not _batched(stat):
            raise RuntimeError(
                f"Batch norm got a batched tensor as input while the running_mean or running_var, which will be updated in place, were not "
                f"batched.; {name} is one tensor for all of vmap: pass running statistics with in_dims=0, or none"
            )


def _batched(t: Tensor) -> bool:
    return torch._C._functorch.is_batchedtensor(t)  # pyright: ignore[reportAttributeAccessIssue]


def _per_channel(x: Tensor, named: Named, copies: int, channel_dim: int) -> None:
    name, param = named
    channels = x.shape[channel_dim] if x.dim() > 1 else 0
    if param is not None and param.numel() != channels:
        raise RuntimeError(
            f"{name} should contain {channels * copies} elements not {param.numel() * copies}; {name} has shape {list(param.shape)}, "
            f"expected [{channels}], the channels of input of shape {list(x.shape)}{_moved(x, param, channel_dim)}"
        )


def _more_than_one(sizes: Sequence[int], hint: str) -> None:
    if sizes[0] * prod(sizes[2:]) == 1:
        raise ValueError(f"Expected more than 1 value per channel when training, got input size {sizes}; {hint}")


def _moved(x: Tensor, param: Tensor | None, channel_dim: int | None = None) -> str:
    """A hint where the parameter fits the other place of the channels."""
    if not isinstance(param, Tensor):
        return ""
    if channel_dim == -1 and x.dim() > 2 and param.numel() == x.shape[1] != x.shape[-1]:
        return "; its size is that of dimension 1 of input: is input (N, C, ...)? Then leave channel_dim at 1"
    if channel_dim != -1 and x.dim() > 2 and param.numel() == x.shape[-1] != x.shape[1]:
        last = "" if channel_dim is None else ", or channel_dim=-1"
        return f"; its size is that of the last dimension of input: is input (N, ..., C)? Then pass input.movedim(-1, 1){last}"
    return ""


def _nearest(channels: int, num_groups: int) -> str:
    divisors = [d for d in range(1, channels + 1) if channels % d == 0]
    below, above = [d for d in divisors if d < num_groups][-1:], [d for d in divisors if d > num_groups][:1]
    return f"nearest divisors of {channels}: {', '.join(map(str, below + above))}"
