"""Check properties of tensors that several norms require: dtype, device and size."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

from onepass.core.memory import require_memory_if_shown

FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
HALVES = (torch.bfloat16, torch.float16)

# The names that torch's messages use for dtypes.
SCALAR = {
    torch.float64: "Double", torch.float32: "Float", torch.bfloat16: "BFloat16", torch.float16: "Half", torch.bool: "Bool",
    torch.uint8: "Byte", torch.int8: "Char", torch.int16: "Short", torch.int32: "Int", torch.int64: "Long",
    torch.complex64: "ComplexFloat", torch.complex128: "ComplexDouble",
}  # fmt: skip

NameAndTensor = tuple[str, Tensor | None]


def require_tensors(*params: NameAndTensor) -> None:
    for name, param in params:
        if param is not None and not isinstance(param, Tensor):
            raise TypeError(f"argument '{name}' must be Tensor, not {type(param).__name__}; convert it with torch.as_tensor")


def require_floating(x: Tensor, kernel: str, name: str = "input") -> None:
    """Raise unless x is dense and its dtype is one of FLOATS. `kernel` is the name that torch's message begins with."""
    if x.layout != torch.strided:
        raise NotImplementedError(
            f'"{kernel}" not implemented for layout {x.layout}; expected a dense, strided input: convert it with input.to_dense(). '
            "For a jagged tensor, normalize its values"
        )
    if x.dtype not in FLOATS:
        scalar = SCALAR.get(x.dtype, str(x.dtype).removeprefix("torch.").capitalize())
        raise NotImplementedError(
            f"\"{kernel}\" not implemented for '{scalar}'; {name} has dtype {x.dtype}, expected float64, float32, bfloat16 or float16: "
            f"convert it with {name}.float()"
        )


def require_same_device(x: Tensor, *params: NameAndTensor) -> None:
    for name, param in params:
        if param is not None and param.device != x.device:
            raise RuntimeError(
                f"Tensor on device {param.device} is not on the expected device {x.device}!; {name} is on {param.device} and input on "
                f"{x.device}: move it with {name}.to({str(x.device)!r})"
            )


def require_device_and_dtype(x: Tensor, *params: NameAndTensor) -> None:
    """Raise unless all parameters are on x's device and have one dtype: that of x, or float32 if x is float16 or bfloat16."""
    require_same_device(x, *params)
    named = [(name, param) for name, param in params if param is not None]
    if not named or all(param.dtype == x.dtype for _, param in named):
        return
    if x.dtype in HALVES and all(param.dtype == torch.float32 for _, param in named):
        return
    if named[0][1].dtype == x.dtype:
        wrong = next((n, p) for n, p in named if p.dtype != x.dtype)
        phrase = f"expected scalar type {SCALAR[x.dtype]} but found {SCALAR.get(wrong[1].dtype, wrong[1].dtype)}"
    elif any(param.dtype != torch.float32 for _, param in named):
        wrong = next((n, p) for n, p in named if p.dtype != torch.float32)
        phrase = "mixed dtype (CPU): expect parameter to have scalar type of Float"
    else:
        wrong = named[0]
        phrase = "mixed dtype (CPU): all inputs must share same datatype."
    expected = f"all {x.dtype} or all torch.float32" if x.dtype in HALVES else f"{x.dtype}"
    raise RuntimeError(
        f"{phrase}; {wrong[0]} has dtype {wrong[1].dtype} and input {x.dtype}, parameters must be {expected}: "
        f"convert with {wrong[0]}.to({x.dtype})"
    )


def require_at_least_2d(x: Tensor) -> None:
    if x.dim() < 2:
        raise IndexError(
            f"Dimension out of range (expected to be in range of [{-max(x.dim(), 1)}, {max(x.dim(), 1) - 1}], but got 1); expected input "
            f"of shape (N, C, *), got {list(x.shape)}: add a batch dimension with input.unsqueeze(0)"
        )


def check_channel_parameters(x: Tensor, channel_dim: int, *params: NameAndTensor) -> None:
    """Raise unless x is floating-point, and `params` have one value per channel and a dtype and device that fit x."""
    require_tensors(*params)
    for named in params:
        require_one_per_channel(x, named, 1, channel_dim)
    require_floating(x, "batch_norm")
    require_device_and_dtype(x, *params)


def require_one_per_channel(x: Tensor, named: NameAndTensor, copies: int, channel_dim: int) -> None:
    """Raise unless the tensor has one value per channel.

    `copies` only affects the message: torch's instance_norm repeats the values for each sample, and its message counts them all.
    """
    name, param = named
    channels = x.shape[channel_dim] if x.dim() > 1 else 0
    if param is not None and param.numel() != channels:
        raise RuntimeError(
            f"{name} should contain {channels * copies} elements not {param.numel() * copies}; {name} has shape {list(param.shape)}, "
            f"expected [{channels}], the channels of input of shape {list(x.shape)}{channel_dim_hint(x, param, channel_dim)}"
        )


def require_more_than_one_value(sizes: Sequence[int], hint: str) -> None:
    """Raise if each channel has only one value. `sizes` is the shape in the order (N, C, *), which torch's message prints."""
    if sizes[0] * prod(sizes[2:]) == 1:
        raise ValueError(f"Expected more than 1 value per channel when training, got input size {sizes}; {hint}")


def require_both_or_neither(*running: NameAndTensor) -> None:
    missing = [name for name, stat in running if stat is None]
    if len(missing) == 1:
        raise ValueError(
            f"running_mean and running_var must either both be None or neither be None; {missing[0]} is None: pass both or none"
        )


def require_updatable(x: Tensor, *running: NameAndTensor) -> None:
    """Raise unless a call can update these running statistics in place."""
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
            raise RuntimeError(f"{name} requires grad, but the call updates it in place; expected a buffer: pass {name}.detach()")
        if torch._C._are_functorch_transforms_active() and _is_batched(x) and not _is_batched(stat):
            raise RuntimeError(
                f"Batch norm got a batched tensor as input while the running_mean or running_var, which will be updated in place, were not "
                f"batched.; all samples of vmap share one {name}: pass running statistics with in_dims=0, or none"
            )


def position_sizes(x: Tensor, channel_dim: int) -> Sequence[int]:
    """Return the sizes of all dimensions of x except samples and channels."""
    return x.shape[2:] if channel_dim == 1 else x.shape[1:-1]


def channel_dim_hint(x: Tensor, param: Tensor | None, channel_dim: int | None = None) -> str:
    """Return a hint for a message if the channels of x seem to be last instead of in dimension 1, or the reverse; else "".

    The size of the parameter tells which dimension holds the channels. `channel_dim` is None for norms without that argument.
    """
    if not isinstance(param, Tensor):
        return ""
    if channel_dim == -1 and x.dim() > 2 and param.numel() == x.shape[1] != x.shape[-1]:
        return "; it has the size of dimension 1 of input: is input (N, C, ...)? Then leave channel_dim at 1"
    if channel_dim != -1 and x.dim() > 2 and param.numel() == x.shape[-1] != x.shape[1]:
        last = "" if channel_dim is None else ", or channel_dim=-1"
        return f"; it has the size of the last dimension of input: is input (N, ..., C)? Then pass input.movedim(-1, 1){last}"
    return ""


def _is_batched(t: Tensor) -> bool:
    return torch._C._functorch.is_batchedtensor(t)  # pyright: ignore[reportAttributeAccessIssue]
