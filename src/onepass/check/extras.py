"""Check the arguments that torch's norms do not have: activation, save, weight_offset, channel_dim, modulate and residual."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from onepass.core.spec import ACTIVATIONS

from .arguments import as_int
from .tensors import FLOATS, require_floating, require_same_device, require_tensors


def as_activation(name: str | None) -> str:
    """Return the name that NormSpec uses for this activation, such as "silu" for "swish"; "" for None."""
    known = {"swish": "silu", **{name: name for name in ACTIVATIONS}}
    if name is None:
        return ""
    if not isinstance(name, str) or name not in known:
        raise ValueError(
            f"activation={name!r} is unknown; expected {', '.join(ACTIVATIONS)}, swish or None: apply other activations to the output"
        )
    return known[name]


def saves_output(save: str, activation: str | None) -> bool:
    """Return whether the forward saves its output y, instead of x, for the backward."""
    if not isinstance(save, str) or save not in ("x", "y"):
        raise ValueError(f'save={save!r} is unknown; expected "x", the input, or "y", the output: this tensor is saved for the backward')
    if save == "y" and activation is not None:
        raise ValueError(
            f'save="y" was given with activation={activation!r}, but an activation cannot be inverted; expected no activation: apply it '
            'to the output, or leave save at "x"'
        )
    return save == "y"


def check_weight_offset(weight: Tensor | None, offset: float) -> None:
    if isinstance(offset, (str, Tensor, list, tuple)) or offset is None:
        raise TypeError(f"argument 'weight_offset' must be float, not {type(offset).__name__}; got {offset!r}: pass 1.0 for 1 + weight")
    if offset and weight is None:
        raise ValueError(f"weight_offset={offset} was given without a weight to add it to; pass weight, or leave weight_offset at 0")


def as_channel_dim(x: Tensor, dim: int) -> int:
    """Return 1 if `dim` is dimension 1 of x, or -1 if it is the last dimension. Raise for other dimensions."""
    found = as_int("channel_dim", dim)
    found = found + x.dim() if found < 0 else found
    if found == 1 or x.dim() < 2:
        return 1
    if found != x.dim() - 1:
        move = f": move the channels with input.movedim({dim}, 1)" if 0 <= found < x.dim() else ""
        raise ValueError(f"channel_dim={dim} of input of shape {list(x.shape)} is neither 1, for (N, C, *), nor -1, for (N, *, C){move}")
    return -1


def check_module_channel_dim(channel_dim: int) -> None:
    """Raise unless the channel_dim of a module is 1 or -1. A module does not know the shape of its input yet."""
    if channel_dim not in (1, -1):
        raise ValueError(f"channel_dim={channel_dim} is neither 1, for (N, C, *), nor -1, for (N, *, C): move the channels of the input")


def require_constant_momentum(momentum: Any) -> None:
    if momentum is None:
        raise ValueError("momentum=None means a cumulative average, but SwitchableNorm does not count its batches: try 0.1")


def as_scale_and_shift(x: Tensor, modulate: Any, channel_dim: int) -> tuple[Tensor | None, Tensor | None]:
    """Return (scale, shift) from `modulate`, each of shape (N, C) or None. `channel_dim` is the channel dimension of x."""
    if not isinstance(modulate, (tuple, list)) or len(modulate) != 2:
        got = f"{len(modulate)} values" if isinstance(modulate, (tuple, list)) else type(modulate).__name__
        raise TypeError(f"modulate must be a pair (scale, shift), got {got}: pass modulate=(scale, shift); either can be None")
    scale, shift = modulate
    named = ("modulate's scale", scale), ("modulate's shift", shift)
    require_tensors(*named)
    require_same_device(x, *named)
    position = channel_dim + x.dim() if channel_dim < 0 else channel_dim
    if not 0 < position < x.dim():
        raise RuntimeError(
            f"modulate has a scale and shift per sample, but input of shape {list(x.shape)} has no sample dimension before its channels: "
            "add one with input.unsqueeze(0)"
        )
    expected = (x.shape[0], x.shape[position])
    for name, t in named:
        if t is None:
            continue
        if tuple(t.shape) != expected:
            raise RuntimeError(
                f"Expected {name} to have shape {list(expected)}, one per sample and channel of input of shape {list(x.shape)}, but got "
                f"{list(t.shape)}{_modulation_shape_fix(t, x, expected)}"
            )
        if t.dtype not in FLOATS or (t.dtype == torch.float64 and x.dtype != torch.float64):
            raise RuntimeError(f"{name} has dtype {t.dtype} and input {x.dtype}; convert it with .to({x.dtype})")
    return scale, shift


def check_residual(x: Tensor, residual: Any) -> None:
    if not isinstance(residual, Tensor):
        raise TypeError(f"argument 'residual' must be Tensor, not {type(residual).__name__}; convert it with torch.as_tensor")
    require_floating(x, "add_norm")
    require_floating(residual, "add_norm", "residual")
    require_same_device(x, ("residual", residual))
    if residual.shape != x.shape:
        raise RuntimeError(
            f"Expected residual to have the shape of input, {list(x.shape)}, but got {list(residual.shape)}; to repeat its values, pass "
            "residual.expand_as(input)"
        )


def _modulation_shape_fix(t: Tensor, x: Tensor, expected: tuple[int, int]) -> str:
    if list(t.shape) in ([expected[1]], [1, expected[1]]):
        return f"; repeat it with .expand{expected}"
    if t.numel() == expected[0] * expected[1]:
        return f"; reshape it with .reshape{expected}"
    if t.shape == x.shape:
        return "; one per position is not supported: apply it to the output, or flatten the positions of input into its samples"
    return ""
