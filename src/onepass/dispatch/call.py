"""From a function of `onepass.functional` to a launcher, by the route that the call takes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._functorch.utils import unwrap_dead_wrappers
from torch.autograd import forward_ad

from onepass.check.operands import check_forward
from onepass.core import reference
from onepass.core.memory import LOWEST, ZeroTensor, require_memory, require_memory_if_shown
from onepass.core.operands import NO_OPTIONAL, OptionalOperands, Result
from onepass.core.problem import bind, summed_like
from onepass.core.spec import NormSpec
from onepass.planning.options import batch_invariant, options_in_context

from . import library  # noqa: F401, registers the ops
from .autograd import Update, apply_norm, pending_updates
from .launchers import OPERAND_NAMES, Define, Kind, Launchers, find, kind_of, prepare, remember
from .packed import extras_norm, plain_norm, trained_norm
from .recent import find_recent, key_of, note
from .route import DIRECT, OP, compiling, dispatch_modes, functorch_active, grad_enabled, in_plain_context, jit_tracing, route


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
    """Normalize x, by `mean` and `var` if they are given.

    `define(x, weight, bias, *args)` checks its arguments and returns the spec. It runs once per kind of call. It is part of the cache
    key, so pass a module-level function, not a new lambda in each call. `check` runs before it, and may check mean and var.
    """
    # This is `recall(key_of(...), ...)` if `in_plain_context()`. It is written out, because every call passes here.
    if not (compiling() or functorch_active() or dispatch_modes() or jit_tracing() or forward_ad._current_level >= 0):
        key = (
            define, args, options_in_context.get(), batch_invariant.on, grad_enabled(), x.shape,
            weight is None, bias is None, mean is None, var is None,
        )  # fmt: skip
        try:
            for same, launch in find_recent(key, ()):
                if var is None and weight is not None:
                    like = same(x, weight) if bias is None else same(x, weight, bias)
                elif mean is not None and weight is not None and bias is not None:
                    like = same(x, weight, bias, mean, var)
                else:
                    like = same(*[t for t in (x, weight, bias, mean, var) if t is not None])
                if like:
                    return launch(x, weight, bias, mean, var)
        except (RuntimeError, TypeError):
            pass  # checks follow, and may raise a better error. TypeError: an argument cannot be hashed
    return _normalize_checked(define, args, x, weight, bias, mean, var, check)


def _normalize_checked(
    define: Define, args: tuple[Any, ...], x: Tensor, weight: Any, bias: Any, mean: Any, var: Any, check: Callable[[], None]
) -> Tensor:
    """As `normalize`, for a call that is not like a recent one. Remember its launcher for the next call like it."""
    if not compiling():  # torch.compile would put this call into its graph
        x, weight, bias, mean, var = unwrap_dead_wrappers((x, weight, bias, mean, var))
    operands = x, weight, bias, mean, var
    if route(*operands) is not DIRECT:
        check()
        return normalize_with(define, args, *operands).y
    try:
        given = None if var is None else (mean is None or (mean.shape, mean.dtype), var.shape, var.dtype)
        kind = kind_of(define, args, x, weight, bias, given)
        launchers = find(kind)
        if launchers is None:
            check()
            problem = bind(define(x, weight, bias, *args), x, weight, bias, var is not None)
            check_forward(problem, x, weight, bias, mean, var, NO_OPTIONAL)
            launchers = prepare(kind, problem, x, weight, bias)
        if grad_enabled() and True in [t.requires_grad for t in (x, weight, bias) if t is not None]:
            launch = _training(launchers)
            y = launch(*operands)
            launch = trained_norm(launchers) or launch
        else:
            launch = launchers.infer
            y = launch(*operands)
    except ZeroTensor:
        return _by_spec(OP, define(x, weight, bias, *args), (*operands, *NO_OPTIONAL), False, None).y
    except (RuntimeError, TypeError):
        # The checks raise a better error for what the key misses (a parameter on another device) or cannot hash (a list).
        check()
        define(x, weight, bias, *args)
        raise
    note(key_of(define, args, x, *[t is None for t in operands[1:]]), operands, launch)
    return y


def _training(launchers: Launchers) -> Callable[..., Tensor]:
    """Return (x, weight, bias, mean, var) -> y, which autograd can differentiate."""
    if launchers.train_forward and launchers.problem.given:
        return partial(plain_norm, launchers)
    if launchers.train_forward:
        return lambda x, weight, bias, mean, var: plain_norm(launchers, x, weight, bias)
    return lambda *operands: apply_norm(launchers, False, *operands, *NO_OPTIONAL)[0]


def normalize_known(
    define: Define,
    args: tuple[Any, ...],
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    scale: Tensor | None = None,
    shift: Tensor | None = None,
) -> tuple[Tensor, Tensor | None] | None:
    """Return (y, x + residual) with little host time, for a residual or a modulation. The sum is None without a residual.

    Return None, and change nothing, if `normalize_with` has not run a call of this kind. Do the same if the call fails: the caller then
    calls `normalize_with`, which raises a better error.
    """
    if not in_plain_context():
        return None
    operands = x, weight, bias, residual, scale, shift
    try:
        # `key_of` and `recall` are written out, as in `normalize`.
        key = (
            define, args, options_in_context.get(), batch_invariant.on, grad_enabled(), x.shape,
            weight is None, bias is None, residual is None, scale is None, shift is None, scale is shift,
        )  # fmt: skip
        different = operands[:-1] if scale is shift else operands  # `same_as` needs different objects
        for same, launch in find_recent(key, ()):
            if same(*[t for t in different if t is not None]):
                return launch(x, weight, bias, residual, scale, shift)
        if route(*operands) is not DIRECT:
            return None
        launchers = find(_extras_kind(define, args, *operands))
        if launchers is None:
            return None
        if grad_enabled() and True in [t.requires_grad for t in operands if t is not None]:
            launch = _training_with_extras(launchers)
            found = launch(*operands)
            launch = trained_norm(launchers) or launch
        else:
            launch = launchers.infer_extras
            found = launch(*operands)
        note(key, different, launch)
        return found
    except (RuntimeError, TypeError):  # TypeError: an argument cannot be hashed
        return None


def _training_with_extras(launchers: Launchers) -> Callable[..., tuple[Tensor, Tensor | None]]:
    """Return (x, weight, bias, residual, scale, shift) -> (y, x + residual), which autograd can differentiate."""
    if launchers.train_extras:
        if launchers.problem.addends:
            return partial(extras_norm, launchers)
        return lambda *operands: (extras_norm(launchers, *operands), None)

    def by_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, *extras: Tensor | None) -> tuple[Tensor, Tensor | None]:
        found = apply_norm(launchers, True, x, weight, bias, None, None, *extras, None, None, None, None)
        return found[0], found[4]

    return by_norm


def _extras_kind(define: Define, args: tuple[Any, ...], x: Tensor, weight: Any, bias: Any, *extras: Tensor | None) -> Kind:
    return kind_of(define, args, x, weight, bias, ("extras", *[None if t is None else (t.shape, t.dtype, t.device) for t in extras]))


def normalize_with(
    define: Define,
    args: tuple[Any, ...],
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    mean: Tensor | None = None,
    var: Tensor | None = None,
    optional: OptionalOperands = NO_OPTIONAL,
    track: bool = False,
    stats: bool = True,
    update: Update | None = None,
) -> Result:
    """Normalize x as `normalize` does, with optional operands. Return a Result with statistics, which have no gradient.

    `track` requests the variance. Without `stats`, the result may lack statistics. It may always lack those that were given.

    `update(result)` runs before autograd saves a tensor, because torch's kernels also update running statistics that early.
    Checkpointing stops a recomputation at its last saved tensor, so it would skip a later update.
    """
    operands = x, weight, bias, mean, var, *optional
    present = [t for t in operands if t is not None]
    way = route(*present)
    if way is not DIRECT:
        return _by_spec(way, define(summed_like(x, optional.residual), weight, bias, *args), operands, track, update)
    kind = kind_of(define, args, x, weight, bias, (track, *[None if t is None else (t.shape, t.dtype, t.device) for t in operands[3:]]))
    launchers = find(kind)
    if launchers is None:
        spec = define(summed_like(x, optional.residual), weight, bias, *args)
        problem = bind(spec, x, weight, bias, var is not None, track, optional)
        check_forward(problem, x, weight, bias, mean, var, optional)
        launchers = prepare(kind, problem, x, weight, bias)
        if not (stats or track or var is not None) and optional[3:] == NO_OPTIONAL[3:]:
            remember(_extras_kind(define, args, x, weight, bias, *optional[:3]), launchers)  # for `normalize_known`
    try:
        if grad_enabled() and True in [t.requires_grad for t in present]:
            if launchers.train_extras and not (stats or track or var is not None or update):
                # A later call of `normalize_known` must save as many tensors as this one, because checkpoints count them.
                y, total = _training_with_extras(launchers)(x, weight, bias, *optional[:3])
                return Result(y, None, None, None, total)  # pyright: ignore[reportArgumentType]
            return Result(*apply_norm(launchers, update or True, *operands))  # pyright: ignore[reportArgumentType, reportGeneralTypeIssues]
        if min([t.data_ptr() for t in present]) < LOWEST:
            require_memory(OPERAND_NAMES, operands)
        launch = launchers.forward if stats or track else launchers.forward_without_statistics
        result = launch(x, weight, bias, mean, var, optional)
    except ZeroTensor:
        return _by_spec(OP, define(summed_like(x, optional.residual), weight, bias, *args), operands, track, update)
    except RuntimeError:
        define(summed_like(x, optional.residual), weight, bias, *args)  # raises a better error, as in `normalize`
        raise
    if update:
        update(result)
    return result


def _if_needed(total: Tensor, operands: Sequence[Tensor | None]) -> Tensor:
    """Return x + residual, detached unless x or the residual needs a gradient."""
    x, residual = operands[0], operands[5]
    return total if (x is not None and x.requires_grad) or (residual is not None and residual.requires_grad) else total.detach()


def _by_spec(way: str, spec: NormSpec, operands: Sequence[Tensor | None], track: bool, update: Update | None) -> Result:
    """Run the forward by the registered op or by the reference, which take a spec instead of a prepared launcher."""
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
        if update and (pending or compiling()):  # autograd saved nothing, so it did not update
            update(result)
        return result
    x, weight, bias, mean, var, *others = operands
    assert x is not None
    result = reference.forward(spec, x, weight, bias, mean, var, OptionalOperands(*others))
    mean, var = (None if stat is None else stat.detach() for stat in (result.mean, result.var))
    result = Result(result.y, mean, result.rstd.detach(), var, result.sum)
    if update:
        update(result)
    return result
