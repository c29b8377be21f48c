"""What may change under a patched module, and is looked at in each call: values its forward read, modules inside it, hooks."""

from __future__ import annotations

import sys
from collections.abc import Callable
from enum import Enum
from importlib import import_module
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import _has_any_global_hook

MISSING = "no such attribute"  # what is held of one that is not there


def hooks_of(module: nn.Module) -> bool:
    """Whether someone watches what goes into a module, or comes out."""
    own = module.__dict__
    return bool(own["_forward_hooks"] or own["_forward_pre_hooks"] or own["_backward_hooks"] or own["_backward_pre_hooks"])


# Whether someone watches every module: then each has to be called.
all_watched: Callable[[], Any] = _has_any_global_hook


def is_plain(value: Any) -> bool:
    """A value that can be written down, and compared with what is there later."""
    if isinstance(value, (list, tuple, set, frozenset, dict)):
        return len(value) < 100 and all(map(is_plain, [*value, *value.values()] if isinstance(value, dict) else value))
    plain = (
        int,
        float,
        complex,
        str,
        bytes,
        type(None),
        type(...),
        Enum,
        torch.dtype,
        torch.device,
        torch.layout,
        torch.memory_format,
        slice,
    )
    return isinstance(value, plain)


def snapshot(value: Any) -> Any:
    """A plain value as it is now, hashable."""
    if isinstance(value, (list, set, frozenset, dict)):
        return type(value).__name__, *((key, snapshot(value[key])) if isinstance(value, dict) else snapshot(key) for key in value)
    return (slice, value.start, value.stop, value.step) if isinstance(value, slice) else value


def same(found: Any, held: Any) -> bool:
    """Whether a value is what it was when it was taken down."""
    return found is held or (
        is_plain(found) and (type(found) is type(held) or not isinstance(found, (int, float))) and snapshot(found) == held
    )


def finder(path: str) -> Callable[[nn.Module], Any]:
    """Where a value lies, as a function of the module: "self.act.slope", or of none: "package.module:NAME.attribute"."""
    place, _, name = path.rpartition(":")
    if place:
        first, *rest = name.split(".")
        names = vars(sys.modules.get(place) or import_module(place))
        return lambda _: _follow(names.get(first, MISSING), rest)
    _, first, *rest = path.split(".")

    def find(module: nn.Module) -> Any:
        value = getattr(module, first, MISSING)
        return _follow(value, rest) if rest else value

    return find


def _follow(value: Any, names: list[str]) -> Any:
    for name in names:
        value = getattr(value, name, MISSING)
    return value


def unchanged(module: nn.Module, held: dict[str, Any]) -> bool:
    """Whether all that was read is as it was."""
    return all(same(finder(path)(module), value) for path, value in held.items())
