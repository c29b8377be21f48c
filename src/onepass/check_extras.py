"""Every validation of the extras: activation, save, weight_offset, channel_dim, modulation, residual, out, and the plain operator.

Messages as in `check.py`: torch's phrase where torch has one, then what was found, what was expected and the likely fix.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .check import FLOATS, alike, are_tensors, floating, one_device, whole
from .memory import require_memory
from .spec import ACTIVATIONS


def activation(name: str | None) -> str:
    """The name as the spec knows it."""
    known = {"swish": "silu", **{name: name for name in ACTIVATIONS}}
    if name is None:
        return ""
    if not isinstance(name, str) or name not in known:
        raise ValueError(f"activation={name!r} is unknown; expected {', '.join(ACTIVATIONS)}, swish or None: apply any other to the output")
    return known[name]


def from_y(save: str, activation: str | None) -> bool:
    """Whether y is saved for the backward in the place of x."""
    if not isinstance(save, str) or save not in ("x", "y"):
        raise ValueError(f'save={save!r} is unknown; expected "x", the input, or "y", the output, to be kept for the backward')
    if save == "y" and activation is not None:
        raise ValueError(
            f'save="y" was given with activation={activation!r}, through which there is no way back from output to input; expected no '
            'activation: apply it to the output, or leave save at "x"'
        )
    return save == "y"


def weight_offset(weight: Tensor | None, offset: float) -> None:
    if isinstance(offset, (str, Tensor, list, tuple)) or offset is None:
        raise TypeError(f"argument 'weight_offset' must be float, not {type(offset).__name__}; got {offset!r}: pass 1.0 for 1 + weight")
    if offset and weight is None:
        raise ValueError(f"weight_offset={offset} was given without a weight to add it to; pass weight, or leave weight_offset at 0")


def channel_dim(x: Tensor, dim: int) -> int:
    """1, or -1 where the channels are last."""
    found = whole("channel_dim", dim)
    found = found + x.dim() if found < 0 else found
    if found == 1 or x.dim() < 2:
        return 1
    if found != x.dim() - 1:
        move = f": move the channels with input.movedim({dim}, 1)" if 0 <= found < x.dim() else ""
        raise ValueError(f"channel_dim={dim} of input of shape {list(x.shape)} is neither 1, for (N, C, *), nor -1, for (N, *, C){move}")
    return -1


def either_end(channel_dim: int) -> None:
    """The channel_dim of a module, which has not seen an input yet."""
    if channel_dim not in (1, -1):
        raise ValueError(f"channel_dim={channel_dim} is neither 1, for (N, C, *), nor -1, for (N, *, C): move the channels of the input")


def constant_momentum(momentum: Any) -> None:
    if momentum is None:
        raise ValueError("momentum=None, a cumulative average, needs a count of batches, which SwitchableNorm does not keep: try 0.1")


def modulation(x: Tensor, modulate: Any, channel_dim: int) -> tuple[Tensor | None, Tensor | None]:
    """scale and shift, each (N, C)."""
    if not isinstance(modulate, (tuple, list)) or len(modulate) != 2:
        got = f"{len(modulate)} values" if isinstance(modulate, (tuple, list)) else type(modulate).__name__
        raise TypeError(f"modulate must be a pair (scale, shift), got {got}: pass modulate=(scale, shift), either may be None")
    scale, shift = modulate
    named = ("modulate's scale", scale), ("modulate's shift", shift)
    are_tensors(*named)
    one_device(x, *named)
    position = channel_dim + x.dim() if channel_dim < 0 else channel_dim
    if not 0 < position < x.dim():
        raise RuntimeError(
            f"modulate has a scale and shift per sample, and input of shape {list(x.shape)} has no sample dimension before its channels: "
            "add one with input.unsqueeze(0)"
        )
    expected = (x.shape[0], x.shape[position])
    for name, t in named:
        if t is None:
            continue
        if tuple(t.shape) != expected:
            if list(t.shape) in ([expected[1]], [1, expected[1]]):
                fix = f"; repeat it with .expand{expected}"
            elif t.numel() == expected[0] * expected[1]:
                fix = f"; reshape it with .reshape{expected}"
            elif t.shape == x.shape:
                fix = "; one per position is not taken: apply it to the output, or flatten the positions of input into its samples"
            else:
                fix = ""
            raise RuntimeError(
                f"Expected {name} to have shape {list(expected)}, one per sample and channel of input of shape {list(x.shape)}, but got "
                f"{list(t.shape)}{fix}"
            )
        if t.dtype not in FLOATS or (t.dtype == torch.float64 and x.dtype != torch.float64):
            raise RuntimeError(f"{name} has dtype {t.dtype} and input {x.dtype}; convert it with .to({x.dtype})")
    return scale, shift


def residual(x: Tensor, residual: Any) -> None:
    if not isinstance(residual, Tensor):
        raise TypeError(f"argument 'residual' must be Tensor, not {type(residual).__name__}; convert it with torch.as_tensor")
    floating(x, "add_norm")
    floating(residual, "add_norm", "residual")
    one_device(x, ("residual", residual))
    if residual.shape != x.shape:
        raise RuntimeError(
            f"Expected residual to have the shape of input, {list(x.shape)}, but got {list(residual.shape)}; expand it with "
            "residual.expand_as(input) where its values repeat"
        )


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
