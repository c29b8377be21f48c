"""The new classes of modules that call a norm and its neighbour as one.

`SequentialRecipe` is for nn.Sequential, `BlockRecipe` for modules with rewritten methods. Each call checks that the
modules have not changed and have no hooks. If they have, it calls them one by one, as the original class does.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from onepass.patching.class_swap import Swapped
from onepass.patching.guards import has_global_hooks, has_hooks, signature_of
from onepass.patching.swapped_norm import ACTIVATIONS, ONEPASS_CLASSES, NormRecipe, original_when_compiling

from .rewriting import Place, rewrite

_compiling = torch.compiler.is_dynamo_compiling


@dataclass(frozen=True)
class SequentialRecipe:
    """nn.Sequential with fused activations."""

    fused: tuple[tuple[int, int, str, tuple[Any, ...]], ...]  # positions of norm and activation, the activation's name and `signature_of`

    def bases(self) -> tuple[type, ...]:
        return (_FusedSequential,)

    def namespace(self, original: type[nn.Module]) -> dict[str, Any]:
        return {"forward": original_when_compiling(_FusedSequential._onepass_forward, original.forward)}


class _FusedSequential(nn.Sequential):
    _recipe: SequentialRecipe

    def _onepass_forward(self, input: Any) -> Any:
        if has_global_hooks():
            return nn.Sequential.forward(self, input)
        modules, index = list(self), 0
        fused = {norm: (act, name, signature) for norm, act, name, signature in self._recipe.fused}
        while index < len(modules):
            act, name, signature = fused.get(index, (index, "", ()))
            unchanged = name and act < len(modules) and signature_of(modules[act]) == signature
            unchanged = unchanged and all(map(is_identity, modules[index + 1 : act]))
            if unchanged and _can_activate_now(modules[index]) and not has_hooks(modules[act]):
                input, index = modules[index](input, activation=name), act + 1
            else:
                input, index = modules[index](input), index + 1
        return input


def is_identity(module: Any) -> bool:
    """Whether a module returns its input, and has no hooks."""
    never_drops = isinstance(module, nn.modules.dropout._DropoutNd) and module.p == 0
    return (never_drops or type(module) is nn.Identity) and not has_hooks(module)


def _can_activate_now(norm: nn.Module) -> bool:
    """Whether a norm can apply an activation in this call: it has none of its own, and no hooks."""
    recipe = getattr(norm, "_recipe", None)
    can_activate = recipe.activation is None if isinstance(recipe, NormRecipe) else is_onepass_without_activation(norm)
    return can_activate and not has_hooks(norm)


def is_onepass_without_activation(module: Any) -> bool:
    """Whether a module of onepass.nn can apply another activation."""
    return type(module) in ONEPASS_CLASSES and module.activation is None and module.save == "x"


@dataclass(frozen=True)
class BlockRecipe:
    """A module with rewritten methods."""

    methods: tuple[tuple[str, tuple[tuple[Place, str], ...], bool], ...]  # name, and the arguments of `rewrite`
    activations: tuple[tuple[str, tuple[Any, ...]], ...]  # the name of each activation, and its `signature_of`

    def bases(self) -> tuple[type, ...]:
        return (_FusedBlock,)

    def namespace(self, original: type[nn.Module]) -> dict[str, Any]:
        """Under torch.compile the original methods run, and a graph pass fuses. Methods that keep layouts stay rewritten."""
        methods = {}
        for name, fused, keep_layout in self.methods:
            before = getattr(original, name)
            after = rewrite(before, dict(fused), keep_layout)
            methods[name] = after if keep_layout else original_when_compiling(after, before)
        return methods


class _FusedBlock(nn.Module):
    """The methods that rewritten code calls."""

    _recipe: BlockRecipe

    def _onepass_act_norm(self, norm: Any, act: Any, name: str, x: Any) -> Any:
        """`act(norm(x))`. `act` is None if the source calls a function."""
        unchanged = act is None or ((name, signature_of(act)) in self._recipe.activations and not has_hooks(act))
        if not _compiling() and unchanged and _can_activate_now(norm) and not has_global_hooks():
            return norm(x, activation=name)
        return ACTIVATIONS[name](norm(x)) if act is None else act(norm(x))

    def _onepass_add_norm(self, norm: Any, x: Any, residual: Any) -> tuple[Any, Any]:
        """`norm(x + residual)`, and the sum."""
        if not _compiling() and isinstance(norm, Swapped) and not has_hooks(norm) and not has_global_hooks():
            return norm(x, residual=residual)
        total = x + residual
        return norm(total), total

    def _onepass_view(self, x: Any, *size: Any) -> Any:
        """`x.view(size)`, which also works for a channels-last x."""
        as_size = isinstance(x, Tensor) and x.dim() in (4, 5) and not isinstance(size[0], torch.dtype)
        return x.reshape(*size) if as_size else x.view(*size)

    def _onepass_contiguous(self, x: Any) -> Any:
        """`x.contiguous()`, except that a channels-last x stays channels-last."""
        format = {4: torch.channels_last, 5: torch.channels_last_3d}.get(x.dim()) if isinstance(x, Tensor) else None
        return x if format is not None and x.is_contiguous(memory_format=format) else x.contiguous()
