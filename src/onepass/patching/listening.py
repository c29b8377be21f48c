"""Functions written anew so that they tell which way their conditions went. What they compute is what they computed."""

from __future__ import annotations

import ast
import functools
import types
from collections.abc import Callable, Iterable, Iterator
from copy import deepcopy
from typing import Any

from torch import Tensor, nn

from .source import compiled, tree_of
from .values import Question, Reading


class Listener:
    """The functions of a reading, and the answers to its questions."""

    def __init__(self, reading: Reading) -> None:
        self.questions = list(reading.questions.items())
        self.answers: dict[int, set[bool]] = {at: set() for at in range(len(self.questions))}
        self.made: dict[Any, Any] = {}
        names = {"_onepass_asked": self._asked, "_onepass_looped": self._looped, "_onepass_heard": self.heard}
        for function in reading.functions:
            asks = {place: (at, question) for at, ((of, place), question) in enumerate(self.questions) if of is function}
            calls = {place for of, place in reading.calls if of is function}
            if asks or calls:
                self.made[function] = compiled(function, _told(tree_of(function), asks, calls), names)

    def heard(self, function: Any) -> Any:
        """A function as it is written here, if it is; a module's forward for the module."""
        inner = function.__wrapped__ if isinstance(function, functools._lru_cache_wrapper) else function
        if isinstance(inner, types.FunctionType):
            return self.made.get(inner, function)
        if isinstance(inner, types.MethodType):
            made = self.made.get(inner.__func__)
            return function if made is None else types.MethodType(made, inner.__self__)
        made = self.made.get(type(inner).forward) if isinstance(inner, nn.Module) else None
        return function if made is None else types.MethodType(made, inner)

    def unanswered(self) -> str:
        """A question that went one way only: its text, or "". One that was never asked stands behind another that says so."""
        for at, (_, question) in enumerate(self.questions):
            if len(self.answers[at]) == 1 and not {True, False} - self.answers[at] <= question.may_lack:
                return question.text
        return ""

    def _asked(self, at: int, value: Any) -> Any:
        if not isinstance(value, Tensor) or value.numel() == 1:  # else it is no condition
            self.answers[at].add(bool(value))
        return value

    def _looped(self, at: int, values: Iterable[Any]) -> Iterator[Any]:
        entered = False
        for value in values:
            entered = True
            self.answers[at].add(True)
            yield value
        if not entered:
            self.answers[at].add(False)


def _told(tree: ast.FunctionDef, asks: dict[int, tuple[int, Question]], calls: set[int]) -> ast.FunctionDef:
    """A tree that reports its conditions, and calls what reports its own."""
    tree = deepcopy(tree)
    places = list(ast.walk(tree))
    marked: dict[int, Callable[[Any], ast.expr]] = {}
    for place, (at, question) in asks.items():
        name = "_onepass_looped" if question.loop else "_onepass_asked"
        marked[id(places[place])] = lambda node, name=name, at=at: _call(name, node, ast.Constant(at), node)
    wrapped = {id(places[place].func) for place in calls}  # pyright: ignore[reportAttributeAccessIssue]

    class Tell(ast.NodeTransformer):
        def visit(self, node: ast.AST) -> Any:
            mark = marked.get(id(node))
            seen: Any = self.generic_visit(node)
            if id(node) in wrapped:
                seen = _call("_onepass_heard", node, seen)
            return seen if mark is None else mark(seen)

    return ast.fix_missing_locations(Tell().visit(tree))


def _call(name: str, at: ast.AST, *args: Any) -> ast.Call:
    return ast.copy_location(ast.Call(ast.Name(name, ast.Load()), [*args], []), at)
