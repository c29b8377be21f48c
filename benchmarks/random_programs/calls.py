"""The calls that programs make. A call takes the functional module of torch (F) or of onepass (O), and the tensors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from onepass import functional as O

GROUPS = 4
CHANNELS = (4, 12, 64, 200)


@dataclass
class Tensors:
    """The operands of one run of a program. Some need no gradient, and some are None."""

    x: Tensor
    weight: Tensor | None
    bias: Tensor | None
    residual: Tensor
    scale: Tensor
    running_mean: Tensor
    running_var: Tensor

    @property
    def leaves(self) -> list[Tensor]:
        return [t for t in (self.x, self.weight, self.bias) if isinstance(t, Tensor) and t.is_leaf and t.requires_grad]


def _rows(norm: str) -> Callable[[Any, Tensors], Any]:
    def call(m: Any, t: Tensors) -> Any:
        shape = t.x.shape[-1:]
        return m.rms_norm(t.x, shape, t.weight, 1e-5) if norm == "rms_norm" else m.layer_norm(t.x, shape, t.weight, t.bias)

    return call


def _added(m: Any, t: Tensors) -> Any:
    if m is O:
        return O.add_layer_norm(t.x, t.residual, t.x.shape[-1:], t.weight, t.bias)
    total = t.x + t.residual
    return F.layer_norm(total, t.x.shape[-1:], t.weight, t.bias), total


def _activated(m: Any, t: Tensors) -> Any:
    if m is O:
        return O.group_norm(t.x, GROUPS, t.weight, t.bias, activation="silu")
    return F.silu(F.group_norm(t.x, GROUPS, t.weight, t.bias))


def _modulated(m: Any, t: Tensors) -> Any:
    if m is O:
        return O.group_norm(t.x, GROUPS, t.weight, t.bias, modulate=(t.scale, None))
    return F.group_norm(t.x, GROUPS, t.weight, t.bias) * (1 + t.scale.reshape(*t.scale.shape, *[1] * (t.x.dim() - 2)))


OPS: dict[str, Callable[[Any, Tensors], Any]] = {
    "layer_norm": _rows("layer_norm"),
    "rms_norm": _rows("rms_norm"),
    "group_norm": lambda m, t: m.group_norm(t.x, GROUPS, t.weight, t.bias),
    "group_norm, silu": _activated,
    "group_norm, modulated": _modulated,
    "add_layer_norm": _added,
    "instance_norm": lambda m, t: m.instance_norm(t.x, None, None, t.weight, t.bias),
    "instance_norm, tracking": lambda m, t: m.instance_norm(t.x, t.running_mean, t.running_var, t.weight, t.bias),
    "batch_norm": lambda m, t: m.batch_norm(t.x, None, None, t.weight, t.bias, training=True),
    "batch_norm, tracking": lambda m, t: m.batch_norm(t.x, t.running_mean, t.running_var, t.weight, t.bias, training=True),
    "batch_norm, evaluation": lambda m, t: m.batch_norm(t.x, t.running_mean, t.running_var, t.weight, t.bias),
}

FUSED = ("group_norm, silu", "group_norm, modulated", "add_layer_norm")
LAST = ("layer_norm", "rms_norm", "add_layer_norm")  # in these norms, channels are the last dimension of x
