"""Decide which functions are trusted: the analysis does not read their source.

The result of a trusted function depends only on its arguments. The lists below also name the exceptions: functions of
torch whose results depend on the machine or on settings.
"""

from __future__ import annotations

import types
from typing import Any

import torch
from torch import nn

from .values import BoundMethod

TRUSTED_PACKAGES = {
    "torch", "onepass", "einops", "math", "operator", "functools", "itertools", "contextlib", "typing", "collections", "numbers",
}  # fmt: skip


PURE_BUILTINS = {
    abs, all, any, bool, callable, complex, dict, divmod, enumerate, filter, float, frozenset, int, isinstance, issubclass, len, list, map,
    max, min, pow, range, repr, reversed, round, set, slice, sorted, str, sum, tuple, type, zip,
}  # fmt: skip


# Builtins that inspect their arguments, but never call them.
NEVER_CALL_ARGUMENTS = {type, isinstance, issubclass, callable, bool, len, repr, str}


VARIED_BY_TRIALS = {  # functions of torch whose result differs between trials (recognition/trials.py)
    "is_grad_enabled", "is_inference_mode_enabled", "is_autocast_enabled", "is_autocast_cpu_enabled", "get_autocast_dtype",
    "get_autocast_gpu_dtype", "get_autocast_cpu_dtype",
}  # fmt: skip


COMPILING_QUERIES = {"is_scripting", "is_compiling", "is_dynamo_compiling", "is_torchdynamo_compiling", "is_exporting"}


# Torch functions whose names start with one of these depend on settings or on random numbers.
QUERY_PREFIXES = ("is_", "get_", "are_", "has_", "initial_seed", "seed", "rand", "bernoulli", "multinomial", "normal", "poisson")


MACHINE_PACKAGES = ("torch.cuda", "torch.backends", "torch.mps", "torch.xpu", "torch.distributed", "torch.version", "torch.onnx")


DEVICE_ATTRIBUTES = {
    "is_cuda", "is_cpu", "is_mps", "is_xpu", "is_xla", "is_mkldnn", "is_ipu", "is_mtia", "is_maia", "is_hpu", "get_device",
}  # fmt: skip


RETURN_NO_TENSOR = {  # methods of tensors and functions of torch that do not return a tensor
    "size", "dim", "ndimension", "numel", "nelement", "stride", "storage_offset", "element_size", "item", "tolist", "type", "result_type",
    "is_tensor", "is_floating_point", "is_complex", "is_nonzero", "is_same_size", "is_conj", "is_neg", "is_signed",
}  # fmt: skip


def is_trusted(function: Any) -> bool:
    """Return whether a function is defined in a trusted package."""
    name = getattr(function, "__globals__", {}).get("__name__") or getattr(function, "__module__", None) or ""
    return name.split(".")[0] in TRUSTED_PACKAGES


def is_from_torch(value: Any) -> bool:
    """Return whether a package, class or function belongs to torch."""
    name = value.__name__ if isinstance(value, types.ModuleType) else getattr(value, "__module__", None) or ""
    return name.split(".")[0] == "torch" or (callable(value) and getattr(torch, getattr(value, "__name__", ""), None) is value)


def is_user_code(value: Any) -> bool:
    """Return whether a value is a function, method or nn.Module from outside trusted packages."""
    if isinstance(value, BoundMethod):
        return not is_trusted(value.function)
    if isinstance(value, nn.Module):
        return not is_trusted(type(value).forward)
    return isinstance(value, (types.FunctionType, types.MethodType)) and not is_trusted(value)
