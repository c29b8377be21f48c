"""The new classes of modules that compute a norm and its neighbour (an activation or a sum) in one call.

`SequentialRecipe` is for nn.Sequential, `BlockRecipe` for modules with rewritten methods. Each call checks that norm and
activation have not changed and have no hooks. Otherwise they are called one by one, as in the original class.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from onepass.patching.class_swap import Swapped
from onepass.patching.guards import has_global_hooks, has_hooks, signature_of
from onepass.patching.swapped_norm import ACTIVATIONS, ONEPASS_CLASSES, NormRecipe
from onepass.patching.under_compile import compiling, current_compiler, fx, original_when_compiling

from .rewriting import Place, rewrite


@dataclass(frozen=True)
class SequentialRecipe:
    """The recipe of an nn.Sequential whose norms also compute the activations after them."""

    # For each pair: the position of the norm, the position of the activation, the activation's name, its `signature_of`.
    fused: tuple[tuple[int, int, str, tuple[Any, ...]], ...]

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
    """Return whether a module only returns its input (nn.Identity, or dropout with p=0), and has no hooks."""
    never_drops = isinstance(module, nn.modules.dropout._DropoutNd) and module.p == 0
    return (never_drops or type(module) is nn.Identity) and not has_hooks(module)


def _can_activate_now(norm: nn.Module) -> bool:
    """Return whether a norm can also compute an activation now: it has no activation and no hooks, and its forward is ours."""
    recipe = getattr(norm, "_recipe", None)
    can_activate = recipe.activation is None if isinstance(recipe, NormRecipe) else is_onepass_without_activation(norm)
    return can_activate and _runs_own_class(norm)


def _runs_own_class(norm: nn.Module) -> bool:
    """Return whether a call of a norm runs the forward of its class, and no hooks.

    A forward that was set on the module may not know our arguments `activation` and `residual`.
    """
    own = norm.__dict__  # `has_hooks` is written out here, because fused models call this function often
    hooks = own["_forward_hooks"] or own["_forward_pre_hooks"] or own["_backward_hooks"] or own["_backward_pre_hooks"]
    return not hooks and "forward" not in own


def is_onepass_without_activation(module: Any) -> bool:
    """Return whether a module is a norm of onepass.nn to which an activation can be added."""
    return type(module) in ONEPASS_CLASSES and module.activation is None and module.save == "x"


@dataclass(frozen=True)
class BlockRecipe:
    """The recipe of a module whose methods are rewritten."""

    methods: tuple[tuple[str, tuple[tuple[Place, str], ...], bool], ...]  # name, `fused` and `keep_layout` (see `rewrite`)
    activations: tuple[tuple[str, tuple[Any, ...]], ...]  # (name, `signature_of`) of each fused activation

    def bases(self) -> tuple[type, ...]:
        return (_FusedBlock,)

    def namespace(self, original: type[nn.Module]) -> dict[str, Any]:
        """Return the rewritten methods.

        Under torch.compile the original methods run, and a graph pass fuses norms with their neighbours
        (dispatch/compiled.py). Methods with `keep_layout` are an exception: they run rewritten there, too.
        """
        methods = {}
        for name, fused, keep_layout in self.methods:
            before = getattr(original, name)
            after = rewrite(before, dict(fused), keep_layout)
            methods[name] = after if keep_layout else original_when_compiling(after, before)
        return methods


class _FusedBlock(nn.Module):
    """Base class of modules with rewritten methods. It has the methods that the rewritten code calls."""

    _recipe: BlockRecipe

    def _onepass_act_norm(self, norm: Any, act: Any, name: str, x: Any) -> Any:
        """Return `act(norm(x))`. If the source calls a function such as F.silu, `act` is None and `name` is "silu"."""
        unchanged = act is None or ((name, signature_of(act)) in self._recipe.activations and not has_hooks(act))
        if not compiling() and unchanged and _can_activate_now(norm) and not has_global_hooks():
            return norm(x, activation=name)
        return ACTIVATIONS[name](norm(x)) if act is None else act(norm(x))

    def _onepass_add_norm(self, norm: Any, x: Any, residual: Any) -> tuple[Any, Any]:
        """Return `norm(x + residual)` and `x + residual`."""
        if not compiling() and isinstance(norm, Swapped) and _runs_own_class(norm) and not has_global_hooks():
            # Without hooks, a call of the module does no more than this, and takes longer.
            made: Any = type(norm)
            usual = type(x) is type(residual) is Tensor and made.forward is made._made_forward and not norm._compiled_call_impl
            if usual and current_compiler() is None and not fx["_is_fx_tracing_flag"]:
                return made._onepass_add(norm, x, residual)
            return (norm if norm._compiled_call_impl else norm.forward)(x, residual=residual)
        total = x + residual
        return norm(total), total

    def _onepass_view(self, x: Any, *size: Any) -> Any:
        """Return `x.view(size)`; for 4-D and 5-D tensors `x.reshape(size)`, which also works if x is channels-last."""
        as_size = isinstance(x, Tensor) and x.dim() in (4, 5) and not isinstance(size[0], torch.dtype)
        return x.reshape(*size) if as_size else x.view(*size)

    def _onepass_contiguous(self, x: Any) -> Any:
        """Return `x.contiguous()`, or x itself if it is channels-last."""
        format = {4: torch.channels_last, 5: torch.channels_last_3d}.get(x.dim()) if isinstance(x, Tensor) else None
        return x if format is not None and x.is_contiguous(memory_format=format) else x.contiguous()
