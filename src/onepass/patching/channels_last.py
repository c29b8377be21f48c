"""Make the weights of convolutions channels-last. Then convolutions return channels-last tensors, and norms keep that layout."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

_FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}


@dataclass(frozen=True)
class ChannelsLastRecipe:
    """The recipe of a convolution whose weight `patch` made channels-last. It changes no method: it is a mark for `unpatch`."""

    def bases(self) -> tuple[type, ...]:
        return ()

    def namespace(self, original: type[nn.Module]) -> dict[str, Any]:
        return {}


def can_convert(module: nn.Module) -> bool:
    """Return whether `to_channels_last` can convert a module.

    The module must be a 2-D or 3-D convolution. Its weight must be contiguous, must not be channels-last at the same
    time (as 1×1 kernels are), and must not share its memory with other tensors.
    """
    weight: Any = module._parameters.get("weight") if isinstance(module, nn.modules.conv._ConvNd) else None
    if weight is None or is_lazy(weight) or type(weight.data) is not Tensor or weight.dim() not in _FORMATS:
        return False
    owns_memory = weight.is_meta or weight.untyped_storage().nbytes() == weight.numel() * weight.element_size()
    return owns_memory and weight.is_contiguous() and not weight.is_contiguous(memory_format=_FORMATS[weight.dim()])


def to_channels_last(module: nn.Module) -> None:
    """Make the weight of a convolution channels-last. The parameter stays the same object."""
    _set_layout(module, True)


def to_contiguous(module: nn.Module) -> None:
    """Undo `to_channels_last`: make the weight contiguous again."""
    _set_layout(module, False)


@torch.inference_mode(False)
def _set_layout(module: nn.Module, channels_last: bool) -> None:
    weight: Any = module.weight
    format = _FORMATS[weight.dim()] if channels_last else torch.contiguous_format
    weight.data = weight.data.contiguous(memory_format=format)
