"""Interpret expressions: operators, conditions inside expressions, and collections."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable
from typing import Any

from .calls import Calls
from .values import FIXED, TENSOR, VARIES, Known, is_tensor, varies

_COMPARISONS: dict[type, Callable[..., Any]] = {
    ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt, ast.GtE: operator.ge,
    ast.In: lambda a, b: a in b, ast.NotIn: lambda a, b: a not in b, ast.Is: operator.is_, ast.IsNot: operator.is_not,
}  # fmt: skip


_OPERATIONS: dict[type, Callable[..., Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv, ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod, ast.Pow: operator.pow, ast.USub: operator.neg, ast.UAdd: operator.pos, ast.Invert: operator.invert,
    ast.Not: operator.not_,
}  # fmt: skip


class Expressions(Calls):
    """The part of the interpreter that handles all expressions except names, attributes and calls."""

    def _eval_IfExp(self, node: ast.IfExp) -> Any:
        test = self.test(node.test)
        if isinstance(test, Known):
            return self.value(node.body if test.value else node.orelse)
        before, self.branch_varies = self.branch_varies, self.branch_varies or varies(test)
        value = self.either(self.value(node.body), self.value(node.orelse))
        self.branch_varies = before
        return value

    def _eval_BoolOp(self, node: ast.BoolOp) -> Any:
        return self.and_or(node, lambda operand: self.value(operand) if operand is node.values[-1] else self.test(operand), False)

    def and_or(self, node: ast.BoolOp, evaluate: Callable[[ast.expr], Any], as_condition: bool) -> Any:
        """Return the value of an expression with `and` or `or` as an object of values.py, such as `Known(3)`.

        Operands after one that decides the outcome are not evaluated. With `as_condition`, only the truth of the value
        matters.
        """
        deciding_outcome, undecided = isinstance(node.op, ast.Or), []
        for operand in node.values:
            value = evaluate(operand)
            is_known = isinstance(value, Known)
            if is_known and bool(value.value) is deciding_outcome and (as_condition or not undecided):
                return value
            if not is_known or operand is node.values[-1]:
                undecided.append(value)
        return undecided[0] if len(undecided) == 1 else self.computed(node, undecided)

    def _eval_Compare(self, node: ast.Compare) -> Any:
        parts = [self.value(part) for part in (node.left, *node.comparators)]
        by_identity = len(parts) == 2 and isinstance(node.ops[0], (ast.Is, ast.IsNot))
        if by_identity and any(map(is_tensor, parts)) and any(isinstance(part, Known) and part.value is None for part in parts):
            return Known(isinstance(node.ops[0], ast.IsNot))
        value = self.computed(node, parts, _COMPARISONS[type(node.ops[0])] if len(parts) == 2 else None)
        if varies(value):
            self.add_condition(node, ast.unparse(node))  # even outside an `if`, because the result can be used as a number
        return value

    def _eval_BinOp(self, node: ast.BinOp) -> Any:
        parts = [self.value(node.left), self.value(node.right)]
        return TENSOR if any(map(is_tensor, parts)) else self.computed(node, parts, _OPERATIONS.get(type(node.op)))

    def _eval_UnaryOp(self, node: ast.UnaryOp) -> Any:
        value = self.value(node.operand)
        return TENSOR if is_tensor(value) and not isinstance(node.op, ast.Not) else self.computed(node, [value], _OPERATIONS[type(node.op)])

    def _eval_Subscript(self, node: ast.Subscript) -> Any:
        parts = [self.value(node.value), self.value(node.slice)]
        return TENSOR if is_tensor(parts[0]) else self.computed(node, parts, operator.getitem)

    def _eval_Slice(self, node: ast.Slice) -> Any:
        parts = [Known(None) if part is None else self.value(part) for part in (node.lower, node.upper, node.step)]
        return self.computed(node, parts, slice)

    def _eval_Tuple(self, node: ast.Tuple | ast.List | ast.Set) -> Any:
        make = {ast.Tuple: tuple, ast.List: list, ast.Set: set}[type(node)]
        return self.computed(node, [self.value(part) for part in node.elts], lambda *parts: make(parts))

    _eval_List = _eval_Set = _eval_Tuple

    def _eval_Dict(self, node: ast.Dict) -> Any:
        return self.computed(node, [self.value(part) for part in (*node.keys, *node.values) if part is not None])

    def _eval_Starred(self, node: ast.Starred) -> Any:
        return VARIES if varies(self.value(node.value)) else FIXED

    def _eval_JoinedStr(self, node: ast.JoinedStr) -> Any:
        return self.computed(node, [self.value(part) for part in node.values])

    def _eval_FormattedValue(self, node: ast.FormattedValue) -> Any:
        return self.value(node.value)

    def _eval_NamedExpr(self, node: ast.NamedExpr) -> Any:
        value = self.value(node.value)
        self.assign(node.target, value)
        return value

    def _eval_Lambda(self, node: ast.Lambda) -> Any:
        before = dict(self.variables)
        self.variables |= {arg.arg: VARIES for arg in ast.walk(node.args) if isinstance(arg, ast.arg)}
        self.value(node.body)
        self.variables = before
        return VARIES

    def _eval_ListComp(self, node: ast.ListComp | ast.SetComp | ast.GeneratorExp | ast.DictComp) -> Any:
        before, parts = dict(self.variables), []
        for generator in node.generators:
            parts.append(self.value(generator.iter))
            self.assign(generator.target, VARIES if varies(parts[-1]) else FIXED)
            parts += [self.test(test) for test in generator.ifs]
        elements = (node.key, node.value) if isinstance(node, ast.DictComp) else (node.elt,)
        parts += [self.value(element) for element in elements]
        self.variables = before
        return self.computed(node, parts)

    _eval_SetComp = _eval_GeneratorExp = _eval_DictComp = _eval_ListComp
