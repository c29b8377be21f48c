"""Norms with gradients that need little host time. They save mean and rstd packed in one tensor, called statistics (or `stats`).

A backward must check the tensors that it gets. It skips the checks if an earlier backward of its kind has checked tensors like these.
The comparison is made by the autograd function in C++ (remembered.h) while the front door is open. Otherwise, and if that finds no
earlier backward, `was_checked` makes it, with functions of recent.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from types import BuiltinFunctionType
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from onepass.backends.front_door import FrontDoor
from onepass.check.saved import PACKED_SAVED_NAMES, as_saved, check_gradient, signatures
from onepass.core.memory import ZeroTensor
from onepass.core.operands import Gradients, Needs, SavedTensors
from onepass.core.statistics import unpack

from .autograd import general_backward
from .launchers import Again, Launchers
from .node import Node
from .route import DIRECT, OP, compiling, dispatch_modes, functorch_active, grad_enabled, jit_tracing, route_backward

Running = list[Any]  # [running_mean, running_var, momentum]; emptied when the running statistics are updated


def plain_norm(launchers: Launchers, x: Tensor, weight: Tensor | None, bias: Tensor | None, *given: Tensor | None) -> Tensor:
    """Return y, which autograd can differentiate. `given` is empty, or has a mean and a variance to normalize with.

    The family must have a `train_forward` and a `train_backward`. `Norm` (autograd.py) does the same with more host time.
    """
    return Node.apply(_plain_forward, _plain_backward, launchers, x, weight, bias, *given)


def tracking_norm(launchers: Launchers, running: Running, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    """As `plain_norm`. The forward also updates the running statistics, and then clears `running`."""
    return Node.apply(partial(_tracking_forward, running), _plain_backward, launchers, x, weight, bias)


def extras_norm(launchers: Launchers, *operands: Tensor | None) -> Any:
    """As `plain_norm`, with the operands x, weight, bias, residual, scale and shift. Return y, or (y, x + residual)."""
    return Node.apply(_extras_forward, _extras_backward, launchers, *operands)


def trained_norm(launchers: Launchers) -> Callable[..., Any] | None:
    """Return a norm with gradients in C++, or None if there is none. Some call must have run in Python before.

    Without a residual or a modulation, it is (x, weight, bias, mean, var) -> y, like `plain_norm`. Otherwise it is (x, weight, bias,
    residual, scale, shift) -> (y, x + residual), like `extras_norm`.
    """
    problem = launchers.problem
    adds, extras = bool(problem.addends), bool(problem.addends or problem.scale or problem.shift)
    launch = launchers.train_extras if extras else launchers.train_forward
    if FrontDoor.trained is None or not isinstance(launch, BuiltinFunctionType) or launchers.packed is None:
        return None
    bias, statistics, total = -1 if launchers.drops_bias else 2, -3, -4  # results of a launcher are -2 - their number

    def careful(*operands: Tensor | None) -> Any:
        if not extras:
            return plain_norm(launchers, *operands[: 5 if problem.given else 3])  # pyright: ignore[reportArgumentType]
        found = extras_norm(launchers, *operands)
        return found if adds else (found, None)

    return FrontDoor.trained(
        {
            "launch": launch,
            "careful": careful,
            # Looked up in each call, as in `plain_norm`, so that tests can replace them.
            "backward": (lambda *given: _extras_backward(*given)) if extras else (lambda *given: _plain_backward(*given)),
            "state": launchers,
            "number": 6 if extras else 5,
            "inputs": 6 if extras else 5 if problem.given else 3,
            "saved": (total if adds else 0, 1, bias, statistics, *((4, 5) if extras else ())),
            "outputs": (0, 2) if adds else (0,),
            "summed": (0, 3) if adds else (),
            "returns_pair": extras,
        }
    )


def _plain_forward(launchers: Launchers, x, weight, bias, *given):
    y, stats = launchers.train_forward(x, weight, bias, *given)  # pyright: ignore[reportOptionalCall]
    return y, 1, _saved(launchers, x, weight, bias, stats)


def _tracking_forward(running: Running, launchers: Launchers, x, weight, bias):
    y, stats = launchers.train_track(x, weight, bias, *running)  # pyright: ignore[reportOptionalCall]
    running.clear()  # tells the caller that the running statistics are updated
    return y, 1, _saved(launchers, x, weight, bias, stats)


def _extras_forward(launchers: Launchers, x, weight, bias, residual, scale, shift):
    y, stats, total = launchers.train_extras(x, weight, bias, residual, scale, shift)  # pyright: ignore[reportOptionalCall]
    if total is None:
        return y, 1, _saved(launchers, x, weight, bias, stats, scale, shift)
    differentiable = 2 if x.requires_grad or residual.requires_grad else 1
    return (y, total), differentiable, _saved(launchers, total, weight, bias, stats, scale, shift)


def _saved(launchers: Launchers, x, weight, bias, *others) -> tuple[Any, ...]:
    """Return the tensors to save. The first call of a kind stores their signatures in `launchers.packed`."""
    saved = x, weight, None if launchers.drops_bias else bias, *others
    if launchers.packed is None:
        launchers.packed = signatures(saved)
    return saved


def _plain_backward(launchers: Launchers, needs: tuple[bool, ...], dy: Tensor | None, *saved):
    no_more = (None, None) if len(needs) == 5 else ()  # given statistics are inputs, too, but have no gradients
    if dy is None:
        return None, None, None, *no_more
    if was_checked(launchers, dy, None, saved):
        x, weight, bias, stats = saved
        try:
            bias = weight if launchers.drops_bias else bias
            return *launchers.train_backward(dy, x, weight, bias, stats, needs[:3]), *no_more  # pyright: ignore[reportOptionalCall]
        except ZeroTensor:
            pass
    arguments, results = (0, 1, 2, 2 if launchers.drops_bias else 3, 4), (0, 1, 2, *[-1] * len(no_more))
    again = Again(needs, (dy, *saved), launchers.train_backward, arguments, needs[:3], results)
    return *packed_backward(launchers, dy, None, saved, Needs(*needs[:3]), again)[:3], *no_more


def _extras_backward(launchers: Launchers, needed: tuple[bool, ...], dy: Tensor | None, *others):
    added = launchers.problem.addends is not None
    dsum, saved = (others[0], others[1:]) if added else (None, others)
    dtypes = launchers.problem.addends or (launchers.problem.dtype, None)
    if dy is None:
        return _in_extras_order((dsum, None, None, None, None), *dtypes)
    x_needed, weight_needed, bias_needed, residual_needed, *last = needed
    needs = x_needed or residual_needed, weight_needed, bias_needed, *last
    if was_checked(launchers, dy, dsum, saved):
        x, weight, bias, *extras = saved
        try:
            bias = weight if launchers.drops_bias else bias
            grads = launchers.train_extras_backward(dy, x, weight, bias, *extras, dsum, needs)  # pyright: ignore[reportOptionalCall]
            return _in_extras_order(grads, *dtypes)
        except ZeroTensor:
            pass
    again, own = None, launchers.problem.dtype
    if dtypes == (own, own) or not added:  # otherwise dx must be converted
        x = 2 if added else 1  # the index of x among dy, dsum (if there is one), x, …
        arguments = 0, x, x + 1, x + (1 if launchers.drops_bias else 2), x + 3, x + 4, x + 5, 1 if added else -1
        results = 0, 1, 2, 0 if added else -1, 3, 4
        again = Again(needed, (dy, *others), launchers.train_extras_backward, arguments, needs, results)
    return _in_extras_order(packed_backward(launchers, dy, dsum, saved, Needs(*needs), again)[:5], *dtypes)


def _in_extras_order(grads: Sequence[Tensor | None], x: torch.dtype, residual: torch.dtype | None) -> tuple[Tensor | None, ...]:
    """Return the gradients in the order of x, weight, bias, residual, scale and shift."""
    dx, dweight, dbias, dscale, dshift = grads
    dresidual = None
    if dx is not None:
        dresidual = None if residual is None else dx if dx.dtype == residual else dx.to(residual)
        dx = dx if dx.dtype == x else dx.to(x)
    return dx, dweight, dbias, dresidual, dscale, dshift


def was_checked(launchers: Launchers, dy: Tensor, dsum: Tensor | None, saved: Sequence[Tensor | None]) -> bool:
    """Return whether `packed_backward` has checked tensors like these before, and no mode is on that would change the route."""
    if (  # `in_plain_context`, written out
        grad_enabled() or compiling() or functorch_active() or dispatch_modes() or jit_tracing() or forward_ad._current_level >= 0
    ):  # fmt: skip
        return False
    present = [t for t in (dy, dsum, *saved) if t is not None]
    for same in launchers.checked.get(len(present), ()):  # noqa: SIM110, `any` of a generator takes longer than this loop
        if same(*present):
            return True
    return False


def packed_backward(
    launchers: Launchers, dy: Tensor, dsum: Tensor | None, unpacked: Sequence[Any], needs: Needs, again: Again | None
) -> Gradients:
    """Check the tensors of a backward of this file, and compute the gradients. Remember the tensors, so that similar ones need no check.

    `unpacked` are the saved tensors, as autograd returned them. `again` describes the backward for the autograd function in C++.
    """
    way, problem = route_backward(dy, dsum, *unpacked), launchers.problem
    tensors = unpacked if signatures(unpacked) == launchers.packed else as_saved(problem.spec, unpacked, launchers.packed or (), True)
    x, weight, bias, stats, *extras = tensors
    bias = weight if launchers.drops_bias else bias
    check_gradient("dy", dy, problem, launchers.device)
    check_gradient("dsum", dsum, problem, launchers.device)
    if stats.stride() != launchers.packed_stride and way is DIRECT:
        way = OP
    arrived = [t.stride() for t in (dy, dsum) if t is not None]
    if way is DIRECT and x.stride() == launchers.saved_stride and arrived.count(problem.y_stride) == len(arrived):
        try:
            if extras:
                grads = launchers.train_extras_backward(dy, x, weight, bias, stats, *extras, dsum, needs[:5])  # pyright: ignore[reportOptionalCall]
            else:
                grads = launchers.train_backward(dy, x, weight, bias, stats, needs[:3])  # pyright: ignore[reportOptionalCall]
            if tensors is unpacked:
                launchers.remember_checked([t for t in (dy, dsum, *unpacked) if t is not None], again)
            return Gradients(*grads)
        except ZeroTensor:
            way = OP
    saved = SavedTensors(x, weight, bias, *unpack(problem, stats), None, *extras)
    return general_backward(launchers, way, dy, dsum, saved, needs, PACKED_SAVED_NAMES, unpacked)
