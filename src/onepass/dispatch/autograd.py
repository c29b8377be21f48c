"""The autograd functions of the direct route, and the backward of the other routes (see route.py)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextvars import ContextVar

import torch
from torch import Tensor

from onepass.check.saved import SAVED_NAMES, as_saved, check_gradient, signatures
from onepass.core import reference
from onepass.core.memory import LOWEST, ZeroTensor, require_memory, require_memory_if_shown
from onepass.core.operands import Gradients, Needs, OptionalOperands, Result, SavedTensors
from onepass.core.spec import NormSpec

from .launchers import OPERAND_NAMES, Launchers
from .node import skip_functorch
from .route import DIRECT, OP, REFERENCE, route_backward

Update = Callable[[Result], None]  # updates running statistics from the result of a forward

_BACKWARD_NAMES = ("dy", "dsum", *SAVED_NAMES)
pending_updates: ContextVar[list[Update]] = ContextVar("updates")  # updates to run before the op's autograd saves tensors


class Norm(torch.autograd.Function):
    """Saves what was normalized (x, x + residual, or y) and the statistics, and nothing else of x's size."""

    @staticmethod
    def forward(ctx, launchers: Launchers, stats: bool | Update, x, weight, bias, mean, var, *others):  # pyright: ignore[reportIncompatibleMethodOverride]
        operands = x, weight, bias, mean, var, *others
        if min([t.data_ptr() for t in operands if t is not None]) < LOWEST:
            require_memory(OPERAND_NAMES, operands)
        given, from_y, optional = launchers.problem.given, launchers.problem.from_y, OptionalOperands(*others)
        result = launchers.forward(x, weight, bias, mean, var, optional)
        if callable(stats):
            stats(result)  # before anything is saved
        ctx.launchers, ctx.dtypes = launchers, (x.dtype, None if optional.residual is None else optional.residual.dtype)
        ctx.set_materialize_grads(False)
        # Given statistics are running statistics, which may change before the backward. So save a copy.
        mean = None if from_y else result.mean.clone() if given and result.mean is not None else result.mean
        normalized = result.y if from_y else x if result.sum is None else result.sum
        saved: tuple[Tensor | None, ...] = normalized, weight, None if launchers.drops_bias else bias, mean, result.rstd
        if any(t is not None for t in optional):
            running = (None if t is None else t.clone() for t in optional[5:])
            saved = *saved, result.var if launchers.problem.spec.mix else None, *optional[1:5], *running
        if launchers.saved is None:
            launchers.saved = signatures(saved)
        ctx.save_for_backward(*saved)
        if not stats:
            return result.y, None, None, None, result.sum
        if given:  # not computed here; they may be the operands themselves
            result = result._replace(mean=None, var=None)
        constants = [*result[1:4], None if ctx.needs_input_grad[2] or ctx.needs_input_grad[7] else result.sum]
        ctx.mark_non_differentiable(*(t for t in constants if t is not None))
        return tuple(result)

    @staticmethod
    def backward(ctx, dy, _mean, _rstd, _var, dsum):  # pyright: ignore[reportIncompatibleMethodOverride]
        if dy is None:  # saved tensors are not needed, and users may have changed them in place
            return None, None, *in_operand_order(Gradients(dsum), *ctx.dtypes)
        launchers, needs = ctx.launchers, needs_of(ctx.needs_input_grad[2:])
        problem, unpacked = launchers.problem, ctx.saved_tensors
        way = route_backward(dy, dsum, *unpacked)
        tensors = unpacked if signatures(unpacked) == launchers.saved else as_saved(problem.spec, unpacked, launchers.saved)
        saved = SavedTensors(*tensors)
        if launchers.drops_bias:
            saved = saved._replace(bias=saved.weight)
        check_gradient("dy", dy, problem, launchers.device)
        check_gradient("dsum", dsum, problem, launchers.device)
        grads = general_backward(launchers, way, dy, dsum, saved, needs, SAVED_NAMES, unpacked)
        return None, None, *in_operand_order(grads, *ctx.dtypes)


def general_backward(
    launchers: Launchers,
    way: str,
    dy: Tensor,
    dsum: Tensor | None,
    saved: SavedTensors,
    needs: Needs,
    names: Sequence[str],
    unpacked: Sequence[Tensor | None],
) -> Gradients:
    """Compute gradients by the launcher of a backward, or by the op or the reference where it cannot run.

    All tensors were checked, except for their memory. `names` are those of the `unpacked` tensors.
    """
    problem, operands = launchers.problem, (dy, dsum, *unpacked)
    if way is DIRECT and saved.x.stride() == launchers.saved_stride:
        try:
            if min([t.data_ptr() for t in operands if t is not None]) < LOWEST:
                require_memory(("dy", "dsum", *names), operands)
            return launchers.backward(dy, dsum, saved, needs)
        except ZeroTensor:
            pass
    # A hook on saved tensors may have changed the strides of x. The op plans for the tensors that it gets.
    return backward_by_spec(OP if way is DIRECT else way, problem.spec, problem.given, dy, dsum, saved, needs)


def needs_of(needed: Sequence[bool]) -> Needs:
    """Return which gradients are needed, from the flags of x, weight, bias, mean, var and the optional operands.

    x and residual share one gradient, and statistics have none.
    """
    x, weight, bias, _, _, residual, *others = needed
    return Needs(x or residual, weight, bias, *others[:4])


def in_operand_order(grads: Gradients, x: torch.dtype, residual: torch.dtype | None) -> tuple[Tensor | None, ...]:
    """Return the gradients in the order of x, weight, bias, mean, var and the optional operands."""
    dx, dweight, dbias, *others = grads
    dresidual = None if dx is None or residual is None else dx.to(residual)
    if dx is not None and dx.dtype != x:
        dx = dx.to(x)
    return dx, dweight, dbias, None, None, dresidual, *others, None, None


def backward_by_spec(
    way: str, spec: NormSpec, given: bool, dy: Tensor, dsum: Tensor | None, saved: SavedTensors, needs: Needs
) -> Gradients:
    """Run the backward by the registered op or by the reference, which take a spec instead of a prepared launcher."""
    require_memory_if_shown(_BACKWARD_NAMES, (dy, dsum, *saved))
    if way is REFERENCE:
        if spec.from_y and torch.is_grad_enabled():
            raise RuntimeError(
                'save="y" keeps the output for the backward, which cannot be differentiated again (create_graph=True) without the input: '
                'leave save at "x"'
            )
        return reference.backward(spec, dy, dsum, saved, needs, given)
    wanted = wanted_gradients(needs, saved)
    x, weight, bias, mean, rstd, var, *others = saved
    grads = torch.ops.onepass.norm_backward(dy, x, weight, bias, mean, rstd, *spec.pack(), given, wanted, var, dsum, *others)
    return Gradients(*[grad if needed else None for grad, needed in zip(grads, wanted)])


def wanted_gradients(needs: Sequence[bool], saved: SavedTensors) -> list[bool]:
    """Return which gradients to compute: those that are needed and whose operand is not None."""
    return [needed and t is not None for needed, t in zip(Needs(*needs), differentiable(saved))]


def differentiable(saved: SavedTensors) -> tuple[Tensor | None, ...]:
    """Return the operands that have gradients, in the order of Gradients."""
    return saved.x, saved.weight, saved.bias, saved.scale, saved.shift, saved.mean_weight, saved.var_weight


apply_norm = skip_functorch(Norm)
