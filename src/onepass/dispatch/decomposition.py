"""Our ops in terms of torch's, for `torch.export`: `run_decompositions()` and `torch.onnx.export` use these functions.

torch finds the decomposition of an op under the dispatch key CompositeImplicitAutograd. torch.compile would find it there, too, and
would replace our kernels. So the functions decline, by returning NotImplemented, unless a program that was exported is decomposed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from onepass.core import norms, reference
from onepass.core.activations import ACTIVATION_FUNCTIONS
from onepass.core.operands import Gradients, OptionalOperands, Result, SavedTensors
from onepass.core.spec import NormSpec

from .torch_calls import TorchCall, torch_call

_KEYS = torch._C.DispatchKey  # pyright: ignore[reportAttributeAccessIssue]


def register(op: Any, decompose: Callable[..., Any]) -> None:
    """Make `decompose` the decomposition of an op. It gets the arguments of the op."""

    def if_exported(*args: Any) -> Any:
        # torch adds kernels for autograd to an op while it decomposes a program (`_override_composite_implicit_decomp`), only then.
        return decompose(*args) if _KEYS.AutogradCPU in op.py_kernels else NotImplemented

    op.py_impl(_KEYS.CompositeImplicitAutograd)(if_exported)


def forward(spec: NormSpec, operands: Sequence[Tensor | None], optional: OptionalOperands) -> Result:
    """Return the result of `onepass::norm`. `operands` are x, weight, bias, mean and var.

    Unused parts of the result leave the graph, because torch removes dead code.
    """
    x, weight, bias, mean, var = operands
    assert x is not None
    result = reference.forward(spec, x, weight, bias, mean, var, optional)
    total = x if result.sum is None else result.sum
    fields = {"weight": weight, "bias": bias, "mean": mean, "var": var, "sizes": [size for _, size in spec.sizes], "eps": spec.eps}
    call = _torch_call(spec, var is not None)
    same_dtypes = all(t is None or t.dtype == total.dtype for t in (weight, bias, mean, var))
    if call is not None and same_dtypes and optional.scale is None and optional.shift is None and total.numel() != 0:
        y = call.function(total, *call.arguments(total, fields))
        result = result._replace(y=ACTIVATION_FUNCTIONS[spec.activation].apply(y) if spec.activation else y)
    return result._replace(y=_laid_out_like(result.y, total))


def _torch_call(spec: NormSpec, given: bool) -> TorchCall | None:
    """As `torch_call`, and LayerNorm2d with two permutes."""
    if not given and replace(spec, activation="", from_y=False) == norms.layer_norm2d(spec.eps):
        return TorchCall(_layer_norm2d, lambda x, f: (f["weight"], f["bias"], f["eps"]))
    return torch_call(spec, given)


def _layer_norm2d(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    last = x.movedim(1, -1)
    return F.layer_norm(last, last.shape[-1:], weight, bias, eps).movedim(-1, 1)


def backward(spec: NormSpec, dy: Tensor, dsum: Tensor | None, saved: SavedTensors, needs: Sequence[bool], given: bool) -> Gradients:
    """Return the Gradients of `onepass::norm_backward`."""
    grads = reference.backward(spec, dy, dsum, saved, needs, given)
    return grads if grads.dx is None else grads._replace(dx=_laid_out_like(grads.dx, saved.x))


def _laid_out_like(y: Tensor, x: Tensor) -> Tensor:
    """Return y with the strides of `empty_like(x)`, which our ops give it. Later nodes may be views that need these."""
    target = torch.empty_like(x)
    return y if y.stride() == target.stride() else torch.ops.aten.copy(target, y)
