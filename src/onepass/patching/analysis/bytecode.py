"""Check functions whose source cannot be read. Only their bytecode is available, so they must not branch."""

from __future__ import annotations

import builtins
import dis
import inspect
import types
from typing import Any

from torch import nn

from onepass.patching.guards import is_plain

from .trust import DEVICE_ATTRIBUTES, PURE_BUILTINS, is_from_torch, is_trusted
from .values import Analysis, Known, NotAnalyzable


def check_bytecode(analysis: Analysis, function: types.FunctionType, args: list[Any], reason: str) -> None:
    """Raise NotAnalyzable if a function branches, changes anything, or reads globals other than torch and builtins.

    Attributes of the nn.Module that the function reads are guarded (guards.py). `reason` says why the source cannot be read.
    """
    codes, owner = [function.__code__], next((arg for arg in args if isinstance(arg, Known) and isinstance(arg.value, nn.Module)), None)
    for code in codes:
        codes += [const for const in code.co_consts if isinstance(const, types.CodeType)]
        for instruction in dis.get_instructions(code):
            kind, name = instruction.opname, instruction.argval
            if "JUMP" in kind or kind in ("FOR_ITER", "SETUP_FINALLY") or getattr(code, "co_exceptiontable", b""):
                raise NotAnalyzable(f"it branches, and {reason}")
            if kind.startswith(("STORE_ATTR", "STORE_GLOBAL", "STORE_SUBSCR", "LOAD_DEREF")) and name != "__class__":
                raise NotAnalyzable(f"it reads or changes {name!r}, and {reason}")
            if kind in ("LOAD_GLOBAL", "LOAD_NAME"):
                value = function.__globals__.get(name, getattr(builtins, name, None))
                is_code = isinstance(value, (types.ModuleType, types.BuiltinFunctionType, types.FunctionType, type))
                if not (is_code and (is_from_torch(value) or value in PURE_BUILTINS or value is super)):
                    raise NotAnalyzable(f"it reads {name!r}, and {reason}")
            if kind.startswith(("LOAD_ATTR", "LOAD_METHOD")):
                _check_attribute(analysis, owner, name, reason)


def _check_attribute(analysis: Analysis, owner: Known | None, name: str, reason: str) -> None:
    """Check an attribute that a function reads. It may belong to `owner`, the module: bytecode does not tell whose it is.

    Raise NotAnalyzable for an attribute that tells the device, for names such as `__dict__`, and for properties and methods
    of the user's class. Guard a plain value: each call of the patched module checks it (guards.py).
    """
    if name in DEVICE_ATTRIBUTES or name.startswith("__"):
        raise NotAnalyzable(f"it reads {name}, and {reason}")
    if owner is None or name in ("training", *owner.value._parameters, *owner.value._buffers):
        return
    found = owner.value.__dict__.get(name, inspect.getattr_static(type(owner.value), name, None))
    if isinstance(found, (property, types.FunctionType)) and not is_trusted(getattr(found, "fget", found)):
        raise NotAnalyzable(f"it calls its {name!r}, and {reason}")
    if found is not None and is_plain(found):
        analysis.guard(f"{owner.path}.{name}", found, name)
