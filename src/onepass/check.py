"""Every validation of what users pass, and its message.

A message begins with torch's own phrase, under torch's own exception type, and goes on with what was found, what was expected and the
likely fix. Nothing is touched before its checks have passed.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
HALVES = (torch.bfloat16, torch.float16)
_SCALAR = {
    torch.float64: "Double", torch.float32: "Float", torch.bfloat16: "BFloat16", torch.float16: "Half", torch.bool: "Bool",
    torch.uint8: "Byte", torch.int8: "Char", torch.int16: "Short", torch.int32: "Int", torch.int64: "Long",
    torch.complex64: "ComplexFloat", torch.complex128: "ComplexDouble",
}  # fmt: skip

Named = tuple[str, Tensor | None]


def layer_norm(x: Tensor, normalized_shape: Sequence[int], weight: Tensor | None, bias: Tensor | None) -> None:
    _float(x, "LayerNormKernelImpl")
    _trailing(x, normalized_shape, "*, ")
    params = ("weight", weight), ("bias", bias)
    _are_tensors(*params)
    _shaped_like(normalized_shape, *params)
    _together(x, *params)


def rms_norm(x: Tensor, normalized_shape: Sequence[int], weight: Tensor | None) -> None:
    _float(x, "rms_norm")
    _trailing(x, normalized_shape, "*")
    _are_tensors(("weight", weight))
    _shaped_like(normalized_shape, ("weight", weight))
    _one_device(x, ("weight", weight))


def group_norm(x: Tensor, num_groups: int, weight: Tensor | None, bias: Tensor | None) -> None:
    _float(x, "GroupNormKernelImpl")
    if x.dim() < 2:
        raise RuntimeError(
            f"Expected at least 2 dimensions for input tensor but received {x.dim()}; group_norm takes (N, C, *), "
            f"input has shape {list(x.shape)}: add a batch dimension with input.unsqueeze(0)"
        )
    channels = x.shape[1]
    if num_groups == 0:
        raise ZeroDivisionError(f"integer division or modulo by zero; num_groups=0, expected a divisor of the {channels} channels of input")
    if num_groups < 0:
        raise RuntimeError(
            f"Expected num groups to be greater than 0, got {num_groups}; expected a divisor of the {channels} channels of input"
        )
    if channels % num_groups:
        raise RuntimeError(
            f"Expected number of channels in input to be divisible by num_groups, but got input of shape {list(x.shape)} "
            f"and num_groups={num_groups}; {_nearest(channels, num_groups)}"
        )
    sizes = [x.shape[0] * channels // num_groups, num_groups, *x.shape[2:]]
    _more_than_one(sizes, f"each of the {num_groups} groups holds one value: use fewer groups or larger input")
    params = ("weight", weight), ("bias", bias)
    _are_tensors(*params)
    for name, param in params:
        if param is not None and tuple(param.shape) != (channels,):
            raise RuntimeError(
                f"Expected {name} to be a vector of size equal to the number of channels in input, but got {name} of shape "
                f"{list(param.shape)} and input of shape {list(x.shape)}; expected shape [{channels}]{_channels_last(x, param)}"
            )
    _together(x, *params)


def layer_norm2d(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> None:
    _float(x, "LayerNormKernelImpl")
    if x.dim() != 4:
        raise RuntimeError(
            f"expected 4D input (got {x.dim()}D input); layer_norm2d takes (N, C, H, W), input has shape {list(x.shape)}: "
            "for (N, L, C) use layer_norm"
        )
    params = ("weight", weight), ("bias", bias)
    _are_tensors(*params)
    for name, param in params:
        if param is not None and tuple(param.shape) != (x.shape[1],):
            raise RuntimeError(
                f"Expected {name} to be of same shape as normalized_shape, but got {name} of shape {list(param.shape)} and "
                f"normalized_shape = [{x.shape[1]}], the channels of input of shape {list(x.shape)}{_channels_last(x, param)}"
            )
    _together(x, *params)


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
) -> None:
    if use_input_stats and prod(x.shape[2:]) == 1:
        raise ValueError(
            f"Expected more than 1 spatial element when training, got input size {x.shape}; instance_norm takes (N, C, L, ...) and one "
            "element has no variance: pass use_input_stats=False with running statistics, or use group_norm or layer_norm"
        )
    _at_least_2d(x)
    _float(x, "batch_norm")
    running = ("running_mean", running_mean), ("running_var", running_var)
    if not use_input_stats and (running_mean is None or running_var is None):
        raise RuntimeError(
            "Expected running_mean and running_var to be defined when use_input_stats is false; got "
            + " and ".join(f"{name}={'None' if stat is None else 'a tensor'}" for name, stat in running)
            + ": pass both, or use_input_stats=True"
        )
    _both_or_neither(*running)
    params = ("weight", weight), ("bias", bias)
    _are_tensors(*params)
    for named in (*params, *running):
        _per_channel(x, named, x.shape[0])
    _together(x, *params)
    _together(x, *running)


def batch_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
) -> None:
    running = ("running_mean", running_mean), ("running_var", running_var)
    if momentum is None:
        raise TypeError(
            "batch_norm(): argument 'momentum' (position 7) must be float, not NoneType; momentum=None, a cumulative average, "
            "belongs to the modules onepass.nn.BatchNorm1d, 2d and 3d, which count their batches"
        )
    if training:
        if x.numel():
            _at_least_2d(x)
        _more_than_one(x.shape, "one value has no variance: use a larger batch, or training=False with running statistics")
        _both_or_neither(*running)
    if eps < 0 or (training and eps == 0):
        wanted = "positive during training" if training else "non-negative"
        raise ValueError(f"batch_norm eps must be {wanted}, but got {eps}; it keeps a channel of equal values finite: try 1e-5")
    for name, stat in running:
        if stat is None and not training:
            raise RuntimeError(
                f"{name} must be defined in evaluation mode; got {name}=None: pass running statistics, or training=True to use the batch's"
            )
    params = ("weight", weight), ("bias", bias)
    _are_tensors(*params)
    for named in (*running, *params):
        _per_channel(x, named, 1)
    _float(x, "batch_norm")
    _together(x, *params, *running)


def tensor(x: Any) -> None:
    if not isinstance(x, Tensor):
        raise TypeError(f"input must be Tensor, not {type(x).__name__}; got {x!r}: convert it with torch.as_tensor")


def whole(function: str, name: str, value: Any) -> int:
    """A number of something, as an int."""
    try:
        return operator.index(value)
    except TypeError:
        raise TypeError(
            f"{function}(): argument '{name}' (position 2) must be int, not {type(value).__name__}; got {name}={value!r}"
        ) from None


def shape_of(function: str, normalized_shape: Any) -> tuple[int, ...]:
    """normalized_shape as a tuple."""
    try:
        return tuple(normalized_shape)
    except TypeError:
        raise TypeError(
            f"{function}(): argument 'normalized_shape' (position 2) must be tuple of ints, not "
            f"{type(normalized_shape).__name__}; got {normalized_shape!r}, did you mean ({normalized_shape!r},)?"
        ) from None


def _float(x: Tensor, kernel: str) -> None:
    if x.layout != torch.strided:
        raise NotImplementedError(
            f'"{kernel}" not implemented for layout {x.layout}; expected a dense, strided input: convert it with input.to_dense(), or '
            "normalize the values of a jagged one"
        )
    if x.dtype not in FLOATS:
        scalar = _SCALAR.get(x.dtype, str(x.dtype).removeprefix("torch.").capitalize())
        raise NotImplementedError(
            f"\"{kernel}\" not implemented for '{scalar}'; input has dtype {x.dtype}, expected float64, float32, bfloat16 or float16: "
            "convert it with input.float()"
        )


def _trailing(x: Tensor, normalized_shape: Sequence[int], star: str) -> None:
    shape = list(normalized_shape)
    if any(isinstance(n, float) for n in shape):
        raise TypeError(f"argument 'normalized_shape' (position 2) must be tuple of ints, not of floats; got {tuple(shape)}")
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
                )
            )


def _together(x: Tensor, *params: Named) -> None:
    """Parameters share x's device, and one dtype: x's, or float32 beside a half type."""
    _one_device(x, *params)
    named = [(name, param) for name, param in params if param is not None]
    if not named or all(param.dtype == x.dtype for _, param in named):
        return
    if x.dtype in HALVES and all(param.dtype == torch.float32 for _, param in named):
        return
    if named[0][1].dtype == x.dtype:
        odd = next((n, p) for n, p in named if p.dtype != x.dtype)
        phrase = f"expected scalar type {_SCALAR[x.dtype]} but found {_SCALAR.get(odd[1].dtype, odd[1].dtype)}"
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


def _are_tensors(*params: Named) -> None:
    for name, param in params:
        if param is not None and not isinstance(param, Tensor):
            raise TypeError(f"argument '{name}' must be Tensor, not {type(param).__name__}; convert it with torch.as_tensor")


def _one_device(x: Tensor, *params: Named) -> None:
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


def _per_channel(x: Tensor, named: Named, copies: int) -> None:
    name, param = named
    channels = x.shape[1] if x.dim() > 1 else 0
    if param is not None and param.numel() != channels:
        raise RuntimeError(
            f"{name} should contain {channels * copies} elements not {param.numel() * copies}; {name} has shape {list(param.shape)}, "
            f"expected [{channels}], the channels of input of shape {list(x.shape)}{_channels_last(x, param)}"
        )


def _more_than_one(sizes: Sequence[int], hint: str) -> None:
    if sizes[0] * prod(sizes[2:]) == 1:
        raise ValueError(f"Expected more than 1 value per channel when training, got input size {sizes}; {hint}")


def _channels_last(x: Tensor, param: Tensor) -> str:
    if x.dim() > 2 and param.numel() == x.shape[-1] != x.shape[1]:
        return "; its size is that of the last dimension of input: is input (N, ..., C)? Then pass input.movedim(-1, 1)"
    return ""


def _nearest(channels: int, num_groups: int) -> str:
    divisors = [d for d in range(1, channels + 1) if channels % d == 0]
    below, above = [d for d in divisors if d < num_groups][-1:], [d for d in divisors if d > num_groups][:1]
    return f"nearest divisors of {channels}: {', '.join(map(str, below + above))}"
