"""What the analysis knows of a value, and the result of an analysis."""

from __future__ import annotations

import types
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from onepass.patching.guards import is_plain, snapshot


class NotAnalyzable(Exception):
    """Raised if neither analysis nor trials can tell what a forward does. The report prints the message."""


class Known(NamedTuple):
    """The value itself: a constant, an attribute, a function."""

    value: Any
    path: str = ""  # where it is stored: "self.eps", "package.module:NAME"; "" if it cannot be found again


class Unknown(NamedTuple):
    """A value that varies with the call, or that is the same in every call but unknown."""

    varies: bool
    tensor: bool = False
    shape: torch.Size | None = None  # of a parameter or buffer, which trials do not vary; None for other tensors


FIXED, VARIES, TENSOR = Unknown(False), Unknown(True), Unknown(True, True)


class Variadic(NamedTuple):
    """The values of `*args` as a list, or of `**kwargs` as a dictionary."""

    values: Any


class BoundMethod(NamedTuple):
    """A function with its first argument."""

    owner: Any
    function: types.FunctionType


class SuperProxy(NamedTuple):
    """The value of `super()`."""

    after: type
    owner: Known


class Condition(NamedTuple):
    """A condition on a value that varies."""

    text: str
    optional_outcomes: frozenset[bool]  # outcomes that trials need not see, such as a branch that only raises an error
    is_loop: bool = False  # the iterable of a `for` loop: its outcome is whether it has any elements


@dataclass
class Analysis:
    """The result: facts about a forward and all functions that it calls, except those of trusted packages.

    The number of a node is its position in `ast.walk`.
    """

    guarded: dict[str, Any] = field(default_factory=dict)  # snapshots of values that it reads, by path
    attributes_in_conditions: set[str] = field(default_factory=set)
    checks_compiling: bool = False  # whether it asks if it is being compiled
    functions: set[Any] = field(default_factory=set)  # all functions that were followed
    conditions: dict[tuple[Any, int], Condition] = field(default_factory=dict)  # by function and node number
    calls: set[tuple[Any, int]] = field(default_factory=set)  # calls of followed functions: calling function, node number

    def guard(self, path: str, value: Any, text: str) -> None:
        if not path:
            raise NotAnalyzable(f"it reads {text}, and changes to it would go unnoticed")
        self.guarded[path] = snapshot(value)


def varies(value: Any) -> bool:
    if isinstance(value, Variadic):
        return any(map(varies, value.values.values() if isinstance(value.values, dict) else value.values))
    return isinstance(value, Unknown) and value.varies


def is_tensor(value: Any) -> bool:
    return isinstance(value, Unknown) and value.tensor


def are_same(a: Any, b: Any) -> bool:
    """Whether the analysis knows the same of two values."""
    if not (isinstance(a, Known) and isinstance(b, Known)):
        return a is b
    return a.value is b.value or (is_plain(a.value) and is_plain(b.value) and type(a.value) is type(b.value) and a.value == b.value)


def is_callable_or_package(value: Any) -> bool:
    """Functions, classes, and modules of either kind. They need no guard: their attributes are guarded when read."""
    return callable(value) or isinstance(value, types.ModuleType)
