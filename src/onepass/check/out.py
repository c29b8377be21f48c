from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from onepass.core.memory import require_memory

from .tensors import alike, are_tensors


def no_gradient(*operands: Tensor | None) -> None:
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in operands):
        raise RuntimeError(
            "functions with out=... arguments don't support automatic differentiation, but one of the arguments requires grad.; call it "
            "under torch.no_grad(), or without out"
        )


def out(out: Any, x: Tensor, *others: Tensor | None) -> None:
    if not isinstance(out, Tensor):
        raise TypeError(f"argument 'out' must be Tensor, not {type(out).__name__}; allocate it with torch.empty_like(input)")
    no_gradient(out, x, *others)
    if out.shape != x.shape or out.dtype != x.dtype or out.device != x.device or out.layout != x.layout:
        raise RuntimeError(
            f"Expected out tensor of shape {list(x.shape)}, dtype {x.dtype} on {x.device}, but got shape {list(out.shape)}, dtype "
            f"{out.dtype} on {out.device}, layout {out.layout}; allocate it with torch.empty_like(input)"
        )
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active() or type(out) is not Tensor or out.is_meta:
        return  # no memory to look at
    require_memory(("out",), (out,))
    if not _nested(out):
        raise RuntimeError(
            f"unsupported operation: more than one element of the written-to tensor refers to a single memory location; out has strides "
            f"{out.stride()} for shape {list(out.shape)}: allocate it with torch.empty_like(input)"
        )
    for t in (x, *others):
        if t is not None and _share(out, t) and not (t is x and _same(out, x)):
            what = "input without being it" if t is x else "another argument"
            raise RuntimeError(
                "unsupported operation: some elements of the input tensor and the written-to tensor refer to a single memory location; out "
                f"shares memory with {what}: pass input itself, or memory of its own"
            )


def _same(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors of one shape are element by element the same memory; the stride of a dimension of one does not matter."""
    return a.data_ptr() == b.data_ptr() and all(n == 1 or s == t for n, s, t in zip(a.shape, a.stride(), b.stride()))


def _steps(t: Tensor) -> list[tuple[int, int]]:
    """(stride, size) of the dimensions that have more than one element, the widest first."""
    return sorted(((stride, n) for n, stride in zip(t.shape, t.stride()) if n > 1), reverse=True)


def _nested(t: Tensor) -> bool:
    """Whether each stride passes over all that lies inside it, so that no two elements meet."""
    inside = 0
    for stride, n in reversed(_steps(t)):
        if stride <= inside:
            return False
        inside += stride * (n - 1)
    return True


def _share(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors may share an element: exact for slices of one buffer, else by the spans from first to last element."""
    if not a.numel() or not b.numel() or type(b) not in (Tensor, torch.nn.Parameter) or b.device != a.device:
        return False
    last_a, last_b = (t.data_ptr() + (1 + sum(stride * (n - 1) for stride, n in _steps(t))) * t.element_size() for t in (a, b))
    if a.data_ptr() >= last_b or b.data_ptr() >= last_a:
        return False
    distance, odd = divmod(b.data_ptr() - a.data_ptr(), a.element_size())
    if odd or a.dtype != b.dtype or _steps(a) != _steps(b) or not _nested(a):
        return True
    return _reaches(distance, _steps(a))


def _reaches(distance: int, steps: list[tuple[int, int]]) -> bool:
    """Whether `distance` is a sum of k·stride with |k| < n; strides are nested, so that k is the quotient, rounded down or up."""
    if not steps:
        return distance == 0
    (stride, n), *inner = steps
    return any(abs(k) < n and _reaches(distance - k * stride, inner) for k in (distance // stride, distance // stride + 1))


def rows(out: Tensor, x: Tensor, gamma: Tensor | None, beta: Tensor | None, num_tokens: int, hidden_size: int) -> None:
    """The sizes of the plain operator, against each tensor."""
    are_tensors(("gamma", gamma), ("beta", beta))
    for name, t in (("out", out), ("input", x)):
        if not isinstance(t, Tensor):
            raise TypeError(f"argument '{name}' must be Tensor, not {type(t).__name__}; convert it with torch.as_tensor")
    for name, size in (("num_tokens", num_tokens), ("hidden_size", hidden_size)):
        if isinstance(size, float):
            raise TypeError(f"argument '{name}' must be int, not float; got {name}={size}")
        if size < (name == "hidden_size"):
            raise RuntimeError(f"{name}={size}, expected {'at least one' if name == 'hidden_size' else 'no less than zero'}")
    for name, t in (("input", x), ("out", out)):
        if t.numel() != num_tokens * hidden_size:
            raise RuntimeError(
                f"Expected {name} to hold num_tokens·hidden_size = {num_tokens}·{hidden_size} = {num_tokens * hidden_size} elements, but "
                f"got shape {list(t.shape)}, {t.numel()} elements"
            )
        if not t.is_contiguous():
            raise RuntimeError(
                f"Expected {name} to be contiguous, rows of hidden_size={hidden_size} elements one after another, but got strides "
                f"{list(t.stride())} for shape {list(t.shape)}; call layer_norm with out=, which takes any strides"
            )
    if out.dtype != x.dtype or out.device != x.device:
        raise RuntimeError(f"Expected out of dtype {x.dtype} on {x.device} as input, but got {out.dtype} on {out.device}")
    for name, t in (("gamma", gamma), ("beta", beta)):
        if t is not None and t.numel() != hidden_size:
            raise RuntimeError(
                f"Expected {name} to hold hidden_size={hidden_size} elements, but got shape {list(t.shape)}, {t.numel()} elements"
            )
    alike(x, ("gamma", gamma), ("beta", beta))
