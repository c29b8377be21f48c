"""batch_norm in training with running statistics. Where the family can, a kernel updates them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from onepass.core.memory import require_memory
from onepass.core.operands import NO_OPTIONAL, Result
from onepass.core.problem import bind
from onepass.planning.options import options_in_context

from .autograd import Update, apply_norm
from .launchers import OPERAND_NAMES, Define, Kind, Launchers, find, kind_of, prepare
from .packed import Running, tracking_norm
from .recent import key_of, note, recall
from .route import DIRECT, grad_enabled, in_plain_context, route


def normalize_and_track(
    define: Define,
    args: tuple[Any, ...],
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor,
    running_var: Tensor,
    momentum: float,
    update: Update,
) -> Tensor | None:
    """Normalize x by its own statistics, and update the running statistics, (12). `update(result)` does so if no kernel can.

    Return None, and change nothing, if `may_track` has not accepted a call of this kind. Do the same if the call fails: the caller then
    makes a checked call, which raises a better error.
    """
    if not in_plain_context():
        return None
    operands, running = (x, weight, bias, running_mean, running_var), [running_mean, running_var, momentum]
    key = key_of(define, args, x, "track", momentum, weight is None, bias is None)
    launch = recall(key, operands)
    known = launch is not None
    if launch is None:
        if route(*operands) is not DIRECT or not all(t.is_contiguous() and not t.is_inference() for t in running[:2]):
            return None
        launchers = find(_tracking_kind(define, args, *operands, momentum))
        if launchers is None:
            return None
        needs_gradient = grad_enabled() and True in [t.requires_grad for t in operands if t is not None]
        if needs_gradient and (running_mean.requires_grad or running_var.requires_grad):
            return None
        launch = _tracking(launchers, needs_gradient)
    try:
        y = launch(x, weight, bias, running, update)
    except RuntimeError:
        if not running:  # a hook on saved tensors raised after the update; a second call would update again
            raise
        return None
    if not known:
        note(key, operands, launch)
    return y


def _tracking(launchers: Launchers, needs_gradient: bool) -> Callable[..., Tensor]:
    """Return (x, weight, bias, running, update) -> y, which updates the running statistics and then clears `running`."""
    if needs_gradient and launchers.train_track:
        return lambda x, weight, bias, running, _: tracking_norm(launchers, running, x, weight, bias)
    track = launchers.track
    if track and not needs_gradient:
        return lambda x, weight, bias, running, _: track(x, weight, bias, *running)

    def by_update(x: Tensor, weight: Tensor | None, bias: Tensor | None, running: Running, update: Update) -> Tensor:
        def update_and_clear(result: Result) -> None:
            running.clear()
            update(result)

        require_memory(OPERAND_NAMES, (x, weight, bias, *running[:2]))  # without memory, `update` would crash
        operands = x, weight, bias, None, None
        if needs_gradient:
            return apply_norm(launchers, update_and_clear, *operands, *NO_OPTIONAL)[0]
        result = launchers.forward(*operands, NO_OPTIONAL)
        update_and_clear(result)
        return result.y

    return by_update


def may_track(
    define: Define,
    args: tuple[Any, ...],
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Any,
    running_var: Any,
    momentum: Any,
) -> bool:
    """Return whether `normalize_and_track` may run this call, and prepare its launchers if so. The arguments were checked before."""
    running = running_mean, running_var
    fits = type(momentum) is float and all(t.dtype == torch.float32 and t.device == x.device for t in running) and x.numel() > 0
    if not fits or route(x, weight, bias, *running) is not DIRECT or options_in_context.get().explain:
        return False
    kind = _tracking_kind(define, args, x, weight, bias, *running, momentum)
    if find(kind) is None:
        prepare(kind, bind(define(x, weight, bias, *args), x, weight, bias, track=True), x, weight, bias)
    return True


def _tracking_kind(
    define: Define, args: tuple[Any, ...], x: Tensor, weight: Any, bias: Any, running_mean: Tensor, running_var: Tensor, momentum: float
) -> Kind:
    running = running_mean.shape, running_mean.dtype, running_mean.device, running_var.shape, running_var.dtype, running_var.device
    others = "track", momentum, *running
    return kind_of(define, args, x, weight, bias, others)
