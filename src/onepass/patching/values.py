"""What is known of a value in the source of a forward, and what is taken down while it is followed."""

from __future__ import annotations

import types
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn

from .state import is_plain, snapshot

# Packages whose functions only compute: what they return depends on what they are given, and on what is listed here.
TRUSTED = {"torch", "onepass", "einops", "math", "operator", "functools", "itertools", "contextlib", "typing", "collections", "numbers"}


PURE = {
    abs, all, any, bool, callable, complex, dict, divmod, enumerate, filter, float, frozenset, int, isinstance, issubclass, len, list, map,
    max, min, pow, range, repr, reversed, round, set, slice, sorted, str, sum, tuple, type, zip,
}  # fmt: skip


LOOKS = {type, isinstance, issubclass, callable, bool, len, repr, str}  # call nothing of what they are given


TRIED = {  # functions of torch whose answers the trials vary
    "is_grad_enabled", "is_inference_mode_enabled", "is_autocast_enabled", "is_autocast_cpu_enabled", "get_autocast_dtype",
    "get_autocast_gpu_dtype", "get_autocast_cpu_dtype",
}  # fmt: skip


COMPILING = {"is_scripting", "is_compiling", "is_dynamo_compiling", "is_torchdynamo_compiling", "is_exporting"}


ABOUT_TENSORS = {"is_tensor", "is_floating_point", "is_complex", "is_nonzero", "is_same_size", "is_conj", "is_neg", "is_signed"}


ASKS = ("is_", "get_", "are_", "has_", "initial_seed", "seed", "rand", "bernoulli", "multinomial", "normal", "poisson")


MACHINE = ("torch.cuda", "torch.backends", "torch.mps", "torch.xpu", "torch.distributed", "torch.version", "torch.onnx")


DEVICE = {"is_cuda", "is_cpu", "is_mps", "is_xpu", "is_xla", "is_mkldnn", "is_ipu", "is_mtia", "is_maia", "is_hpu", "get_device"}


NO_TENSOR = {  # methods and functions that return none
    "size", "dim", "ndimension", "numel", "nelement", "stride", "storage_offset", "element_size", "item", "tolist", "type", "result_type",
    *ABOUT_TENSORS,
}  # fmt: skip


class Untriable(Exception):
    """Why no trial can tell what a forward does."""


class Known(NamedTuple):
    """A value itself: a constant, an attribute, a function."""

    value: Any
    path: str = ""  # where it lies: "self.eps", "package.module:NAME"; "" where it cannot be found again


class Unknown(NamedTuple):
    """A value that varies with the call, or is only known to be the same in every one."""

    varies: bool
    tensor: bool = False
    shape: torch.Size | None = None  # of a tensor of the module, which the trials do not vary


class Several(NamedTuple):
    """The rest of the arguments of a call: a list of what is known of each, or a dictionary."""

    values: Any


FIXED, VARIES, INPUT = Unknown(False), Unknown(True), Unknown(True, True)


class Method(NamedTuple):
    """A function with its first argument."""

    own: Any
    function: types.FunctionType


class Super(NamedTuple):
    after: type
    own: Known


class Question(NamedTuple):
    """A condition on what varies, and which of its answers the trials need not see: those after which an error is raised."""

    text: str
    may_lack: frozenset[bool]
    loop: bool = False  # what a loop goes over: whether there is anything


@dataclass
class Reading:
    """What was read of a forward, and of all functions it calls that are not torch's."""

    held: dict[str, Any] = field(default_factory=dict)  # values it read, by path
    tested: set[str] = field(default_factory=set)  # attributes that stand in conditions
    asks_compiling: bool = False
    functions: set[Any] = field(default_factory=set)
    questions: dict[tuple[Any, int], Question] = field(default_factory=dict)  # by function and number of the node
    calls: set[tuple[Any, int]] = field(default_factory=set)  # of functions that were read

    def hold(self, path: str, value: Any, text: str) -> None:
        if not path:
            raise Untriable(f"it reads {text}, which may change unseen")
        self.held[path] = snapshot(value)


def varies(value: Any) -> bool:
    if isinstance(value, Several):
        return any(map(varies, value.values.values() if isinstance(value.values, dict) else value.values))
    return isinstance(value, Unknown) and value.varies


def is_tensor(value: Any) -> bool:
    return isinstance(value, Unknown) and value.tensor


def are_equal(a: Any, b: Any) -> bool:
    """Whether the same is known of two values."""
    if not (isinstance(a, Known) and isinstance(b, Known)):
        return a is b
    return a.value is b.value or (is_plain(a.value) and is_plain(b.value) and type(a.value) is type(b.value) and a.value == b.value)


def is_lasting(value: Any) -> bool:
    """What stays what it is: functions, classes, modules of either kind. Whatever they hold is read where it is used."""
    return callable(value) or isinstance(value, types.ModuleType)


def trusted(function: Any) -> bool:
    """Whether a function only computes."""
    named = getattr(function, "__globals__", {}).get("__name__") or getattr(function, "__module__", None) or ""
    return named.split(".")[0] in TRUSTED


def is_torch(value: Any) -> bool:
    """Whether a module, class or function is torch's own."""
    named = value.__name__ if isinstance(value, types.ModuleType) else getattr(value, "__module__", None) or ""
    return named.split(".")[0] == "torch" or (callable(value) and getattr(torch, getattr(value, "__name__", ""), None) is value)


def is_foreign(value: Any) -> bool:
    """Whether a value is code that is not torch's: then whoever is handed it may call it."""
    if isinstance(value, Method):
        return not trusted(value.function)
    if isinstance(value, nn.Module):
        return not trusted(type(value).forward)
    return isinstance(value, (types.FunctionType, types.MethodType)) and not trusted(value)
