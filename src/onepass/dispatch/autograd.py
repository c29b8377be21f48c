from __future__ import annotations

from collections.abc import Callable, Sequence
from contextvars import ContextVar

import torch
from torch import Tensor

from onepass.check.saved import SAVED, SAVED_BRIEFLY, as_saved, check_gradient, signatures
from onepass.core import reference
from onepass.core.memory import LOWEST, ZeroTensor, require_memory, require_memory_if_shown
from onepass.core.operands import NO_OPTIONAL, Gradients, Needs, OptionalOperands, Result
from onepass.core.spec import NormSpec

from .launchers import OPERAND_NAMES, Launchers
from .route import DIRECT, OP, REFERENCE, route_backward

Update = Callable[[Result], None]


_UNPACKED = ("dy", "dsum", *SAVED)


pending_updates: ContextVar[list[Update]] = ContextVar("updates")  # what the op's autograd is to do before it saves


class Norm(torch.autograd.Function):
    """Saves what was normalized (x, or its sum with the residual), or y in its place, and the statistics, nothing else of x's size."""

    @staticmethod
    def forward(ctx, ready: Launchers, stats: bool | Update, x, weight, bias, mean, var, *extras):  # pyright: ignore[reportIncompatibleMethodOverride]
        operands = x, weight, bias, mean, var, *extras
        if min([t.data_ptr() for t in operands if t is not None]) < LOWEST:
            require_memory(OPERAND_NAMES, operands)
        given, from_y, extras = ready.problem.given, ready.problem.from_y, OptionalOperands(*extras)
        result = ready.forward(x, weight, bias, mean, var, extras)
        if callable(stats):
            stats(result)  # before anything is saved
        ctx.ready, ctx.dtypes = ready, (x.dtype, None if extras.residual is None else extras.residual.dtype)
        ctx.set_materialize_grads(False)
        # Given statistics are running ones: training may go on before this backward comes.
        mean = None if from_y else result.mean.clone() if given and result.mean is not None else result.mean
        running = (None if t is None else t.clone() for t in extras[5:])
        normalized = result.y if from_y else x if result.sum is None else result.sum
        ctx.plain = all(t is None for t in extras)
        saved: tuple[Tensor | None, ...] = normalized, weight, None if ready.drops_bias else bias, mean, result.rstd
        if not ctx.plain:
            saved = *saved, result.var if ready.problem.spec.mix else None, *extras[1:5], *running
        if ready.saved is None:
            ready.saved = signatures(saved)
        ctx.save_for_backward(*saved)
        if not stats:
            return result.y, None, None, None, result.sum
        if given:  # not computed, and perhaps the operands themselves
            result = result._replace(mean=None, var=None)
        constants = [*result[1:4], None if ctx.needs_input_grad[2] or ctx.needs_input_grad[7] else result.sum]
        ctx.mark_non_differentiable(*(t for t in constants if t is not None))
        return tuple(result)

    @staticmethod
    def backward(ctx, dy, _mean, _rstd, _var, dsum):  # pyright: ignore[reportIncompatibleMethodOverride]
        if dy is None:  # what was saved is not looked at: users may have changed it in place
            return None, None, *in_operand_order(Gradients(dsum), *ctx.dtypes)
        ready, wanted = ctx.ready, needs_of(ctx.needs_input_grad[2:])
        problem, saved = ready.problem, ctx.saved_tensors
        way = route_backward(dy, *saved)
        x, weight, bias, mean, rstd, *others = saved if signatures(saved) == ready.saved else as_saved(problem.spec, saved, ready.saved)
        bias = weight if ready.drops_bias else bias
        var, extras = (None, NO_OPTIONAL) if ctx.plain else (others[0], OptionalOperands(dsum, *others[1:]))
        check_gradient("dy", dy, problem, ready.where)
        check_gradient("dsum", dsum, problem, ready.where)
        if way is DIRECT and x.stride() == ready.saved_stride:
            try:
                unpacked = dy, dsum, *saved
                if min([t.data_ptr() for t in unpacked if t is not None]) < LOWEST:
                    require_memory(_UNPACKED, unpacked)
                grads = ready.backward(dy, x, weight, bias, mean, rstd, wanted, extras, var)
                return None, None, *in_operand_order(grads, *ctx.dtypes)
            except ZeroTensor:
                pass
        # A hook on saved tensors may have laid x out anew: the op binds what it is given.
        way = OP if way is DIRECT else way
        grads = backward_by_spec(way, problem.spec, problem.given, dy, x, weight, bias, mean, rstd, wanted, extras, var)
        return None, None, *in_operand_order(grads, *ctx.dtypes)


class PlainNorm(torch.autograd.Function):
    """As _Norm, for x, weight and bias alone, by a family that has a short way: in a small step all else costs more than the norm."""

    @staticmethod
    def forward(ctx, ready: Launchers, x, weight, bias):  # pyright: ignore[reportIncompatibleMethodOverride]
        y, stats = ready.train.forward(x, weight, bias)
        ctx.ready = ready
        ctx.set_materialize_grads(False)
        saved = x, weight, None if ready.drops_bias else bias, stats
        if ready.saved is None:
            ready.saved = signatures(saved)
        ctx.save_for_backward(*saved)
        return y

    @staticmethod
    def backward(ctx, dy):  # pyright: ignore[reportIncompatibleMethodOverride]
        if dy is None:
            return None, None, None, None
        ready, needed, saved = ctx.ready, ctx.needs_input_grad[1:], ctx.saved_tensors
        way, problem = route_backward(dy, *saved), ready.problem
        x, weight, bias, stats = saved if signatures(saved) == ready.saved else as_saved(problem.spec, saved, ready.saved)
        bias = weight if ready.drops_bias else bias
        check_gradient("dy", dy, problem, ready.where)
        if way is DIRECT and x.stride() == ready.saved_stride and stats.stride() == ready.train.stat_stride:
            try:
                if dy.stride() == problem.y_stride:
                    return None, *ready.train.backward(dy, x, weight, bias, stats, needed)
                require_memory(("dy", *SAVED_BRIEFLY), (dy, *saved))
                return None, *ready.backward(dy, x, weight, bias, *ready.train.statistics(stats), Needs(*needed))[:3]
            except ZeroTensor:
                pass
        way = OP if way is DIRECT else way
        mean, rstd = ready.train.statistics(stats)
        return None, *backward_by_spec(way, problem.spec, False, dy, x, weight, bias, mean, rstd, Needs(*needed), NO_OPTIONAL, None)[:3]


def needs_of(needed: Sequence[bool]) -> Needs:
    """Which gradients the operands x, weight, bias, mean, var, *extras need: one for x and residual together, none for statistics."""
    x, weight, bias, _, _, residual, *others = needed
    return Needs(x or residual, weight, bias, *others[:4])


def in_operand_order(grads: Gradients, x: torch.dtype, residual: torch.dtype | None) -> tuple[Tensor | None, ...]:
    """Gradients in the order of the operands x, weight, bias, mean, var, *extras."""
    dx, dweight, dbias, *others = grads
    dresidual = None if dx is None or residual is None else dx.to(residual)
    if dx is not None and dx.dtype != x:
        dx = dx.to(x)
    return dx, dweight, dbias, None, None, dresidual, *others, None, None


def backward_by_spec(
    way: str,
    spec: NormSpec,
    given: bool,
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor | None,
    rstd: Tensor,
    needs: Needs,
    extras: OptionalOperands,
    var: Tensor | None,
) -> Gradients:
    """The backward of the routes that know a spec but no problem."""
    require_memory_if_shown(_UNPACKED, (dy, extras.residual, x, weight, bias, mean, rstd, var, *extras[1:]))
    if way is REFERENCE:
        if spec.from_y and torch.is_grad_enabled():
            raise RuntimeError(
                'save="y" keeps the output for the backward, which cannot be differentiated again (create_graph=True) without the input: '
                'leave save at "x"'
            )
        return reference.backward(spec, dy, x, weight, bias, (mean, rstd) if given else None, needs, extras, rstd if spec.from_y else None)
    wanted = wanted_gradients(needs, x, weight, bias, extras)
    grads = torch.ops.onepass.norm_backward(dy, x, weight, bias, mean, rstd, *spec.pack(), given, wanted, var, *extras)
    return Gradients(*[grad if needed else None for grad, needed in zip(grads, wanted)])


def wanted_gradients(needs: Sequence[bool], x: Tensor, weight: Tensor | None, bias: Tensor | None, extras: OptionalOperands) -> list[bool]:
    """The gradients that are needed, of operands that are there."""
    return [needed and t is not None for needed, t in zip(Needs(*needs), differentiable(x, weight, bias, extras))]


def differentiable(x: Tensor, weight: Tensor | None, bias: Tensor | None, extras: OptionalOperands) -> tuple[Tensor | None, ...]:
    """The operands that have gradients, in the order of Gradients."""
    return x, weight, bias, extras.scale, extras.shift, extras.mean_weight, extras.var_weight
