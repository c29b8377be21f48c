"""Interpret calls in the source of a forward.

Functions of trusted packages (`trust`) are not interpreted. Other Python functions are followed: their source is
interpreted, too. Any other call raises NotAnalyzable.
"""

from __future__ import annotations

import ast
import functools
import inspect
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from onepass.patching.guards import MISSING, is_plain

from .names import Names
from .trust import (
    COMPILING_QUERIES,
    MACHINE_PACKAGES,
    NEVER_CALL_ARGUMENTS,
    PURE_BUILTINS,
    QUERY_PREFIXES,
    RETURN_NO_TENSOR,
    VARIED_BY_TRIALS,
    is_from_torch,
    is_trusted,
    is_user_code,
)
from .values import FIXED, TENSOR, VARIES, BoundMethod, Known, SuperProxy, Unknown, Variadic, is_tensor, varies

SHAPE_METHODS: dict[str, Callable[..., Any]] = {
    "size": lambda shape, *dim: shape[dim[0]] if dim else shape, "dim": len, "ndimension": len, "numel": lambda shape: shape.numel(),
}  # fmt: skip


class Calls(Names):
    """The part of the interpreter that handles calls."""

    def _eval_Call(self, node: ast.Call) -> Any:
        if isinstance(node.func, ast.Name) and node.func.id == "super" and not node.args:
            return self._super()
        args, keywords = self._arguments(node)
        values = [VARIES] if None in args or None in keywords.values() else [*args, *keywords.values()]
        if isinstance(node.func, ast.Attribute) and not isinstance(base := self.value(node.func.value), Known):
            return self._method_of_unknown(node.func, base, values)
        function = self.value(node.func)
        if isinstance(function, Known):
            return self._call_known(node, function, args, keywords, values)
        if varies(function):
            return VARIES  # a nested function, already followed where it was defined
        raise self.error(node, f"it calls {ast.unparse(node.func)}, which is unknown")

    def _method_of_unknown(self, function: ast.Attribute, base: Any, values: list[Any]) -> Any:
        """Return the result of a method of an unknown value, such as `x.sum()`, as an object of values.py."""
        if isinstance(base, Unknown) and base.shape is not None and function.attr in SHAPE_METHODS:
            return self.computed(function, [Known(base.shape), *values], SHAPE_METHODS[function.attr])
        self.value(function)  # raises an error for methods such as get_device
        if is_tensor(base) and function.attr not in RETURN_NO_TENSOR and not function.attr.startswith("is_"):
            return TENSOR
        return VARIES if varies(base) or any(map(varies, values)) else FIXED

    def _super(self) -> Any:
        code, owner = self.function.__code__, self.variables.get(self.tree.args.args[0].arg)
        if "__class__" not in code.co_freevars or not isinstance(owner, Known):
            return VARIES
        return Known(SuperProxy((self.function.__closure__ or ())[code.co_freevars.index("__class__")].cell_contents, owner))

    def _arguments(self, node: ast.Call) -> tuple[list[Any], dict[str, Any]]:
        """Return the arguments of a call as objects of values.py. None stands for an unknown number of arguments."""
        args, keywords = [], {}
        for arg in node.args:
            if not isinstance(arg, ast.Starred):
                args.append(self.value(arg))
                continue
            rest = self.value(arg.value)
            known = [Known(part) for part in rest.value] if isinstance(rest, Known) and isinstance(rest.value, (tuple, list)) else [None]
            args += rest.values if isinstance(rest, Variadic) else known
        for keyword in node.keywords:
            value = self.value(keyword.value)
            if keyword.arg is None:
                keywords |= value.values if isinstance(value, Variadic) else {"**": None}
            else:
                keywords[keyword.arg] = value
        return args, keywords

    def _call_known(self, node: ast.Call, function: Known, args: list[Any], keywords: dict[str, Any], values: list[Any]) -> Any:
        """Return the result of a known function as an object of values.py. `values` has all arguments in one list."""
        called, text = function.value, ast.unparse(node.func)
        if isinstance(called, functools.partial):
            keywords = {**{name: Known(value) for name, value in called.keywords.items()}, **keywords}
            return self._call_known(node, Known(called.func), [*map(Known, called.args), *args], keywords, values)
        if isinstance(called, torch.jit.ScriptFunction):
            raise self.error(node, f"it calls {text}, which is scripted")
        if isinstance(called, BoundMethod):
            called, args = called.function, [called.owner, *args]
        elif isinstance(called, nn.Module):
            if "forward" in vars(called):
                raise self.error(node, f"it calls {text}, whose forward was replaced")
            if is_trusted(type(called).forward):
                return TENSOR
            called, args = type(called).forward, [function, *args]
        elif isinstance(called, types.MethodType):
            owner = called.__self__
            if isinstance(owner, type) and issubclass(owner, torch.autograd.Function) and called.__name__ == "apply":
                return self._follow_autograd_function(owner)
            called, args = called.__func__, [Known(owner, function.path.rpartition(".")[0]), *args]
        if called in (hasattr, getattr) and len(args) > 1:
            return self._getattr_or_hasattr(node, called, args)
        wrapped = inspect.unwrap(called) if callable(called) else called
        if is_trusted(called) and wrapped is not called and not is_trusted(wrapped):  # inside a wrapper of torch, such as no_grad
            return self.follow(wrapped, args, keywords, False)
        is_pure = isinstance(called, (type, types.BuiltinFunctionType)) and called in PURE_BUILTINS
        if isinstance(called, types.BuiltinMethodType) and called.__self__ is not None:
            is_pure = is_pure or is_plain(called.__self__)
        if is_pure or is_from_torch(called) or is_trusted(called):
            if called not in NEVER_CALL_ARGUMENTS and any(isinstance(part, Known) and is_user_code(part.value) for part in values):
                raise self.error(node, f"it passes a function to {text}, which may call it")
            return self._call_pure(node, called, values, keywords) if is_pure else self._call_torch(node, called, text, values)
        if isinstance(called, type) and issubclass(called, BaseException):
            return FIXED
        if isinstance(called, (types.FunctionType, functools._lru_cache_wrapper)):
            self.analysis.calls.add((self.function, self.node_numbers[id(node)]))
            return self.follow(called, args, keywords, True)
        raise self.error(node, f"it calls {text}, whose source cannot be read")

    def _call_pure(self, node: ast.Call, called: Any, values: list[Any], keywords: dict[str, Any]) -> Any:
        """Return the result of a builtin function, or of a method of a string or the like, as an object of values.py."""
        first = values[0] if values else FIXED
        if called is isinstance and is_tensor(first) and isinstance(values[1], Known):
            classes = values[1].value if isinstance(values[1].value, tuple) else (values[1].value,)
            if Tensor in classes:  # True, because the original forward runs for other inputs
                return Known(True)
        if called is type and len(values) == 1 and isinstance(first, Known):
            return Known(type(first.value), f"{first.path}.__class__")
        if any(map(varies, values)):
            if called in (min, max) and not any(map(is_tensor, values)):
                raise self.error(node, f"it uses {ast.unparse(node)}, and in trials the result may always be the same argument")
            if called in (isinstance, issubclass, bool, any, all):
                self.add_condition(node, ast.unparse(node))
        return self.computed(node, values, None if keywords else called)

    def _call_torch(self, node: ast.Call, called: Any, text: str, values: list[Any]) -> Any:
        """Return the result of a function of torch, or of another trusted package, as an object of values.py."""
        name, module = getattr(called, "__name__", ""), getattr(called, "__module__", None) or ""
        if type(called).__module__ == "torch._ops" and "aten" not in str(called):
            raise self.error(node, f"it calls {text}, whose source cannot be read")
        if name in VARIED_BY_TRIALS:
            return VARIES
        if name in COMPILING_QUERIES:
            return Known(False)  # "not compiling": compiled code runs the original forward
        if name == "is_tensor" and is_tensor(values[0]):
            return Known(True)
        any_varies = any(map(varies, values))
        if module.startswith(MACHINE_PACKAGES) or (name.startswith(QUERY_PREFIXES) and not any_varies):
            raise self.error(node, f"it calls {text}(), whose result trials cannot vary")
        return TENSOR if any(map(is_tensor, values)) and name not in RETURN_NO_TENSOR else VARIES if any_varies else FIXED

    def _getattr_or_hasattr(self, node: ast.Call, called: Any, args: list[Any]) -> Any:
        base, name = args[:2]
        if not isinstance(base, Known) or not isinstance(name, Known) or not isinstance(name.value, str):
            raise self.error(
                node, f"it reads attribute {ast.unparse(node.args[1])} of {ast.unparse(node.args[0])}, which cannot be followed"
            )
        exists = hasattr(base.value, name.value)
        if not exists and isinstance(base.value, nn.Module):
            self.analysis.guard(f"{base.path}.{name.value}", MISSING, name.value)
        if called is hasattr:
            return Known(exists)
        return self.attribute(node, base, name.value) if exists else args[2] if len(args) > 2 else FIXED

    def _follow_autograd_function(self, function: type[torch.autograd.Function]) -> Any:
        """Follow the methods of an autograd.Function, and return TENSOR. Trials cannot record their conditions."""
        for name in ("forward", "backward", "setup_context"):
            step = inspect.getattr_static(function, name, None)
            step = step.__func__ if isinstance(step, (staticmethod, classmethod)) else step
            if isinstance(step, types.FunctionType) and not is_trusted(step):
                self.follow(step, [VARIES] * step.__code__.co_argcount, {}, False)
        return TENSOR
