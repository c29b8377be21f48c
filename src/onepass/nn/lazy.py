"""Lazy modules: BatchNorm and InstanceNorm that learn the number of channels from their first input."""

from __future__ import annotations

from typing import Any

from torch import nn

from .running import (
    BatchNorm1d,
    BatchNorm2d,
    BatchNorm3d,
    InstanceNorm1d,
    InstanceNorm2d,
    InstanceNorm3d,
    _BatchNorm,
    _InstanceNorm,
)


class _Lazy(nn.modules.batchnorm._LazyNormBase):
    """Takes the extras of our modules, and finds the channels of an input (N, *, C)."""

    def __init__(self, *args: Any, activation: str | None = None, save: str = "x", channel_dim: int = 1, **keywords: Any) -> None:
        super().__init__(*args, **keywords)  # torch's arguments: eps, momentum, affine, track_running_stats, device, dtype
        self._set_extras(activation=activation, save=save, channel_dim=channel_dim)  # pyright: ignore[reportCallIssue]

    def initialize_parameters(self, input: Any) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        super().initialize_parameters(input if self.channel_dim == 1 else input.movedim(-1, 1))


class LazyBatchNorm1d(_Lazy, nn.LazyBatchNorm1d, _BatchNorm):
    """`torch.nn.LazyBatchNorm1d`, which becomes a `BatchNorm1d` of onepass.

    Example: `LazyBatchNorm1d()(torch.randn(8, 64))`
    """

    cls_to_become = BatchNorm1d  # pyright: ignore[reportAssignmentType]


class LazyBatchNorm2d(_Lazy, nn.LazyBatchNorm2d, _BatchNorm):
    """`torch.nn.LazyBatchNorm2d`, which becomes a `BatchNorm2d` of onepass.

    Example: `LazyBatchNorm2d(activation="relu")(torch.randn(8, 64, 32, 32))`
    """

    cls_to_become = BatchNorm2d  # pyright: ignore[reportAssignmentType]


class LazyBatchNorm3d(_Lazy, nn.LazyBatchNorm3d, _BatchNorm):
    """`torch.nn.LazyBatchNorm3d`, which becomes a `BatchNorm3d` of onepass.

    Example: `LazyBatchNorm3d()(torch.randn(8, 64, 4, 8, 8))`
    """

    cls_to_become = BatchNorm3d  # pyright: ignore[reportAssignmentType]


class LazyInstanceNorm1d(_Lazy, nn.LazyInstanceNorm1d, _InstanceNorm):
    """`torch.nn.LazyInstanceNorm1d`, which becomes an `InstanceNorm1d` of onepass.

    Example: `LazyInstanceNorm1d()(torch.randn(8, 64, 32))`
    """

    cls_to_become = InstanceNorm1d  # pyright: ignore[reportAssignmentType]


class LazyInstanceNorm2d(_Lazy, nn.LazyInstanceNorm2d, _InstanceNorm):
    """`torch.nn.LazyInstanceNorm2d`, which becomes an `InstanceNorm2d` of onepass.

    Example: `LazyInstanceNorm2d()(torch.randn(8, 64, 32, 32))`
    """

    cls_to_become = InstanceNorm2d  # pyright: ignore[reportAssignmentType]


class LazyInstanceNorm3d(_Lazy, nn.LazyInstanceNorm3d, _InstanceNorm):
    """`torch.nn.LazyInstanceNorm3d`, which becomes an `InstanceNorm3d` of onepass.

    Example: `LazyInstanceNorm3d()(torch.randn(8, 64, 4, 8, 8))`
    """

    cls_to_become = InstanceNorm3d  # pyright: ignore[reportAssignmentType]
