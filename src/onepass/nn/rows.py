"""Modules that normalize the last dimensions: LayerNorm and RMSNorm."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Optional, Tuple

from torch import Tensor, nn

from onepass import functional as F
from onepass.check.norms import parameter_shape
from onepass.functional.extras import Modulation

from . import scripted, traced
from .extras import ExtrasMixin


def _scripted_layer_norm(self, input: Tensor, modulate: Optional[Tuple[Tensor, Tensor]] = None, activation: Optional[str] = None):
    shape, offset, activation = self.normalized_shape, self.weight_offset, self.activation if activation is None else activation
    return scripted.layer_norm(input, shape, self.weight, self.bias, self.eps, offset, self.granularity, modulate, activation)


def _scripted_rms_norm(self, x: Tensor, modulate: Optional[Tuple[Tensor, Tensor]] = None, activation: Optional[str] = None):
    activation = self.activation if activation is None else activation
    return scripted.rms_norm(x, self.normalized_shape, self.weight, self.eps, self.weight_offset, modulate, activation)


class LayerNorm(ExtrasMixin, nn.LayerNorm):
    """`torch.nn.LayerNorm`, computed by `onepass.functional.layer_norm`: y = (x - mean)/sqrt(var + eps)·weight + bias.

    Mean and variance are taken over the last dimensions, whose sizes are `normalized_shape`.

    With `granularity="channel"`, weight and bias have one value per channel, which is the first normalized dimension. With
    `granularity="global"`, weight and bias are scalars.

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
        self._set_extras(activation=activation, save=save, weight_offset=weight_offset, granularity=granularity)
        shape = parameter_shape(granularity, self.normalized_shape)
        for name, param in (("weight", self.weight), ("bias", self.bias)):
            if param is not None and param.shape != shape:
                setattr(self, name, nn.Parameter(param.new_empty(shape)))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        super().reset_parameters()
        self._reset_offset_weight(self.weight)

    @scripted.scripted_by(_scripted_layer_norm)
    def forward(self, input: Tensor, modulate: Modulation | None = None, activation: str | None = None) -> Tensor:
        if type(input) is not Tensor and traced.is_proxy(input):
            return traced.as_call_of_module(self, input, modulate, activation)
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


class RMSNorm(ExtrasMixin, nn.RMSNorm):
    """`torch.nn.RMSNorm`, computed by `onepass.functional.rms_norm`: y = x/sqrt(mean(x²) + eps)·weight.

    The mean is taken over the last dimensions, whose sizes are `normalized_shape`. `weight_offset=1.0` uses 1 + weight, as Gemma does.

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
        self._set_extras(activation=activation, save=save, weight_offset=weight_offset)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        super().reset_parameters()
        self._reset_offset_weight(self.weight)

    @scripted.scripted_by(_scripted_rms_norm)
    def forward(self, x: Tensor, modulate: Modulation | None = None, activation: str | None = None) -> Tensor:
        if type(x) is not Tensor and traced.is_proxy(x):
            return traced.as_call_of_module(self, x, modulate, activation)
        keywords: dict[str, Any] = {"activation": activation or self.activation, "modulate": modulate, "weight_offset": self.weight_offset}
        return F.rms_norm(x, self.normalized_shape, self.weight, self.eps, save=self.save, **keywords)
