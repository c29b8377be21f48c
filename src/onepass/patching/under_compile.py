"""Make patched modules run their original methods under torch.compile and torch.fx.

So a compiled model has the same guards as the unpatched model, and a traced model the same graph.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from types import FunctionType
from typing import Any

import torch
from torch.fx import _symbolic_trace

compiling = torch.compiler.is_dynamo_compiling
fx = vars(_symbolic_trace)  # has "_is_fx_tracing_flag". The public function takes longer to return it

try:
    from torch._C._dynamo import eval_frame as _eval_frame

    current_compiler: Callable[[], Any] = _eval_frame.get_eval_frame_callback  # False if compiled code may run, but no new code
    _skip: Any = _eval_frame._FrameExecStrategy(_eval_frame._FrameAction.SKIP, _eval_frame._FrameAction.DEFAULT)
except (ImportError, AttributeError):  # an older torch: patched modules add guards, and nothing else changes
    _eval_frame: Any = None
    current_compiler = lambda: None  # noqa: E731


def original_when_compiling(method: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method that calls `original` under torch.compile and torch.fx, and `method` otherwise.

    It also calls `original` if that is the method of the module's class. accelerate keeps the method of a patched module, and calls it
    after `unpatch`, too.

    Inside a model, torch.compile traces `original` in place of this method, because of `_torchdynamo_inline`. If a compiled model
    begins with this method, torch.compile does not trace it (`_skip`). It then begins with `original`, which the method calls.
    """
    made: Any = _with_closure_of(original)
    ours = {"_onepass_method": method, "_onepass_original": original, "_onepass_name": original.__name__}
    made.__kwdefaults__ = {**(getattr(original, "__kwdefaults__", None) or {}), **ours}
    made.__defaults__ = getattr(original, "__defaults__", None)  # for guards; no call uses them, since `either` requires only the module
    made = wraps(original)(made)
    made._torchdynamo_inline = original
    if _eval_frame is not None:
        _eval_frame.set_code_exec_strategy(made.__code__, _skip)
    return made


# The code below `if 0` never runs. It names the free variables of the original, so that `either` has the same ones. The closure
# and the keyword arguments of the original may have any names, so the names here are unusual.
_SOURCE = """
def make({names}):
    def either(_onepass_self, /, *_onepass_args, _onepass_method, _onepass_original, _onepass_name, **_onepass_kwargs):
        if 0:
            {names} _onepass_self
        if (
            _onepass_compiling() or _onepass_compiler() is not None or _onepass_fx["_is_fx_tracing_flag"]
            or getattr(type(_onepass_self), _onepass_name, None) is _onepass_original
        ):
            return _onepass_original(_onepass_self, *_onepass_args, **_onepass_kwargs)
        return _onepass_method(_onepass_self, *_onepass_args, **_onepass_kwargs)
    return either
"""


def _with_closure_of(original: Any) -> FunctionType:
    """Return the function `either`, with the closure of `original`.

    torch.compile traces `original`, but its guards look at the function that they find in the class. They read its closure and its
    defaults, so both must be those of `original`.
    """
    names = original.__code__.co_freevars if isinstance(original, FunctionType) else ()
    # torch.jit.script compiles the source of `original`, and looks for its names in the globals of `either`.
    known = getattr(original, "__globals__", {})
    scope = {**known, "_onepass_compiling": compiling, "_onepass_compiler": current_compiler, "_onepass_fx": fx, "__name__": __name__}
    exec(_SOURCE.format(names="".join(f"{name}, " for name in names)), scope)
    either: Any = scope["make"](*names)  # pyright: ignore[reportCallIssue]
    code = either.__code__
    assert code.co_freevars == names
    if str(getattr(original, "__module__", None)).startswith("torch.nn."):  # it may be None
        # torch.compile does not begin to trace in a file of torch.nn. It looks at the file of a model's forward, and if it is one of
        # these, it begins a frame earlier. Since it traces `original`, this function must seem to be from the same file.
        code = code.replace(co_filename=original.__code__.co_filename)
    return FunctionType(code, scope, "either", None, original.__closure__ if names else None)
