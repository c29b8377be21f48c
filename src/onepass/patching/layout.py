"""Convolutions with channels-last weights: then their outputs are channels-last, whatever they are given, and norms keep that."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

_FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}


@dataclass(frozen=True)
class ChannelsLast:
    """The mark of a convolution that was converted; it computes what it did."""

    def bases(self) -> tuple[type, ...]:
        return ()

    def namespace(self, original: type[nn.Module]) -> dict[str, Any]:
        return {}


def convertible(module: nn.Module) -> bool:
    weight: Any = getattr(module, "weight", None)
    plain = isinstance(module, nn.modules.conv._ConvNd) and isinstance(weight, Tensor) and type(weight.data) is Tensor
    return plain and weight.dim() in _FORMATS and not weight.is_contiguous(memory_format=_FORMATS[weight.dim()])


def convert(module: nn.Module) -> None:
    """The same parameter, its memory laid out anew."""
    weight: Any = module.weight
    weight.data = weight.data.contiguous(memory_format=_FORMATS[weight.dim()])


def revert(module: nn.Module) -> None:
    weight: Any = module.weight
    weight.data = weight.data.contiguous()
