"""What can be fused in a model: norms with what stands beside them, in nn.Sequential and in the methods of any other module.

Here it is decided whether the modules behind the names in `source` are a norm of ours and an activation it can apply, and whether anyone
would notice that the activation is not called any more.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from onepass import nn as ours

from . import source
from .classes import Swapped, made
from .norms import ACTIVATIONS, Norm, unless_compiling
from .recognition import activation_of
from .source import Place
from .state import all_watched, hooks_of

_compiling = torch.compiler.is_dynamo_compiling


@dataclass(frozen=True)
class Sequence:
    """nn.Sequential: norms and the activations they apply, by position."""

    fused: tuple[tuple[int, int, str, type], ...]  # norm, activation, its name and its class

    def bases(self) -> tuple[type, ...]:
        return (_Sequence,)

    def namespace(self, original: type[nn.Module]) -> dict[str, Any]:
        return {"forward": unless_compiling(_Sequence._fused, original.forward)}


class _Sequence(nn.Sequential):
    _recipe: Sequence

    def _fused(self, input: Any) -> Any:
        if all_watched():
            return nn.Sequential.forward(self, input)
        modules, at = list(self), 0
        fused = {norm: (act, name, cls) for norm, act, name, cls in self._recipe.fused}
        while at < len(modules):
            act, name, cls = fused.get(at, (at, "", object))
            still = name and act < len(modules) and type(modules[act]) is cls and all(map(_passes, modules[at + 1 : act]))
            if still and _fusable(modules[at]) and not hooks_of(modules[act]):
                input, at = modules[at](input, activation=name), act + 1
            else:
                input, at = modules[at](input), at + 1
        return input


def _fusable(norm: nn.Module) -> bool:
    """Whether a norm applies activations, has none, and nobody watches it."""
    recipe = getattr(norm, "_recipe", None)
    free = recipe.activation is None if isinstance(recipe, Norm) else _ours(norm)
    return free and not hooks_of(norm)


def _ours(module: Any) -> bool:
    """A module of onepass.nn that can be given an activation."""
    return type(module).__module__ == ours.__name__ and module.activation is None and module.save == "x"


@dataclass(frozen=True)
class Block:
    """A module with methods written anew: for each its name, the places fused with their activations, and whether layouts are kept."""

    methods: tuple[tuple[str, tuple[tuple[Place, str], ...], bool], ...]
    classes: tuple[tuple[str, type], ...]  # of activations, by name

    def bases(self) -> tuple[type, ...]:
        return (_Block,)

    def namespace(self, original: type[nn.Module]) -> dict[str, Any]:
        """Compiled, a method is as it was unless it must keep layouts: there `graph.merge` does what is done here."""
        made = {}
        for name, fused, dense in self.methods:
            before = getattr(original, name)
            after = source.rewritten(before, dict(fused), dense)
            made[name] = after if dense else unless_compiling(after, before)
        return made


class _Block(nn.Module):
    """What methods written anew call. Modules may have been exchanged since, or hooks added: then all is as it was."""

    _recipe: Block

    def _activated(self, norm: Any, act: Any, name: str, x: Any) -> Any:
        same = act is None or ((name, type(act)) in self._recipe.classes and not hooks_of(act))
        if not _compiling() and same and _fusable(norm) and not all_watched():
            return norm(x, activation=name)
        return ACTIVATIONS[name](norm(x)) if act is None else act(norm(x))

    def _added(self, norm: Any, x: Any, residual: Any) -> tuple[Any, Any]:
        if not _compiling() and isinstance(norm, Swapped) and not hooks_of(norm) and not all_watched():
            return norm(x, residual=residual)
        total = x + residual
        return norm(total), total

    def _view(self, x: Any, *size: Any) -> Any:
        """`x.view(size)`, also where channels are last."""
        as_size = isinstance(x, Tensor) and x.dim() in (4, 5) and not isinstance(size[0], torch.dtype)
        return x.reshape(*size) if as_size else x.view(*size)

    def _dense(self, x: Any) -> Any:
        """`x.contiguous()`, where channels that are last stay so."""
        format = {4: torch.channels_last, 5: torch.channels_last_3d}.get(x.dim()) if isinstance(x, Tensor) else None
        return x if format is not None and x.is_contiguous(memory_format=format) else x.contiguous()


class Fusion(NamedTuple):
    """A norm, and what it is fused with; or why not."""

    norm: nn.Module
    what: str
    obstacle: str


@dataclass
class Fused:
    """What was found in one module."""

    recipe: Sequence | Block | None = None
    fusions: list[Fusion] = field(default_factory=list)


class Norms(NamedTuple):
    """What is known of a model: the recipes of the norms that are ours, or will be, and how often each module is registered."""

    recipes: dict[int, Norm | None]  # by id; None for a module of onepass.nn
    registered: dict[int, int]

    def obstacle(self, norm: nn.Module, act: Any) -> str:
        recipe = self.recipes[id(norm)]
        if act is not None and not (recipe.activation is None if recipe else _ours(norm)):
            return "the norm has an activation of its own, or saves its output"
        if hooks_of(norm):
            return "the norm has hooks, which would see the activation's result"
        if self.registered[id(norm)] > 1:
            return "the norm is shared"
        if isinstance(act, nn.Module) and hooks_of(act):
            return "the activation has hooks"
        if isinstance(act, nn.Module) and self.registered.get(id(act), 1) > 1:
            return "the activation is shared"
        return ""


def fuse(module: nn.Module, norms: Norms, channels_last: bool) -> Fused:
    """How a module is to be changed, and what is to be said of its norms."""
    if isinstance(module, Swapped) or "forward" in module.__dict__:
        return Fused()
    if isinstance(module, nn.Sequential) and type(module).forward is nn.Sequential.forward:
        return _sequential(module, norms)
    return _methods(module, norms, channels_last)


def _sequential(module: nn.Sequential, norms: Norms) -> Fused:
    children, found, fused = list(module), Fused(), []
    for at, norm in enumerate(children):
        if id(norm) not in norms.recipes:
            continue
        then = at + 1
        while then < len(children) and _passes(children[then]):
            then += 1
        if then == len(children) or not _acts(children[then]):
            continue
        act, name = children[then], activation_of(children[then])
        obstacle = norms.obstacle(norm, act) if name else "no norm applies it"
        found.fusions.append(Fusion(norm, type(act).__name__, obstacle))
        if name and not obstacle:
            fused.append((at, then, name, type(act)))
    found.recipe = Sequence(tuple(fused)) if fused else None
    return found


def _passes(module: Any) -> bool:
    """What hands its input on."""
    never = isinstance(module, nn.modules.dropout._DropoutNd) and module.p == 0
    return (never or type(module) is nn.Identity) and not hooks_of(module)


def _acts(module: nn.Module) -> bool:
    return type(module).__module__ == "torch.nn.modules.activation" or activation_of(module) is not None


def _methods(module: nn.Module, norms: Norms, channels_last: bool) -> Fused:
    found, methods, classes = Fused(), [], dict[tuple[str, type], None]()
    near = {path.split(".")[0] for path, child in module.named_modules() if id(child) in norms.recipes and path}
    for name, function in _functions(type(module)):
        names = set(inspect.unwrap(function).__code__.co_names)
        layouts = channels_last and bool(names & {"contiguous", "view"})
        if not (names & near or layouts):
            continue
        try:
            said: list[Fusion] = []
            here = list(_in_method(module, function, norms, said))
            fused = {place: activation for place, activation, _ in here}
            dense = layouts and source.keeps_layout(function)
            if fused or dense:
                made(type(module), Block(((name, tuple(fused.items()), dense),), ()))
        except Exception:  # whatever stands there, it can stay
            continue
        if fused or dense:
            methods.append((name, tuple(fused.items()), dense))
        found.fusions += said
        classes |= dict.fromkeys((activation, cls) for _, activation, cls in here)
    found.recipe = Block(tuple(methods), tuple(classes)) if methods else None
    return found


def _in_method(module: nn.Module, function: Callable[..., Any], norms: Norms, said: list[Fusion]) -> Iterator[tuple[Place, str, type]]:
    for place in source.places(function):
        norm = _at(module, place.norm)
        if not isinstance(norm, nn.Module) or id(norm) not in norms.recipes:
            continue
        if place.beside == "+":
            recipe = norms.recipes[id(norm)]
            if recipe is not None and recipe.rows:
                obstacle = norms.obstacle(norm, None)
                said.append(Fusion(norm, "the sum before it", obstacle))
                if not obstacle:
                    yield place, "", object
            continue
        if not all(path.startswith("self.") and type(_at(module, path[5:])) is nn.Identity for path in place.through):
            continue
        inside = place.beside.startswith("self.")
        act = _at(module, place.beside[5:]) if inside else source.resolve(function, place.beside)
        name = activation_of(act) if isinstance(act, nn.Module) or _is_activation(act) else None
        if name is None:
            continue
        obstacle = norms.obstacle(norm, act)
        said.append(Fusion(norm, type(act).__name__ if inside else str(getattr(act, "__name__", "")), obstacle))
        if not obstacle:
            yield place, name, type(act)


def _at(module: nn.Module, path: str) -> nn.Module | None:
    """The module that is registered there; what a property returns may be another one each time."""
    value: nn.Module | None = module
    for name in path.split("."):
        value = None if value is None else value._modules.get(name)
    return value


def _is_activation(function: Any) -> bool:
    """Functions called what an activation is called may be tried; others may do anything."""
    name = getattr(function, "__name__", "").lower()
    return callable(function) and any(word in name for word in ("silu", "swish", "relu", "gelu", "nonlinearity"))


@cache
def _functions(cls: type[nn.Module]) -> list[tuple[str, Callable[..., Any]]]:
    """The methods of a class, those of nn.Module left out."""
    names = dict.fromkeys(name for base in cls.__mro__ if base not in (nn.Module, object) for name in vars(base))
    found = [(name, inspect.getattr_static(cls, name)) for name in names if not name.startswith("__")]
    return [(name, function) for name, function in found if inspect.isfunction(function) and inspect.isfunction(inspect.unwrap(function))]
