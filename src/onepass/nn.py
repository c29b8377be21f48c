"""torch.nn's norms as subclasses: the same constructors, parameters, state_dicts and reprs, with onepass's forward. No maths here."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from . import check
from . import functional as F

__all__ = [
    "BatchNorm1d", "BatchNorm2d", "BatchNorm3d", "GroupNorm", "InstanceNorm1d", "InstanceNorm2d", "InstanceNorm3d", "LayerNorm",
    "LayerNorm2d", "RMSNorm",
]  # fmt: skip


class LayerNorm(nn.LayerNorm):
    """`torch.nn.LayerNorm`, computed by `onepass.functional.layer_norm`.

    Example: `LayerNorm(64)(torch.randn(2, 16, 64))`
    """

    def forward(self, input: Tensor) -> Tensor:
        return F.layer_norm(input, self.normalized_shape, self.weight, self.bias, self.eps)


class RMSNorm(nn.RMSNorm):
    """`torch.nn.RMSNorm`, computed by `onepass.functional.rms_norm`.

    Example: `RMSNorm(64)(torch.randn(2, 16, 64))`
    """

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.normalized_shape, self.weight, self.eps)


class GroupNorm(nn.GroupNorm):
    """`torch.nn.GroupNorm`, computed by `onepass.functional.group_norm`.

    Example: `GroupNorm(32, 320)(torch.randn(2, 320, 8, 8))`
    """

    def forward(self, input: Tensor) -> Tensor:
        return F.group_norm(input, self.num_groups, self.weight, self.bias, self.eps)


class LayerNorm2d(nn.LayerNorm):
    """LayerNorm over the channels at each pixel of (N, C, H, W), computed by `onepass.functional.layer_norm2d`.

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
    ) -> None:
        super().__init__(num_channels, eps, elementwise_affine, bias, device, dtype)

    def forward(self, input: Tensor) -> Tensor:
        check.num_channels(input, self.normalized_shape[0])
        return F.layer_norm2d(input, self.weight, self.bias, self.eps)


class _BatchNorm(nn.modules.batchnorm._BatchNorm):
    def forward(self, input: Tensor) -> Tensor:
        self._check_input_dim(input)
        momentum: Any = 0.0 if self.momentum is None else self.momentum
        if self.training and self.track_running_stats and self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            if self.momentum is None:  # a cumulative average; left on the device, where it stalls nothing and compiles whole
                momentum = self.num_batches_tracked.to(torch.float64).reciprocal()
        batch = self.training or (self.running_mean is None and self.running_var is None)
        keep = not self.training or self.track_running_stats
        mean, var = (self.running_mean, self.running_var) if keep else (None, None)
        return F.batch_norm(input, mean, var, self.weight, self.bias, batch, momentum, self.eps)


class BatchNorm1d(_BatchNorm, nn.BatchNorm1d):
    """`torch.nn.BatchNorm1d`, computed by `onepass.functional.batch_norm`.

    Example: `BatchNorm1d(64)(torch.randn(8, 64))`
    """


class BatchNorm2d(_BatchNorm, nn.BatchNorm2d):
    """`torch.nn.BatchNorm2d`, computed by `onepass.functional.batch_norm`.

    Example: `BatchNorm2d(64)(torch.randn(8, 64, 32, 32))`
    """


class BatchNorm3d(_BatchNorm, nn.BatchNorm3d):
    """`torch.nn.BatchNorm3d`, computed by `onepass.functional.batch_norm`.

    Example: `BatchNorm3d(64)(torch.randn(8, 64, 4, 8, 8))`
    """


class _InstanceNorm(nn.modules.instancenorm._InstanceNorm):
    def _apply_instance_norm(self, input: Tensor) -> Tensor:
        momentum = 0.0 if self.momentum is None else self.momentum
        batch = self.training or not self.track_running_stats
        return F.instance_norm(input, self.running_mean, self.running_var, self.weight, self.bias, batch, momentum, self.eps)


class InstanceNorm1d(_InstanceNorm, nn.InstanceNorm1d):
    """`torch.nn.InstanceNorm1d`, computed by `onepass.functional.instance_norm`.

    Example: `InstanceNorm1d(64)(torch.randn(8, 64, 32))`
    """


class InstanceNorm2d(_InstanceNorm, nn.InstanceNorm2d):
    """`torch.nn.InstanceNorm2d`, computed by `onepass.functional.instance_norm`.

    Example: `InstanceNorm2d(64)(torch.randn(8, 64, 32, 32))`
    """


class InstanceNorm3d(_InstanceNorm, nn.InstanceNorm3d):
    """`torch.nn.InstanceNorm3d`, computed by `onepass.functional.instance_norm`.

    Example: `InstanceNorm3d(64)(torch.randn(8, 64, 4, 8, 8))`
    """
