"""Modules for inputs (N, C, *) that can keep running statistics: BatchNorm and InstanceNorm."""

from __future__ import annotations

import sys
from typing import Any, Optional, Tuple

import torch
from torch import Tensor, nn

from onepass import functional as F
from onepass.functional.extras import Modulation

from . import scripted, traced
from .extras import ChannelExtrasMixin


def _scripted_batch_norm(self, input: Tensor, modulate: Optional[Tuple[Tensor, Tensor]] = None, activation: Optional[str] = None):
    self._check_input_dim(input)
    momentum = 0.0 if self.momentum is None else self.momentum
    if self.training and self.track_running_stats and self.num_batches_tracked is not None:
        self.num_batches_tracked.add_(1)
        if self.momentum is None:
            momentum = 1.0 / float(self.num_batches_tracked)
    batch = self.training or (self.running_mean is None and self.running_var is None)
    keep = not self.training or self.track_running_stats
    mean, var = self.running_mean if keep else None, self.running_var if keep else None
    x = scripted.channels_second(input, self.channel_dim)
    y = torch.nn.functional.batch_norm(x, mean, var, self.weight, self.bias, batch, momentum, self.eps)
    y = scripted.modulated_channels(y, modulate, self.activation if activation is None else activation)
    return scripted.channels_back(y, self.channel_dim)


def _scripted_instance_norm(self, input: Tensor, modulate: Optional[Tuple[Tensor, Tensor]] = None, activation: Optional[str] = None):
    self._check_input_dim(input)
    alone = input.dim() == self._get_no_batch_dim()
    x = scripted.channels_second(input.unsqueeze(0) if alone else input, self.channel_dim)
    batch, momentum = self.training or not self.track_running_stats, 0.0 if self.momentum is None else self.momentum
    y = torch.nn.functional.instance_norm(x, self.running_mean, self.running_var, self.weight, self.bias, batch, momentum, self.eps)
    y = scripted.modulated_channels(y, modulate, self.activation if activation is None else activation)
    y = scripted.channels_back(y, self.channel_dim)
    return y.squeeze(0) if alone else y


def _scripted_apply(self, input: Tensor):
    """torch's forward calls it with a batch. Patched modules run torch's forward."""
    batch, momentum = self.training or not self.track_running_stats, 0.0 if self.momentum is None else self.momentum
    return torch.nn.functional.instance_norm(input, self.running_mean, self.running_var, self.weight, self.bias, batch, momentum, self.eps)


class _BatchNorm(ChannelExtrasMixin, nn.modules.batchnorm._BatchNorm):
    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        device: Any = None,
        dtype: Any = None,
        *,
        activation: str | None = None,
        save: str = "x",
        channel_dim: int = 1,
        **newer: Any,  # arguments that later versions of torch may add
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats, device, dtype, **newer)
        self._set_extras(activation=activation, save=save, channel_dim=channel_dim)

    def named_children(self) -> Any:
        """Raise if torch's convert_sync_batchnorm asks: its SyncBatchNorm has no activation, and expects channels in dimension 1.

        torch offers no better place: it asks every module for its children, right after the conversion.
        """
        if (self.activation or self.channel_dim != 1) and sys._getframe(1).f_code.co_name == "convert_sync_batchnorm":
            raise TypeError(
                f"cannot convert {self} to torch.nn.SyncBatchNorm, which has no activation and no channel_dim; expected a BatchNorm "
                "without these: create it without them, and apply the activation after it"
            )
        return super().named_children()

    @scripted.scripted_by(_scripted_batch_norm)
    def forward(self, input: Tensor, modulate: Modulation | None = None, activation: str | None = None) -> Tensor:
        if type(input) is not Tensor and traced.is_proxy(input):
            return traced.as_call_of_module(self, input, modulate, activation)
        self._check_input_dim(input)
        count = self.num_batches_tracked if self.training and self.track_running_stats else None
        momentum: Any = 0.0 if self.momentum is None else self.momentum
        if count is not None:
            # Count the batch before the norm, as torch does. Checkpointing may stop its recomputation inside the norm, and would
            # skip a count after the norm.
            count.add_(1)
        if self.momentum is None and count is not None:
            # momentum=None asks for a cumulative average. Compute 1/count on the device: reading the count on the host would
            # wait for the device, and break the graph of torch.compile.
            momentum = count.to(torch.float64).reciprocal()
        batch = self.training or (self.running_mean is None and self.running_var is None)
        keep = not self.training or self.track_running_stats
        mean, var = (self.running_mean, self.running_var) if keep else (None, None)
        keywords = {"save": self.save, **self._call_keywords(modulate, activation)}
        try:
            return F.batch_norm(input, mean, var, self.weight, self.bias, batch, momentum, self.eps, **keywords)
        except (RuntimeError, TypeError, ValueError):  # do not count a batch whose call raises
            if count is not None:
                count.sub_(1)
            raise


class BatchNorm1d(_BatchNorm, nn.BatchNorm1d):
    """`torch.nn.BatchNorm1d`, computed by `onepass.functional.batch_norm`: y = (x - mean)/sqrt(var + eps)·weight + bias.

    Mean and variance are taken over the batch and all positions of a channel. Outside training, they are the running statistics.

    Example: `BatchNorm1d(64)(torch.randn(8, 64))`
    """

    _twin_class = nn.BatchNorm1d


class BatchNorm2d(_BatchNorm, nn.BatchNorm2d):
    """`torch.nn.BatchNorm2d`, computed by `onepass.functional.batch_norm`: y = (x - mean)/sqrt(var + eps)·weight + bias.

    Mean and variance are taken over the batch and all positions of a channel. Outside training, they are the running statistics.

    Example: `BatchNorm2d(64, activation="relu")(torch.randn(8, 64, 32, 32))`
    """

    _twin_class = nn.BatchNorm2d


class BatchNorm3d(_BatchNorm, nn.BatchNorm3d):
    """`torch.nn.BatchNorm3d`, computed by `onepass.functional.batch_norm`: y = (x - mean)/sqrt(var + eps)·weight + bias.

    Mean and variance are taken over the batch and all positions of a channel. Outside training, they are the running statistics.

    Example: `BatchNorm3d(64)(torch.randn(8, 64, 4, 8, 8))`
    """

    _twin_class = nn.BatchNorm3d


class _InstanceNorm(ChannelExtrasMixin, nn.modules.instancenorm._InstanceNorm):
    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float = 0.1,
        affine: bool = False,
        track_running_stats: bool = False,
        device: Any = None,
        dtype: Any = None,
        *,
        activation: str | None = None,
        save: str = "x",
        channel_dim: int = 1,
        **newer: Any,  # arguments that later versions of torch may add
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats, device, dtype, **newer)
        self._set_extras(activation=activation, save=save, channel_dim=channel_dim)

    @scripted.scripted_by(_scripted_instance_norm)
    def forward(self, input: Tensor, modulate: Modulation | None = None, activation: str | None = None) -> Tensor:
        if type(input) is not Tensor and traced.is_proxy(input):
            return traced.as_call_of_module(self, input, modulate, activation)
        if self.channel_dim == 1 and modulate is None and activation is None:
            # torch's forward checks the input and calls `_apply_instance_norm` below.
            return nn.modules.instancenorm._InstanceNorm.forward(self, input)
        self._check_input_dim(input)
        if input.dim() == self._get_no_batch_dim():
            return self._apply_instance_norm(input.unsqueeze(0), modulate, activation).squeeze(0)
        return self._apply_instance_norm(input, modulate, activation)

    @scripted.scripted_by(_scripted_apply)
    def _apply_instance_norm(self, input: Tensor, modulate: Modulation | None = None, activation: str | None = None) -> Tensor:
        momentum = 0.0 if self.momentum is None else self.momentum
        batch = self.training or not self.track_running_stats
        running, keywords = (self.running_mean, self.running_var), {"save": self.save, **self._call_keywords(modulate, activation)}
        return F.instance_norm(input, *running, self.weight, self.bias, batch, momentum, self.eps, **keywords)


class InstanceNorm1d(_InstanceNorm, nn.InstanceNorm1d):
    """`torch.nn.InstanceNorm1d`, computed by `onepass.functional.instance_norm`: y = (x - mean)/sqrt(var + eps)·weight + bias.

    Mean and variance are taken over all positions of a channel of a sample.

    Example: `InstanceNorm1d(64)(torch.randn(8, 64, 32))`
    """


class InstanceNorm2d(_InstanceNorm, nn.InstanceNorm2d):
    """`torch.nn.InstanceNorm2d`, computed by `onepass.functional.instance_norm`: y = (x - mean)/sqrt(var + eps)·weight + bias.

    Mean and variance are taken over all positions of a channel of a sample.

    Example: `InstanceNorm2d(64)(torch.randn(8, 64, 32, 32))`
    """


class InstanceNorm3d(_InstanceNorm, nn.InstanceNorm3d):
    """`torch.nn.InstanceNorm3d`, computed by `onepass.functional.instance_norm`: y = (x - mean)/sqrt(var + eps)·weight + bias.

    Mean and variance are taken over all positions of a channel of a sample.

    Example: `InstanceNorm3d(64)(torch.randn(8, 64, 4, 8, 8))`
    """
