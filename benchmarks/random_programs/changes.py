"""What users do to tensors: before a call, between forward and backward, and in hooks on saved tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .calls import Tensors

_zero: Any = torch._efficientzerotensor  # pyright: ignore[reportPrivateImportUsage]


def free(t: Tensor) -> Tensor:
    """Free the storage of a tensor, as FSDP (fully sharded data parallel) does, and return the tensor.

    torch's elementwise operations would crash on such a tensor, so only onepass runs a program that frees one.
    """
    t.untyped_storage().resize_(0)
    return t


def _negative(t: Tensor) -> Tensor:
    found = (-t.detach())._neg_view()
    return found.requires_grad_(t.requires_grad)


def _assign(name: str, change: Callable[[Tensor], Tensor]) -> Callable[[Tensors], None]:
    def do(t: Tensors) -> None:
        target = getattr(t, name)
        if target is not None:
            target.data = change(target.data)

    return do


def _replace(name: str, change: Callable[[Tensor], Any]) -> Callable[[Tensors], None]:
    def do(t: Tensors) -> None:
        if getattr(t, name) is not None:
            setattr(t, name, change(getattr(t, name)))

    return do


def _in_place(name: str) -> Callable[[Tensors], None]:
    def do(t: Tensors) -> None:
        if getattr(t, name) is not None:
            with torch.no_grad():
                getattr(t, name).add_(1)

    return do


def _strided(t: Tensor) -> Tensor:
    return torch.stack([t, t], -1)[..., 0]


CONVERSIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "half": lambda t: t.half(),
    "bfloat16": lambda t: t.bfloat16(),
    "double": lambda t: t.double(),
    "shorter": lambda t: t[: max(t.shape[0] // 2, 1)].clone(),
    "longer": lambda t: torch.cat([t, t]),
    "strided": _strided,
    "cloned": torch.clone,
    "other values": lambda t: t + 1,
    "free": free,
}

# By name: what happens to the operands before the call (BEFORE), and between forward and backward (BETWEEN).
BEFORE: dict[str, Callable[[Tensors], None]] = {
    **{f"{name} {how}": _replace(name, change) for name in ("x", "weight", "bias") for how, change in CONVERSIONS.items() if how != "free"},
    **{f"{name} freed": _replace(name, free) for name in ("x", "weight", "bias", "running_mean", "running_var")},
    **{f"{name} negative": _replace(name, _negative) for name in ("x", "weight", "bias", "running_mean")},
    **{f"{name} zero": _replace(name, lambda t: _zero(t.shape, dtype=t.dtype, device=t.device)) for name in ("weight", "bias")},
    **{f"{name} zeros": _replace(name, torch.zeros_like) for name in ("weight", "bias")},
    **{f"{name} meta": _replace(name, lambda t: t.to("meta")) for name in ("weight", "bias", "running_mean")},
    "weight a list": _replace("weight", lambda t: t.tolist()),
    "no running_var": _replace("running_var", lambda t: None),
    "no running_mean": _replace("running_mean", lambda t: None),
}

BETWEEN: dict[str, Callable[[Tensors], None]] = {
    **{f"{name}.data {how}": _assign(name, change) for name in ("x", "weight") for how, change in CONVERSIONS.items()},
    **{f"{name} in place": _in_place(name) for name in ("x", "weight", "bias", "running_mean", "running_var")},
    "running_mean.data half": _assign("running_mean", lambda t: t.half()),
}

HOOKS: dict[str, Callable[[Tensor], Any]] = {
    "same": lambda t: t,
    "clone": lambda t: t.clone(),
    "strided": _strided,
    "half": lambda t: t.half(),
    "double": lambda t: t.double(),
    "shorter": lambda t: t.flatten()[:1],
    "numpy": lambda t: torch.from_numpy(t.detach().double().numpy(force=True).copy()).to(t),
    "freed": lambda t: free(t.clone()),
}

CONVERTING = ("half", "bfloat16", "double", "shorter", "longer")
CONTEXTS = ("", "", "", "no_grad", "inference_mode", "checkpoint", "checkpoint, reentrant", "hooks", "hooks", "autocast", "default_device")

GRADIENTS: dict[str, Callable[[Tensor], Tensor]] = {
    "plain": lambda y: torch.linspace(-1, 1, y.numel(), device=y.device).view(y.shape).to(y.dtype),
    "strided": lambda y: _strided(GRADIENTS["plain"](y)),
    "expanded": lambda y: torch.full((), 0.5, dtype=y.dtype, device=y.device).expand(y.shape),
    "negative": lambda y: _negative(GRADIENTS["plain"](y)),
    "zero": lambda y: _zero(y.shape, dtype=y.dtype, device=y.device),
    "zeros": torch.zeros_like,
    "freed": lambda y: free(torch.zeros_like(y, requires_grad=False)),
    "short": lambda y: GRADIENTS["plain"](y)[:1],
    "double": lambda y: GRADIENTS["plain"](y).double(),
}

LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda t: t,
    "transposed": lambda t: t.transpose(0, 1).contiguous().transpose(0, 1),
    "last": lambda t: t.movedim(1, -1).contiguous().movedim(-1, 1),
    "offset": lambda t: torch.cat([t.flatten()[:1], t.flatten()])[1:].view(t.shape),
    "strided": _strided,
    "expanded": lambda t: t[:1].expand(t.shape),
}
