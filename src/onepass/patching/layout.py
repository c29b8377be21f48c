"""Convolutions with channels-last weights: then their outputs are channels-last, whatever they are given, and norms keep that."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

_FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}


@dataclass(frozen=True)
class ChannelsLast:
    """The mark of a convolution that was converted; it computes what it did."""

    def bases(self) -> tuple[type, ...]:
        return ()

    def namespace(self, original: type[nn.Module]) -> dict[str, Any]:
        return {}


def convertible(module: nn.Module) -> bool:
    """A convolution with a dense weight that is its own."""
    weight: Any = module._parameters.get("weight") if isinstance(module, nn.modules.conv._ConvNd) else None
    if weight is None or is_lazy(weight) or type(weight.data) is not Tensor or weight.dim() not in _FORMATS:
        return False
    whole = weight.is_meta or weight.untyped_storage().nbytes() == weight.numel() * weight.element_size()
    return whole and weight.is_contiguous() and not weight.is_contiguous(memory_format=_FORMATS[weight.dim()])


def convert(module: nn.Module) -> None:
    """The same parameter, its memory laid out anew."""
    _lay_out(module, True)


def revert(module: nn.Module) -> None:
    _lay_out(module, False)


@torch.inference_mode(False)
def _lay_out(module: nn.Module, channels_last: bool) -> None:
    weight: Any = module.weight
    format = _FORMATS[weight.dim()] if channels_last else torch.contiguous_format
    weight.data = weight.data.contiguous(memory_format=format)
