"""torch.nn's norms as subclasses: the same constructors, parameters, state_dicts and reprs, with onepass's forward. No maths here.

Every module takes `activation` as a keyword and `modulate` in its call; those that torch fixes to (N, C, *) take `channel_dim=-1`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from . import check, check_extras
from . import functional as F
from .functional import Modulation

__all__ = [
    "BatchNorm1d", "BatchNorm2d", "BatchNorm3d", "GroupNorm", "InstanceNorm1d", "InstanceNorm2d", "InstanceNorm3d", "LayerNorm",
    "LayerNorm2d", "RMSNorm", "SwitchableNorm1d", "SwitchableNorm2d", "SwitchableNorm3d",
]  # fmt: skip


class _Extended(nn.Module):
    """A module with extras: keywords of its constructor, kept as attributes, shown in its repr where they are not the default."""

    activation: str | None = None
    _extras: tuple[str, ...] = ("activation",)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        extras = {name: kwargs.pop(name) for name in self._extras if name in kwargs}
        check_extras.activation(extras.get("activation"))
        super().__init__(*args, **kwargs)
        for name, value in extras.items():
            setattr(self, name, value)

    def extra_repr(self) -> str:
        shown = [f"{name}={getattr(self, name)!r}" for name in self._extras if getattr(self, name) != getattr(type(self), name)]
        return ", ".join([super().extra_repr(), *shown])


class _Offset(_Extended):
    """With weight_offset: the weight is stored as its distance from it, and starts where their sum is one."""

    weight_offset: float = 0.0
    _extras = ("activation", "weight_offset")

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        check_extras.weight_offset(self.weight, self.weight_offset)  # pyright: ignore[reportArgumentType]
        self.reset_parameters()

    def reset_parameters(self) -> None:
        super().reset_parameters()  # pyright: ignore[reportAttributeAccessIssue]
        if self.weight_offset:
            nn.init.constant_(self.weight, 1 - self.weight_offset)  # pyright: ignore[reportArgumentType]


class LayerNorm(_Offset, nn.LayerNorm):
    """`torch.nn.LayerNorm`, computed by `onepass.functional.layer_norm`; keywords `activation`, `weight_offset`, `granularity`.

    With `granularity="channel"` weight and bias have the shape of the first normalized dimension, with "global" they are scalars.

    Example: `LayerNorm((96, 7, 7), granularity="channel")(torch.randn(2, 96, 7, 7))`
    """

    granularity: str = "element"
    _extras = ("activation", "weight_offset", "granularity")

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        check.granular_shape(kwargs.get("granularity", "element"), ())  # before anything is made
        super().__init__(*args, **kwargs)
        shape = check.granular_shape(self.granularity, self.normalized_shape)
        for name, param in (("weight", self.weight), ("bias", self.bias)):
            if param is not None and param.shape != shape:
                setattr(self, name, nn.Parameter(param.new_empty(shape)))
        self.reset_parameters()

    def forward(self, input: Tensor, modulate: Modulation | None = None) -> Tensor:
        return F.layer_norm(
            input,
            self.normalized_shape,
            self.weight,
            self.bias,
            self.eps,
            activation=self.activation,
            modulate=modulate,
            weight_offset=self.weight_offset,
            granularity=self.granularity,
        )


class RMSNorm(_Offset, nn.RMSNorm):
    """`torch.nn.RMSNorm`, computed by `onepass.functional.rms_norm`; keywords `activation`, `weight_offset`.

    Example: `RMSNorm(64, weight_offset=1.0)(torch.randn(2, 16, 64))`
    """

    def forward(self, x: Tensor, modulate: Modulation | None = None) -> Tensor:
        extras: dict[str, Any] = {"activation": self.activation, "modulate": modulate, "weight_offset": self.weight_offset}
        return F.rms_norm(x, self.normalized_shape, self.weight, self.eps, **extras)


class LayerNorm2d(_Extended, nn.LayerNorm):
    """LayerNorm over the channels at each pixel of (N, C, H, W), computed by `onepass.functional.layer_norm2d`; keyword `activation`.

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
        **extras: Any,
    ) -> None:
        super().__init__(num_channels, eps, elementwise_affine, bias, device, dtype, **extras)

    def forward(self, input: Tensor, modulate: Modulation | None = None) -> Tensor:
        check.num_channels(input, self.normalized_shape[0])
        return F.layer_norm2d(input, self.weight, self.bias, self.eps, activation=self.activation, modulate=modulate)


class _Channels(_Extended):
    """With channel_dim: -1 where the channels are the last dimension."""

    channel_dim: int = 1
    _extras = ("activation", "channel_dim")

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        check_extras.either_end(kwargs.get("channel_dim", 1))
        super().__init__(*args, **kwargs)

    def _keywords(self, modulate: Modulation | None) -> dict[str, Any]:
        return {"channel_dim": self.channel_dim, "activation": self.activation, "modulate": modulate}


class GroupNorm(_Channels, nn.GroupNorm):
    """`torch.nn.GroupNorm`, computed by `onepass.functional.group_norm`; keywords `activation`, `channel_dim`.

    Example: `GroupNorm(32, 320, activation="silu")(torch.randn(2, 320, 8, 8))`
    """

    def forward(self, input: Tensor, modulate: Modulation | None = None) -> Tensor:
        return F.group_norm(input, self.num_groups, self.weight, self.bias, self.eps, **self._keywords(modulate))


class _BatchNorm(_Channels, nn.modules.batchnorm._BatchNorm):
    def forward(self, input: Tensor, modulate: Modulation | None = None) -> Tensor:
        self._check_input_dim(input)
        momentum: Any = 0.0 if self.momentum is None else self.momentum
        if self.training and self.track_running_stats and self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            if self.momentum is None:  # a cumulative average; left on the device, where it stalls nothing and compiles whole
                momentum = self.num_batches_tracked.to(torch.float64).reciprocal()
        batch = self.training or (self.running_mean is None and self.running_var is None)
        keep = not self.training or self.track_running_stats
        mean, var = (self.running_mean, self.running_var) if keep else (None, None)
        return F.batch_norm(input, mean, var, self.weight, self.bias, batch, momentum, self.eps, **self._keywords(modulate))


class BatchNorm1d(_BatchNorm, nn.BatchNorm1d):
    """`torch.nn.BatchNorm1d`, computed by `onepass.functional.batch_norm`; keywords `activation`, `channel_dim`.

    Example: `BatchNorm1d(64)(torch.randn(8, 64))`
    """


class BatchNorm2d(_BatchNorm, nn.BatchNorm2d):
    """`torch.nn.BatchNorm2d`, computed by `onepass.functional.batch_norm`; keywords `activation`, `channel_dim`.

    Example: `BatchNorm2d(64, activation="relu")(torch.randn(8, 64, 32, 32))`
    """


class BatchNorm3d(_BatchNorm, nn.BatchNorm3d):
    """`torch.nn.BatchNorm3d`, computed by `onepass.functional.batch_norm`; keywords `activation`, `channel_dim`.

    Example: `BatchNorm3d(64)(torch.randn(8, 64, 4, 8, 8))`
    """


class _InstanceNorm(_Channels, nn.modules.instancenorm._InstanceNorm):
    def forward(self, input: Tensor, modulate: Modulation | None = None) -> Tensor:
        if self.channel_dim == 1 and modulate is None:
            return super().forward(input)  # torch's checks, then _apply_instance_norm
        self._check_input_dim(input)
        if input.dim() == self._get_no_batch_dim():
            return self._apply_instance_norm(input.unsqueeze(0), modulate).squeeze(0)
        return self._apply_instance_norm(input, modulate)

    def _apply_instance_norm(self, input: Tensor, modulate: Modulation | None = None) -> Tensor:
        momentum = 0.0 if self.momentum is None else self.momentum
        batch = self.training or not self.track_running_stats
        running = self.running_mean, self.running_var
        return F.instance_norm(input, *running, self.weight, self.bias, batch, momentum, self.eps, **self._keywords(modulate))


class InstanceNorm1d(_InstanceNorm, nn.InstanceNorm1d):
    """`torch.nn.InstanceNorm1d`, computed by `onepass.functional.instance_norm`; keywords `activation`, `channel_dim`.

    Example: `InstanceNorm1d(64)(torch.randn(8, 64, 32))`
    """


class InstanceNorm2d(_InstanceNorm, nn.InstanceNorm2d):
    """`torch.nn.InstanceNorm2d`, computed by `onepass.functional.instance_norm`; keywords `activation`, `channel_dim`.

    Example: `InstanceNorm2d(64)(torch.randn(8, 64, 32, 32))`
    """


class InstanceNorm3d(_InstanceNorm, nn.InstanceNorm3d):
    """`torch.nn.InstanceNorm3d`, computed by `onepass.functional.instance_norm`; keywords `activation`, `channel_dim`.

    Example: `InstanceNorm3d(64)(torch.randn(8, 64, 4, 8, 8))`
    """


class _SwitchableNorm(_Channels):
    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        using_bn: bool = True,
        device: Any = None,
        dtype: Any = None,
        **extras: Any,
    ) -> None:
        super().__init__(**extras)
        self.num_features, self.eps, self.momentum, self.using_bn = num_features, eps, momentum, using_bn
        new = {"device": device, "dtype": dtype}
        for name, size in (("weight", num_features), ("bias", num_features), ("mean_weight", 2 + using_bn), ("var_weight", 2 + using_bn)):
            wanted = affine or name in ("mean_weight", "var_weight")
            self.register_parameter(name, nn.Parameter(torch.empty(size, **new)) if wanted else None)
        for name in ("running_mean", "running_var"):
            self.register_buffer(name, torch.empty(num_features, **new) if using_bn and track_running_stats else None)
        self.reset_parameters()

    weight: Tensor | None
    bias: Tensor | None
    mean_weight: Tensor
    var_weight: Tensor
    running_mean: Tensor | None
    running_var: Tensor | None

    def reset_parameters(self) -> None:
        for tensor, value in (
            *((self.weight, 1.0), (self.bias, 0.0), (self.mean_weight, 1.0), (self.var_weight, 1.0)),
            *((self.running_mean, 0.0), (self.running_var, 1.0)),
        ):
            if tensor is not None:
                nn.init.constant_(tensor, value)

    def _check_input_dim(self, input: Tensor) -> None:
        raise NotImplementedError

    def forward(self, input: Tensor, modulate: Modulation | None = None) -> Tensor:
        self._check_input_dim(input)
        return F.switchable_norm(
            input,
            self.mean_weight,
            self.var_weight,
            self.running_mean,
            self.running_var,
            self.weight,
            self.bias,
            self.training or self.running_mean is None,
            self.momentum,
            self.eps,
            self.using_bn,
            **self._keywords(modulate),
        )

    def extra_repr(self) -> str:
        words = f"{self.num_features}, eps={self.eps}, momentum={self.momentum}, affine={self.weight is not None}, using_bn={self.using_bn}"
        return words + super().extra_repr()


class SwitchableNorm1d(_SwitchableNorm):
    """A learned mix of InstanceNorm, LayerNorm and BatchNorm on (N, C) or (N, C, L), computed by `onepass.functional.switchable_norm`;
    keywords `activation`, `channel_dim`. On (N, C) LayerNorm and BatchNorm alone are mixed.

    Example: `SwitchableNorm1d(64)(torch.randn(8, 64, 32))`
    """

    _check_input_dim = nn.BatchNorm1d._check_input_dim  # pyright: ignore[reportAssignmentType]


class SwitchableNorm2d(_SwitchableNorm):
    """A learned mix of InstanceNorm, LayerNorm and BatchNorm on (N, C, H, W), computed by `onepass.functional.switchable_norm`;
    keywords `activation`, `channel_dim`.

    Example: `SwitchableNorm2d(64)(torch.randn(8, 64, 32, 32))`
    """

    _check_input_dim = nn.BatchNorm2d._check_input_dim  # pyright: ignore[reportAssignmentType]


class SwitchableNorm3d(_SwitchableNorm):
    """A learned mix of InstanceNorm, LayerNorm and BatchNorm on (N, C, D, H, W), computed by `onepass.functional.switchable_norm`;
    keywords `activation`, `channel_dim`.

    Example: `SwitchableNorm3d(64)(torch.randn(8, 64, 4, 8, 8))`
    """

    _check_input_dim = nn.BatchNorm3d._check_input_dim  # pyright: ignore[reportAssignmentType]
