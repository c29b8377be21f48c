"""Find norms and their neighbours in the source of a method, and rewrite the method to fuse them.

A neighbour is an activation after the norm, or a sum before it. Three patterns are rewritten, anywhere in the method:

    self.act(self.norm(h))        ->  self._onepass_act_norm(self.norm, self.act, "silu", h)
    self.norm(x + h)              ->  self._onepass_add_norm(self.norm, x, h)[0]
    h.contiguous(), h.view(...)   ->  self._onepass_contiguous(h), self._onepass_view(h, ...)

The first two patterns may also be separate statements, such as `h = self.norm(h); h = self.act(h)`, and
`x = x + h; r = x; h = self.norm(x)`. After a sum, the norm may be part of an expression, if it is what runs first there:
`x = x + h; return x + self.mlp(self.norm(x))`.

If a branch of an `if` ends with a norm and an activation follows the `if`, the activation is first moved into the
branches.

This file only looks at names in the source, so it takes every call `self.name(x)` for a norm. `find` decides whether the
modules behind the names can be fused. `fused_modules` defines the `_onepass_...` methods.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from copy import deepcopy
from functools import cache
from typing import Any, NamedTuple

from onepass.patching.function_source import MethodSource, compile_method, method_source


class Place(NamedTuple):
    """A norm and its neighbour in a method, by their names in the source."""

    norm: str  # the name after "self.", such as "norm1"
    neighbour: str  # the activation as the source calls it, "self.act" or "F.silu"; "+" for a sum before the norm
    between: tuple[str, ...] = ()  # what is called between norm and activation, such as "self.drop"
    flags: tuple[tuple[str, bool], ...] = ()  # ("first", True) inside `if self.first`: the place is reached only with these values


@cache
def places(function: Callable[..., Any]) -> tuple[Place, ...]:
    """Return all places in a method with an activation after a norm, or a sum before it."""
    rewriter = _Rewriter(method_source(function), None, False)
    rewriter.rewrite()
    return tuple(dict.fromkeys(rewriter.places))


def rewrite(function: Callable[..., Any], fused: dict[Place, str], keep_layout: bool) -> Callable[..., Any]:
    """Return a rewritten copy of a method.

    `fused` has the places to fuse, each with the name of its activation ("" for a sum). With `keep_layout`, contiguous()
    and view() are replaced by methods that accept channels-last tensors.
    """
    source = method_source(function)
    return compile_method(function, source, _Rewriter(source, fused, keep_layout).rewrite())


def has_layout_calls(function: Callable[..., Any]) -> bool:
    """Return whether a method calls contiguous() or view(), so that `rewrite` with `keep_layout` changes the method."""
    source = method_source(function)
    return ast.unparse(_Rewriter(source, {}, True).rewrite()) != ast.unparse(_Rewriter(source, {}, False).rewrite())


class _Rewriter(ast.NodeTransformer):
    """Rewrites a method at the places in `fused`, and collects all places. If `fused` is None, only the places are used."""

    def __init__(self, source: MethodSource, fused: dict[Place, str] | None, keep_layout: bool) -> None:
        self.tree, self.fused, self.keep_layout = deepcopy(source.tree), fused, keep_layout
        self.self_name = self.tree.args.args[0].arg  # the name of the first parameter, usually "self"
        nodes = list(ast.walk(self.tree))
        names = [node.id for node in nodes if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Store)]
        names += [_dotted_name(node.target) for node in nodes if isinstance(node, ast.AugAssign)]
        self.loads = {name: names.count(name) for name in names}
        self.places: list[Place] = []
        self.flags: list[tuple[str, bool]] = []  # of the branches around the current statement

    def rewrite(self) -> ast.FunctionDef:
        self.tree.body = self._block(self.tree.body)
        return ast.fix_missing_locations(self.tree)

    def _record_place(self, norm: ast.Call, neighbour: str, between: tuple[str, ...] = ()) -> str | None:
        """Record a place. Return the name of the activation to fuse, "" for a sum to fuse, or None if nothing is fused here."""
        place = Place(self._name_called(norm.func)[len("self.") :], neighbour, between, tuple(self.flags))
        self.places.append(place)
        return None if self.fused is None else self.fused.get(place)

    def _name_called(self, function: ast.expr) -> str:
        """Return the name of a called function, such as "self.act" or "F.silu". "self" stands for the first parameter."""
        first, dot, rest = _dotted_name(function).partition(".")
        return f"self.{rest}" if dot and first == self.self_name else f"{first}{dot}{rest}"

    def _block(self, body: list[ast.stmt]) -> list[ast.stmt]:
        """Rewrite a list of statements, and return the new list."""
        body, done, outside = self._move_into_branches(body), [], len(self.flags)
        while body:
            replacement, used = self._fuse_first(body)
            done += replacement if used else [self.visit(body[0])]
            self.flags += self._flags_after(body[0])
            body = body[used or 1 :]
        del self.flags[outside:]
        return done

    def visit_body(self, node: Any) -> Any:
        """Rewrite a statement that contains other statements, such as `if` or `for`."""
        for name, value in ast.iter_fields(node):
            if isinstance(value, list) and value and isinstance(value[0], ast.stmt):
                setattr(node, name, self._block(value))
            elif isinstance(value, list):
                setattr(node, name, [self.visit(item) if isinstance(item, ast.AST) else item for item in value])
            elif isinstance(value, ast.AST):
                setattr(node, name, self.visit(value))
        return node

    visit_For = visit_While = visit_With = visit_Try = visit_ExceptHandler = visit_body

    def visit_If(self, node: ast.If) -> ast.If:
        flag = self._flag(node)
        node.test = self.visit(node.test)
        outside = len(self.flags)
        self.flags += flag
        node.body = self._block(node.body)
        del self.flags[outside:]
        self.flags += [(name, not value) for name, value in flag]
        node.orelse = self._block(node.orelse)
        del self.flags[outside:]
        return node

    def _flag(self, node: ast.If) -> list[tuple[str, bool]]:
        """Return the flag of the first branch: [("first", True)] for `if self.first`, [("first", False)] for `if not self.first`."""
        negated = isinstance(node.test, ast.UnaryOp) and isinstance(node.test.op, ast.Not)
        name = self._name_called(node.test.operand if negated else node.test)  # pyright: ignore[reportAttributeAccessIssue]
        return [(name[len("self.") :], not negated)] if name.startswith("self.") else []

    def _flags_after(self, statement: ast.stmt) -> list[tuple[str, bool]]:
        """Return the flag of what follows a statement: [("first", False)] after `if self.first: return …`."""
        if not isinstance(statement, ast.If) or statement.orelse or not isinstance(statement.body[-1], (ast.Return, ast.Raise)):
            return []
        return [(name, not value) for name, value in self._flag(statement)]

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.FunctionDef:
        return node  # stays as it is, because a nested function has its own names

    visit_AsyncFunctionDef = visit_ClassDef = visit_FunctionDef  # pyright: ignore[reportAssignmentType]

    def _fuse_first(self, body: list[ast.stmt]) -> tuple[list[ast.stmt], int]:
        """Fuse the first statements of `body`. Return new statements, and how many old ones they replace (0: nothing fused)."""
        first, *rest = body
        norm = self._norm_call(first)
        between: tuple[str, ...] = ()
        for index, then in enumerate(rest if norm else ()):
            neighbour = self._activation_of(then, _target(first))
            activation = self._record_place(norm, neighbour, between) if neighbour and norm else None
            if activation:
                assert norm and isinstance(then, ast.Assign)
                then.value = self._act_norm_call(norm, then.value, activation)
                return [then], 2 + index
            if not neighbour or _target(then) != _target(first):
                break
            between = (*between, neighbour)
        if isinstance(first, ast.Assign) and (total := _target(first)) and _is_sum(first.value):
            kept = [rest[0]] if rest and _is_copy(rest[0], total) else []
            then = rest[len(kept)] if len(rest) > len(kept) else None
            norm = _first_call(then)
            if norm and self._is_norm(norm) and ast.unparse(norm.args[0]) == total and self._record_place(norm, "+") is not None:
                assert isinstance(first.value, ast.BinOp) and then is not None
                both = ast.Tuple([ast.Name("_onepass_y", ast.Store()), ast.Name(total, ast.Store())], ast.Store())
                call = ast.Assign([both], self._add_norm_call(norm, first.value))
                _Replace(norm, ast.Name("_onepass_y", ast.Load())).visit(then)  # `then` may be the sum before the next norm
                return [ast.copy_location(call, norm), *kept], 1 + len(kept)
        return [], 0

    def _move_into_branches(self, body: list[ast.stmt]) -> list[ast.stmt]:
        """Move an activation after an `if` into the branches of the `if`, if a branch ends with a norm. Return the new body."""
        done: list[ast.stmt] = []
        for statement in body:
            before = done[-1] if done else None
            if isinstance(before, ast.If) and any(self._can_fuse(end, statement) for end in _last_statements(before)):
                _append_to_branches(before, statement)
            else:
                done.append(statement)
        return done

    def _can_fuse(self, statement: ast.stmt, following: ast.stmt) -> bool:
        norm = self._norm_call(statement)
        neighbour = self._activation_of(following, _target(statement)) if norm else None
        return bool(norm and neighbour and (self._record_place(norm, neighbour) or self.fused is None))

    def _norm_call(self, statement: ast.stmt | None) -> ast.Call | None:
        """Return the call in a statement `v = self.norm(x)`; None for any other statement."""
        call = statement.value if isinstance(statement, ast.Assign) and _target(statement) else None
        return call if self._is_norm(call) else None  # pyright: ignore[reportReturnType]

    def _is_norm(self, node: Any) -> bool:
        one_argument = (
            isinstance(node, ast.Call) and len(node.args) == 1 and not node.keywords and not isinstance(node.args[0], ast.Starred)
        )
        return one_argument and _dotted_name(node.func).startswith(f"{self.self_name}.")

    def _activation_of(self, statement: ast.stmt, value: str | None) -> str | None:
        """Return the name "act" in `w = act(v)`, where `value` is "v"; None for other statements, or if v is used elsewhere."""
        act = _activation_call(statement.value) if isinstance(statement, ast.Assign) and value else None
        if act is None or ast.unparse(act.args[0]) != value or (_target(statement) != value and self.loads[value] > 1):  # pyright: ignore[reportArgumentType]
            return None
        return self._name_called(act.func) if _target(statement) else None

    def visit_Call(self, node: ast.Call) -> ast.AST:
        act = _activation_call(node)
        if act is not None and self._is_norm(act.args[0]):
            norm: Any = act.args[0]
            activation = self._record_place(norm, self._name_called(act.func))
            if activation:
                return self._act_norm_call(norm, act, activation)
        if self._is_norm(node) and _is_sum(node.args[0]) and self._record_place(node, "+") is not None:
            return ast.copy_location(ast.Subscript(self._add_norm_call(node, node.args[0]), ast.Constant(0), ast.Load()), node)
        method = node.func.attr if self.keep_layout and isinstance(node.func, ast.Attribute) else ""
        self.generic_visit(node)
        if method == "contiguous" and not node.args and not node.keywords:
            return self._call("_onepass_contiguous", node, node.func.value)  # pyright: ignore[reportAttributeAccessIssue]
        if method == "view" and node.args and not node.keywords:
            return self._call("_onepass_view", node, node.func.value, *node.args)  # pyright: ignore[reportAttributeAccessIssue]
        return node

    def _act_norm_call(self, norm: ast.Call, act: Any, activation: str) -> ast.Call:
        function = act.func if _dotted_name(act.func).startswith(f"{self.self_name}.") else ast.Constant(None)
        return self._call("_onepass_act_norm", norm, norm.func, function, ast.Constant(activation), self.visit(norm.args[0]))

    def _add_norm_call(self, norm: ast.Call, total: Any) -> ast.Call:
        return self._call("_onepass_add_norm", norm, norm.func, self.visit(total.left), self.visit(total.right))

    def _call(self, method: str, location: ast.AST, *args: ast.expr) -> ast.Call:
        """Return a call of a method of `_FusedBlock` (fused_modules.py), with the line number of `location`."""
        return ast.copy_location(ast.Call(ast.Attribute(ast.Name(self.self_name, ast.Load()), method, ast.Load()), [*args], []), location)


def _dotted_name(node: ast.AST) -> str:
    """Return a name with its attributes, such as "a.b.c"; "" for any other node."""
    if isinstance(node, ast.Attribute):
        base = _dotted_name(node.value)
        return f"{base}.{node.attr}" if base else ""
    return node.id if isinstance(node, ast.Name) else ""


def _target(statement: Any) -> str | None:
    """Return the name "v" in a statement `v = ...`; None for any other statement."""
    single = isinstance(statement, ast.Assign) and len(statement.targets) == 1
    return _dotted_name(statement.targets[0]) or None if single and isinstance(statement.targets[0], ast.Name) else None


def _activation_call(node: Any) -> ast.Call | None:
    """Return the node if it may call an activation: `act(x)` or `act(x, inplace=...)`; otherwise None."""
    plain = isinstance(node, ast.Call) and len(node.args) == 1 and all(keyword.arg == "inplace" for keyword in node.keywords)
    return node if plain and _dotted_name(node.func) else None


def _is_sum(node: ast.AST) -> bool:
    return isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add)


def _first_call(statement: ast.stmt | None) -> ast.Call | None:
    """Return the call that runs first in a statement such as `v = …`, `v += …` or `return …`. None if that is not certain."""
    if not isinstance(statement, (ast.Assign, ast.AugAssign, ast.Return, ast.Expr)) or statement.value is None:
        return None
    if isinstance(statement, ast.AugAssign) and not isinstance(statement.target, ast.Name):  # `a[f()] += …` calls f first
        return None
    for node in _evaluated(statement.value):
        if isinstance(node, ast.Call):
            return node
        if not isinstance(node, (ast.Name, ast.Constant, ast.Attribute, ast.Tuple, ast.BinOp)):
            return None
    return None


def _evaluated(node: ast.expr) -> Iterator[ast.expr]:
    """Yield the parts of an expression in the order in which Python evaluates them, and then the expression itself.

    Parts of other expressions than these, such as `a if b else c`, are not yielded.
    """
    if isinstance(node, ast.Call):
        parts = [node.func, *node.args, *(keyword.value for keyword in node.keywords)]
    elif isinstance(node, ast.BinOp):
        parts = [node.left, node.right]
    elif isinstance(node, ast.Tuple):
        parts = node.elts
    else:
        parts = [node.value] if isinstance(node, ast.Attribute) else []
    for part in parts:
        yield from _evaluated(part)
    yield node


class _Replace(ast.NodeTransformer):
    """Replaces one node of a tree by another."""

    def __init__(self, old: ast.AST, new: ast.expr) -> None:
        self.old, self.new = old, new

    def visit(self, node: ast.AST) -> Any:
        return ast.copy_location(self.new, node) if node is self.old else self.generic_visit(node)


def _is_copy(statement: Any, value: str) -> bool:
    """Return whether a statement is `r = v`, where `value` is "v"."""
    return bool(_target(statement)) and _dotted_name(statement.value) == value


def _last_statements(node: ast.If) -> Iterator[ast.stmt]:
    """Yield the last statement of every branch of an `if`. If that is an `if` itself, yield those of its branches instead."""
    for branch in (node.body, node.orelse):
        if branch:
            yield from _last_statements(branch[-1]) if isinstance(branch[-1], ast.If) else [branch[-1]]


def _append_to_branches(node: ast.If, statement: ast.stmt) -> None:
    """Append a statement to every branch of an `if`. If the source has no `else`, add one.

    Branches that end with return, raise, continue or break stay as they are.
    """
    for branch in (node.body, node.orelse):
        if branch and isinstance(branch[-1], ast.If):
            _append_to_branches(branch[-1], statement)
        elif not branch or not isinstance(branch[-1], (ast.Return, ast.Raise, ast.Continue, ast.Break)):
            branch.append(deepcopy(statement))
