"""What a swapped norm computes: its recipe and its forward.

The forward finds parameters and eps in the module, under the names its own class gave them, and calls `onepass.functional`. A block that
was fused calls it with more than its input: `activation`, applied to the result, or `residual`, added first; then it returns (y, sum).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from onepass import functional as F
from onepass import nn as ours

from .state import MISSING, all_watched, finder, hooks_of, same

_compiling = torch.compiler.is_dynamo_compiling


Source = str | float | Callable[[nn.Module], Any] | None


# Elements from which on ours is the faster one (H200, 2026-11-16; docs/measured.md). Below, what was there before is called.
COMPILED = 2**22  # by torch.compile: a call of our op takes the host 55 µs


TRAINED_ROWS = 2**23  # eager, in training, beside torch's own layer_norm or rms_norm: these take the host 171 µs with a backward, ours 440


HALVES = (torch.float16, torch.bfloat16)


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": torch.nn.functional.silu,
    "relu": torch.nn.functional.relu,
    "gelu": torch.nn.functional.gelu,
    "gelu_tanh": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
}


def unless_compiling(method: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
    """A method that dynamo never sees: it traces, and guards, what was there before."""

    @wraps(original)
    def either(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return original(self, *args, **kwargs) if _compiling() else method(self, *args, **kwargs)

    return either


@dataclass(frozen=True)
class Norm:
    """How a module of another class is one of ours.

    `weight`, `bias` and `eps` say where the module has them: the name of an attribute, a function of the module, or the value itself.
    """

    like: type[nn.Module]  # of onepass.nn
    weight: Source = "weight"
    bias: Source = "bias"
    eps: Source = "eps"
    weight_offset: float = 0.0
    activation: str | None = None  # what the class applies itself
    result: str = ""  # the dtype of y where weight has another than x: that of "x", of "weight", or "promoted"; if "", torch's rules
    autocast: bool = True  # torch.nn's rules there
    argument: str = "input"  # what its forward calls x
    # Where one of these does not hold, the class that was there computes: it was tried with these values, modules, ranks and dtypes.
    held: tuple[tuple[str, Any], ...] = ()  # what its forward reads, by path
    children: tuple[tuple[str, type], ...] = ()
    not_ranks: tuple[int, ...] = ()  # of x
    not_dtypes: tuple[tuple[torch.dtype, torch.dtype], ...] = ()  # of x and of parameters

    def bases(self) -> tuple[type, ...]:
        return (_Direct,) if self.like in _FUNCTIONS else (_Running, self.like)

    def namespace(self, original: type[nn.Module]) -> dict[str, Any]:
        """Compiled, all but norms of groups and channels are as they were: inductor's kernels are as fast, and take in neighbours."""
        ours = _Normed._called
        forward = ours if self.like in COMPILED_TOO else unless_compiling(ours, original.forward)
        return {"extra_repr": original.extra_repr, "forward": forward, "_guards": _Guards.of(self)}

    def find(self, module: nn.Module, source: Source) -> Any:
        return getattr(module, source) if isinstance(source, str) else source(module) if callable(source) else source

    @property
    def rows(self) -> bool:
        """Whether it goes along the last dimensions; then a sum before it can be part of it."""
        return self.like in (ours.LayerNorm, ours.RMSNorm)


class _Guards(NamedTuple):
    """What has to be as it was when the module was tried. A call looks at all of it, so it is written out."""

    own: tuple[tuple[str, Any], ...]  # attributes of the module
    children: tuple[tuple[str, type, tuple[tuple[str, Any], ...]], ...]  # modules inside, with attributes of theirs
    others: tuple[tuple[Callable[[nn.Module], Any], Any], ...]
    not_ranks: tuple[int, ...]
    not_dtypes: dict[torch.dtype, tuple[torch.dtype, ...]]  # of parameters, by that of x

    @classmethod
    def of(cls, recipe: Norm) -> _Guards | None:
        held, inside = [(path.split("."), path, value) for path, value in recipe.held], dict(recipe.children)
        own = tuple((parts[1], value) for parts, _, value in held if parts[0] == "self" and len(parts) == 2)
        of_child = [
            (parts[1:], path, value) for parts, path, value in held if parts[0] == "self" and len(parts) == 3 and parts[1] in inside
        ]
        children = tuple((name, kind, tuple((of[1], value) for of, _, value in of_child if of[0] == name)) for name, kind in inside.items())
        done = {f"self.{name}" for name, _ in own} | {path for _, path, _ in of_child}
        rest = [(path, value) for path, value in recipe.held if path not in done]
        dtypes = {x: tuple(weight for of_x, weight in recipe.not_dtypes if of_x == x) for x, _ in recipe.not_dtypes}
        guards = cls(own, children, tuple((finder(path), value) for path, value in rest), recipe.not_ranks, dtypes)
        return guards if any(guards) else None

    def broken(self, module: nn.Module, x: Tensor) -> bool:
        own, children, others, not_ranks, not_dtypes = self
        for name, value in own:
            if (found := getattr(module, name, MISSING)) is not value and not same(found, value):
                return True
        if others:
            for find, value in others:
                if (found := find(module)) is not value and not same(found, value):
                    return True
        if children:
            inside = module._modules
            for name, kind, attributes in children:
                if type(child := inside.get(name)) is not kind or hooks_of(child):  # pyright: ignore[reportArgumentType]
                    return True
                for attribute, value in attributes:
                    if (found := getattr(child, attribute, MISSING)) is not value and not same(found, value):
                        return True
            if all_watched():
                return True
        if not_ranks and x.dim() in not_ranks:
            return True
        if not_dtypes and x.dtype in not_dtypes:
            dtypes = [param.dtype for param in module._parameters.values() if param is not None] or [x.dtype]
            return any(dtype in not_dtypes[x.dtype] for dtype in dtypes)
        return False


class _Normed(nn.Module):
    """The call: one tensor, by position or by name. Anything else is for the original to answer, or to refuse."""

    _original: type[nn.Module]
    _recipe: Norm
    _guards: _Guards | None

    def _called(self, *args: Any, activation: str | None = None, residual: Tensor | None = None, **kwargs: Any) -> Any:
        if not kwargs and len(args) == 1:
            x = args[0]
        elif not args and kwargs.keys() == {self._recipe.argument}:
            x = kwargs[self._recipe.argument]
        else:
            return self._original.forward(self, *args, **kwargs)
        if not isinstance(x, Tensor):
            if not hasattr(type(x), "__torch_function__"):  # as a proxy of torch.fx has
                return self._by_original(x, activation, residual)
        elif x.is_nested or x.is_complex() or _original_is_faster(self._recipe, x) or (self._guards and self._guards.broken(self, x)):
            return self._by_original(x, activation, residual)
        activation = activation or self._recipe.activation
        if residual is None:
            return self._normalize(x, activation)
        if isinstance(x, Tensor) and isinstance(residual, Tensor) and x.shape == residual.shape and x.dtype == residual.dtype:
            return self._normalize(x, activation, residual)
        total = x + residual
        return self._normalize(total, activation), total

    def _by_original(self, x: Tensor, activation: str | None, residual: Tensor | None) -> Any:
        """As it was: for tensors that onepass does not take, or not faster."""
        total = x if residual is None else x + residual
        y = self._original.forward(self, total)
        y = y if activation is None else ACTIVATIONS[activation](y)
        return y if residual is None else (y, total)

    def _normalize(self, x: Tensor, activation: str | None, residual: Tensor | None = None) -> Any:
        raise NotImplementedError


def _original_is_faster(recipe: Norm, x: Tensor) -> bool:
    """Where the host's time decides."""
    if _compiling():
        return x.numel() < COMPILED
    trained = recipe.rows and recipe.autocast and x.is_cuda and x.requires_grad and torch.is_grad_enabled()
    return trained and x.numel() < TRAINED_ROWS


class _Running(_Normed):
    """Norms that keep running statistics: the forward of ours, of which the made class is a subclass."""

    def _normalize(self, x: Tensor, activation: str | None, residual: Tensor | None = None) -> Any:
        assert residual is None
        return self._recipe.like.forward(self, x, activation=activation)


class _Direct(_Normed):
    """All others: the function, with what the recipe finds."""

    def _normalize(self, x: Tensor, activation: str | None, residual: Tensor | None = None) -> Any:
        recipe, find = self._recipe, self._recipe.find
        weight, bias, eps = find(self, recipe.weight), find(self, recipe.bias), find(self, recipe.eps)
        if recipe.result and weight is not None and weight.dtype != x.dtype:
            return self._mixed(x, residual, weight, bias, eps, activation)
        if recipe.autocast or not torch.is_autocast_enabled(x.device.type):
            return _FUNCTIONS[recipe.like](self, x, residual, weight, bias, eps, activation)
        with torch.autocast(x.device.type, enabled=False):  # the class computes in dtypes of its own choice
            return _FUNCTIONS[recipe.like](self, x, residual, weight, bias, eps, activation)

    def _mixed(self, x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float, activation: str | None) -> Any:
        """x and parameters of two dtypes: their wider one, unless a kernel takes both and y is to be as x."""
        recipe, wide = self._recipe, torch.promote_types(x.dtype, weight.dtype)
        dtype = {"x": x.dtype, "weight": weight.dtype, "promoted": wide}[recipe.result]
        total = x if residual is None else x + residual
        x = total
        if not (dtype == x.dtype and x.dtype in HALVES and weight.dtype == torch.float32):
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


COMPILED_TOO = {ours.GroupNorm, ours.InstanceNorm1d, ours.InstanceNorm2d, ours.InstanceNorm3d}


_FUNCTIONS: dict[type[nn.Module], Callable[..., Any]] = {
    ours.LayerNorm: _layer_norm, ours.RMSNorm: _rms_norm, ours.LayerNorm2d: _layer_norm2d, ours.GroupNorm: _group_norm,
}  # fmt: skip
