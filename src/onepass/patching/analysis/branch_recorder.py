"""Record the outcomes (True or False) of the conditions in a forward, while trials (trials.py) run it on random input.

An instrumented function computes the same as the original, and records the outcomes of its conditions.
"""

from __future__ import annotations

import ast
import functools
import types
from collections.abc import Callable, Iterable, Iterator
from copy import deepcopy
from typing import Any

from torch import Tensor, nn

from onepass.patching.function_source import compile_like, tree_of

from .values import Analysis, Condition


class BranchRecorder:
    """Makes an instrumented version of each function in an analysis, and collects the outcomes of conditions."""

    def __init__(self, analysis: Analysis) -> None:
        self.conditions = list(analysis.conditions.items())
        self.outcomes: dict[int, set[bool]] = {index: set() for index in range(len(self.conditions))}
        self.new_functions: dict[Any, Any] = {}
        names = {
            "_onepass_condition": self._record_condition,
            "_onepass_loop": self._record_loop,
            "_onepass_instrumented": self.instrumented,
        }
        for function in analysis.functions:
            conditions = {node: (index, condition) for index, ((of, node), condition) in enumerate(self.conditions) if of is function}
            calls = {node for of, node in analysis.calls if of is function}
            if conditions or calls:
                self.new_functions[function] = compile_like(function, _instrument(tree_of(function), conditions, calls), names)

    def instrumented(self, function: Any) -> Any:
        """Return the instrumented version of a function, method or module; the object itself if there is no such version."""
        inner = function.__wrapped__ if isinstance(function, functools._lru_cache_wrapper) else function
        if isinstance(inner, types.FunctionType):
            return self.new_functions.get(inner, function)
        if isinstance(inner, types.MethodType):
            new = self.new_functions.get(inner.__func__)
            return function if new is None else types.MethodType(new, inner.__self__)
        new = self.new_functions.get(type(inner).forward) if isinstance(inner, nn.Module) else None
        return function if new is None else types.MethodType(new, inner)

    def one_sided_condition(self) -> str:
        """Return the text of a condition that had only one outcome; "" if there is none.

        A condition that was never reached does not count: the condition that leads to it had only one outcome.
        """
        for index, (_, condition) in enumerate(self.conditions):
            if len(self.outcomes[index]) == 1 and not {True, False} - self.outcomes[index] <= condition.optional_outcomes:
                return condition.text
        return ""

    def _record_condition(self, index: int, value: Any) -> Any:
        if not isinstance(value, Tensor) or value.numel() == 1:  # a tensor with more elements cannot decide a branch
            self.outcomes[index].add(bool(value))
        return value

    def _record_loop(self, index: int, values: Iterable[Any]) -> Iterator[Any]:
        entered = False
        for value in values:
            entered = True
            self.outcomes[index].add(True)
            yield value
        if not entered:
            self.outcomes[index].add(False)


def _instrument(tree: ast.FunctionDef, conditions: dict[int, tuple[int, Condition]], calls: set[int]) -> ast.FunctionDef:
    """Return a copy of a syntax tree that records the outcomes of conditions, and calls instrumented versions of functions.

    `conditions` maps the number of a node to (index in the recorder, condition). `calls` has the numbers of the nodes that
    call other functions. Nodes are numbered in the order of `ast.walk`.
    """
    tree = deepcopy(tree)
    nodes = list(ast.walk(tree))
    recorders: dict[int, Callable[[Any], ast.expr]] = {}
    for number, (index, condition) in conditions.items():
        name = "_onepass_loop" if condition.is_loop else "_onepass_condition"
        recorders[id(nodes[number])] = lambda node, name=name, index=index: _call(name, node, ast.Constant(index), node)
    called = {id(nodes[number].func) for number in calls}  # pyright: ignore[reportAttributeAccessIssue]

    class Instrument(ast.NodeTransformer):
        def visit(self, node: ast.AST) -> Any:
            record = recorders.get(id(node))
            new: Any = self.generic_visit(node)
            if id(node) in called:
                new = _call("_onepass_instrumented", node, new)
            return new if record is None else record(new)

    return ast.fix_missing_locations(Instrument().visit(tree))


def _call(name: str, location: ast.AST, *args: Any) -> ast.Call:
    return ast.copy_location(ast.Call(ast.Name(name, ast.Load()), [*args], []), location)
