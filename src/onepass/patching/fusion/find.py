"""Find the norms of a model that can be fused with a neighbour, in nn.Sequential and in the methods of other modules.

A neighbour is an activation after the norm, or a sum before it. `rewriting` finds the names of norms and neighbours in
the source. This file checks that the names belong to a norm that onepass computes, and to an activation that onepass
has. It also checks that norm and activation have no hooks and only one parent, because a fused activation is no longer
called as a module.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple

from torch import nn

from onepass.patching.class_swap import Swapped, swapped_class
from onepass.patching.function_source import resolve_global
from onepass.patching.guards import has_hooks, signature_of
from onepass.patching.recognition.activations import activation_name
from onepass.patching.swapped_norm import ACTIVATIONS, NormRecipe

from .fused_modules import BlockRecipe, SequentialRecipe, is_identity, is_onepass_without_activation
from .rewriting import Place, has_layout_calls, places


class Fusion(NamedTuple):
    """A norm and its neighbour ("SiLU", "the sum before it"). `obstacle` says why the two cannot be fused; "" if they can."""

    norm: nn.Module
    neighbour: str
    obstacle: str


@dataclass
class ModuleFusions:
    """All fusions in one module, also those with an obstacle, and the recipe for the new class of the module."""

    recipe: SequentialRecipe | BlockRecipe | None = None
    fusions: list[Fusion] = field(default_factory=list)


class ModelNorms(NamedTuple):
    """The norms of a model that onepass already computes, or will compute after `patch`."""

    recipes: dict[int, NormRecipe | None]  # by id of the norm; None for a module of onepass.nn
    registered: dict[int, int]  # the number of parents of every module, by id of the module

    def obstacle(self, norm: nn.Module, act: Any) -> str:
        """Return why a norm cannot be fused with an activation (or with a sum, if `act` is None); "" if it can."""
        recipe = self.recipes[id(norm)]
        if act is not None and not (recipe.activation is None if recipe else is_onepass_without_activation(norm)):
            return "the norm already has an activation, or saves its output"
        if has_hooks(norm):
            return "the norm has hooks, which would see the result of the activation"
        if self.registered[id(norm)] > 1:
            return "the norm is shared"
        if isinstance(act, nn.Module) and has_hooks(act):
            return "the activation has hooks"
        if isinstance(act, nn.Module) and self.registered.get(id(act), 1) > 1:
            return "the activation is shared"
        return ""


def find_fusions(module: nn.Module, norms: ModelNorms, channels_last: bool) -> ModuleFusions:
    """Return the fusions in one module, except those in its children. `channels_last` is the argument of `patch`."""
    if isinstance(module, Swapped) or "forward" in module.__dict__:
        return ModuleFusions()
    if isinstance(module, nn.Sequential) and type(module).forward is nn.Sequential.forward:
        return _find_in_sequential(module, norms)
    return _find_in_methods(module, norms, channels_last)


def _find_in_sequential(module: nn.Sequential, norms: ModelNorms) -> ModuleFusions:
    children, found, fused = list(module), ModuleFusions(), []
    for index, norm in enumerate(children):
        if id(norm) not in norms.recipes:
            continue
        next_index = index + 1
        while next_index < len(children) and is_identity(children[next_index]):
            next_index += 1
        if next_index == len(children) or not _is_activation_module(children[next_index]):
            continue
        act, name = children[next_index], activation_name(children[next_index])
        obstacle = norms.obstacle(norm, act) if name else "onepass has no such activation"
        found.fusions.append(Fusion(norm, type(act).__name__, obstacle))
        if name and not obstacle:
            fused.append((index, next_index, name, signature_of(act)))
    found.recipe = SequentialRecipe(tuple(fused)) if fused else None
    return found


def _is_activation_module(module: nn.Module) -> bool:
    return type(module).__module__ == "torch.nn.modules.activation" or activation_name(module) is not None


def _find_in_methods(module: nn.Module, norms: ModelNorms, channels_last: bool) -> ModuleFusions:
    found, methods, activations = ModuleFusions(), [], dict[tuple[str, tuple[Any, ...]], None]()
    attributes_with_norms = {path.split(".")[0] for path, child in module.named_modules() if id(child) in norms.recipes and path}
    for name, function in _methods_of(type(module)):
        names = set(inspect.unwrap(function).__code__.co_names)
        may_change_layout = channels_last and bool(names & {"contiguous", "view"})
        if not (names & attributes_with_norms or may_change_layout):
            continue
        try:
            fusions: list[Fusion] = []
            fusable = list(_find_in_method(module, function, norms, fusions))
            fused = {place: activation for place, activation, _ in fusable}
            keep_layout = may_change_layout and has_layout_calls(function)
            if fused or keep_layout:
                swapped_class(type(module), BlockRecipe(((name, tuple(fused.items()), keep_layout),), ()))
        except Exception:  # the method cannot be rewritten, so it stays as it is
            continue
        if fused or keep_layout:
            methods.append((name, tuple(fused.items()), keep_layout))
        found.fusions += fusions
        activations |= dict.fromkeys((activation, signature) for _, activation, signature in fusable)
    found.recipe = BlockRecipe(tuple(methods), tuple(activations)) if methods else None
    return found


def _find_in_method(
    module: nn.Module, function: Callable[..., Any], norms: ModelNorms, fusions: list[Fusion]
) -> Iterator[tuple[Place, str, tuple[Any, ...]]]:
    """Yield (place, name of the activation, its `signature_of`) for each norm to fuse.

    The name is "" for a sum. The signature is () for a sum, and for an activation that is a function. All norms with a
    neighbour, fusable or not, are appended to `fusions`.
    """
    for place in places(function):
        norm = _submodule(module, place.norm)
        if not isinstance(norm, nn.Module) or id(norm) not in norms.recipes or not _is_reached(module, place):
            continue
        if place.neighbour == "+":
            recipe = norms.recipes[id(norm)]
            if recipe is not None and recipe.normalizes_rows:
                obstacle = norms.obstacle(norm, None)
                fusions.append(Fusion(norm, "the sum before it", obstacle))
                if not obstacle:
                    yield place, "", ()
            continue
        if not all(path.startswith("self.") and type(_submodule(module, path[5:])) is nn.Identity for path in place.between):
            continue
        is_submodule = place.neighbour.startswith("self.")
        act = _submodule(module, place.neighbour[5:]) if is_submodule else resolve_global(function, place.neighbour)
        name = activation_name(act) if isinstance(act, nn.Module) or _may_be_activation(act) else None
        if name is None:
            continue
        obstacle = norms.obstacle(norm, act)
        fusions.append(Fusion(norm, type(act).__name__ if is_submodule else str(getattr(act, "__name__", "")), obstacle))
        if not obstacle:
            yield place, name, signature_of(act) if isinstance(act, nn.Module) else ()


def _is_reached(module: nn.Module, place: Place) -> bool:
    """Return whether a place is reached: it is not in a branch that the module never takes, such as that of `if self.norm_first`.

    Only attributes with the values True and False are looked at. If one changes later, its other branch runs as it was written.
    """
    return not any(module.__dict__.get(name) is (not value) for name, value in place.flags)


def _submodule(module: nn.Module, path: str) -> nn.Module | None:
    """Return the child module at a path such as "block.norm", or None. Properties do not count: their value may change."""
    value: nn.Module | None = module
    for name in path.split("."):
        value = None if value is None else value._modules.get(name)
    return value


def _may_be_activation(function: Any) -> bool:
    """Return whether a function is named like an activation. Other functions are not tried, since a call may do anything."""
    name = getattr(function, "__name__", "").lower()
    return callable(function) and any(word in name for word in (*ACTIVATIONS, "swish", "nonlinearity"))


@cache
def _methods_of(cls: type[nn.Module]) -> list[tuple[str, Callable[..., Any]]]:
    """Return (name, function) for the methods of a class, without those of nn.Module and those whose names start with "__"."""
    names = dict.fromkeys(name for base in cls.__mro__ if base not in (nn.Module, object) for name in vars(base))
    found = [(name, inspect.getattr_static(cls, name)) for name in names if not name.startswith("__")]
    return [(name, function) for name, function in found if inspect.isfunction(function) and inspect.isfunction(inspect.unwrap(function))]
