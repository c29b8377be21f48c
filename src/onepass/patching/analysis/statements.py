"""Interpret statements: assignments, branches and loops, and the conditions of branches and loops.

To follow code is to interpret its source without running it.
"""

from __future__ import annotations

import ast
import functools
import sys
from typing import Any

from onepass.patching.guards import is_plain

from .expressions import Expressions
from .values import FIXED, TENSOR, VARIES, Known, Variadic, are_same, is_callable_or_package, is_tensor, varies


class Statements(Expressions):
    """The complete interpreter: follows a function statement by statement."""

    def run(self, args: list[Any], keywords: dict[str, Any]) -> Any:
        """Interpret the function with these arguments, and return its result as an object of values.py."""
        self._bind(args, keywords)
        self._block(self.tree.body)
        return functools.reduce(self.either, self.returns) if self.returns else Known(None)

    def _bind(self, args: list[Any], keywords: dict[str, Any]) -> None:
        """Assign the arguments, or else the defaults, to the parameters of the function."""
        unknown_number = None in args or None in keywords.values()  # see `Calls._arguments` in calls.py
        spec, rest = self.tree.args, dict(keywords)
        named = [arg.arg for arg in (*spec.posonlyargs, *spec.args)]
        positional = self.function.__defaults__ or ()
        by_keyword: Any = getattr(self.function, "__kwdefaults__", None)
        defaults = dict(zip(named[len(named) - len(positional) :], positional)) | (by_keyword or {})
        for name, value in defaults.items():
            if isinstance(value, (list, dict, set)):
                raise self.error(self.tree, f"its default for {name!r} is mutable")
        given = dict(zip(named, args))
        for name in (*named, *[arg.arg for arg in spec.kwonlyargs]):
            default = Known(defaults[name]) if name in defaults else VARIES
            self.variables[name] = VARIES if unknown_number else given.get(name) or rest.pop(name, None) or default
        if spec.vararg:
            self.variables[spec.vararg.arg] = VARIES if unknown_number else Variadic(args[len(named) :])
        if spec.kwarg:
            self.variables[spec.kwarg.arg] = VARIES if unknown_number else Variadic(rest)

    # Conditions

    def test(self, node: ast.expr, optional_outcomes: frozenset[bool] = frozenset()) -> Any:
        """Return a condition as `Known(True)`, `Known(False)` or `Unknown` (values.py). Record it if it varies between calls.

        In an expression with `and` or `or`, each operand is recorded on its own.
        """
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            inner = self.test(node.operand, frozenset(not outcome for outcome in optional_outcomes))
            return Known(not inner.value) if isinstance(inner, Known) else inner
        if isinstance(node, ast.BoolOp):
            return self.and_or(node, lambda operand: self.test(operand, optional_outcomes), True)
        value = self.value(node)
        self.analysis.attributes_in_conditions |= {inner.attr for inner in ast.walk(node) if isinstance(inner, ast.Attribute)}
        if varies(value):
            self.add_condition(node, ast.unparse(node), optional_outcomes)
        if not isinstance(value, Known):
            return value
        if not is_plain(value.value) and not is_callable_or_package(value.value):
            raise self.error(node, f"it branches on {ast.unparse(node)}, and changes to it would go unnoticed")
        return Known(bool(value.value) if is_plain(value.value) else True)

    # Statements. A method `_exec_...` returns False if the code after the statement cannot run.

    def _block(self, body: list[ast.stmt]) -> bool:
        """Follow a list of statements. Return False if the code after them cannot run, because one of them returns or raises."""
        for statement in body:
            execute = getattr(self, f"_exec_{type(statement).__name__}", None)
            if execute is None:
                raise self.error(statement, f"it has a statement that cannot be followed, {type(statement).__name__.lower()!r}")
            if execute(statement) is False:
                return False
        return True

    def _exec_Pass(self, node: Any) -> None: ...

    _exec_Break = _exec_Continue = _exec_Pass

    def _exec_Expr(self, node: ast.Expr) -> None:
        self.value(node.value)

    def _exec_Return(self, node: ast.Return) -> bool:
        value = Known(None) if node.value is None else self.value(node.value)
        self.returns.append(VARIES if self.branch_varies and not is_tensor(value) else value)
        return False

    def _exec_Raise(self, node: ast.Raise) -> bool:
        return False

    def _exec_Assert(self, node: ast.Assert) -> None:
        self.test(node.test, frozenset({False}))

    def _exec_Assign(self, node: ast.Assign) -> None:
        value = self.value(node.value)
        for target in node.targets:
            self.assign(target, value)

    def _exec_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.assign(node.target, self.value(node.value))

    def _exec_AugAssign(self, node: ast.AugAssign) -> None:
        before = self.variables.get(node.target.id, FIXED) if isinstance(node.target, ast.Name) else FIXED
        added = self.value(node.value)
        self.assign(node.target, TENSOR if is_tensor(before) else self.computed(node, [before, added]))

    def assign(self, target: ast.expr, value: Any) -> None:
        part = VARIES if varies(value) else FIXED
        if isinstance(target, ast.Name):
            keep = not self.branch_varies or is_tensor(value) or are_same(self.variables.get(target.id), value)
            self.variables[target.id] = value if keep else VARIES
        elif isinstance(target, (ast.Tuple, ast.List)):
            elements = list(value.value) if isinstance(value, Known) and isinstance(value.value, (tuple, list)) else []
            parts = [Known(element) for element in elements] if len(elements) == len(target.elts) else [part] * len(target.elts)
            for element_target, element in zip(target.elts, parts):
                self.assign(element_target, element)
        elif isinstance(target, ast.Starred):
            self.assign(target.value, part)
        elif isinstance(target, ast.Subscript) and varies(self.value(target.value)):
            self.value(target.slice)
        else:
            raise self.error(target, f"it keeps state between calls: it sets {ast.unparse(target)}")

    def _exec_Delete(self, node: ast.Delete) -> None:
        if not all(isinstance(target, ast.Name) for target in node.targets):
            raise self.error(node, "it deletes something that is not a local variable")

    def _exec_If(self, node: ast.If) -> bool:
        optional = frozenset({True} if _ends_with_raise(node.body) else {False} if _ends_with_raise(node.orelse) else ())
        test = self.test(node.test, optional)
        if isinstance(test, Known):
            return self._block(node.body if test.value else node.orelse)
        return self._branches(varies(test), node.body, node.orelse)

    def _branches(self, test_varies: bool, *branches: list[ast.stmt]) -> bool:
        """Follow all branches, although each call takes only one. Return whether the code after the branches can run.

        Afterwards, `self.variables` has the values of all branches, merged by `either`.
        """
        outer, before, after = self.branch_varies, dict(self.variables), []
        self.branch_varies = outer or test_varies
        for branch in branches:
            self.variables = dict(before)
            after += [self.variables] if self._block(branch) else []
        for names in after[:1]:
            self.variables = dict(names)
        for name, value in [pair for names in after[1:] for pair in names.items()]:
            self.variables[name] = self.either(self.variables[name], value) if name in self.variables else value
        self.branch_varies = outer
        return bool(after)

    def _exec_While(self, node: ast.While) -> None:
        for _ in range(2):  # the second time, variables have their values from the end of the loop body
            self._branches(varies(self.test(node.test)), node.body, [])
        self._block(node.orelse)

    def _exec_For(self, node: ast.For) -> None:
        iterable = self.value(node.iter)
        if varies(iterable):
            self.add_condition(node.iter, f"for ... in {ast.unparse(node.iter)}", frozenset({False}), is_loop=True)
        for _ in range(2):
            self.assign(node.target, VARIES if varies(iterable) else FIXED)
            self._branches(varies(iterable), node.body, [])
        self._block(node.orelse)

    def _exec_With(self, node: ast.With) -> bool:
        for item in node.items:
            value = self.value(item.context_expr)
            if isinstance(value, Known):
                raise self.error(node, f"it enters {ast.unparse(item.context_expr)}, which cannot be followed")
            if item.optional_vars is not None:
                self.assign(item.optional_vars, value)
        return self._block(node.body)

    def _exec_Try(self, node: ast.Try) -> bool:
        if node.handlers:
            raise self.error(node, "it catches errors, which may not occur in trials")
        return self._block(node.body) and self._block(node.finalbody)

    def _exec_FunctionDef(self, node: ast.FunctionDef) -> None:
        """Follow a nested function where it is defined, as if all its arguments varied."""
        before, returns = dict(self.variables), list(self.returns)
        self.variables |= {arg.arg: VARIES for arg in ast.walk(node.args) if isinstance(arg, ast.arg)}
        self._block(node.body)
        self.variables, self.returns = {**before, node.name: VARIES}, returns

    def _exec_Import(self, node: ast.Import | ast.ImportFrom) -> None:
        for alias in node.names:
            package_name = node.module or "" if isinstance(node, ast.ImportFrom) else alias.name
            package = sys.modules.get(package_name)
            if package is None or getattr(node, "level", 0):
                raise self.error(node, f"it imports {package_name!r} in the call")
            if isinstance(node, ast.ImportFrom):
                self.variables[alias.asname or alias.name] = self.outside(
                    vars(package).get(alias.name), f"{package_name}:{alias.name}", alias.name
                )
            else:
                self.variables[alias.asname or package_name.split(".")[0]] = Known(
                    package if alias.asname else sys.modules[package_name.split(".")[0]]
                )

    _exec_ImportFrom = _exec_Import


def _ends_with_raise(body: list[ast.stmt]) -> bool:
    return bool(body) and isinstance(body[-1], ast.Raise)
