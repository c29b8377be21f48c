"""torch.nn's norms as subclasses: the same constructors, parameters, state_dicts and reprs, with onepass's forward. No maths here.

Every module takes the keyword `activation`, and `modulate` and `activation` in its call; those that torch fixes to (N, C, *) take
`channel_dim=-1`; all but SwitchableNorm take `save`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
    """A module with extras, which stand in its repr where they are not the default.

    The defaults are the class's, so that a module of torch.nn can become one of ours by its class alone.
    """

    activation: str | None = None
    save: str = "x"
    channel_dim: int = 1
    weight_offset: float = 0.0
    granularity: str = "element"

    def _extend(self, **extras: Any) -> None:
        check_extras.activation(extras["activation"])
        check_extras.from_y(extras.get("save", "x"), extras["activation"])
        check_extras.either_end(extras.get("channel_dim", 1))
        for name, value in extras.items():
            setattr(self, name, value)

    def extra_repr(self) -> str:
        names = ("activation", "save", "channel_dim", "weight_offset", "granularity")
        shown = [f"{name}={getattr(self, name)!r}" for name in names if getattr(self, name) != getattr(_Extended, name)]
        return ", ".join(filter(None, [super().extra_repr(), *shown]))

    def _start_at_one(self, weight: Tensor | None) -> None:
        """Where the weight is stored as its distance from an offset, it starts where their sum is one."""
        check_extras.weight_offset(weight, self.weight_offset)
        if weight is not None and self.weight_offset:
            nn.init.constant_(weight, 1 - self.weight_offset)


class LayerNorm(_Extended, nn.LayerNorm):
    """`torch.nn.LayerNorm`, computed by `onepass.functional.layer_norm`.

    With `granularity="channel"` weight and bias have the shape of the first normalized dimension, with "global" they are scalars.

    Example: `LayerNorm((96, 7, 7), granularity="channel")(torch.randn(2, 96, 7, 7))`
    """

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        bias: bool = True,
        device: Any = None,
        dtype: Any = None,
        *,
        activation: str | None = None,
        save: str = "x",
        weight_offset: float = 0.0,
        granularity: str = "element",
    ) -> None:
        super().__init__(normalized_shape, eps, elementwise_affine, bias, device, dtype)  # pyright: ignore[reportArgumentType]
        self._extend(activation=activation, save=save, weight_offset=weight_offset, granularity=granularity)
        shape = check.granular_shape(granularity, self.normalized_shape)
        for name, param in (("weight", self.weight), ("bias", self.bias)):
            if param is not None and param.shape != shape:
                setattr(self, name, nn.Parameter(param.new_empty(shape)))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        super().reset_parameters()
        self._start_at_one(self.weight)

    def forward(self, input: Tensor, modulate: Modulation | None = None, activation: str | None = None) -> Tensor:
        return F.layer_norm(
            input,
            self.normalized_shape,
            self.weight,
            self.bias,
            self.eps,
            activation=activation or self.activation,
            modulate=modulate,
            save=self.save,
            weight_offset=self.weight_offset,
            granularity=self.granularity,
        )


class RMSNorm(_Extended, nn.RMSNorm):
    """`torch.nn.RMSNorm`, computed by `onepass.functional.rms_norm`.

    Example: `RMSNorm(64, weight_offset=1.0)(torch.randn(2, 16, 64))`
    """

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float | None = None,
        elementwise_affine: bool = True,
        device: Any = None,
        dtype: Any = None,
        *,
        activation: str | None = None,
        save: str = "x",
        weight_offset: float = 0.0,
    ) -> None:
        super().__init__(normalized_shape, eps, elementwise_affine, device, dtype)  # pyright: ignore[reportArgumentType]
        self._extend(activation=activation, save=save, weight_offset=weight_offset)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        super().reset_parameters()
        self._start_at_one(self.weight)

    def forward(self, x: Tensor, modulate: Modulation | None = None, activation: str | None = None) -> Tensor:
        extras: dict[str, Any] = {"activation": activation or self.activation, "modulate": modulate, "weight_offset": self.weight_offset}
        return F.rms_norm(x, self.normalized_shape, self.weight, self.eps, save=self.save, **extras)


class LayerNorm2d(_Extended, nn.LayerNorm):
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
        *,
        activation: str | None = None,
        save: str = "x",
    ) -> None:
        super().__init__(num_channels, eps, elementwise_affine, bias, device, dtype)
        self._extend(activation=activation, save=save)

    def forward(self, input: Tensor, modulate: Modulation | None = None, activation: str | None = None) -> Tensor:
        check.num_channels(input, self.normalized_shape[0])
        extras: dict[str, Any] = {"activation": activation or self.activation, "modulate": modulate}
        return F.layer_norm2d(input, self.weight, self.bias, self.eps, save=self.save, **extras)


class _Channels(_Extended):
    def _keywords(self, modulate: Modulation | None, activation: str | None) -> dict[str, Any]:
        return {"channel_dim": self.channel_dim, "activation": activation or self.activation, "modulate": modulate}


class GroupNorm(_Channels, nn.GroupNorm):
    """`torch.nn.GroupNorm`, computed by `onepass.functional.group_norm`.

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
        **newer: Any,  # what later versions of torch take
    ) -> None:
        super().__init__(num_groups, num_channels, eps, affine, device, dtype, **newer)
        self._extend(activation=activation, save=save, channel_dim=channel_dim)

    def forward(self, input: Tensor, modulate: Modulation | None = None, activation: str | None = None) -> Tensor:
        keywords = self._keywords(modulate, activation)
        return F.group_norm(input, self.num_groups, self.weight, self.bias, self.eps, save=self.save, **keywords)


class _BatchNorm(_Channels, nn.modules.batchnorm._BatchNorm):
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
        **newer: Any,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats, device, dtype, **newer)
        self._extend(activation=activation, save=save, channel_dim=channel_dim)

    def forward(self, input: Tensor, modulate: Modulation | None = None, activation: str | None = None) -> Tensor:
        self._check_input_dim(input)
        count = self.num_batches_tracked if self.training and self.track_running_stats else None
        momentum: Any = 0.0 if self.momentum is None else self.momentum
        if count is not None:
            count.add_(1)  # before the norm, as in torch: checkpointing ends a recomputation inside it, by an exception
        if self.momentum is None and count is not None:
            # A cumulative average; left on the device, where it stalls nothing and compiles whole.
            momentum = count.to(torch.float64).reciprocal()
        batch = self.training or (self.running_mean is None and self.running_var is None)
        keep = not self.training or self.track_running_stats
        mean, var = (self.running_mean, self.running_var) if keep else (None, None)
        keywords = {"save": self.save, **self._keywords(modulate, activation)}
        try:
            return F.batch_norm(input, mean, var, self.weight, self.bias, batch, momentum, self.eps, **keywords)
        except (RuntimeError, TypeError, ValueError):  # a call that is refused is not counted
            if count is not None:
                count.sub_(1)
            raise


class BatchNorm1d(_BatchNorm, nn.BatchNorm1d):
    """`torch.nn.BatchNorm1d`, computed by `onepass.functional.batch_norm`.

    Example: `BatchNorm1d(64)(torch.randn(8, 64))`
    """


class BatchNorm2d(_BatchNorm, nn.BatchNorm2d):
    """`torch.nn.BatchNorm2d`, computed by `onepass.functional.batch_norm`.

    Example: `BatchNorm2d(64, activation="relu")(torch.randn(8, 64, 32, 32))`
    """


class BatchNorm3d(_BatchNorm, nn.BatchNorm3d):
    """`torch.nn.BatchNorm3d`, computed by `onepass.functional.batch_norm`.

    Example: `BatchNorm3d(64)(torch.randn(8, 64, 4, 8, 8))`
    """


class _InstanceNorm(_Channels, nn.modules.instancenorm._InstanceNorm):
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
        **newer: Any,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats, device, dtype, **newer)
        self._extend(activation=activation, save=save, channel_dim=channel_dim)

    def forward(self, input: Tensor, modulate: Modulation | None = None, activation: str | None = None) -> Tensor:
        if self.channel_dim == 1 and modulate is None and activation is None:
            return nn.modules.instancenorm._InstanceNorm.forward(self, input)  # torch's checks, then _apply_instance_norm
        self._check_input_dim(input)
        if input.dim() == self._get_no_batch_dim():
            return self._apply_instance_norm(input.unsqueeze(0), modulate, activation).squeeze(0)
        return self._apply_instance_norm(input, modulate, activation)

    def _apply_instance_norm(self, input: Tensor, modulate: Modulation | None = None, activation: str | None = None) -> Tensor:
        momentum = 0.0 if self.momentum is None else self.momentum
        batch = self.training or not self.track_running_stats
        running, keywords = (self.running_mean, self.running_var), {"save": self.save, **self._keywords(modulate, activation)}
        return F.instance_norm(input, *running, self.weight, self.bias, batch, momentum, self.eps, **keywords)


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


class _SwitchableNorm(_Channels):
    weight: Tensor | None
    bias: Tensor | None
    mean_weight: Tensor
    var_weight: Tensor
    running_mean: Tensor | None
    running_var: Tensor | None
    _check_input_dim: Callable[[Tensor], None]

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
        *,
        activation: str | None = None,
        channel_dim: int = 1,
    ) -> None:
        super().__init__()
        self._extend(activation=activation, channel_dim=channel_dim)
        check_extras.constant_momentum(momentum)
        self.num_features, self.eps, self.momentum, self.using_bn = num_features, eps, momentum, using_bn
        new = {"device": device, "dtype": dtype}
        for name, size in (("weight", num_features), ("bias", num_features), ("mean_weight", 2 + using_bn), ("var_weight", 2 + using_bn)):
            wanted = affine or name in ("mean_weight", "var_weight")
            self.register_parameter(name, nn.Parameter(torch.empty(size, **new)) if wanted else None)
        for name in ("running_mean", "running_var"):
            self.register_buffer(name, torch.empty(num_features, **new) if using_bn and track_running_stats else None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for tensor, value in (
            *((self.weight, 1.0), (self.bias, 0.0), (self.mean_weight, 1.0), (self.var_weight, 1.0)),
            *((self.running_mean, 0.0), (self.running_var, 1.0)),
        ):
            if tensor is not None:
                nn.init.constant_(tensor, value)

    def forward(self, input: Tensor, modulate: Modulation | None = None, activation: str | None = None) -> Tensor:
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
            **self._keywords(modulate, activation),
        )

    def extra_repr(self) -> str:
        words = f"{self.num_features}, eps={self.eps}, momentum={self.momentum}, affine={self.weight is not None}, "
        words += f"track_running_stats={self.running_mean is not None}, using_bn={self.using_bn}"
        return ", ".join(filter(None, [words, super().extra_repr()]))


class SwitchableNorm1d(_SwitchableNorm):
    """A learned mix of InstanceNorm, LayerNorm and BatchNorm on (N, C) or (N, C, L), computed by `onepass.functional.switchable_norm`.
    On (N, C) LayerNorm and BatchNorm alone are mixed.

    Example: `SwitchableNorm1d(64)(torch.randn(8, 64, 32))`
    """

    _check_input_dim = nn.BatchNorm1d._check_input_dim  # pyright: ignore[reportAssignmentType]


class SwitchableNorm2d(_SwitchableNorm):
    """A learned mix of InstanceNorm, LayerNorm and BatchNorm on (N, C, H, W), computed by `onepass.functional.switchable_norm`.

    Example: `SwitchableNorm2d(64)(torch.randn(8, 64, 32, 32))`
    """

    _check_input_dim = nn.BatchNorm2d._check_input_dim  # pyright: ignore[reportAssignmentType]


class SwitchableNorm3d(_SwitchableNorm):
    """A learned mix of InstanceNorm, LayerNorm and BatchNorm on (N, C, D, H, W), computed by `onepass.functional.switchable_norm`.

    Example: `SwitchableNorm3d(64)(torch.randn(8, 64, 4, 8, 8))`
    """

    _check_input_dim = nn.BatchNorm3d._check_input_dim  # pyright: ignore[reportAssignmentType]
