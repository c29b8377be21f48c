"""SwitchableNorm, a mix of InstanceNorm, LayerNorm and BatchNorm with learned weights."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Optional, Tuple

import torch
from torch import Tensor, nn

from onepass import functional as F
from onepass.check.extras import require_constant_momentum
from onepass.functional.extras import Modulation

from . import scripted, traced
from .extras import ChannelExtrasMixin


def _scripted(self, input: Tensor, modulate: Optional[Tuple[Tensor, Tensor]] = None, activation: Optional[str] = None):
    self._check_input_dim(input)
    x, batch = scripted.channels_second(input, self.channel_dim), self.training or self.running_mean is None
    running_mean, running_var, weight, bias = self.running_mean, self.running_var, self.weight, self.bias
    logits = self.mean_weight, self.var_weight
    y = scripted.switchable_norm(
        x, logits[0], logits[1], running_mean, running_var, weight, bias, batch, self.momentum, self.eps, self.using_bn
    )
    y = scripted.modulated_channels(y, modulate, self.activation if activation is None else activation)
    return scripted.channels_back(y, self.channel_dim)


class _SwitchableNorm(ChannelExtrasMixin):
    if TYPE_CHECKING:  # with these annotations, TorchScript would not take running statistics for buffers
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
        self._set_extras(activation=activation, channel_dim=channel_dim)
        require_constant_momentum(momentum)
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

    @scripted.scripted_by(_scripted)
    def forward(self, input: Tensor, modulate: Modulation | None = None, activation: str | None = None) -> Tensor:
        if type(input) is not Tensor and traced.is_proxy(input):
            return traced.as_call_of_module(self, input, modulate, activation)
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
            **self._call_keywords(modulate, activation),
        )

    def extra_repr(self) -> str:
        words = f"{self.num_features}, eps={self.eps}, momentum={self.momentum}, affine={self.weight is not None}, "
        words += f"track_running_stats={self.running_mean is not None}, using_bn={self.using_bn}"
        return ", ".join(filter(None, [words, super().extra_repr()]))


class SwitchableNorm1d(_SwitchableNorm):
    """A learned mix of InstanceNorm, LayerNorm and BatchNorm for (N, C) or (N, C, L).

    For (N, C), only LayerNorm and BatchNorm are mixed. Computed by `onepass.functional.switchable_norm`.

    Example: `SwitchableNorm1d(64)(torch.randn(8, 64, 32))`
    """

    _check_input_dim = nn.BatchNorm1d._check_input_dim  # pyright: ignore[reportAssignmentType]


class SwitchableNorm2d(_SwitchableNorm):
    """A learned mix of InstanceNorm, LayerNorm and BatchNorm for (N, C, H, W).

    Computed by `onepass.functional.switchable_norm`.

    Example: `SwitchableNorm2d(64)(torch.randn(8, 64, 32, 32))`
    """

    _check_input_dim = nn.BatchNorm2d._check_input_dim  # pyright: ignore[reportAssignmentType]


class SwitchableNorm3d(_SwitchableNorm):
    """A learned mix of InstanceNorm, LayerNorm and BatchNorm for (N, C, D, H, W).

    Computed by `onepass.functional.switchable_norm`.

    Example: `SwitchableNorm3d(64)(torch.randn(8, 64, 4, 8, 8))`
    """

    _check_input_dim = nn.BatchNorm3d._check_input_dim  # pyright: ignore[reportAssignmentType]
