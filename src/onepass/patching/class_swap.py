"""Change the class of a module, and nothing else.

A patched module is the same object with the same attributes. So optimizers, hooks, wrappers, tied weights and
state_dicts keep working. Its new class is a subclass of its original class, with the same name. A recipe says what the
new class does differently. Pickles and copies of a module store the original class and the recipe, from which the new
class is built again. Recipes are defined in swapped_norm.py, channels_last.py and fusion/fused_modules.py.
"""

from __future__ import annotations

import warnings
from functools import cache
from typing import Any, ClassVar, Protocol

from torch import nn

from onepass.functional.compiled import install_when_imported


class Recipe(Protocol):
    """How a new class differs from the original class. Recipes must be hashable."""

    def namespace(self, original: type[nn.Module]) -> dict[str, Any]:
        """Return the attributes of the new class that override those of `original`, such as `forward`."""
        ...

    def bases(self) -> tuple[type, ...]:
        """Return the base classes of the new class that come before `original`."""
        ...


class Swapped(nn.Module):
    """Base class of all new classes: `isinstance(module, Swapped)` tells whether a module is patched."""

    _original_class: ClassVar[type[nn.Module]]
    _recipe: ClassVar[Any]

    def __reduce_ex__(self, protocol: Any) -> Any:
        _, _, *state = super().__reduce_ex__(protocol)
        return _unpickle, (self._original_class, self._recipe), *state

    def _get_name(self) -> str:
        return f"onepass.{self._original_class.__name__}"


def swapped_class(original: type[nn.Module], recipe: Recipe) -> type[Swapped]:
    """Return the new class for an original class and a recipe.

    Equal arguments give the same class object, because torch.compile and `type(a) is type(b)` need that.
    """
    return _make_class(original, recipe, original.forward)


@cache
def _make_class(original: type[nn.Module], recipe: Recipe, forward: Any) -> type[Swapped]:
    """Build the class for `swapped_class`. `forward` is only a cache key: a replaced `original.forward` needs a new class."""
    install_when_imported()  # the graph pass for torch.compile. Here, because an unpickled model does not pass `patch`
    namespace = {"_original_class": original, "_recipe": recipe, "__module__": original.__module__, "__doc__": original.__doc__}
    cls = type(original.__name__, (Swapped, *recipe.bases(), original), namespace | recipe.namespace(original))
    cls.__qualname__ = original.__qualname__
    return cls


def swap_class(module: nn.Module, recipe: Recipe) -> None:
    module.__class__ = swapped_class(type(module), recipe)


def restore_class(module: nn.Module) -> None:
    """Undo `swap_class`. A module that is not patched stays as it is."""
    if isinstance(module, Swapped):
        module.__class__ = module._original_class  # pyright: ignore[reportAttributeAccessIssue]


def class_changed_after_swap(module: nn.Module) -> bool:
    """Return whether a patched module has since got another class, for example by fully_shard or a parametrization."""
    return isinstance(module, Swapped) and "_recipe" not in vars(type(module))


def _unpickle(original: type[nn.Module], recipe: Recipe) -> nn.Module:
    try:
        return object.__new__(swapped_class(original, recipe))
    except Exception as error:
        warnings.warn(f"a {original.__name__} that onepass had patched was loaded unpatched: {error}", stacklevel=2)
        return object.__new__(original)
