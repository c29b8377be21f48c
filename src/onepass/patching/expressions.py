"""Expressions in the source of a forward: what is known of the value of each."""

from __future__ import annotations

import ast
import builtins
import functools
import inspect
import operator
import sys
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from .state import MISSING, is_plain
from .values import (
    ASKS,
    COMPILING,
    DEVICE,
    FIXED,
    INPUT,
    LOOKS,
    MACHINE,
    NO_TENSOR,
    PURE,
    TRIED,
    TRUSTED,
    VARIES,
    Known,
    Method,
    Reading,
    Several,
    Super,
    Unknown,
    Untriable,
    are_equal,
    is_foreign,
    is_lasting,
    is_tensor,
    is_torch,
    trusted,
    varies,
)

_COMPARISONS: dict[type, Callable[..., Any]] = {
    ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt, ast.GtE: operator.ge,
    ast.In: lambda a, b: a in b, ast.NotIn: lambda a, b: a not in b, ast.Is: operator.is_, ast.IsNot: operator.is_not,
}  # fmt: skip


_OPERATIONS: dict[type, Callable[..., Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv, ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod, ast.Pow: operator.pow, ast.USub: operator.neg, ast.UAdd: operator.pos, ast.Invert: operator.invert,
    ast.Not: operator.not_,
}  # fmt: skip


_OF_SHAPES: dict[str, Callable[..., Any]] = {
    "size": lambda shape, *at: shape[at[0]] if at else shape, "dim": len, "ndimension": len, "numel": lambda shape: shape.numel(),
}  # fmt: skip


class Expressions:
    """The expressions of one function. Statements and conditions are for whoever is one of these."""

    function: types.FunctionType
    tree: ast.FunctionDef
    reading: Reading
    names: dict[str, Any]  # what is known of its variables
    numbers: dict[int, int]  # of its nodes, by their identity
    branch_varies: bool

    def assign(self, target: ast.expr, value: Any) -> None:
        raise NotImplementedError

    def test(self, node: ast.expr, may_lack: frozenset[bool] = frozenset()) -> Any:
        raise NotImplementedError

    def ask(self, node: ast.AST, text: str, may_lack: frozenset[bool] = frozenset(), loop: bool = False) -> None:
        raise NotImplementedError

    def follow(self, function: Any, args: list[Any], keywords: dict[str, Any], heard: bool) -> Any:
        """What another function returns; `heard` says whether its answers will be."""
        raise NotImplementedError

    def refusal(self, node: ast.AST, why: str) -> Untriable:
        return Untriable(f"{why} ({self.where(node)})")

    def where(self, node: ast.AST) -> str:
        return f"{self.function.__code__.co_filename.rsplit('/', 1)[-1]}:{getattr(node, 'lineno', self.tree.lineno)}"

    def joined(self, a: Any, b: Any) -> Any:
        """What is known of a value that is one or the other."""
        if are_equal(a, b):
            return a
        if self.branch_varies or varies(a) or varies(b):
            return INPUT if is_tensor(a) and is_tensor(b) else VARIES
        return FIXED

    def value(self, node: ast.expr) -> Any:
        look = getattr(self, f"_see_{type(node).__name__}", None)
        if look is None:
            raise self.refusal(node, f"it has an expression that cannot be followed, {ast.unparse(node)!r:.60}")
        return look(node)

    def computed(self, node: ast.AST, parts: list[Any], compute: Callable[..., Any] | None = None) -> Any:
        """Of what is known, a result that is known too."""
        for part in parts:
            if isinstance(part, Known) and not is_plain(part.value) and not is_lasting(part.value):
                text = part.path.replace(":", ".") or f"a {type(part.value).__name__}"
                raise self.refusal(node, f"it reads {text}, which may change unseen")
        if compute is not None and all(isinstance(part, Known) for part in parts):
            try:
                result = compute(*[part.value for part in parts])
            except Exception:
                return FIXED  # it raises in every call
            return Known(result) if is_plain(result) or isinstance(result, type) else FIXED
        return VARIES if any(map(varies, parts)) else FIXED

    def outside(self, value: Any, path: str, text: str) -> Any:
        """A value from outside of the function."""
        if isinstance(value, Tensor):
            raise Untriable(f"it reads {text}, a tensor that is not its own")
        if is_plain(value) and path.split(".")[0].split(":")[0] not in TRUSTED:
            self.reading.hold(path, value, text)
        return Known(value, path)

    # Names and attributes

    def _see_Constant(self, node: ast.Constant) -> Any:
        return Known(node.value)

    def _see_Name(self, node: ast.Name) -> Any:
        code, names = self.function.__code__, self.function.__globals__  # pyright: ignore[reportAttributeAccessIssue]
        if node.id in self.names:
            return self.names[node.id]
        if node.id in code.co_freevars:
            cell = (self.function.__closure__ or ())[code.co_freevars.index(node.id)]
            return self.outside(cell.cell_contents, "", node.id)
        if node.id in names:
            place = sys.modules.get(names.get("__name__", ""))
            found = place is not None and vars(place) is names
            return self.outside(names[node.id], f"{names['__name__']}:{node.id}" if found else "", node.id)
        return Known(getattr(builtins, node.id)) if hasattr(builtins, node.id) else FIXED

    def _see_Attribute(self, node: ast.Attribute) -> Any:
        base = self.value(node.value)
        if isinstance(base, Known):
            return self._attribute(node, base, node.attr)
        if isinstance(base, Unknown) and base.shape is not None and node.attr in ("shape", "ndim"):
            return Known(base.shape if node.attr == "shape" else len(base.shape))
        if varies(base) and node.attr in DEVICE:
            raise self.refusal(node, f"it looks at {ast.unparse(node)}, and a trial has only a CPU")
        return VARIES if varies(base) else FIXED

    def _attribute(self, node: ast.AST, base: Known, name: str) -> Any:
        value, path = base.value, f"{base.path}.{name}" if base.path else ""
        text = f"{getattr(value, '__name__', base.path or type(value).__name__)}.{name}"
        if isinstance(value, nn.Module):
            return self._of_module(node, base, name)
        if isinstance(value, types.ModuleType):
            return self._of_package(node, value, name)
        if isinstance(value, Super):
            found = getattr(super(value.after, value.own.value), name, None)
            return Known(Method(value.own, found.__func__)) if isinstance(found, types.MethodType) else FIXED
        if isinstance(value, type):
            found = getattr(value, name, MISSING)
            return Known(found) if is_torch(value) else self.outside(found, self._path_in_class(value, name) or path, text)
        if is_plain(value):
            return Known(getattr(value, name)) if hasattr(value, name) else FIXED
        if name in getattr(value, "__dict__", {}):
            return self.outside(value.__dict__[name], path, text)
        raise self.refusal(node, f"it reads {text}, which cannot be followed")

    def _path_in_class(self, cls: type, name: str) -> str:
        """Where an attribute of a class lies, seen from a module of that class."""
        for own in self.names.values():
            if isinstance(own, Known) and isinstance(own.value, cls) and isinstance(own.value, nn.Module):
                return f"{own.path}.__class__.{name}"
        return ""

    def _of_package(self, node: ast.AST, package: types.ModuleType, name: str) -> Any:
        found, text = getattr(package, name, MISSING), f"{package.__name__}.{name}"
        if not is_torch(package):
            return self.outside(found, f"{package.__name__}:{name}", text)
        if text.startswith(tuple(f"{machine}." for machine in MACHINE)) and not isinstance(found, types.ModuleType):
            raise self.refusal(node, f"it asks {text}, which a trial cannot vary")
        return Known(found)

    def _of_module(self, node: ast.AST, base: Known, name: str) -> Any:
        module, path = base.value, f"{base.path}.{name}"
        own, stored = module.__dict__, {**module._parameters, **module._buffers, **module._modules}
        if name == "training":
            return VARIES
        if name == "__class__":
            return Known(type(module), path)
        if name.startswith("__"):
            raise self.refusal(node, f"it reads {path}, which cannot be followed")
        if isinstance(stored.get(name), Tensor):
            return Unknown(True, True, stored[name].shape)
        if name in stored:
            return Known(stored[name], path) if stored[name] is not None else self.outside(None, path, path)
        found = inspect.getattr_static(type(module), name, MISSING)
        if isinstance(found, property):
            return self.follow(found.fget, [base], {}, False)
        if name in own:
            if is_lasting(own[name]) and not isinstance(own[name], types.MethodType):
                self.reading.hold(path, own[name], path)  # a function that may be exchanged
            return INPUT if isinstance(own[name], Tensor) else self.outside(own[name], path, path)
        if isinstance(found, types.FunctionType):
            return Known(Method(base, found))
        if isinstance(found, staticmethod):
            return Known(found.__func__)
        if found is MISSING and not trusted(getattr(type(module), "__getattr__", None)):
            raise self.refusal(node, f"it reads {path}, which its class makes up")
        return self.outside(found, path, path)

    # Calls

    def _see_Call(self, node: ast.Call) -> Any:
        if isinstance(node.func, ast.Name) and node.func.id == "super" and not node.args:
            return self._super()
        args, keywords = self._arguments(node)
        flat = [VARIES] if None in args or None in keywords.values() else [*args, *keywords.values()]
        if isinstance(node.func, ast.Attribute) and not isinstance(base := self.value(node.func.value), Known):
            return self._of_tensor(node.func, base, flat)
        function = self.value(node.func)
        if isinstance(function, Known):
            return self._result(node, function, args, keywords, flat)
        if varies(function):
            return VARIES  # a function of its own, followed where it stands
        raise self.refusal(node, f"it calls {ast.unparse(node.func)}, which is not known")

    def _of_tensor(self, function: ast.Attribute, base: Any, flat: list[Any]) -> Any:
        """A method of what is not known: of a tensor, a size, a dtype."""
        if isinstance(base, Unknown) and base.shape is not None and function.attr in _OF_SHAPES:
            return self.computed(function, [Known(base.shape), *flat], _OF_SHAPES[function.attr])
        self.value(function)  # a refusal
        if is_tensor(base) and function.attr not in NO_TENSOR and not function.attr.startswith("is_"):
            return INPUT
        return VARIES if varies(base) or any(map(varies, flat)) else FIXED

    def _super(self) -> Any:
        code, own = self.function.__code__, self.names.get(self.tree.args.args[0].arg)
        if "__class__" not in code.co_freevars or not isinstance(own, Known):
            return VARIES
        return Known(Super((self.function.__closure__ or ())[code.co_freevars.index("__class__")].cell_contents, own))

    def _arguments(self, node: ast.Call) -> tuple[list[Any], dict[str, Any]]:
        """What is known of them; None for those of which not even the number is."""
        args, keywords = [], {}
        for arg in node.args:
            if not isinstance(arg, ast.Starred):
                args.append(self.value(arg))
                continue
            rest = self.value(arg.value)
            known = [Known(part) for part in rest.value] if isinstance(rest, Known) and isinstance(rest.value, (tuple, list)) else [None]
            args += rest.values if isinstance(rest, Several) else known
        for keyword in node.keywords:
            value = self.value(keyword.value)
            if keyword.arg is None:
                keywords |= value.values if isinstance(value, Several) else {"**": None}
            else:
                keywords[keyword.arg] = value
        return args, keywords

    def _result(self, node: ast.Call, function: Known, args: list[Any], keywords: dict[str, Any], flat: list[Any]) -> Any:
        called, text = function.value, ast.unparse(node.func)
        if isinstance(called, functools.partial):
            keywords = {**{name: Known(value) for name, value in called.keywords.items()}, **keywords}
            return self._result(node, Known(called.func), [*map(Known, called.args), *args], keywords, flat)
        if isinstance(called, torch.jit.ScriptFunction):
            raise self.refusal(node, f"it calls {text}, which is scripted")
        if isinstance(called, Method):
            called, args = called.function, [called.own, *args]
        elif isinstance(called, nn.Module):
            if "forward" in vars(called):
                raise self.refusal(node, f"it calls {text}, whose forward was replaced")
            if trusted(type(called).forward):
                return INPUT
            called, args = type(called).forward, [function, *args]
        elif isinstance(called, types.MethodType):
            owner = called.__self__
            if isinstance(owner, type) and issubclass(owner, torch.autograd.Function) and called.__name__ == "apply":
                return self._differentiated(owner)
            called, args = called.__func__, [Known(owner, function.path.rpartition(".")[0]), *args]
        if called in (hasattr, getattr) and len(args) > 1:
            return self._by_name(node, called, args)
        wrapped = inspect.unwrap(called) if callable(called) else called
        if trusted(called) and wrapped is not called and not trusted(wrapped):  # no_grad and the like
            return self.follow(wrapped, args, keywords, False)
        pure = isinstance(called, (type, types.BuiltinFunctionType)) and called in PURE
        if isinstance(called, types.BuiltinMethodType) and called.__self__ is not None:
            pure = pure or is_plain(called.__self__)
        if pure or is_torch(called) or trusted(called):
            if called not in LOOKS and any(isinstance(part, Known) and is_foreign(part.value) for part in flat):
                raise self.refusal(node, f"it hands code to {text}, which may call it")
            return self._pure(node, called, flat, keywords) if pure else self._of_torch(node, called, text, flat)
        if isinstance(called, type) and issubclass(called, BaseException):
            return FIXED
        if isinstance(called, (types.FunctionType, functools._lru_cache_wrapper)):
            self.reading.calls.add((self.function, self.numbers[id(node)]))
            return self.follow(called, args, keywords, True)
        raise self.refusal(node, f"it calls {text}, which cannot be looked into")

    def _pure(self, node: ast.Call, called: Any, flat: list[Any], keywords: dict[str, Any]) -> Any:
        """Builtin functions, and methods of plain values."""
        first = flat[0] if flat else FIXED
        if called is isinstance and is_tensor(first) and isinstance(flat[1], Known):
            classes = flat[1].value if isinstance(flat[1].value, tuple) else (flat[1].value,)
            if Tensor in classes:  # what is no tensor goes to the class that was there
                return Known(True)
        if called is type and len(flat) == 1 and isinstance(first, Known):
            return Known(type(first.value), f"{first.path}.__class__")
        if any(map(varies, flat)):
            if called in (min, max) and not any(map(is_tensor, flat)):
                raise self.refusal(node, f"it takes {ast.unparse(node)}, of which trials may see one side")
            if called in (isinstance, issubclass, bool, any, all):
                self.ask(node, ast.unparse(node))
        return self.computed(node, flat, None if keywords else called)

    def _of_torch(self, node: ast.Call, called: Any, text: str, flat: list[Any]) -> Any:
        name, module = getattr(called, "__name__", ""), getattr(called, "__module__", None) or ""
        if type(called).__module__ == "torch._ops" and "aten" not in str(called):
            raise self.refusal(node, f"it calls {text}, which cannot be looked into")
        if name in TRIED:
            return VARIES
        if name in COMPILING:
            self.reading.asks_compiling = True
            return Known(False)  # what is compiled or scripted is what was there
        if name == "is_tensor" and is_tensor(flat[0]):
            return Known(True)
        changes = any(map(varies, flat))
        if module.startswith(MACHINE) or (name.startswith(ASKS) and not changes):
            raise self.refusal(node, f"it asks {text}(), which a trial cannot vary")
        return INPUT if any(map(is_tensor, flat)) and name not in NO_TENSOR else VARIES if changes else FIXED

    def _by_name(self, node: ast.Call, called: Any, args: list[Any]) -> Any:
        """hasattr and getattr."""
        base, name = args[:2]
        if not isinstance(base, Known) or not isinstance(name, Known) or not isinstance(name.value, str):
            raise self.refusal(node, f"it looks for {ast.unparse(node.args[1])} in {ast.unparse(node.args[0])}, which cannot be followed")
        there = hasattr(base.value, name.value)
        if not there and isinstance(base.value, nn.Module):
            self.reading.hold(f"{base.path}.{name.value}", MISSING, name.value)
        if called is hasattr:
            return Known(there)
        return self._attribute(node, base, name.value) if there else args[2] if len(args) > 2 else FIXED

    def _differentiated(self, function: type[torch.autograd.Function]) -> Any:
        """A function with a backward."""
        for name in ("forward", "backward", "setup_context"):
            step = inspect.getattr_static(function, name, None)
            step = step.__func__ if isinstance(step, (staticmethod, classmethod)) else step
            if isinstance(step, types.FunctionType) and not trusted(step):
                self.follow(step, [VARIES] * step.__code__.co_argcount, {}, False)
        return INPUT

    # Conditions, operators and collections

    def _see_IfExp(self, node: ast.IfExp) -> Any:
        test = self.test(node.test)
        if isinstance(test, Known):
            return self.value(node.body if test.value else node.orelse)
        outside, self.branch_varies = self.branch_varies, self.branch_varies or varies(test)
        value = self.joined(self.value(node.body), self.value(node.orelse))
        self.branch_varies = outside
        return value

    def _see_BoolOp(self, node: ast.BoolOp) -> Any:
        return self.all_or_any(node, lambda operand: self.value(operand) if operand is node.values[-1] else self.test(operand), False)

    def all_or_any(self, node: ast.BoolOp, look: Callable[[ast.expr], Any], as_condition: bool) -> Any:
        """`and` and `or`, as far as their operands are reached."""
        decides, found = isinstance(node.op, ast.Or), []
        for operand in node.values:
            value = look(operand)
            known = isinstance(value, Known)
            if known and bool(value.value) is decides and (as_condition or not found):
                return value
            if not known or operand is node.values[-1]:
                found.append(value)
        return found[0] if len(found) == 1 else self.computed(node, found)

    def _see_Compare(self, node: ast.Compare) -> Any:
        parts = [self.value(part) for part in (node.left, *node.comparators)]
        by_identity = len(parts) == 2 and isinstance(node.ops[0], (ast.Is, ast.IsNot))
        if by_identity and any(map(is_tensor, parts)) and any(isinstance(part, Known) and part.value is None for part in parts):
            return Known(isinstance(node.ops[0], ast.IsNot))
        value = self.computed(node, parts, _COMPARISONS[type(node.ops[0])] if len(parts) == 2 else None)
        if varies(value):
            self.ask(node, ast.unparse(node))  # also where it stands in no condition: True is 1
        return value

    def _see_BinOp(self, node: ast.BinOp) -> Any:
        parts = [self.value(node.left), self.value(node.right)]
        return INPUT if any(map(is_tensor, parts)) else self.computed(node, parts, _OPERATIONS.get(type(node.op)))

    def _see_UnaryOp(self, node: ast.UnaryOp) -> Any:
        value = self.value(node.operand)
        return INPUT if is_tensor(value) and not isinstance(node.op, ast.Not) else self.computed(node, [value], _OPERATIONS[type(node.op)])

    def _see_Subscript(self, node: ast.Subscript) -> Any:
        parts = [self.value(node.value), self.value(node.slice)]
        return INPUT if is_tensor(parts[0]) else self.computed(node, parts, operator.getitem)

    def _see_Slice(self, node: ast.Slice) -> Any:
        parts = [Known(None) if part is None else self.value(part) for part in (node.lower, node.upper, node.step)]
        return self.computed(node, parts, slice)

    def _see_Tuple(self, node: ast.Tuple | ast.List | ast.Set) -> Any:
        make = {ast.Tuple: tuple, ast.List: list, ast.Set: set}[type(node)]
        return self.computed(node, [self.value(part) for part in node.elts], lambda *parts: make(parts))

    _see_List = _see_Set = _see_Tuple

    def _see_Dict(self, node: ast.Dict) -> Any:
        return self.computed(node, [self.value(part) for part in (*node.keys, *node.values) if part is not None])

    def _see_Starred(self, node: ast.Starred) -> Any:
        return VARIES if varies(self.value(node.value)) else FIXED

    def _see_JoinedStr(self, node: ast.JoinedStr) -> Any:
        return self.computed(node, [self.value(part) for part in node.values])

    def _see_FormattedValue(self, node: ast.FormattedValue) -> Any:
        return self.value(node.value)

    def _see_NamedExpr(self, node: ast.NamedExpr) -> Any:
        value = self.value(node.value)
        self.assign(node.target, value)
        return value

    def _see_Lambda(self, node: ast.Lambda) -> Any:
        outside = dict(self.names)
        self.names |= {arg.arg: VARIES for arg in ast.walk(node.args) if isinstance(arg, ast.arg)}
        self.value(node.body)
        self.names = outside
        return VARIES

    def _see_ListComp(self, node: ast.ListComp | ast.SetComp | ast.GeneratorExp | ast.DictComp) -> Any:
        outside, parts = dict(self.names), []
        for generator in node.generators:
            parts.append(self.value(generator.iter))
            self.assign(generator.target, VARIES if varies(parts[-1]) else FIXED)
            parts += [self.test(test) for test in generator.ifs]
        elements = (node.key, node.value) if isinstance(node, ast.DictComp) else (node.elt,)
        parts += [self.value(element) for element in elements]
        self.names = outside
        return self.computed(node, parts)

    _see_SetComp = _see_GeneratorExp = _see_DictComp = _see_ListComp
