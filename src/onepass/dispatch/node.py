"""The autograd function of the norms in packed.py: in C++ while the front door is open, otherwise in Python.

`Node.apply(forward, backward, state, *inputs)` returns outputs that autograd can differentiate.

- `forward(state, *inputs)` returns three things: the outputs, how many of them have gradients, and a tuple of tensors to save. The
  outputs are a tensor, or a tuple. In a tuple, the tensors with gradients come first. No graph is recorded while `forward` runs.
- `backward(state, needs, *gradients, *saved)` returns a gradient, or None, for each input. `needs` says which are needed. If the
  gradient of the first output is None, `saved` is empty: the saved tensors are not needed, and reading them raises an error if users
  have changed them in place.

A training step that computes nothing takes 123 µs with `torch.autograd.Function`, and 93 µs with the function in C++. For comparison,
a whole step of torch's layer_norm takes 137 µs (1024 elements, Neoverse-N1 CPU, torch 2.13, 2026-11-17).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def skip_functorch(function: Any) -> Callable[..., Any]:
    """Return `function.apply` without its preparations for functorch, which take 10 µs. Callers must know that no transform is active.

    Autograd calls a backward through a Python method, which first looks for a `vjp`. Our functions have none, so skip that method, too.
    """
    function._backward_cls.apply = function.backward
    return super(torch.autograd.Function, function).apply  # pyright: ignore[reportAttributeAccessIssue]


class PythonNode(torch.autograd.Function):
    """The same as `OnepassNormBackward` in backends/c/src/front_door/node.h."""

    @staticmethod
    def forward(ctx, forward: Callable[..., Any], backward: Callable[..., Any], state: Any, *inputs):  # pyright: ignore[reportIncompatibleMethodOverride]
        outputs, differentiable, saved = forward(state, *inputs)
        ctx.run, ctx.state = backward, state
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*saved)
        if isinstance(outputs, tuple):
            ctx.mark_non_differentiable(*outputs[differentiable:])
        return outputs

    @staticmethod
    def backward(ctx, dy, *others):  # pyright: ignore[reportIncompatibleMethodOverride]
        saved = () if dy is None else ctx.saved_tensors
        return None, None, None, *ctx.run(ctx.state, ctx.needs_input_grad[3:], dy, *others, *saved)


class Node:
    """Holds `apply`, as described above. It is not a node of a graph, and not torch.autograd.graph.Node."""

    in_python: Callable[..., Any] = staticmethod(skip_functorch(PythonNode))
    apply: Callable[..., Any] = in_python  # dispatch/front_door.py replaces it by the function in C++
