"""Guards: the checks that each call of a patched norm makes. If one fails, the norm runs its original forward.

Most checks compare a value that the original forward reads with its snapshot from the time of `patch`. The others look
at child modules, hooks, the rank of x, and dtypes. A plain value is a number, a string and the like, or a small
collection of these. A snapshot is a hashable copy of a plain value.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from enum import Enum
from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

MISSING = "no such attribute"  # stands for the value of an attribute that does not exist


_PLAIN_TYPES = (
    int, float, complex, str, bytes, type(None), type(...), Enum, torch.dtype, torch.device, torch.layout, torch.memory_format, slice,
)  # fmt: skip


def has_hooks(module: nn.Module) -> bool:
    """Return whether a module has forward or backward hooks of its own."""
    own = module.__dict__
    return bool(own["_forward_hooks"] or own["_forward_pre_hooks"] or own["_backward_hooks"] or own["_backward_pre_hooks"])


# Returns whether torch has global hooks, which run in the calls of all modules. If it has, nothing may be fused.
has_global_hooks: Callable[[], Any] = _has_any_global_hook


COMMON_ATTRIBUTES = frozenset((*vars(nn.Module()), "training"))  # attributes that every nn.Module has


def is_plain(value: Any) -> bool:
    """Return whether a value is a number, a string and the like, or a collection of fewer than 100 such values."""
    if isinstance(value, (list, tuple, set, frozenset, dict)):
        return len(value) < 100 and all(map(is_plain, [*value, *value.values()] if isinstance(value, dict) else value))
    return isinstance(value, _PLAIN_TYPES)


def snapshot(value: Any) -> Any:
    """Return a hashable copy of a plain value, such as ("list", 1, 2) for [1, 2]."""
    if isinstance(value, tuple):
        copied = tuple(map(snapshot, value))
        return value if all(a is b for a, b in zip(copied, value)) else ("tuple", *copied)
    if isinstance(value, (list, set, frozenset, dict)):
        return type(value).__name__, *((key, snapshot(value[key])) if isinstance(value, dict) else snapshot(key) for key in value)
    return (slice, value.start, value.stop, value.step) if isinstance(value, slice) else value


def signature_of(act: nn.Module) -> tuple[Any, ...]:
    """Return the class and the plain attributes of an activation, such as (nn.GELU, ("approximate", "none")).

    If this differs from what it was during `patch`, the activation has changed. `inplace` is left out.
    """
    cls = type(act)
    if cls is nn.SiLU or cls is nn.ReLU:  # a shortcut: their only attribute is `inplace`
        return (cls,)
    own = act.__dict__.items()
    return cls, *[(k, snapshot(v)) for k, v in own if k not in COMMON_ATTRIBUTES and k != "inplace" and is_plain(v)]


def matches(value: Any, expected: Any) -> bool:
    """Return whether a value equals the snapshot `expected`."""
    return value is expected or (
        is_plain(value) and (type(value) is type(expected) or not isinstance(value, (int, float))) and snapshot(value) == expected
    )


def getter(path: str) -> Callable[[nn.Module], Any]:
    """Return a function that takes a module and returns the value at `path`.

    The path starts at the module ("self.act.slope"), or at a global variable ("package.module:NAME.attribute").
    """
    place, _, name = path.rpartition(":")
    if place:
        first, *rest = name.split(".")
        names = vars(sys.modules.get(place) or import_module(place))
        return lambda _: _get_nested(names.get(first, MISSING), rest)
    _, first, *rest = path.split(".")

    def get(module: nn.Module) -> Any:
        value = getattr(module, first, MISSING)
        return _get_nested(value, rest) if rest else value

    return get


def _get_nested(value: Any, names: list[str]) -> Any:
    for name in names:
        value = getattr(value, name, MISSING)
    return value


def all_match(module: nn.Module, guarded: dict[str, Any]) -> bool:
    """Return whether all guarded values still equal their snapshots. `guarded` maps paths, such as "self.eps", to snapshots."""
    return all(matches(getter(path)(module), value) for path, value in guarded.items())


class Guards(NamedTuple):
    """The checks of one patched norm. They are grouped by where a value is stored, because that makes them faster."""

    own: tuple[tuple[str, Any], ...]  # attributes of the norm: name and snapshot
    children: tuple[tuple[str, type, tuple[tuple[str, Any], ...]], ...]  # child modules: name, class, attributes with snapshots
    others: tuple[tuple[Callable[[nn.Module], Any], Any], ...]  # other values: the `getter` and the snapshot of each
    unsupported_ranks: tuple[int, ...]  # ranks of x for which the original forward runs
    unsupported_dtypes: dict[torch.dtype, tuple[torch.dtype, ...]]  # by dtype of x: dtypes of parameters for which it runs

    @classmethod
    def make(
        cls,
        guarded: tuple[tuple[str, Any], ...],
        child_classes: tuple[tuple[str, type], ...],
        unsupported_ranks: tuple[int, ...],
        unsupported_dtypes: tuple[tuple[torch.dtype, torch.dtype], ...],
    ) -> Guards | None:
        """Build the guards from fields of a `NormRecipe` (swapped_norm.py). Return None if there is nothing to check."""
        split, classes = [(path.split("."), path, value) for path, value in guarded], dict(child_classes)
        own = tuple((parts[1], value) for parts, _, value in split if parts[0] == "self" and len(parts) == 2)
        of_children = [
            (parts[1:], path, value) for parts, path, value in split if parts[0] == "self" and len(parts) == 3 and parts[1] in classes
        ]
        children = tuple(
            (name, kind, tuple((parts[1], value) for parts, _, value in of_children if parts[0] == name)) for name, kind in classes.items()
        )
        done = {f"self.{name}" for name, _ in own} | {path for _, path, _ in of_children}
        others = tuple((getter(path), value) for path, value in guarded if path not in done)
        dtypes = {x: tuple(weight for of_x, weight in unsupported_dtypes if of_x == x) for x, _ in unsupported_dtypes}
        guards = cls(own, children, others, unsupported_ranks, dtypes)
        return guards if any(guards) else None

    def fail(self, module: nn.Module, x: Tensor) -> bool:
        """Return whether any check fails. `is` comes before `matches`: it is faster, and this runs in every call of the norm."""
        own, children, others, unsupported_ranks, unsupported_dtypes = self
        for name, expected in own:
            if (value := getattr(module, name, MISSING)) is not expected and not matches(value, expected):
                return True
        if others:
            for get, expected in others:
                if (value := get(module)) is not expected and not matches(value, expected):
                    return True
        if children:
            modules = module._modules
            for name, kind, attributes in children:
                if type(child := modules.get(name)) is not kind or has_hooks(child):  # pyright: ignore[reportArgumentType]
                    return True
                for attribute, expected in attributes:
                    if (value := getattr(child, attribute, MISSING)) is not expected and not matches(value, expected):
                        return True
            if has_global_hooks():
                return True
        if unsupported_ranks and x.dim() in unsupported_ranks:
            return True
        if unsupported_dtypes and x.dtype in unsupported_dtypes:
            dtypes = [param.dtype for param in module._parameters.values() if param is not None] or [x.dtype]
            return any(dtype in unsupported_dtypes[x.dtype] for dtype in dtypes)
        return False
