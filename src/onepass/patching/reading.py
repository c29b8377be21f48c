"""What a forward decides by: its source is followed with what is known of each value, and nothing is run.

A value is known (a constant, an attribute of the module, a function), fixed (it does not depend on the call) or varies with the call. A
condition on known or fixed values goes the same way in every call, for as long as the plain values behind it stay: these are `held`. A
condition on what varies is a question to the trials, which have to see both answers. Whatever can be neither followed nor tried (a
device, the environment, the clock, code that is not Python) is a reason to leave the module alone.
"""

from __future__ import annotations

import ast
import builtins
import dis
import functools
import inspect
import sys
import types
from collections.abc import Callable
from typing import Any

from torch import nn

from .expressions import Expressions
from .source import Unreadable, tree_of
from .state import is_plain
from .values import (
    DEVICE,
    FIXED,
    INPUT,
    PURE,
    VARIES,
    Known,
    Question,
    Reading,
    Several,
    Untriable,
    are_equal,
    is_lasting,
    is_tensor,
    is_torch,
    trusted,
    varies,
)


def read(module: nn.Module, reading: Reading) -> Reading:
    """Take down what the forward of a module decides by. Raises Untriable, with the reason."""
    forward, own = type(module).forward, Known(module, "self")
    inner = inspect.unwrap(forward)
    if not trusted(forward):
        _follow(reading, forward, [own, INPUT], {}, (), True)
    elif not trusted(inner):  # inside of no_grad and the like
        _follow(reading, inner, [own, INPUT], {}, (), False)
    else:  # it may call methods that are not torch's
        for name in inner.__code__.co_names:
            found = inspect.getattr_static(type(module), name, None)
            method = found.fget if isinstance(found, property) else found
            if isinstance(method, types.FunctionType) and not trusted(method):
                _follow(reading, method, [own, *[VARIES] * (method.__code__.co_argcount - 1)], {}, (), False)
    return reading


def read_function(function: Callable[..., Any]) -> Reading:
    """As `read`, for a function of one tensor."""
    reading = Reading()
    if not trusted(function):
        _follow(reading, function, [INPUT], {}, (), True)
    elif not trusted(inspect.unwrap(function)):
        _follow(reading, inspect.unwrap(function), [INPUT], {}, (), False)
    return reading


def _follow(reading: Reading, function: Any, args: list[Any], keywords: dict[str, Any], stack: tuple[Any, ...], heard: bool) -> Any:
    """What a function returns. One whose answers are not heard must not ask, unless before an error."""
    if isinstance(function, functools._lru_cache_wrapper):
        function = function.__wrapped__
    if not isinstance(function, types.FunctionType):
        raise Untriable(f"it calls {getattr(function, '__name__', function)!r:.60}, which is not written in Python")
    if trusted(function) or function in stack or len(stack) > 20:
        return VARIES
    try:
        tree = tree_of(function)
    except Unreadable as reason:
        _without_source(reading, function, args, str(reason))
        return VARIES
    reading.functions.add(function)
    before = set(reading.questions)
    returned = _Statements(reading, function, tree, (*stack, function)).followed(args, keywords)
    asked = [question.text for place, question in reading.questions.items() if place not in before and not question.may_lack]
    if asked and not heard:
        raise Untriable(f"it branches on {asked[0]}, where no trial listens")
    return returned


class _Statements(Expressions):
    """One function, followed statement by statement."""

    def __init__(self, reading: Reading, function: types.FunctionType, tree: ast.FunctionDef, stack: tuple[Any, ...]) -> None:
        self.reading, self.function, self.tree, self.stack = reading, function, tree, stack
        self.numbers = {id(node): at for at, node in enumerate(ast.walk(tree))}
        self.names: dict[str, Any] = {}
        self.returns: list[Any] = []
        self.branch_varies = False

    def follow(self, function: Any, args: list[Any], keywords: dict[str, Any], heard: bool) -> Any:
        return _follow(self.reading, function, args, keywords, self.stack, heard)

    def followed(self, args: list[Any], keywords: dict[str, Any]) -> Any:
        """What the function returns."""
        self._bind(args, keywords)
        self._block(self.tree.body)
        return functools.reduce(self.joined, self.returns) if self.returns else Known(None)

    def _bind(self, args: list[Any], keywords: dict[str, Any]) -> None:
        """Parameters get what is known of their arguments, else their defaults."""
        loose = None in args or None in keywords.values()  # "*args" of which nothing is known
        spec, rest = self.tree.args, dict(keywords)
        named = [arg.arg for arg in (*spec.posonlyargs, *spec.args)]
        values = self.function.__defaults__ or ()
        more: Any = getattr(self.function, "__kwdefaults__", None)
        defaults = dict(zip(named[len(named) - len(values) :], values)) | (more or {})
        for name, value in defaults.items():
            if isinstance(value, (list, dict, set)):
                raise self.refusal(self.tree, f"its default for {name!r} may change")
        given = dict(zip(named, args))
        for name in (*named, *[arg.arg for arg in spec.kwonlyargs]):
            default = Known(defaults[name]) if name in defaults else VARIES
            self.names[name] = VARIES if loose else given.get(name) or rest.pop(name, None) or default
        if spec.vararg:
            self.names[spec.vararg.arg] = VARIES if loose else Several(args[len(named) :])
        if spec.kwarg:
            self.names[spec.kwarg.arg] = VARIES if loose else Several(rest)

    # Conditions

    def test(self, node: ast.expr, may_lack: frozenset[bool] = frozenset()) -> Any:
        """What is known of a condition; one that varies is a question, or several."""
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            inner = self.test(node.operand, frozenset(not answer for answer in may_lack))
            return Known(not inner.value) if isinstance(inner, Known) else inner
        if isinstance(node, ast.BoolOp):
            return self.all_or_any(node, lambda operand: self.test(operand, may_lack), True)
        value = self.value(node)
        self.reading.tested |= {inner.attr for inner in ast.walk(node) if isinstance(inner, ast.Attribute)}
        if varies(value):
            self.ask(node, ast.unparse(node), may_lack)
        if not isinstance(value, Known):
            return value
        if not is_plain(value.value) and not is_lasting(value.value):
            raise self.refusal(node, f"it decides by {ast.unparse(node)}, which may change unseen")
        return Known(bool(value.value) if is_plain(value.value) else True)

    def ask(self, node: ast.AST, text: str, may_lack: frozenset[bool] = frozenset(), loop: bool = False) -> None:
        question = Question(f"`{text}` ({self.where(node)})", may_lack, loop)
        self.reading.questions[self.function, self.numbers[id(node)]] = question

    # Statements: each says False where nothing comes after it

    def _block(self, body: list[ast.stmt]) -> bool:
        """Whether statements come to their end."""
        for statement in body:
            look = getattr(self, f"_do_{type(statement).__name__}", None)
            if look is None:
                raise self.refusal(statement, f"it has a statement that cannot be followed, {type(statement).__name__.lower()!r}")
            if look(statement) is False:
                return False
        return True

    def _do_Pass(self, node: Any) -> None: ...

    _do_Break = _do_Continue = _do_Pass

    def _do_Expr(self, node: ast.Expr) -> None:
        self.value(node.value)

    def _do_Return(self, node: ast.Return) -> bool:
        value = Known(None) if node.value is None else self.value(node.value)
        self.returns.append(VARIES if self.branch_varies and not is_tensor(value) else value)
        return False

    def _do_Raise(self, node: ast.Raise) -> bool:
        return False

    def _do_Assert(self, node: ast.Assert) -> None:
        self.test(node.test, frozenset({False}))

    def _do_Assign(self, node: ast.Assign) -> None:
        value = self.value(node.value)
        for target in node.targets:
            self.assign(target, value)

    def _do_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.assign(node.target, self.value(node.value))

    def _do_AugAssign(self, node: ast.AugAssign) -> None:
        before = self.names.get(node.target.id, FIXED) if isinstance(node.target, ast.Name) else FIXED
        added = self.value(node.value)
        self.assign(node.target, INPUT if is_tensor(before) else self.computed(node, [before, added]))

    def assign(self, target: ast.expr, value: Any) -> None:
        part = VARIES if varies(value) else FIXED
        if isinstance(target, ast.Name):
            same = not self.branch_varies or is_tensor(value) or are_equal(self.names.get(target.id), value)
            self.names[target.id] = value if same else VARIES
        elif isinstance(target, (ast.Tuple, ast.List)):
            known = list(value.value) if isinstance(value, Known) and isinstance(value.value, (tuple, list)) else []
            parts = [Known(one) for one in known] if len(known) == len(target.elts) else [part] * len(target.elts)
            for one, into in zip(parts, target.elts):
                self.assign(into, one)
        elif isinstance(target, ast.Starred):
            self.assign(target.value, part)
        elif isinstance(target, ast.Subscript) and varies(self.value(target.value)):
            self.value(target.slice)
        else:
            raise self.refusal(target, f"it keeps a state: it sets {ast.unparse(target)}")

    def _do_Delete(self, node: ast.Delete) -> None:
        if not all(isinstance(target, ast.Name) for target in node.targets):
            raise self.refusal(node, "it deletes what is not its own")

    def _do_If(self, node: ast.If) -> bool:
        raises = frozenset({True} if _raises(node.body) else {False} if _raises(node.orelse) else ())
        test = self.test(node.test, raises)
        if isinstance(test, Known):
            return self._block(node.body if test.value else node.orelse)
        return self._either(varies(test), node.body, node.orelse)

    def _either(self, depends: bool, *branches: list[ast.stmt]) -> bool:
        """One of several branches is taken, which `depends` on the call or not."""
        outside, before, after = self.branch_varies, dict(self.names), []
        self.branch_varies = outside or depends
        for branch in branches:
            self.names = dict(before)
            after += [self.names] if self._block(branch) else []
        for names in after[:1]:
            self.names = dict(names)
        for name, value in [pair for names in after[1:] for pair in names.items()]:
            self.names[name] = self.joined(self.names[name], value) if name in self.names else value
        self.branch_varies = outside
        return bool(after)

    def _do_While(self, node: ast.While) -> None:
        for _ in range(2):  # what is assigned later in the loop is known the second time
            self._either(varies(self.test(node.test)), node.body, [])
        self._block(node.orelse)

    def _do_For(self, node: ast.For) -> None:
        over = self.value(node.iter)
        if varies(over):
            self.ask(node.iter, f"for ... in {ast.unparse(node.iter)}", frozenset({False}), loop=True)
        for _ in range(2):
            self.assign(node.target, VARIES if varies(over) else FIXED)
            self._either(varies(over), node.body, [])
        self._block(node.orelse)

    def _do_With(self, node: ast.With) -> bool:
        for item in node.items:
            value = self.value(item.context_expr)
            if isinstance(value, Known):
                raise self.refusal(node, f"it enters {ast.unparse(item.context_expr)}, which cannot be followed")
            if item.optional_vars is not None:
                self.assign(item.optional_vars, value)
        return self._block(node.body)

    def _do_Try(self, node: ast.Try) -> bool:
        if node.handlers:
            raise self.refusal(node, "it catches errors, which a trial may not meet")
        return self._block(node.body) and self._block(node.finalbody)

    def _do_FunctionDef(self, node: ast.FunctionDef) -> None:
        """A function of its own: followed where it stands, with arguments that may be anything."""
        outside, returns = dict(self.names), list(self.returns)
        self.names |= {arg.arg: VARIES for arg in ast.walk(node.args) if isinstance(arg, ast.arg)}
        self._block(node.body)
        self.names, self.returns = {**outside, node.name: VARIES}, returns

    def _do_Import(self, node: ast.Import | ast.ImportFrom) -> None:
        for alias in node.names:
            place = node.module or "" if isinstance(node, ast.ImportFrom) else alias.name
            module = sys.modules.get(place)
            if module is None or getattr(node, "level", 0):
                raise self.refusal(node, f"it imports {place!r} when it is called")
            if isinstance(node, ast.ImportFrom):
                self.names[alias.asname or alias.name] = self.outside(vars(module).get(alias.name), f"{place}:{alias.name}", alias.name)
            else:
                self.names[alias.asname or place.split(".")[0]] = Known(module if alias.asname else sys.modules[place.split(".")[0]])

    _do_ImportFrom = _do_Import


def _raises(body: list[ast.stmt]) -> bool:
    return bool(body) and isinstance(body[-1], ast.Raise)


def _without_source(reading: Reading, function: types.FunctionType, args: list[Any], reason: str) -> None:
    """A function of which only the code is at hand: it must not branch, nor read anything but torch and its module."""
    codes, own = [function.__code__], next((arg for arg in args if isinstance(arg, Known) and isinstance(arg.value, nn.Module)), None)
    for code in codes:
        codes += [const for const in code.co_consts if isinstance(const, types.CodeType)]
        for instruction in dis.get_instructions(code):
            kind, name = instruction.opname, instruction.argval
            if "JUMP" in kind or kind in ("FOR_ITER", "SETUP_FINALLY") or getattr(code, "co_exceptiontable", b""):
                raise Untriable(f"it branches, and {reason}")
            if kind.startswith(("STORE_ATTR", "STORE_GLOBAL", "STORE_SUBSCR", "LOAD_DEREF")) and name != "__class__":
                raise Untriable(f"it reads or changes {name!r}, and {reason}")
            if kind in ("LOAD_GLOBAL", "LOAD_NAME"):
                value = function.__globals__.get(name, getattr(builtins, name, None))
                lasting = isinstance(value, (types.ModuleType, types.BuiltinFunctionType, types.FunctionType, type))
                if not (lasting and (is_torch(value) or value in PURE or value is super)):
                    raise Untriable(f"it reads {name!r}, and {reason}")
            if kind.startswith(("LOAD_ATTR", "LOAD_METHOD")):
                _bare_attribute(reading, own, name, reason)


def _bare_attribute(reading: Reading, own: Known | None, name: str, reason: str) -> None:
    """An attribute of it is not known what; perhaps of the module."""
    if name in DEVICE or name.startswith("__"):
        raise Untriable(f"it looks at {name}, and {reason}")
    if own is None or name in ("training", *own.value._parameters, *own.value._buffers):
        return
    found = own.value.__dict__.get(name, inspect.getattr_static(type(own.value), name, None))
    if isinstance(found, (property, types.FunctionType)) and not trusted(getattr(found, "fget", found)):
        raise Untriable(f"it calls its {name!r}, and {reason}")
    if found is not None and is_plain(found):
        reading.hold(f"{own.path}.{name}", found, name)
