"""What the analysis of a forward knows of a value, and the result of an analysis."""

from __future__ import annotations

import types
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from onepass.patching.guards import is_plain, snapshot


class NotAnalyzable(Exception):
    """Raised if neither analysis nor trials can tell what a forward does. The report of `patch` prints the message."""


class Known(NamedTuple):
    """A value that the analysis knows: a constant, an attribute, a function."""

    value: Any
    path: str = ""  # where the value is stored, such as "self.eps" or "package.module:NAME"; "" if it has no path


class Unknown(NamedTuple):
    """A value that the analysis does not know. It either varies from call to call, or is always the same."""

    varies: bool
    tensor: bool = False
    shape: torch.Size | None = None  # the shape of a parameter or buffer, which is the same in every call; otherwise None


FIXED, VARIES, TENSOR = Unknown(False), Unknown(True), Unknown(True, True)


class Variadic(NamedTuple):
    """The values in `*args` (a list) or `**kwargs` (a dictionary), each as `Known` or `Unknown`."""

    values: Any


class BoundMethod(NamedTuple):
    """A method: a function, and the object that becomes its first argument."""

    owner: Any
    function: types.FunctionType


class SuperProxy(NamedTuple):
    """The value of `super()`: the class after which the search for attributes starts, and the module."""

    after: type
    owner: Known


class Condition(NamedTuple):
    """A condition on a value that varies from call to call."""

    text: str
    optional_outcomes: frozenset[bool]  # outcomes that trials (trials.py) need not see, such as one that leads to an error
    is_loop: bool = False  # for the iterable of a `for` loop, the outcome is whether it has any elements


@dataclass
class Analysis:
    """The result of an analysis: facts about a forward and all functions that it calls, except those of trusted packages.

    The number of a node of a syntax tree is its position in `ast.walk`.
    """

    guarded: dict[str, Any] = field(default_factory=dict)  # snapshots (guards.py) of values that the forward reads, by path
    attributes_in_conditions: set[str] = field(default_factory=set)
    functions: set[Any] = field(default_factory=set)  # all functions whose source was interpreted
    conditions: dict[tuple[Any, int], Condition] = field(default_factory=dict)  # by function and node number
    calls: set[tuple[Any, int]] = field(default_factory=set)  # calls of `functions`: (calling function, node number of the call)

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
    """Return whether two objects such as `Known(3)` and VARIES say the same about a value."""
    if not (isinstance(a, Known) and isinstance(b, Known)):
        return a is b
    return a.value is b.value or (is_plain(a.value) and is_plain(b.value) and type(a.value) is type(b.value) and a.value == b.value)


def is_callable_or_package(value: Any) -> bool:
    """Return whether a value is a function, a class, an nn.Module or a package.

    Such a value needs no guard: its attributes are guarded when they are read.
    """
    return callable(value) or isinstance(value, types.ModuleType)
