from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.autograd import forward_ad


def has_negative_bit(*operands: Tensor | None) -> bool:
    """Whether memory holds the negative of what one of these tensors shows."""
    return True in [t.is_neg() for t in operands if t is not None]


# A batch of gradients, as `is_grads_batched` makes of them by a vmap that is not functorch's.
batched: Callable[[Tensor], bool] = torch._C._functorch.is_legacy_batchedtensor  # pyright: ignore[reportAttributeAccessIssue]


DIRECT, OP, REFERENCE = "direct", "op", "reference"


PLAIN = {Tensor, torch.nn.Parameter, type(None)}


grad_enabled = torch.is_grad_enabled


functorch_active = torch._C._are_functorch_transforms_active


dispatch_modes = torch._C._len_torch_dispatch_stack


jit_tracing = torch._C._is_tracing


compiling = torch.compiler.is_dynamo_compiling  # non-strict export, which this misses, shows as a dispatch mode


def route(*operands: Tensor | None) -> str:
    """Which route a call with these tensors takes now."""
    if compiling():
        return REFERENCE if functorch_active() else OP
    if functorch_active() or forward_ad._current_level >= 0 or jit_tracing():
        return REFERENCE
    if dispatch_modes() or not PLAIN.issuperset(map(type, operands)) or has_negative_bit(*operands):
        return OP  # torch's dispatcher resolves negative bits before it calls a registered op
    return DIRECT


def route_backward(dy: Tensor, *saved: Tensor | None) -> str:
    """Which route a backward takes: the definition where it is itself to be differentiated or dy is a batch of gradients."""
    return REFERENCE if grad_enabled() or batched(dy) else route(dy, *saved)
