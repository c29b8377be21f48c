"""The class of a swapped norm: its recipe and its forward.

The forward reads parameters and eps from the module, under the names that its original class uses, and calls
`onepass.functional`. Fused modules (`fusion/`) pass one more argument: `activation`, applied to the result, or
`residual`, added to the input. With `residual` the forward returns (y, sum).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn

from onepass import functional as F
from onepass import nn as onepass_nn
from onepass.core.activations import ACTIVATION_FUNCTIONS

from .guards import Guards

_compiling = torch.compiler.is_dynamo_compiling


# Where a module keeps a value: the name of an attribute, a function of the module, or the value itself.
Location = str | float | Callable[[nn.Module], Any] | None


# Inputs with fewer elements run the original forward, which is faster there (H200, 2026-11-16; docs/measured.md).
MIN_ELEMENTS_COMPILED = 2**22  # under torch.compile: a call of our op takes 55 µs of host time


# For modules that call torch's layer_norm or rms_norm, in eager training. Forward and backward take 171 µs of host time
# in torch, and 440 µs in onepass.
MIN_ELEMENTS_TRAINING = 2**23


ONEPASS_CLASSES = frozenset(getattr(onepass_nn, name) for name in onepass_nn.__all__)


HALF_DTYPES = (torch.float16, torch.bfloat16)


ACTIVATIONS = {name: activation.apply for name, activation in ACTIVATION_FUNCTIONS.items()}


def original_when_compiling(method: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
    """A method that calls `original` under torch.compile, and `method` otherwise. Dynamo then traces only `original`."""

    @wraps(original)
    def either(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return original(self, *args, **kwargs) if _compiling() else method(self, *args, **kwargs)

    return either


@dataclass(frozen=True)
class NormRecipe:
    """Which norm of onepass.nn a module of another class computes, and where the module keeps its parameters."""

    like: type[nn.Module]  # the class of onepass.nn
    weight: Location = "weight"
    bias: Location = "bias"
    eps: Location = "eps"
    weight_offset: float = 0.0
    activation: str | None = None  # the activation that the module itself applies
    # The dtype of y if x and weight have different dtypes: that of "x" or "weight", or "promoted"; "" for torch's rules.
    result: str = ""
    autocast: bool = True  # whether it follows torch.nn's rules under autocast
    argument: str = "input"  # the name of x in its forward
    # The original forward runs if these values or modules have changed, and for these ranks and dtypes.
    guarded: tuple[tuple[str, Any], ...] = ()  # values that its forward reads, by path
    child_classes: tuple[tuple[str, type], ...] = ()
    unsupported_ranks: tuple[int, ...] = ()  # of x
    unsupported_dtypes: tuple[tuple[torch.dtype, torch.dtype], ...] = ()  # of x and of parameters

    def bases(self) -> tuple[type, ...]:
        return (_FunctionalNorm,) if self.like in _FUNCTIONS else (_RunningStatsNorm, self.like)

    def namespace(self, original: type[nn.Module]) -> dict[str, Any]:
        """Under torch.compile most norms run their original forward.

        Inductor's kernels are as fast there, and fuse more neighbours.
        """
        ours = _SwappedNorm._onepass_forward
        forward = ours if self.like in OURS_WHEN_COMPILED else original_when_compiling(ours, original.forward)
        guards = Guards.make(self.guarded, self.child_classes, self.unsupported_ranks, self.unsupported_dtypes)
        return {"extra_repr": original.extra_repr, "forward": forward, "_guards": guards}

    def look_up(self, module: nn.Module, location: Location) -> Any:
        return getattr(module, location) if isinstance(location, str) else location(module) if callable(location) else location

    @property
    def normalizes_rows(self) -> bool:
        """Whether it normalizes the last dimensions. Only such norms can be fused with a sum before them."""
        return self.like in (onepass_nn.LayerNorm, onepass_nn.RMSNorm)


class _SwappedNorm(nn.Module):
    """The forward of a swapped norm: one tensor, by position or by name. Other calls go to the original forward."""

    _original_class: type[nn.Module]
    _recipe: NormRecipe
    _guards: Guards | None

    def _onepass_forward(self, *args: Any, activation: str | None = None, residual: Tensor | None = None, **kwargs: Any) -> Any:
        if not kwargs and len(args) == 1:
            x = args[0]
        elif not args and kwargs.keys() == {self._recipe.argument}:
            x = kwargs[self._recipe.argument]
        else:
            return self._original_class.forward(self, *args, **kwargs)
        if not isinstance(x, Tensor):
            if not hasattr(type(x), "__torch_function__"):  # a torch.fx proxy has it
                return self._call_original(x, activation, residual)
        elif x.is_nested or x.is_complex() or _original_is_faster(self._recipe, x) or (self._guards and self._guards.fail(self, x)):
            return self._call_original(x, activation, residual)
        activation = activation or self._recipe.activation
        if residual is None:
            return self._normalize(x, activation)
        if isinstance(x, Tensor) and isinstance(residual, Tensor) and x.shape == residual.shape and x.dtype == residual.dtype:
            return self._normalize(x, activation, residual)
        total = x + residual
        return self._normalize(total, activation), total

    def _call_original(self, x: Tensor, activation: str | None, residual: Tensor | None) -> Any:
        """Run the original forward: for inputs that onepass does not support or speed up, and if a guard fails."""
        total = x if residual is None else x + residual
        y = self._original_class.forward(self, total)
        y = y if activation is None else ACTIVATIONS[activation](y)
        return y if residual is None else (y, total)

    def _normalize(self, x: Tensor, activation: str | None, residual: Tensor | None = None) -> Any:
        raise NotImplementedError


def _original_is_faster(recipe: NormRecipe, x: Tensor) -> bool:
    """Whether x is so small that the original forward is faster, because host time dominates."""
    if _compiling():
        return x.numel() < MIN_ELEMENTS_COMPILED
    trained = recipe.normalizes_rows and recipe.autocast and x.is_cuda and x.requires_grad and torch.is_grad_enabled()
    return trained and x.numel() < MIN_ELEMENTS_TRAINING


class _RunningStatsNorm(_SwappedNorm):
    """Norms with running statistics. The new class is a subclass of a onepass.nn class, and calls its forward."""

    def _normalize(self, x: Tensor, activation: str | None, residual: Tensor | None = None) -> Any:
        assert residual is None
        return self._recipe.like.forward(self, x, activation=activation)


class _FunctionalNorm(_SwappedNorm):
    """All other norms: call a function with the values that the recipe locates."""

    def _normalize(self, x: Tensor, activation: str | None, residual: Tensor | None = None) -> Any:
        recipe, look_up = self._recipe, self._recipe.look_up
        weight, bias, eps = look_up(self, recipe.weight), look_up(self, recipe.bias), look_up(self, recipe.eps)
        if recipe.result and weight is not None and weight.dtype != x.dtype:
            return self._normalize_mixed(x, residual, weight, bias, eps, activation)
        if recipe.autocast or not torch.is_autocast_enabled(x.device.type):
            return _FUNCTIONS[recipe.like](self, x, residual, weight, bias, eps, activation)
        with torch.autocast(x.device.type, enabled=False):  # the original forward ignores autocast
            return _FUNCTIONS[recipe.like](self, x, residual, weight, bias, eps, activation)

    def _normalize_mixed(
        self, x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float, activation: str | None
    ) -> Any:
        """Compute in the wider dtype of x and weight, unless a kernel supports both and y has the dtype of x."""
        recipe, wide = self._recipe, torch.promote_types(x.dtype, weight.dtype)
        dtype = {"x": x.dtype, "weight": weight.dtype, "promoted": wide}[recipe.result]
        total = x if residual is None else x + residual
        x = total
        if not (dtype == x.dtype and x.dtype in HALF_DTYPES and weight.dtype == torch.float32):
            x, weight, bias = x.to(wide), weight.to(wide), None if bias is None else bias.to(wide)
        with torch.autocast(x.device.type, enabled=False):
            y = _FUNCTIONS[recipe.like](self, x, None, weight, bias, eps, activation).to(dtype)
        return y if residual is None else (y, total)


def _shape(module: Any, x: Tensor, weight: Tensor | None) -> tuple[int, ...]:
    if isinstance(module, (nn.LayerNorm, nn.RMSNorm)):
        return module.normalized_shape
    return tuple(x.shape[-1:] if weight is None else weight.shape)


def _layer_norm(module: Any, x: Tensor, residual: Tensor | None, weight, bias, eps: float, activation: str | None) -> Any:
    shape, extras = _shape(module, x, weight), {"activation": activation, "weight_offset": module._recipe.weight_offset}
    if residual is None:
        return F.layer_norm(x, shape, weight, bias, eps, **extras)
    return F.add_layer_norm(x, residual, shape, weight, bias, eps, **extras)


def _rms_norm(module: Any, x: Tensor, residual: Tensor | None, weight, bias: None, eps: float | None, activation: str | None) -> Any:
    shape, extras = _shape(module, x, weight), {"activation": activation, "weight_offset": module._recipe.weight_offset}
    return F.rms_norm(x, shape, weight, eps, **extras) if residual is None else F.add_rms_norm(x, residual, shape, weight, eps, **extras)


def _layer_norm2d(module: Any, x: Tensor, residual: None, weight, bias, eps: float, activation: str | None) -> Any:
    if x.dim() == 4:
        return F.layer_norm2d(x, weight, bias, eps, activation=activation)
    return F.layer_norm(x.movedim(1, -1), x.shape[1:2], weight, bias, eps, activation=activation).movedim(-1, 1)


def _group_norm(module: Any, x: Tensor, residual: None, weight, bias, eps: float, activation: str | None) -> Any:
    return F.group_norm(x, module.num_groups, weight, bias, eps, activation=activation)


# Norms that onepass also computes under torch.compile.
OURS_WHEN_COMPILED = {onepass_nn.GroupNorm, onepass_nn.InstanceNorm1d, onepass_nn.InstanceNorm2d, onepass_nn.InstanceNorm3d}


_FUNCTIONS: dict[type[nn.Module], Callable[..., Any]] = {
    onepass_nn.LayerNorm: _layer_norm,
    onepass_nn.RMSNorm: _rms_norm,
    onepass_nn.LayerNorm2d: _layer_norm2d,
    onepass_nn.GroupNorm: _group_norm,
}
