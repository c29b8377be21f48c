"""Which route a call takes from its function to a kernel.

- direct: plain tensors outside of compile go straight to a launcher, through an autograd.Function if a gradient is needed;
- op: compile, export, tensor subclasses and dispatch modes see `torch.ops.onepass.norm` and `norm_backward`, which change no
  operand in place;
- reference: functorch transforms, forward-mode AD and jit.trace see the definition in torch operations, and so does a backward that will
  itself be differentiated.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd import forward_ad

from onepass.check.saved import is_gradient_batch

DIRECT, OP, REFERENCE = "direct", "op", "reference"
PLAIN = {Tensor, torch.nn.Parameter, type(None)}

grad_enabled = torch.is_grad_enabled
functorch_active = torch._C._are_functorch_transforms_active
dispatch_modes = torch._C._len_torch_dispatch_stack
jit_tracing = torch._C._is_tracing
compiling = torch.compiler.is_dynamo_compiling  # misses non-strict export, which shows as a dispatch mode


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
    """Which route a backward takes: the reference if it will itself be differentiated or dy is a batch of gradients."""
    return REFERENCE if grad_enabled() or is_gradient_batch(dy) else route(dy, *saved)


def has_negative_bit(*operands: Tensor | None) -> bool:
    """Whether one of these tensors has the negative bit: its memory holds the negative of its values."""
    return True in [t.is_neg() for t in operands if t is not None]
