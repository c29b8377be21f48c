"""The routes from a call to a kernel, and the registered ops.

- direct: plain tensors outside compile go straight to a ready launcher, through a classic autograd.Function if a gradient is needed;
- op: compile, export, tensor subclasses and dispatch modes see `torch.ops.onepass.norm` and `norm_backward`, which do not mutate;
- reference: functorch transforms, forward-mode AD and jit.trace see the definition itself, as does a backward that is to be differentiated.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from onepass.check.operands import check_forward
from onepass.core import reference
from onepass.core.memory import LOWEST, ZeroTensor, require_memory, require_memory_if_shown
from onepass.core.operands import NO_OPTIONAL, OptionalOperands, Result
from onepass.core.problem import bind, summed_like
from onepass.core.spec import NormSpec
from onepass.planning.options import batch_invariant, options_in_context

from . import library  # noqa: F401, registers the ops
from .autograd import Norm, PlainNorm, Update, pending_updates
from .launchers import OPERAND_NAMES, known, launchers_of, prepare
from .route import DIRECT, OP, PLAIN, compiling, dispatch_modes, functorch_active, grad_enabled, jit_tracing, route

Define = Callable[..., NormSpec]


def normalize(
    define: Define,
    args: tuple[Any, ...],
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    mean: Tensor | None = None,
    var: Tensor | None = None,
    check: Callable[[], None] = lambda: None,
) -> Tensor:
    """Normalize x, by `mean` and `var` where they are given.

    `define(x, weight, bias, *args)` checks what it must and returns the spec. It runs once per kind of call, and is part of the kind: a
    lasting function, not a lambda made for each call. `check` comes before it, and may look at mean and var.
    """
    # route(x, weight, bias, mean, var) is not DIRECT, written out: this is the hot path.
    if (
        compiling() or functorch_active() or dispatch_modes() or jit_tracing() or forward_ad._current_level >= 0
        or type(x) not in PLAIN or type(weight) not in PLAIN or type(bias) not in PLAIN
        or x.is_neg() or (weight is not None and weight.is_neg()) or (bias is not None and bias.is_neg())
        or (var is not None and (type(mean) not in PLAIN or type(var) not in PLAIN))
        or (var is not None and (var.is_neg() or (mean is not None and mean.is_neg())))
    ):  # fmt: skip
        check()
        return normalize_with(define, args, x, weight, bias, mean, var).y
    key = (
        define, args, options_in_context.get(), batch_invariant.on, x.shape, x.stride(), x.dtype, x.is_cpu or x.device,
        weight is None or weight.shape, weight is None or weight.dtype, bias is None or bias.shape, bias is None or bias.dtype,
        None if var is None else (None if mean is None else (mean.shape, mean.dtype), var.shape, var.dtype),
    )  # fmt: skip
    try:
        ready = known.get(key)
        if ready is None:
            check()
            problem = bind(define(x, weight, bias, *args), x, weight, bias, var is not None, False, NO_OPTIONAL)
            check_forward(problem, x, weight, bias, mean, var, NO_OPTIONAL)
            ready = prepare(key, problem, x.device, weight, bias)
        if grad_enabled() and (
            x.requires_grad or (weight is not None and weight.requires_grad) or (bias is not None and bias.requires_grad)
        ):
            if ready.train:
                return PlainNorm.apply(ready, x, weight, bias)  # pyright: ignore[reportReturnType]
            return Norm.apply(ready, False, x, weight, bias, mean, var, *NO_OPTIONAL)[0]  # pyright: ignore[reportOptionalSubscript]
        return ready.infer(x, weight, bias, mean, var)
    except ZeroTensor:
        return by_spec(OP, define(x, weight, bias, *args), (x, weight, bias, mean, var, *NO_OPTIONAL), False, None).y
    except (RuntimeError, TypeError):
        check()
        define(x, weight, bias, *args)  # explains what is not in the key, a parameter on another device, or cannot be, a list
        raise


def normalize_and_track(
    define: Define,
    args: tuple[Any, ...],
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor,
    running_var: Tensor,
    momentum: float,
) -> Tensor | None:
    """Normalize x by its own statistics, and update the running ones, (12); None, with nothing done, where that takes more than one call of
    a kernel, or where a call of this kind was not seen before and has to be checked."""
    running = running_mean, running_var
    if route(x, weight, bias, *running) is not DIRECT or not all(t.is_cpu and t.is_contiguous() for t in running):
        return None
    if grad_enabled() and any(t is not None and t.requires_grad for t in (x, weight, bias, *running)):
        return None
    ready = known.get(_kind_of_tracked(define, args, x, weight, bias, running_mean, running_var, momentum))
    if ready is None or ready.track is None:
        return None
    try:
        return ready.track(x, weight, bias, running_mean, running_var, momentum)
    except ZeroTensor:
        return None


def _kind_of_tracked(define: Define, args: tuple[Any, ...], x: Tensor, *operands: Any) -> tuple[Any, ...]:
    tensors = [None if t is None else (t.shape, t.dtype) for t in operands[:4]]
    return (define, args, options_in_context.get(), batch_invariant.on, operands[4], x.shape, x.stride(), x.dtype, x.is_cpu, *tensors)


def may_track(define: Define, args: tuple[Any, ...], x: Tensor, weight, bias, running_mean, running_var, momentum: Any) -> bool:
    """Whether a call that was checked, and with it all of its kind, may be `tracked`."""
    running = running_mean, running_var
    fits = type(momentum) is float and all(t.dtype == torch.float32 and t.is_cpu for t in running) and x.numel() > 0
    if not fits or route(x, weight, bias, *running) is not DIRECT or options_in_context.get().explain:
        return False
    ready = launchers_of(define(x, weight, bias, *args), x, weight, bias, False, True)
    known[_kind_of_tracked(define, args, x, weight, bias, *running, momentum)] = ready
    return True


def normalize_with(
    define: Define,
    args: tuple[Any, ...],
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    mean: Tensor | None = None,
    var: Tensor | None = None,
    extras: OptionalOperands = NO_OPTIONAL,
    track: bool = False,
    stats: bool = True,
    update: Update | None = None,
) -> Result:
    """As `norm`, with any operands, and all that is computed: the statistics, through which no gradient flows (the variance if `track`
    asks for it; not those that were given), and the sum with a residual. Without `stats`, statistics may be missing.

    `update` gets the result before autograd saves anything, as torch's kernels update running statistics. Checkpointing ends a
    recomputation when its last tensor is saved, so nothing after that runs twice."""
    operands = x, weight, bias, mean, var, *extras
    present = [t for t in operands if t is not None]
    way = route(*present)
    if way is not DIRECT:
        return by_spec(way, define(summed_like(x, extras.residual), weight, bias, *args), operands, track, update)
    key = (
        define, args, options_in_context.get(), batch_invariant.on, track, x.stride(),
        *[None if t is None else (t.shape, t.dtype, t.device) for t in operands],
    )  # fmt: skip
    ready = known.get(key)
    if ready is None:
        spec = define(summed_like(x, extras.residual), weight, bias, *args)
        problem = bind(spec, x, weight, bias, var is not None, track, extras)
        check_forward(problem, x, weight, bias, mean, var, extras)
        ready = prepare(key, problem, x.device, weight, bias)
    try:
        if grad_enabled() and True in [t.requires_grad for t in present]:
            return Result(*Norm.apply(ready, update or True, *operands))  # pyright: ignore[reportArgumentType, reportGeneralTypeIssues]
        if min([t.data_ptr() for t in present]) < LOWEST:
            require_memory(OPERAND_NAMES, operands)
        result = (ready.forward if stats or track else ready.bare)(x, weight, bias, mean, var, extras)
    except ZeroTensor:
        return by_spec(OP, define(summed_like(x, extras.residual), weight, bias, *args), operands, track, update)
    if update:
        update(result)
    return result


def _if_needed(total: Tensor, operands: Sequence[Tensor | None]) -> Tensor:
    """The sum, in the graph only if one of its terms is: a weight that needs a gradient has nothing to do with it."""
    x, residual = operands[0], operands[5]
    return total if (x is not None and x.requires_grad) or (residual is not None and residual.requires_grad) else total.detach()


def by_spec(way: str, spec: NormSpec, operands: Sequence[Tensor | None], track: bool, update: Update | None) -> Result:
    """The forward of the routes that know a spec but no problem."""
    require_memory_if_shown(OPERAND_NAMES, operands)
    if way is OP:
        pending = [update] if update and not compiling() else []
        token = pending_updates.set(pending) if pending else None
        try:
            y, mean, rstd, var, total = torch.ops.onepass.norm(*operands[:5], *spec.pack(), track, *operands[5:])
        finally:
            if token:
                pending_updates.reset(token)
        given, added = operands[4] is not None, operands[5] is not None
        mean, var = mean.detach() if spec.centered and not given else None, var.detach() if track else None
        result = Result(y, mean, rstd.detach(), var, _if_needed(total, operands) if added else None)
        if update and (pending or compiling()):  # nothing was saved
            update(result)
        return result
    x, weight, bias, mean, var, *extras = operands
    assert x is not None
    result = reference.forward(spec, x, weight, bias, mean, var, OptionalOperands(*extras))
    mean, var = (None if stat is None else stat.detach() for stat in (result.mean, result.var))
    result = Result(result.y, mean, result.rstd.detach(), var, result.sum)
    if update:
        update(result)
    return result
