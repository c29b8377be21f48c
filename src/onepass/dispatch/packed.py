"""The autograd functions that need little host time. They save mean and rstd in one tensor, called statistics.

A backward must check the tensors that it gets. It skips the checks if an earlier backward of its kind has checked tensors like these.
recent.py makes that comparison.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from onepass.check.saved import PACKED_SAVED_NAMES, as_saved, check_gradient, signatures
from onepass.core.memory import ZeroTensor
from onepass.core.operands import Gradients, Needs, SavedTensors
from onepass.core.statistics import unpack

from .autograd import general_backward, skip_functorch
from .launchers import Launchers
from .route import DIRECT, OP, compiling, dispatch_modes, functorch_active, grad_enabled, jit_tracing, route_backward

Running = list[Any]  # [running_mean, running_var, momentum]; emptied when the running statistics are updated


class PlainNorm(torch.autograd.Function):
    """As `Norm` (autograd.py), for calls whose only operands are x, weight, bias and given statistics.

    The family must have a `train_forward` and a `train_backward`. The forward also updates the `running` statistics, if there are any.
    In small training steps, the other work of `Norm` would take longer than the kernel.
    """

    @staticmethod
    def forward(ctx, launchers: Launchers, running: Running | None, x, weight, bias, *given):  # pyright: ignore[reportIncompatibleMethodOverride]
        if running is None:
            y, stats = launchers.train_forward(x, weight, bias, *given)  # pyright: ignore[reportOptionalCall]
        else:
            y, stats = launchers.train_track(x, weight, bias, *running)  # pyright: ignore[reportOptionalCall]
            running.clear()  # tells the caller that the running statistics are updated
        saved = x, weight, None if launchers.drops_bias else bias, stats
        if launchers.packed is None:
            launchers.packed = signatures(saved)
        ctx.launchers = launchers
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*saved)
        return y

    @staticmethod
    def backward(ctx, dy):  # pyright: ignore[reportIncompatibleMethodOverride]
        if dy is None:
            return None, None, None, None, None, None, None
        launchers, saved = ctx.launchers, ctx.saved_tensors
        if was_checked(launchers, dy, None, saved):
            x, weight, bias, stats = saved
            try:
                bias = weight if launchers.drops_bias else bias
                grads = launchers.train_backward(dy, x, weight, bias, stats, ctx.needs_input_grad[2:5])
                return None, None, *grads, None, None  # the last two: for given statistics; otherwise ignored
            except ZeroTensor:
                pass
        return None, None, *packed_backward(launchers, dy, None, saved, Needs(*ctx.needs_input_grad[2:5]))[:3], None, None


class ExtrasNorm(torch.autograd.Function):
    """As PlainNorm, with a residual or a modulation. Returns y, or (y, x + residual) if there is a residual."""

    @staticmethod
    def forward(ctx, launchers: Launchers, x, weight, bias, residual, scale, shift):  # pyright: ignore[reportIncompatibleMethodOverride]
        y, stats, total = launchers.train_extras(x, weight, bias, residual, scale, shift)  # pyright: ignore[reportOptionalCall]
        saved = x if total is None else total, weight, None if launchers.drops_bias else bias, stats, scale, shift
        if launchers.packed is None:
            launchers.packed = signatures(saved)
        ctx.launchers, ctx.dtypes = launchers, (x.dtype, None if residual is None else residual.dtype)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*saved)
        if total is None:
            return y
        if not (ctx.needs_input_grad[1] or ctx.needs_input_grad[4]):
            ctx.mark_non_differentiable(total)
        return y, total

    @staticmethod
    def backward(ctx, dy, dsum=None):  # pyright: ignore[reportIncompatibleMethodOverride]
        if dy is None:  # saved tensors are not needed, and users may have changed them in place
            return None, *_in_extras_order((dsum, None, None, None, None), *ctx.dtypes)
        launchers, saved = ctx.launchers, ctx.saved_tensors
        _, x_needed, weight_needed, bias_needed, residual_needed, *others = ctx.needs_input_grad
        needs = x_needed or residual_needed, weight_needed, bias_needed, *others
        if was_checked(launchers, dy, dsum, saved):
            x, weight, bias, *extras = saved
            try:
                grads = launchers.train_extras_backward(dy, x, weight, weight if launchers.drops_bias else bias, *extras, dsum, needs)
                return None, *_in_extras_order(grads, *ctx.dtypes)
            except ZeroTensor:
                pass
        return None, *_in_extras_order(packed_backward(launchers, dy, dsum, saved, Needs(*needs))[:5], *ctx.dtypes)


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


def packed_backward(launchers: Launchers, dy: Tensor, dsum: Tensor | None, unpacked: Sequence[Any], needs: Needs) -> Gradients:
    """Check the tensors of a backward of PlainNorm or ExtrasNorm, and compute the gradients. Remember the tensors for `was_checked`."""
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
                launchers.remember_checked([t for t in (dy, dsum, *unpacked) if t is not None])
            return Gradients(*grads)
        except ZeroTensor:
            way = OP
    saved = SavedTensors(x, weight, bias, *unpack(problem, stats), None, *extras)
    return general_backward(launchers, way, dy, dsum, saved, needs, PACKED_SAVED_NAMES, unpacked)


apply_plain_norm, apply_extras_norm = skip_functorch(PlainNorm), skip_functorch(ExtrasNorm)
