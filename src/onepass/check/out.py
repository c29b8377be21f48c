"""Check the tensors that a call writes to, for functions with `out=` and for layer_norm_out."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from onepass.core.memory import require_memory

from .tensors import require_device_and_dtype, require_tensors


def require_no_gradient(*operands: Tensor | None) -> None:
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in operands):
        raise RuntimeError(
            "functions with out=... arguments don't support automatic differentiation, but one of the arguments requires grad.; call it "
            "under torch.no_grad(), or without out"
        )


def check_out(out: Any, x: Tensor, *others: Tensor | None) -> None:
    """Raise unless `out` has the shape, dtype and device of x, and can be written to while x and `others` are read.

    `out` may have exactly the memory of x, or share none with x. It must share none with `others`.
    """
    if not isinstance(out, Tensor):
        raise TypeError(f"argument 'out' must be Tensor, not {type(out).__name__}; allocate it with torch.empty_like(input)")
    require_no_gradient(out, x, *others)
    if out.shape != x.shape or out.dtype != x.dtype or out.device != x.device or out.layout != x.layout:
        raise RuntimeError(
            f"Expected out tensor of shape {list(x.shape)}, dtype {x.dtype} on {x.device}, but got shape {list(out.shape)}, dtype "
            f"{out.dtype} on {out.device}, layout {out.layout}; allocate it with torch.empty_like(input)"
        )
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active() or type(out) is not Tensor or out.is_meta:
        return  # the addresses of these tensors cannot be read
    require_memory(("out",), (out,))
    if not _has_nested_strides(out):
        raise RuntimeError(
            f"unsupported operation: more than one element of the written-to tensor refers to a single memory location; out has strides "
            f"{out.stride()} for shape {list(out.shape)}: allocate it with torch.empty_like(input)"
        )
    for t in (x, *others):
        if t is not None and _may_share_memory(out, t) and not (t is x and _is_same_memory(out, x)):
            what = "input but is not input" if t is x else "another argument"
            raise RuntimeError(
                "unsupported operation: some elements of the input tensor and the written-to tensor refer to a single memory location; out "
                f"shares memory with {what}: pass input itself, or a tensor with memory of its own"
            )


def check_layer_norm_out(out: Tensor, x: Tensor, gamma: Tensor | None, beta: Tensor | None, num_tokens: int, hidden_size: int) -> None:
    """Raise unless the arguments of layer_norm_out fit together.

    `out` and `x` must be contiguous with num_tokens·hidden_size elements, `gamma` and `beta` must have hidden_size elements.
    """
    require_tensors(("gamma", gamma), ("beta", beta))
    for name, t in (("out", out), ("input", x)):
        if not isinstance(t, Tensor):
            raise TypeError(f"argument '{name}' must be Tensor, not {type(t).__name__}; convert it with torch.as_tensor")
    for name, size in (("num_tokens", num_tokens), ("hidden_size", hidden_size)):
        if isinstance(size, float):
            raise TypeError(f"argument '{name}' must be int, not float; got {name}={size}")
        smallest = 1 if name == "hidden_size" else 0
        if size < smallest:
            raise RuntimeError(f"{name}={size}, expected at least {smallest}")
    for name, t in (("input", x), ("out", out)):
        if t.numel() != num_tokens * hidden_size:
            raise RuntimeError(
                f"Expected {name} to hold num_tokens·hidden_size = {num_tokens}·{hidden_size} = {num_tokens * hidden_size} elements, but "
                f"got shape {list(t.shape)}, {t.numel()} elements"
            )
        if not t.is_contiguous():
            raise RuntimeError(
                f"Expected {name} to be contiguous, with hidden_size={hidden_size} elements per row, but got strides "
                f"{list(t.stride())} for shape {list(t.shape)}; for other strides call layer_norm with out="
            )
    if out.dtype != x.dtype or out.device != x.device:
        raise RuntimeError(f"Expected out of dtype {x.dtype} on {x.device}, like input, but got {out.dtype} on {out.device}")
    for name, t in (("gamma", gamma), ("beta", beta)):
        if t is not None and t.numel() != hidden_size:
            raise RuntimeError(
                f"Expected {name} to hold hidden_size={hidden_size} elements, but got shape {list(t.shape)}, {t.numel()} elements"
            )
    require_device_and_dtype(x, ("gamma", gamma), ("beta", beta))


def _is_same_memory(a: Tensor, b: Tensor) -> bool:
    """Return whether tensors of equal shape have each element at the same address."""
    # The stride of a dimension of size 1 does not matter.
    return a.data_ptr() == b.data_ptr() and all(n == 1 or s == t for n, s, t in zip(a.shape, a.stride(), b.stride()))


def _strides_and_sizes(t: Tensor) -> list[tuple[int, int]]:
    """Return (stride, size) of each dimension with more than one element, largest stride first."""
    return sorted(((stride, n) for n, stride in zip(t.shape, t.stride()) if n > 1), reverse=True)


def _has_nested_strides(t: Tensor) -> bool:
    """Return whether each stride exceeds the span of all dimensions with smaller strides. Then no two elements share memory."""
    extent = 0
    for stride, n in reversed(_strides_and_sizes(t)):
        if stride <= extent:
            return False
        extent += stride * (n - 1)
    return True


def _may_share_memory(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors may share memory.

    The answer is exact if both have the same dtype, sizes and strides, and the strides are nested (`_has_nested_strides`).
    Otherwise the answer is True if the ranges between their first and last addresses overlap.
    """
    if not a.numel() or not b.numel() or type(b) not in (Tensor, torch.nn.Parameter) or b.device != a.device:
        return False
    end_a, end_b = (t.data_ptr() + (1 + sum(stride * (n - 1) for stride, n in _strides_and_sizes(t))) * t.element_size() for t in (a, b))
    if a.data_ptr() >= end_b or b.data_ptr() >= end_a:
        return False
    distance, odd = divmod(b.data_ptr() - a.data_ptr(), a.element_size())
    if odd or a.dtype != b.dtype or _strides_and_sizes(a) != _strides_and_sizes(b) or not _has_nested_strides(a):
        return True
    return _is_reachable(distance, _strides_and_sizes(a))


def _is_reachable(distance: int, steps: list[tuple[int, int]]) -> bool:
    """Return whether two elements of a tensor, with a (stride, size) in `steps` for each dimension, can be `distance` apart.

    That is, whether it is a sum of k·stride with |k| < size. The strides are nested, so k is distance/stride, rounded down or up.
    """
    if not steps:
        return distance == 0
    (stride, n), *inner = steps
    return any(abs(k) < n and _is_reachable(distance - k * stride, inner) for k in (distance // stride, distance // stride + 1))
