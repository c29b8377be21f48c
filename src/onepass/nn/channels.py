"""Modules for inputs (N, C, *) that normalize each sample by itself: GroupNorm and LayerNorm2d."""

from __future__ import annotations

from typing import Any, Optional, Tuple

import torch
from torch import Tensor, nn

from onepass import functional as F
from onepass.check.norms import check_num_channels
from onepass.functional.extras import Modulation

from . import scripted, traced
from .extras import ChannelExtrasMixin, ExtrasMixin


def _scripted_group_norm(self, input: Tensor, modulate: Optional[Tuple[Tensor, Tensor]] = None, activation: Optional[str] = None):
    x = scripted.channels_second(input, self.channel_dim)
    y = torch.nn.functional.group_norm(x, self.num_groups, self.weight, self.bias, self.eps)
    y = scripted.modulated_channels(y, modulate, self.activation if activation is None else activation)
    return scripted.channels_back(y, self.channel_dim)


def _scripted_layer_norm2d(self, input: Tensor, modulate: Optional[Tuple[Tensor, Tensor]] = None, activation: Optional[str] = None):
    y = scripted.layer_norm2d(input, self.normalized_shape, self.weight, self.bias, self.eps)
    return scripted.modulated_channels(y, modulate, self.activation if activation is None else activation)


class GroupNorm(ChannelExtrasMixin, nn.GroupNorm):
    """`torch.nn.GroupNorm`, computed by `onepass.functional.group_norm`: y = (x - mean)/sqrt(var + eps)·weight + bias.

    Mean and variance are taken over the channels of a group and all positions of a sample.

    Example: `GroupNorm(32, 320, activation="silu")(torch.randn(2, 320, 8, 8))`
    """

    def __init__(
        self,
        num_groups: int,
        num_channels: int,
        eps: float = 1e-5,
        affine: bool = True,
        device: Any = None,
        dtype: Any = None,
        *,
        activation: str | None = None,
        save: str = "x",
        channel_dim: int = 1,
        **newer: Any,  # arguments that later versions of torch may add
    ) -> None:
        super().__init__(num_groups, num_channels, eps, affine, device, dtype, **newer)
        self._set_extras(activation=activation, save=save, channel_dim=channel_dim)

    @scripted.scripted_by(_scripted_group_norm)
    def forward(self, input: Tensor, modulate: Modulation | None = None, activation: str | None = None) -> Tensor:
        if type(input) is not Tensor and traced.is_proxy(input):
            return traced.as_call_of_module(self, input, modulate, activation)
        keywords = self._call_keywords(modulate, activation)
        return F.group_norm(input, self.num_groups, self.weight, self.bias, self.eps, save=self.save, **keywords)


class LayerNorm2d(ExtrasMixin, nn.LayerNorm):
    """LayerNorm over the channels at each pixel of (N, C, H, W), computed by `onepass.functional.layer_norm2d`.

    y = (x - mean)/sqrt(var + eps)·weight + bias.

    Example: `LayerNorm2d(96)(torch.randn(2, 96, 56, 56))`
    """

    def __init__(
        self,
        num_channels: int,
        eps: float = 1e-6,
        elementwise_affine: bool = True,
        bias: bool = True,
        device: Any = None,
        dtype: Any = None,
        *,
        activation: str | None = None,
        save: str = "x",
    ) -> None:
        super().__init__(num_channels, eps, elementwise_affine, bias, device, dtype)
        self._set_extras(activation=activation, save=save)

    @scripted.scripted_by(_scripted_layer_norm2d)
    def forward(self, input: Tensor, modulate: Modulation | None = None, activation: str | None = None) -> Tensor:
        if type(input) is not Tensor and traced.is_proxy(input):
            return traced.as_call_of_module(self, input, modulate, activation)
        check_num_channels(input, self.normalized_shape[0])
        keywords: dict[str, Any] = {"activation": activation or self.activation, "modulate": modulate}
        return F.layer_norm2d(input, self.weight, self.bias, self.eps, save=self.save, **keywords)
