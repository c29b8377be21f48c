"""Interpret names and attributes: constants, variables, globals, and attributes of modules, packages, classes and values."""

from __future__ import annotations

import ast
import builtins
import inspect
import sys
import types
from typing import Any

from torch import Tensor, nn

from onepass.patching.guards import MISSING, is_plain

from .interpreter import Interpreter
from .trust import DEVICE_ATTRIBUTES, MACHINE_PACKAGES, is_from_torch, is_trusted
from .values import FIXED, TENSOR, VARIES, BoundMethod, Known, SuperProxy, Unknown, is_callable_or_package, varies


class Names(Interpreter):
    """The part of the interpreter that handles names and attributes."""

    def _eval_Constant(self, node: ast.Constant) -> Any:
        return Known(node.value)

    def _eval_Name(self, node: ast.Name) -> Any:
        code, names = self.function.__code__, self.function.__globals__  # pyright: ignore[reportAttributeAccessIssue]
        if node.id in self.variables:
            return self.variables[node.id]
        if node.id in code.co_freevars:
            cell = (self.function.__closure__ or ())[code.co_freevars.index(node.id)]
            return self.outside(cell.cell_contents, "", node.id)
        if node.id in names:
            package = sys.modules.get(names.get("__name__", ""))
            can_find_again = package is not None and vars(package) is names
            return self.outside(names[node.id], f"{names['__name__']}:{node.id}" if can_find_again else "", node.id)
        return Known(getattr(builtins, node.id)) if hasattr(builtins, node.id) else FIXED

    def _eval_Attribute(self, node: ast.Attribute) -> Any:
        base = self.value(node.value)
        if isinstance(base, Known):
            return self.attribute(node, base, node.attr)
        if isinstance(base, Unknown) and base.shape is not None and node.attr in ("shape", "ndim"):
            return Known(base.shape if node.attr == "shape" else len(base.shape))
        if varies(base) and node.attr in DEVICE_ATTRIBUTES:
            raise self.error(node, f"it reads {ast.unparse(node)}, and trials only run on the CPU")
        return VARIES if varies(base) else FIXED

    def attribute(self, node: ast.AST, base: Known, name: str) -> Any:
        """Return the attribute `name` of a known value as an object of values.py, such as `Known(3)`."""
        value, path = base.value, f"{base.path}.{name}" if base.path else ""
        text = f"{getattr(value, '__name__', base.path or type(value).__name__)}.{name}"
        if isinstance(value, nn.Module):
            return self._module_attribute(node, base, name)
        if isinstance(value, types.ModuleType):
            return self._package_attribute(node, value, name)
        if isinstance(value, SuperProxy):
            found = getattr(super(value.after, value.owner.value), name, None)
            return Known(BoundMethod(value.owner, found.__func__)) if isinstance(found, types.MethodType) else FIXED
        if isinstance(value, type):
            found = getattr(value, name, MISSING)
            return Known(found) if is_from_torch(value) else self.outside(found, self._path_in_class(value, name) or path, text)
        if is_plain(value):
            return Known(getattr(value, name)) if hasattr(value, name) else FIXED
        if name in getattr(value, "__dict__", {}):
            return self.outside(value.__dict__[name], path, text)
        raise self.error(node, f"it reads {text}, which cannot be followed")

    def _path_in_class(self, cls: type, name: str) -> str:
        """Return the path of a class attribute, such as "self.__class__.eps"; "" if no variable holds a module of the class."""
        for variable in self.variables.values():
            if isinstance(variable, Known) and isinstance(variable.value, cls) and isinstance(variable.value, nn.Module):
                return f"{variable.path}.__class__.{name}"
        return ""

    def _package_attribute(self, node: ast.AST, package: types.ModuleType, name: str) -> Any:
        found, text = getattr(package, name, MISSING), f"{package.__name__}.{name}"
        if not is_from_torch(package):
            return self.outside(found, f"{package.__name__}:{name}", text)
        if text.startswith(tuple(f"{package_name}." for package_name in MACHINE_PACKAGES)) and not isinstance(found, types.ModuleType):
            raise self.error(node, f"it reads {text}, which trials cannot vary")
        return Known(found)

    def _module_attribute(self, node: ast.AST, base: Known, name: str) -> Any:
        module, path = base.value, f"{base.path}.{name}"
        own, stored = module.__dict__, {**module._parameters, **module._buffers, **module._modules}
        if name == "training":
            return VARIES
        if name == "__class__":
            return Known(type(module), path)
        if name.startswith("__"):
            raise self.error(node, f"it reads {path}, which cannot be followed")
        if isinstance(stored.get(name), Tensor):
            return Unknown(True, True, stored[name].shape)
        if name in stored:
            return Known(stored[name], path) if stored[name] is not None else self.outside(None, path, path)
        found = inspect.getattr_static(type(module), name, MISSING)
        if isinstance(found, property):
            return self.follow(found.fget, [base], {}, False)
        if name in own:
            if is_callable_or_package(own[name]) and not isinstance(own[name], types.MethodType):
                self.analysis.guard(path, own[name], path)  # the user may replace this function later
            return TENSOR if isinstance(own[name], Tensor) else self.outside(own[name], path, path)
        if isinstance(found, types.FunctionType):
            return Known(BoundMethod(base, found))
        if isinstance(found, staticmethod):
            return Known(found.__func__)
        if found is MISSING and not is_trusted(getattr(type(module), "__getattr__", None)):
            raise self.error(node, f"it reads {path}, which its class computes in __getattr__")
        return self.outside(found, path, path)
