"""Check the tensors that autograd hands to a backward.

Users can change a saved tensor between forward and backward: by Module.half(), by assigning to .data, or by hooks on saved
tensors. The kernel of a backward was prepared for the tensors that the forward saved, so changes must be found first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from onepass.core.memory import require_memory_if_shown
from onepass.core.operands import SavedTensors
from onepass.core.problem import NormProblem
from onepass.core.spec import NormSpec

from .tensors import SCALAR

Signature = tuple[torch.dtype, torch.Size, torch.device]


# Returns whether a tensor is a batch of gradients from `torch.autograd.grad(..., is_grads_batched=True)`.
is_gradient_batch: Callable[[Tensor], bool] = torch._C._functorch.is_legacy_batchedtensor  # pyright: ignore[reportAttributeAccessIssue]

SAVED_NAMES = ("input", *SavedTensors._fields[1:])
PACKED_SAVED_NAMES = ("input", "weight", "bias", "statistics", "scale", "shift")  # for calls that save mean and rstd in one tensor


def signatures(tensors: Sequence[Tensor | None]) -> list[Signature | None]:
    """Return (dtype, shape, device) of each tensor, or None for None. Launchers rely on these and on the strides of x."""
    return [None if t is None else (t.dtype, t.shape, t.device) for t in tensors]


def as_saved(spec: NormSpec, saved: Sequence[Tensor | None], were: Sequence[Signature | None], packed: bool = False) -> list[Any]:
    """Return the tensors that the forward saved. Raise if one has changed since then.

    `were` holds the signatures from the forward. With `packed`, the tensors are those of PACKED_SAVED_NAMES, or the first of them.
    On a CPU, norms without a mean accept a changed dtype and convert it back.
    """
    found: list[Any] = []
    for name, t, was in zip(PACKED_SAVED_NAMES if packed else SAVED_NAMES, saved, were):
        now = None if t is None else (t.dtype, t.shape, t.device)
        if t is not None and now and was and now[1:] == was[1:] and not spec.centered and t.is_cpu:
            require_memory_if_shown((name,), (t,))
            t = t.to(was[0])  # torch's rms_norm converts on a CPU; torch's other norms raise
        elif now != was:
            raise RuntimeError(
                f"{_converted(was, now)}{name} was {_in_words(was)} in the forward and is {_in_words(now)} in the backward: call "
                "backward() before you convert, move or replace it; hooks on saved tensors must keep dtype, shape and device"
            )
        found.append(t)
    return found


def check_gradient(name: str, gradient: Tensor | None, problem: NormProblem, device: torch.device) -> None:
    """Raise if a gradient does not have the shape, dtype and device of its output.

    torch's autograd engine checks this, too. But a user can call an autograd node directly, with any tensor.
    """
    if gradient is None or (gradient.shape == problem.shape and gradient.dtype is problem.dtype and gradient.device == device):
        return
    if is_gradient_batch(gradient):
        return
    now, expected = (gradient.dtype, gradient.shape, gradient.device), (problem.dtype, torch.Size(problem.shape), device)
    raise RuntimeError(f"{name} is {_in_words(now)}, expected {_in_words(expected)}, like the output")


def _converted(was: Signature | None, now: Signature | None) -> str:
    """Return torch's words for a changed dtype, or "" if the dtype has not changed."""
    if was is None or now is None or was[0] == now[0]:
        return ""
    return f"expected scalar type {SCALAR[was[0]]} but found {SCALAR.get(now[0], now[0])}; "


def _in_words(signature: Signature | None) -> str:
    if signature is None:
        return "None"
    dtype, shape, device = signature
    return f"{dtype} of shape {list(shape)} on {device}"
