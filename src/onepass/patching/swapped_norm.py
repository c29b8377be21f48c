"""The new class of a patched norm: its recipe, `NormRecipe`, and its forward.

The forward reads parameters and eps from the module, under the names that the original class uses, and calls
`onepass.functional`. Fused modules (`fusion/`) call a norm with one more argument: `activation`, which is applied to the
result, or `residual`, which is added to the input. With `residual`, the forward returns (y, x + residual).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import layer_norm as torch_layer_norm

from onepass import functional as F
from onepass import nn as onepass_nn
from onepass.core.activations import ACTIVATION_FUNCTIONS
from onepass.nn.traced import use_twins

from .guards import Guards
from .under_compile import original_when_compiling

# How to get a value, such as eps: the name of an attribute of the module, a function of the module, or the value itself.
Location = str | float | Callable[[nn.Module], Any] | None


# In eager training on a GPU, modules that call torch's layer_norm or rms_norm run their original forward if x has fewer
# elements than this, because the host limits such steps. Without a limit, a training step of ViT-B (4.8 million elements)
# is 0.94 times as fast as before `patch`, and with it 0.99 times. docs/patching.md has more models.
MIN_ELEMENTS_TRAINING = 2**23


ONEPASS_CLASSES = frozenset(getattr(onepass_nn, name) for name in onepass_nn.__all__)


HALF_DTYPES = (torch.float16, torch.bfloat16)


ACTIVATIONS = {name: activation.apply for name, activation in ACTIVATION_FUNCTIONS.items()}


@dataclass(frozen=True)
class NormRecipe:
    """The recipe of a norm: which class of onepass.nn computes the same, and where the module keeps its parameters."""

    like: type[nn.Module]  # the class of onepass.nn that computes the same as the module
    weight: Location = "weight"
    bias: Location = "bias"
    eps: Location = "eps"
    weight_offset: float = 0.0
    activation: str | None = None  # an activation that the original forward applies after normalizing
    # The dtype of y if x and weight have different dtypes: that of "x", that of "weight", or "promoted"; "" means torch's rules.
    result: str = ""
    autocast: bool = True  # whether the original forward follows torch.nn's rules under autocast
    argument: str = "input"  # the name of x in the signature of the original forward
    # The fields below become guards (guards.py): the original forward runs if a guarded value or the class of a child has
    # changed, and for unsupported ranks and dtypes.
    guarded: tuple[tuple[str, Any], ...] = ()  # (path, snapshot) of the values that the original forward reads
    child_classes: tuple[tuple[str, type], ...] = ()  # (name, class) of the child modules
    unsupported_ranks: tuple[int, ...] = ()  # ranks of x
    unsupported_dtypes: tuple[tuple[torch.dtype, torch.dtype], ...] = ()  # (dtype of x, dtype of parameters)

    def bases(self) -> tuple[type, ...]:
        return (_FunctionalNorm,) if self.like in _FUNCTIONS else (_RunningStatsNorm, self.like)

    def namespace(self, original: type[nn.Module]) -> dict[str, Any]:
        """Return the attributes of the new class: forward, extra_repr and guards.

        Under torch.compile, the original forward is traced, and a graph pass decides which norms onepass computes
        (dispatch/compiled_choice.py).
        """
        usual = _USUAL.get(self) if issubclass(original, nn.GroupNorm if self.like is onepass_nn.GroupNorm else nn.LayerNorm) else None
        forward = original_when_compiling(usual or _SwappedNorm._onepass_forward, original.forward)
        guards = Guards.make(self.guarded, self.child_classes, self.unsupported_ranks, self.unsupported_dtypes)
        made = {"extra_repr": original.extra_repr, "forward": forward, "_made_forward": forward, "_guards": guards}
        made["_read"] = staticmethod(self.reader())
        made["_limited"] = self.normalizes_rows and self.autocast
        if self.like in _FUNCTIONS:
            made["_function"] = staticmethod(_FUNCTIONS[self.like])
        if usual is _usual_layer_norm:
            made["_onepass_add"] = _usual_add_layer_norm
        if issubclass(self.like, nn.modules.batchnorm._BatchNorm):
            use_twins()  # so that torch.fx can fold this norm into a convolution
            made["_twin_class"] = original
        return made

    def reader(self) -> Callable[[nn.Module], tuple[Any, Any, Any]]:
        """Return a function that reads (weight, bias, eps) from a module."""
        weight, bias, eps = (_reader(location) for location in (self.weight, self.bias, self.eps))
        if self.weight != "weight" or self.bias != "bias" or self.eps != "eps":
            return lambda module: (weight(module), bias(module), eps(module))

        def read(module: Any) -> tuple[Any, Any, Any]:
            try:  # faster than attributes, which go through nn.Module.__getattr__
                params = module._parameters
                return params["weight"], params["bias"], module.eps
            except KeyError:  # a parametrization has moved them
                return module.weight, module.bias, module.eps

        return read

    @property
    def normalizes_rows(self) -> bool:
        """Whether the norm normalizes the last dimensions. Only such norms can be fused with a sum before them."""
        return self.like in (onepass_nn.LayerNorm, onepass_nn.RMSNorm)


def _reader(location: Location) -> Callable[[nn.Module], Any]:
    return attrgetter(location) if isinstance(location, str) else location if callable(location) else lambda module: location


class _SwappedNorm(nn.Module):
    """Defines the forward of a patched norm. It takes one tensor; any other call runs the original forward."""

    _is_patched_norm = True  # for the graph pass, which finds this class in a traced graph
    _original_class: type[nn.Module]
    _recipe: NormRecipe
    _guards: Guards | None
    _read: Callable[[nn.Module], tuple[Any, Any, Any]]
    _made_forward: Callable[..., Any]  # the forward of the class, as `patch` made it
    _limited: bool  # whether small tensors run the original forward in eager training on a GPU

    def _onepass_forward(self, *args: Any, activation: str | None = None, residual: Tensor | None = None, **kwargs: Any) -> Any:
        if not kwargs and len(args) == 1:
            x = args[0]
        elif not args and kwargs.keys() == {self._recipe.argument}:
            x = kwargs[self._recipe.argument]
        else:
            return self._original_class.forward(self, *args, **kwargs)
        if not isinstance(x, Tensor):
            if not hasattr(type(x), "__torch_function__"):  # a torch.fx proxy has this method
                return self._call_original(x, activation, residual)
        elif (
            x.is_nested
            or x.is_complex()
            or (x.requires_grad and x.is_cuda and self._limited and _original_is_faster(x))
            or (self._guards and self._guards.fail(self, x))
        ):
            return self._call_original(x, activation, residual)
        activation = activation or self._recipe.activation
        if residual is None:
            return self._normalize(x, activation)
        if isinstance(x, Tensor) and isinstance(residual, Tensor) and x.shape == residual.shape and x.dtype == residual.dtype:
            return self._normalize(x, activation, residual)
        total = x + residual
        return self._normalize(total, activation), total

    def _onepass_add(self, x: Tensor, residual: Tensor) -> Any:
        """As `_onepass_forward(x, residual=residual)`, in fewer steps if both are plain tensors of the same shape and dtype."""
        if (
            x.shape != residual.shape
            or x.dtype != residual.dtype
            or x.is_nested
            or x.is_complex()
            or (x.requires_grad and x.is_cuda and self._limited and _original_is_faster(x))
            or (self._guards and self._guards.fail(self, x))
        ):
            return self._onepass_forward(x, residual=residual)
        return self._normalize(x, self._recipe.activation, residual)

    def _call_original(self, x: Tensor, activation: str | None, residual: Tensor | None) -> Any:
        """Run the original forward, and compute the fused sum before it (`residual`) or the fused activation after it.

        This happens for inputs that onepass does not support or does not speed up, and if a guard fails.
        """
        total = x if residual is None else x + residual
        y = self._original_class.forward(self, total)
        y = y if activation is None else ACTIVATIONS[activation](y)
        return y if residual is None else (y, total)

    def _normalize(self, x: Tensor, activation: str | None, residual: Tensor | None = None) -> Any:
        raise NotImplementedError


def _original_is_faster(x: Tensor) -> bool:
    """Return whether x, which is on a GPU and requires a gradient, is so small that the original forward, with its host time, is faster."""
    return x.numel() < MIN_ELEMENTS_TRAINING and torch.is_grad_enabled()


class _RunningStatsNorm(_SwappedNorm):
    """A patched BatchNorm or InstanceNorm. Its class also inherits from a class of onepass.nn, whose forward it calls."""

    def _normalize(self, x: Tensor, activation: str | None, residual: Tensor | None = None) -> Any:
        assert residual is None
        return self._recipe.like.forward(self, x, activation=activation)


class _FunctionalNorm(_SwappedNorm):
    """A patched LayerNorm, RMSNorm, LayerNorm2d or GroupNorm. It calls a function of `onepass.functional`."""

    _function: Callable[..., Any]  # one of _FUNCTIONS

    def _normalize(self, x: Tensor, activation: str | None, residual: Tensor | None = None) -> Any:
        recipe, (weight, bias, eps) = self._recipe, self._read(self)
        if recipe.result and weight is not None and weight.dtype != x.dtype:
            return self._normalize_mixed(x, residual, weight, bias, eps, activation)
        if recipe.autocast or not torch.is_autocast_enabled(x.device.type):
            return self._function(self, x, residual, weight, bias, eps, activation)
        with torch.autocast(x.device.type, enabled=False):  # the original forward ignores autocast
            return self._function(self, x, residual, weight, bias, eps, activation)

    def _normalize_mixed(
        self, x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float, activation: str | None
    ) -> Any:
        """Normalize an x whose dtype differs from that of weight. Return y, or (y, x + residual) with a residual.

        The kernels support a half-precision x and y with a float32 weight. For other dtypes, x, weight and bias are first
        converted to their promoted dtype.
        """
        recipe, wide = self._recipe, torch.promote_types(x.dtype, weight.dtype)
        dtype = {"x": x.dtype, "weight": weight.dtype, "promoted": wide}[recipe.result]
        total = x if residual is None else x + residual
        x = total
        if not (dtype == x.dtype and x.dtype in HALF_DTYPES and weight.dtype == torch.float32):
            x, weight, bias = x.to(wide), weight.to(wide), None if bias is None else bias.to(wide)
        with torch.autocast(x.device.type, enabled=False):
            y = self._function(self, x, None, weight, bias, eps, activation).to(dtype)
        return y if residual is None else (y, total)


def _layer_norm(module: Any, x: Tensor, residual: Tensor | None, weight, bias, eps: float, activation: str | None) -> Any:
    offset = module._recipe.weight_offset
    shape = module.normalized_shape if isinstance(module, nn.LayerNorm) else tuple(x.shape[-1:] if weight is None else weight.shape)
    if residual is None:
        return F.layer_norm(x, shape, weight, bias, eps, activation=activation, weight_offset=offset)
    return F.add_layer_norm(x, residual, shape, weight, bias, eps, activation=activation, weight_offset=offset)


def _rms_norm(module: Any, x: Tensor, residual: Tensor | None, weight, bias: None, eps: float | None, activation: str | None) -> Any:
    offset = module._recipe.weight_offset
    shape = module.normalized_shape if isinstance(module, nn.RMSNorm) else tuple(x.shape[-1:] if weight is None else weight.shape)
    if residual is None:
        return F.rms_norm(x, shape, weight, eps, activation=activation, weight_offset=offset)
    return F.add_rms_norm(x, residual, shape, weight, eps, activation=activation, weight_offset=offset)


def _layer_norm2d(module: Any, x: Tensor, residual: None, weight, bias, eps: float, activation: str | None) -> Any:
    if x.dim() == 4:
        return F.layer_norm2d(x, weight, bias, eps, activation=activation)
    return F.layer_norm(x.movedim(1, -1), x.shape[1:2], weight, bias, eps, activation=activation).movedim(-1, 1)


def _group_norm(module: Any, x: Tensor, residual: None, weight, bias, eps: float, activation: str | None) -> Any:
    return F.group_norm(x, module.num_groups, weight, bias, eps, activation=activation)


_FUNCTIONS: dict[type[nn.Module], Callable[..., Any]] = {
    onepass_nn.LayerNorm: _layer_norm,
    onepass_nn.RMSNorm: _rms_norm,
    onepass_nn.LayerNorm2d: _layer_norm2d,
    onepass_nn.GroupNorm: _group_norm,
}


# The usual calls of nn.LayerNorm and nn.GroupNorm, in few steps: in a model, where much else runs between two norms, each function
# that Python enters takes about 2 µs on a Neoverse N1, three times as long as in a loop (2026-11-17). `_onepass_forward` is for all calls.


def _usual_layer_norm(self: Any, *args: Any, activation: str | None = None, **others: Any) -> Any:
    if len(args) == 1 and not others and type(args[0]) is Tensor:
        x, params = args[0], self._parameters
        if "weight" in params and "bias" in params and not (x.is_nested or x.is_complex()):
            if not (x.requires_grad and x.is_cuda and self._limited and _original_is_faster(x)):
                return F.layer_norm(x, self.normalized_shape, params["weight"], params["bias"], self.eps, activation=activation)
            if activation is None:
                return torch_layer_norm(x, self.normalized_shape, params["weight"], params["bias"], self.eps)
    return self._onepass_forward(*args, activation=activation, **others)


def _usual_add_layer_norm(self: Any, x: Tensor, residual: Tensor) -> Any:
    params = self._parameters
    usual = x.shape == residual.shape and x.dtype == residual.dtype and "weight" in params and "bias" in params
    if usual and not (x.is_nested or x.is_complex()):
        if not (x.requires_grad and x.is_cuda and self._limited and _original_is_faster(x)):
            return F.add_layer_norm(x, residual, self.normalized_shape, params["weight"], params["bias"], self.eps)
        total = x + residual
        return torch_layer_norm(total, self.normalized_shape, params["weight"], params["bias"], self.eps), total
    return self._onepass_forward(x, residual=residual)


def _usual_group_norm(self: Any, *args: Any, activation: str | None = None, **others: Any) -> Any:
    if len(args) == 1 and not others and type(args[0]) is Tensor:
        x, params = args[0], self._parameters
        if "weight" in params and "bias" in params and not (x.is_nested or x.is_complex()):
            return F.group_norm(x, self.num_groups, params["weight"], params["bias"], self.eps, activation=activation)
    return self._onepass_forward(*args, activation=activation, **others)


_USUAL = {NormRecipe(onepass_nn.LayerNorm): _usual_layer_norm, NormRecipe(onepass_nn.GroupNorm): _usual_group_norm}
