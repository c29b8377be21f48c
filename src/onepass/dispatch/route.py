"""Decides which of three routes a call takes from a function of `onepass.functional` to its computation.

- "direct", for plain tensors: call a launcher, which runs a kernel. If a gradient is needed, an autograd.Function calls it.
- "op", for torch.compile, export, tensor subclasses, dispatch modes and tensors with the negative bit: call
  `torch.ops.onepass.norm` or `norm_backward`.
- "reference", for functorch transforms, forward-mode differentiation and jit.trace, and for a backward that will itself be
  differentiated: compute the definition of the norm (core/reference.py) with torch operations.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd import forward_ad

from onepass.check.saved import is_gradient_batch

from .slower import tell_once

DIRECT, OP, REFERENCE = "direct", "op", "reference"
REFERENCE_RUNS = "torch operations run instead of kernels"
PLAIN = {Tensor, torch.nn.Parameter, type(None)}

grad_enabled = torch.is_grad_enabled
functorch_active = torch._C._are_functorch_transforms_active
dispatch_modes = torch._C._len_torch_dispatch_stack
jit_tracing = torch._C._is_tracing
compiling = torch.compiler.is_dynamo_compiling  # False in a non-strict export, which `dispatch_modes` detects


def in_plain_context() -> bool:
    """Return whether calls with plain tensors take the route DIRECT. So do their backwards, unless these are differentiated."""
    return not (compiling() or functorch_active() or dispatch_modes() or jit_tracing() or forward_ad._current_level >= 0)


def route(*operands: Tensor | None) -> str:
    """Return the route that a call with these tensors takes in the current context: DIRECT, OP or REFERENCE."""
    if compiling():
        return REFERENCE if functorch_active() else OP
    if functorch_active() or forward_ad._current_level >= 0 or jit_tracing():
        tell_once(REFERENCE_RUNS, "a functorch transform, forward-mode differentiation or jit.trace is active")
        return REFERENCE
    if dispatch_modes() or not PLAIN.issuperset(map(type, operands)) or has_negative_bit(*operands):
        return OP  # before torch's dispatcher calls an op, it resolves negative bits
    return DIRECT


def route_backward(dy: Tensor, *others: Tensor | None) -> str:
    """Return the route of a backward: REFERENCE if it will itself be differentiated or if dy is a batch of gradients.

    `is_grads_batched=True` makes such a batch. Otherwise, return `route(dy, *others)`.
    """
    if not (grad_enabled() or is_gradient_batch(dy)):
        return route(dy, *others)
    if not compiling():
        tell_once(REFERENCE_RUNS, "a backward is itself differentiated, or gets a batch of gradients")
    return REFERENCE


def has_negative_bit(*operands: Tensor | None) -> bool:
    """Return whether a tensor has the negative bit set, which means that its memory holds the negatives of its values."""
    return True in [t.is_neg() for t in operands if t is not None]
