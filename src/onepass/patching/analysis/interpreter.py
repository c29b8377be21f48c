"""The base class of the interpreter, which follows a function: interprets its source without running it.

The interpreter represents a value by an object of values.py: `Known(3)` for 3, or an `Unknown` such as VARIES. A guarded
value is checked in each call of the patched module (guards.py).
"""

from __future__ import annotations

import ast
import types
from collections.abc import Callable
from typing import Any

from torch import Tensor

from onepass.patching.guards import is_plain

from .trust import TRUSTED_PACKAGES
from .values import FIXED, TENSOR, VARIES, Analysis, Condition, Known, NotAnalyzable, are_same, is_callable_or_package, is_tensor, varies

# The type of `follow(function, args, keywords, is_recorded)`, which interprets a function and returns its result as an
# object of values.py. `is_recorded` tells whether trials (recognition/trials.py) record the conditions of the function.
Follow = Callable[[Any, list[Any], dict[str, Any], bool], Any]


class Interpreter:
    """Interprets a function. Subclasses add a method `_eval_...` for each kind of expression, and `_exec_...` for statements."""

    def __init__(self, analysis: Analysis, function: types.FunctionType, tree: ast.FunctionDef, follow: Follow) -> None:
        self.analysis, self.function, self.tree, self.follow = analysis, function, tree, follow
        self.node_numbers = {id(node): number for number, node in enumerate(ast.walk(tree))}
        self.variables: dict[str, Any] = {}  # local variables, each as an object of values.py
        self.returns: list[Any] = []
        self.branch_varies = False  # whether the current statement runs only in some calls

    def assign(self, target: ast.expr, value: Any) -> None:
        raise NotImplementedError

    def test(self, node: ast.expr, optional_outcomes: frozenset[bool] = frozenset()) -> Any:
        """Return a condition as `Known(True)`, `Known(False)` or `Unknown` (values.py). Record it if it varies between calls."""
        raise NotImplementedError

    def value(self, node: ast.expr) -> Any:
        """Return the value of an expression as an object of values.py, such as `Known(3)` or VARIES."""
        evaluate = getattr(self, f"_eval_{type(node).__name__}", None)
        if evaluate is None:
            raise self.error(node, f"it has an expression that cannot be followed, {ast.unparse(node)!r:.60}")
        return evaluate(node)

    def add_condition(self, node: ast.AST, text: str, optional_outcomes: frozenset[bool] = frozenset(), is_loop: bool = False) -> None:
        """Record a condition that varies from call to call. Trials must see both of its outcomes, except `optional_outcomes`."""
        condition = Condition(f"`{text}` ({self.where(node)})", optional_outcomes, is_loop)
        self.analysis.conditions[self.function, self.node_numbers[id(node)]] = condition

    def error(self, node: ast.AST, why: str) -> NotAnalyzable:
        return NotAnalyzable(f"{why} ({self.where(node)})")

    def where(self, node: ast.AST) -> str:
        """Return the file and line of a node, such as "model.py:12"."""
        return f"{self.function.__code__.co_filename.rsplit('/', 1)[-1]}:{getattr(node, 'lineno', self.tree.lineno)}"

    def either(self, a: Any, b: Any) -> Any:
        """Merge `a` and `b`, the values of a variable in two branches, into one object of values.py, such as VARIES."""
        if are_same(a, b):
            return a
        if self.branch_varies or varies(a) or varies(b):
            return TENSOR if is_tensor(a) and is_tensor(b) else VARIES
        return FIXED

    def computed(self, node: ast.AST, parts: list[Any], compute: Callable[..., Any] | None = None) -> Any:
        """Return the value that is computed from `parts`: `Known`, FIXED or VARIES (values.py).

        It can be `Known` only if all parts are `Known` and `compute` is given.
        """
        for part in parts:
            if isinstance(part, Known) and not is_plain(part.value) and not is_callable_or_package(part.value):
                text = part.path.replace(":", ".") or f"a {type(part.value).__name__}"
                raise self.error(node, f"it reads {text}, and changes to it would go unnoticed")
        if compute is not None and all(isinstance(part, Known) for part in parts):
            try:
                result = compute(*[part.value for part in parts])
            except Exception:
                return FIXED  # `compute` would fail in every call
            return Known(result) if is_plain(result) or isinstance(result, type) else FIXED
        return VARIES if any(map(varies, parts)) else FIXED

    def outside(self, value: Any, path: str, text: str) -> Any:
        """Return a value from outside the function, such as a global, as `Known`. Numbers, strings and the like are guarded."""
        if isinstance(value, Tensor):
            raise NotAnalyzable(f"it reads {text}, a tensor that does not belong to the module")
        if is_plain(value) and path.split(".")[0].split(":")[0] not in TRUSTED_PACKAGES:
            self.analysis.guard(path, value, text)
        return Known(value, path)
