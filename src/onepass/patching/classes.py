"""Modules that change their class, and nothing else.

A patched module is the same object with the same attributes, so that whoever holds it or its parameters (optimizers, hooks, wrappers,
tied weights, state_dicts) notices nothing. Its class is made here: a subclass of the one it had, and named like it, from a recipe, a frozen
value that says what is different. Pickles and copies keep that class and the recipe, not the made class. Which recipes there are is not
known here.
"""

from __future__ import annotations

import warnings
from functools import cache
from typing import Any, ClassVar, Protocol

from torch import nn


class Recipe(Protocol):
    """A frozen, hashable value."""

    def namespace(self, original: type[nn.Module]) -> dict[str, Any]:
        """What the made class has before `original`: its forward, and what that needs."""
        ...

    def bases(self) -> tuple[type, ...]: ...


class Swapped(nn.Module):
    """The mark of all made classes."""

    _original: ClassVar[type[nn.Module]]
    _recipe: ClassVar[Any]

    def __reduce_ex__(self, protocol: Any) -> Any:
        _, _, *state = super().__reduce_ex__(protocol)
        return _remake, (self._original, self._recipe), *state

    def _get_name(self) -> str:
        return f"onepass.{self._original.__name__}"


def made(original: type[nn.Module], recipe: Recipe) -> type[Swapped]:
    """The class for a recipe: always the same one, as torch.compile and `type(a) is type(b)` expect."""
    return _made(original, recipe, original.forward)


@cache
def _made(original: type[nn.Module], recipe: Recipe, forward: Any) -> type[Swapped]:
    namespace = {"_original": original, "_recipe": recipe, "__module__": original.__module__, "__doc__": original.__doc__}
    made = type(original.__name__, (Swapped, *recipe.bases(), original), namespace | recipe.namespace(original))
    made.__qualname__ = original.__qualname__
    return made


def swap(module: nn.Module, recipe: Recipe) -> None:
    module.__class__ = made(type(module), recipe)


def restore(module: nn.Module) -> None:
    """What `swap` did, undone; any other module is left as it is."""
    if isinstance(module, Swapped):
        module.__class__ = module._original  # pyright: ignore[reportAttributeAccessIssue]


def wrapped_since(module: nn.Module) -> bool:
    """Whether someone else has changed the class after `swap`, as fully_shard and parametrizations do."""
    return isinstance(module, Swapped) and "_recipe" not in vars(type(module))


def _remake(original: type[nn.Module], recipe: Recipe) -> nn.Module:
    try:
        return object.__new__(made(original, recipe))
    except Exception as error:
        warnings.warn(f"a {original.__name__} was patched by onepass and is not any more: {error}", stacklevel=2)
        return object.__new__(original)
