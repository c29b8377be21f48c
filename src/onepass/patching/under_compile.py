"""Under torch.compile, patched modules run their original methods, and add no guards to those of the unpatched model."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import nn

compiling = torch.compiler.is_dynamo_compiling

try:
    from torch._C._dynamo import eval_frame as _eval_frame

    compiler_is_active: Callable[[], Any] = _eval_frame.get_eval_frame_callback
    _skip: Any = _eval_frame._FrameExecStrategy(_eval_frame._FrameAction.SKIP, _eval_frame._FrameAction.DEFAULT)
except (ImportError, AttributeError):  # an older torch: patched modules add guards, and nothing else changes
    _eval_frame: Any = None
    compiler_is_active = compiling


def original_when_compiling(method: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method that calls `original` under torch.compile, and `method` otherwise.

    Where torch.compile meets this method inside of a model, it traces `original` in its place (`_torchdynamo_inline`). Where the
    method is the first that a compiled model calls, torch.compile skips it, so that it starts with `original`.
    """

    @wraps(original)
    def either(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if compiling() or compiler_is_active():
            return original(self, *args, **kwargs)
        return method(self, *args, **kwargs)

    traced: Any = either
    traced._torchdynamo_inline = original
    if _eval_frame is not None:
        _eval_frame.set_code_exec_strategy(traced.__code__, _skip)
    return either
