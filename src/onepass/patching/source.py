"""What the source of a forward says of its norms, and the forward written anew.

Three places are found, wherever they stand:

    h = self.norm(h); h = self.act(h)     or  self.act(self.norm(h))    becomes  self._activated(self.norm, self.act, "silu", h)
    x = x + h; r = x; h = self.norm(x)    or  self.norm(x + h)          becomes  ..., x = self._added(self.norm, x, h)
    h.contiguous(), h.view(...)                                         becomes  self._dense(h), self._view(h, ...)

An activation that follows an `if` is first taken into its branches, since there the norms stand. Only what is named in the source is
decided here; whether the modules behind the names can be fused is for `blocks` to say, which also has those three methods. The new
function has the globals, closure, defaults, wrappers and line numbers of the old one; where the source is not what runs, there is none.
"""

from __future__ import annotations
import __future__

import ast
import inspect
import sys
import types
from collections.abc import Callable, Iterator
from copy import deepcopy
from functools import cache, lru_cache
from typing import Any, NamedTuple


class Place(NamedTuple):
    """A norm in a forward, with what stands beside it."""

    norm: str  # "norm1": self.norm1
    beside: str  # the source of the activation, "self.act" or "F.silu"; "+" for a sum before it
    through: tuple[str, ...] = ()  # what stands between norm and activation, "self.drop"


class Unreadable(Exception):
    """Why a function cannot be written anew."""


class _Text(NamedTuple):
    tree: ast.FunctionDef
    inner: Any  # the function, without what wraps it


def _text(function: Callable[..., Any]) -> _Text:
    text = _source(inspect.unwrap(function))
    if not text.tree.args.args:
        raise Unreadable("its forward has no name for its module")
    return text


def tree_of(function: Callable[..., Any]) -> ast.FunctionDef:
    """The source of a function, of a wrapper its own."""
    return _source(function).tree


@cache
def _source(inner: Any) -> _Text:
    if not isinstance(inner, types.FunctionType):
        raise Unreadable("its forward is no Python function")
    try:
        lines, _ = inspect.findsource(inner)
        tree, code = _definition("".join(lines), inner.__name__, inner.__code__.co_firstlineno)
    except (OSError, SyntaxError, TypeError, StopIteration) as error:
        raise Unreadable("the source of its forward is not at hand") from error
    if not _same(code, inner.__code__):
        raise Unreadable("the source of its forward is not what runs")
    nodes = list(ast.walk(tree))
    if any(map(_mangled, nodes)) or any(isinstance(node, (ast.Global, ast.Nonlocal)) for node in nodes):
        raise Unreadable("its forward has names that mean something else outside of its class")
    if {"locals", "vars", "eval", "exec"} & set(inner.__code__.co_names):
        raise Unreadable("its forward looks at its own names")
    return _Text(tree, inner)


def _definition(source: str, name: str, line: int) -> tuple[ast.FunctionDef, types.CodeType]:
    """The function that begins at a line of a file, as a tree and as code."""
    module, codes = _file(source)
    found = (node for node in ast.walk(module) if isinstance(node, ast.FunctionDef) and node.name == name)
    tree = next(node for node in found if min([node.lineno, *[decorator.lineno for decorator in node.decorator_list]]) == line)
    return tree, next(code for code in codes if (code.co_name, code.co_firstlineno) == (name, line))


@lru_cache(maxsize=32)
def _file(source: str) -> tuple[ast.Module, list[types.CodeType]]:
    codes = [compile(source, "", "exec", dont_inherit=True)]
    for code in codes:
        codes += [const for const in code.co_consts if isinstance(const, types.CodeType)]
    return ast.parse(source), codes


def _mangled(node: ast.AST) -> bool:
    name = getattr(node, "id", None) or getattr(node, "attr", None) or getattr(node, "arg", None) or ""
    return isinstance(name, str) and name.startswith("__") and not name.endswith("__")


def _same(a: types.CodeType, b: types.CodeType) -> bool:
    """Whether two functions do the same, wherever they come from."""
    alike = (a.co_code, a.co_names, a.co_varnames, len(a.co_consts)) == (b.co_code, b.co_names, b.co_varnames, len(b.co_consts))
    constants = zip(a.co_consts, b.co_consts)
    return alike and all(_same(p, q) if isinstance(p, types.CodeType) else repr(p) == repr(q) for p, q in constants)


@cache
def places(function: Callable[..., Any]) -> tuple[Place, ...]:
    """All that a function has."""
    rewriter = _Rewriter(_text(function), None, False)
    rewriter.rewrite()
    return tuple(dict.fromkeys(rewriter.met))


def resolve(function: Callable[..., Any], expression: str) -> Any:
    """What an expression of the source, a global name with its attributes, stands for; None if the name is not global."""
    root, *path = expression.split(".")
    inner: Any = inspect.unwrap(function)
    code = inner.__code__
    if root in (*code.co_varnames, *code.co_cellvars, *code.co_freevars):
        return None
    value = inner.__globals__.get(root)
    for name in path:
        value = getattr(value, name, None)
    return value


def rewritten(function: Callable[..., Any], fused: dict[Place, str], dense: bool) -> Callable[..., Any]:
    """The function with the places in `fused` fused, each with its activation ("" for a sum); if `dense`, contiguous() keeps a layout."""
    text = _text(function)
    return _compiled(text, _Rewriter(text, fused, dense).rewrite(), function)


class _Rewriter(ast.NodeTransformer):
    """Fuses the places that are in `fused`; where that is None, it changes nothing that matters and remembers all places it met."""

    def __init__(self, text: _Text, fused: dict[Place, str] | None, dense: bool) -> None:
        self.tree, self.fused, self.dense = deepcopy(text.tree), fused, dense
        self.self = self.tree.args.args[0].arg
        nodes = list(ast.walk(self.tree))
        names = [node.id for node in nodes if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Store)]
        names += [_chain(node.target) for node in nodes if isinstance(node, ast.AugAssign)]
        self.loads = {name: names.count(name) for name in names}
        self.met: list[Place] = []

    def rewrite(self) -> ast.FunctionDef:
        self.tree.body = self._block(self.tree.body)
        return ast.fix_missing_locations(self.tree)

    def _decide(self, norm: ast.Call, beside: str, through: tuple[str, ...] = ()) -> str | None:
        """The activation to fuse with, "" for a sum; None to leave a place as it is."""
        place = Place(self._said(norm.func)[5:], beside, through)
        self.met.append(place)
        return None if self.fused is None else self.fused.get(place)

    def _said(self, function: ast.expr) -> str:
        """What is called, with "self" for whatever this function calls it."""
        first, dot, rest = _chain(function).partition(".")
        return f"self.{rest}" if dot and first == self.self else f"{first}{dot}{rest}"

    def _block(self, body: list[ast.stmt]) -> list[ast.stmt]:
        """Statements that follow one another."""
        body, done = self._sink(body), []
        while body:
            replaced, used = self._first(body)
            done += replaced if used else [self.visit(body[0])]
            body = body[used or 1 :]
        return done

    def visit_body(self, node: Any) -> Any:
        """A statement with statements inside."""
        for name, value in ast.iter_fields(node):
            if isinstance(value, list) and value and isinstance(value[0], ast.stmt):
                setattr(node, name, self._block(value))
            elif isinstance(value, list):
                setattr(node, name, [self.visit(item) if isinstance(item, ast.AST) else item for item in value])
            elif isinstance(value, ast.AST):
                setattr(node, name, self.visit(value))
        return node

    visit_If = visit_For = visit_While = visit_With = visit_Try = visit_ExceptHandler = visit_body

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.FunctionDef:
        return node  # another function, with names of its own

    visit_AsyncFunctionDef = visit_ClassDef = visit_FunctionDef  # pyright: ignore[reportAssignmentType]

    def _first(self, body: list[ast.stmt]) -> tuple[list[ast.stmt], int]:
        """What takes the place of the first statements, and of how many; none where nothing is fused."""
        first, *rest = body
        norm = self._norm_of(first)
        through: tuple[str, ...] = ()
        for at, then in enumerate(rest if norm else ()):
            beside = self._activated(then, _target(first))
            activation = self._decide(norm, beside, through) if beside and norm else None
            if activation:
                assert norm and isinstance(then, ast.Assign)
                then.value = self._fused(norm, then.value, activation)
                return [then], 2 + at
            if not beside or _target(then) != _target(first):
                break
            through = (*through, beside)
        if isinstance(first, ast.Assign) and (total := _target(first)) and _is_sum(first.value):
            kept = [rest[0]] if rest and _is_copy(rest[0], total) else []
            then = rest[len(kept)] if len(rest) > len(kept) else None
            norm = self._norm_of(then)
            if then is not None and norm and ast.unparse(norm.args[0]) == total and self._decide(norm, "+") is not None:
                assert isinstance(first.value, ast.BinOp) and isinstance(then, ast.Assign)
                both = ast.Tuple([ast.Name("_onepass_y", ast.Store()), ast.Name(total, ast.Store())], ast.Store())
                call = ast.Assign([both], self._with_sum(norm, first.value))
                after = ast.Assign(then.targets, ast.Name("_onepass_y", ast.Load()))
                return [ast.copy_location(call, then), *kept, ast.copy_location(after, then)], 2 + len(kept)
        return [], 0

    def _sink(self, body: list[ast.stmt]) -> list[ast.stmt]:
        """An activation that follows an `if` goes into its branches, if a norm stands at the end of one of them."""
        done: list[ast.stmt] = []
        for statement in body:
            before = done[-1] if done else None
            if isinstance(before, ast.If) and any(self._fuses(end, statement) for end in _ends(before)):
                _append(before, statement)
            else:
                done.append(statement)
        return done

    def _fuses(self, statement: ast.stmt, following: ast.stmt) -> bool:
        norm = self._norm_of(statement)
        beside = self._activated(following, _target(statement)) if norm else None
        return bool(norm and beside and (self._decide(norm, beside) or self.fused is None))

    def _norm_of(self, statement: ast.stmt | None) -> ast.Call | None:
        """The call in `v = self.norm(x)`."""
        call = statement.value if isinstance(statement, ast.Assign) and _target(statement) else None
        return call if self._is_norm(call) else None  # pyright: ignore[reportReturnType]

    def _is_norm(self, node: Any) -> bool:
        alone = isinstance(node, ast.Call) and len(node.args) == 1 and not node.keywords and not isinstance(node.args[0], ast.Starred)
        return alone and _chain(node.func).startswith(f"{self.self}.")

    def _activated(self, statement: ast.stmt, value: str | None) -> str | None:
        """The activation in `w = act(v)`, where v is not used again."""
        act = _acts(statement.value) if isinstance(statement, ast.Assign) and value else None
        if act is None or ast.unparse(act.args[0]) != value or (_target(statement) != value and self.loads[value] > 1):  # pyright: ignore[reportArgumentType]
            return None
        return self._said(act.func) if _target(statement) else None

    def visit_Call(self, node: ast.Call) -> ast.AST:
        act = _acts(node)
        if act is not None and self._is_norm(act.args[0]):
            norm: Any = act.args[0]
            activation = self._decide(norm, self._said(act.func))
            if activation:
                return self._fused(norm, act, activation)
        if self._is_norm(node) and _is_sum(node.args[0]) and self._decide(node, "+") is not None:
            return ast.copy_location(ast.Subscript(self._with_sum(node, node.args[0]), ast.Constant(0), ast.Load()), node)
        method = node.func.attr if self.dense and isinstance(node.func, ast.Attribute) else ""
        self.generic_visit(node)
        if method == "contiguous" and not node.args and not node.keywords:
            return self._call("_dense", node, node.func.value)  # pyright: ignore[reportAttributeAccessIssue]
        if method == "view" and node.args and not node.keywords:
            return self._call("_view", node, node.func.value, *node.args)  # pyright: ignore[reportAttributeAccessIssue]
        return node

    def _fused(self, norm: ast.Call, act: Any, activation: str) -> ast.Call:
        function = act.func if _chain(act.func).startswith(f"{self.self}.") else ast.Constant(None)
        return self._call("_activated", norm, norm.func, function, ast.Constant(activation), self.visit(norm.args[0]))

    def _with_sum(self, norm: ast.Call, total: Any) -> ast.Call:
        return self._call("_added", norm, norm.func, self.visit(total.left), self.visit(total.right))

    def _call(self, method: str, at: ast.AST, *args: ast.expr) -> ast.Call:
        """A method of `blocks`, called in the place of `at`."""
        return ast.copy_location(ast.Call(ast.Attribute(ast.Name(self.self, ast.Load()), method, ast.Load()), [*args], []), at)


def forget() -> None:
    """Let go of the files that were read: their trees are many small objects, through which the garbage collector goes again and again."""
    _file.cache_clear()
    _source.cache_clear()


def keeps_layout(function: Callable[..., Any]) -> bool:
    """Whether `dense` would change a function."""
    text = _text(function)
    return ast.unparse(_Rewriter(text, {}, True).rewrite()) != ast.unparse(_Rewriter(text, {}, False).rewrite())


def _chain(node: ast.AST) -> str:
    """ "a.b.c" of a name with attributes; "" of anything else."""
    if isinstance(node, ast.Attribute):
        before = _chain(node.value)
        return f"{before}.{node.attr}" if before else ""
    return node.id if isinstance(node, ast.Name) else ""


def _target(statement: Any) -> str | None:
    """v in `v = ...`."""
    one = isinstance(statement, ast.Assign) and len(statement.targets) == 1
    return _chain(statement.targets[0]) or None if one and isinstance(statement.targets[0], ast.Name) else None


def _acts(node: Any) -> ast.Call | None:
    """A call of one value, perhaps in place."""
    plain = isinstance(node, ast.Call) and len(node.args) == 1 and all(keyword.arg == "inplace" for keyword in node.keywords)
    return node if plain and _chain(node.func) else None


def _is_sum(node: ast.AST) -> bool:
    return isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add)


def _is_copy(statement: Any, value: str) -> bool:
    """`r = v`."""
    return bool(_target(statement)) and _chain(statement.value) == value


def _ends(node: ast.If) -> Iterator[ast.stmt]:
    """The last statements of all branches."""
    for branch in (node.body, node.orelse):
        if branch:
            yield from _ends(branch[-1]) if isinstance(branch[-1], ast.If) else [branch[-1]]


def _append(node: ast.If, statement: ast.stmt) -> None:
    """Add a statement to all branches, also to those that were not written."""
    for branch in (node.body, node.orelse):
        if branch and isinstance(branch[-1], ast.If):
            _append(branch[-1], statement)
        elif not branch or not isinstance(branch[-1], (ast.Return, ast.Raise, ast.Continue, ast.Break)):
            branch.append(deepcopy(statement))


def _code(inner: Any, tree: ast.FunctionDef, more: tuple[str, ...] = ()) -> types.CodeType:
    """A function compiled as it was: inside of another, for the names it takes from around it, and `more`."""
    bare = deepcopy(tree)
    bare.decorator_list, bare.returns = [], None
    for arg in ast.walk(bare.args):
        if isinstance(arg, ast.arg):
            arg.annotation = None
    bare.args.defaults = [ast.Constant(None) for _ in bare.args.defaults]  # the values are the function's own
    bare.args.kw_defaults = [None if default is None else ast.Constant(None) for default in bare.args.kw_defaults]
    free = [ast.arg(name) for name in (*inner.__code__.co_freevars, *more)]
    outer = ast.FunctionDef("_outer", ast.arguments([], free, None, [], [], None, []), [bare], [], **_VERSION)
    module = ast.fix_missing_locations(ast.Module([ast.copy_location(outer, bare)], []))
    code = compile(module, inner.__code__.co_filename, "exec", inner.__code__.co_flags & _FUTURE, dont_inherit=True)
    for name in ("_outer", tree.name):
        code = next(const for const in code.co_consts if isinstance(const, types.CodeType) and const.co_name == name)
    return code


def _compiled(text: _Text, tree: ast.FunctionDef, function: Callable[..., Any]) -> Callable[..., Any]:
    return _wrapped(function, text.inner, compiled(text.inner, tree, {}))


def compiled(function: Any, tree: ast.FunctionDef, more: dict[str, Any]) -> Any:
    """A function like another, of a tree that also uses the names in `more`."""
    code = _code(function, tree, tuple(more))
    cells = dict(zip(function.__code__.co_freevars, function.__closure__ or ())) | {name: types.CellType(more[name]) for name in more}
    return _like(function, code, tuple(cells[name] for name in code.co_freevars))


def _wrapped(function: Any, inner: Any, made: Any) -> Any:
    """The new function in the wrappers of the old one, each a copy that holds the new where the other holds the old."""
    if function is inner:
        return made
    below = function.__wrapped__
    new = _wrapped(below, inner, made)
    held = [cell for cell in getattr(function, "__closure__", None) or () if _content(cell) is below]
    if not isinstance(function, types.FunctionType) or len(held) != 1:
        raise Unreadable("its forward is wrapped by what cannot be taken off")
    wrapper = _like(
        function, function.__code__, tuple(types.CellType(new) if cell is held[0] else cell for cell in function.__closure__ or ())
    )
    wrapper.__wrapped__ = new
    return wrapper


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return None


def _like(function: Any, code: types.CodeType, closure: tuple[Any, ...]) -> Any:
    """A function with another code and closure, and all else that the old one has."""
    made: Any = types.FunctionType(code, function.__globals__, function.__name__, function.__defaults__, closure)
    made.__kwdefaults__, made.__annotations__, made.__qualname__ = function.__kwdefaults__, function.__annotations__, function.__qualname__
    made.__doc__, made.__module__ = function.__doc__, function.__module__
    made.__dict__.update(function.__dict__)
    return made


_FUTURE = __future__.annotations.compiler_flag


_VERSION: dict[str, Any] = {"type_params": []} if sys.version_info >= (3, 12) else {}
