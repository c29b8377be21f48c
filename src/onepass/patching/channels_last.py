"""Give convolutions channels-last weights. Then their outputs are channels-last, too, and norms keep that layout."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

_FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}


@dataclass(frozen=True)
class ChannelsLastRecipe:
    """Marks a converted convolution, so that `unpatch` finds it. Its forward does not change."""

    def bases(self) -> tuple[type, ...]:
        return ()

    def namespace(self, original: type[nn.Module]) -> dict[str, Any]:
        return {}


def can_convert(module: nn.Module) -> bool:
    """Whether a module is a convolution with a contiguous weight that does not share its memory."""
    weight: Any = module._parameters.get("weight") if isinstance(module, nn.modules.conv._ConvNd) else None
    if weight is None or is_lazy(weight) or type(weight.data) is not Tensor or weight.dim() not in _FORMATS:
        return False
    owns_memory = weight.is_meta or weight.untyped_storage().nbytes() == weight.numel() * weight.element_size()
    return owns_memory and weight.is_contiguous() and not weight.is_contiguous(memory_format=_FORMATS[weight.dim()])


def to_channels_last(module: nn.Module) -> None:
    """Change the layout of the weight. The parameter stays the same object."""
    _set_layout(module, True)


def to_contiguous(module: nn.Module) -> None:
    """Undo `to_channels_last`."""
    _set_layout(module, False)


@torch.inference_mode(False)
def _set_layout(module: nn.Module, channels_last: bool) -> None:
    weight: Any = module.weight
    format = _FORMATS[weight.dim()] if channels_last else torch.contiguous_format
    weight.data = weight.data.contiguous(memory_format=format)
