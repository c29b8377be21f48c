from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from onepass.check.operands import check_backward, check_forward, check_sizes
from onepass.check.saved import as_saved, signatures
from onepass.core.memory import require_memory
from onepass.core.operands import Gradients, Needs, OptionalOperands, Result
from onepass.core.problem import NormProblem, accumulator, bind
from onepass.core.spec import NormSpec
from onepass.core.view import dense_stride, laid_out
from onepass.planning.options import batch_invariant, options_in_context

from . import compiled as compiled_graphs
from .autograd import backward_by_spec, differentiable, in_operand_order, needs_of, pending_updates, wanted_gradients
from .launchers import Launchers, bias_is_not_read, known, launchers_of
from .route import route_backward

_OF_NORM = ("x", "weight", "bias", *OptionalOperands._fields, "mean", "var")


_OF_BACKWARD = ("x", "weight", "bias", "dsum", *OptionalOperands._fields[1:], "dy", "mean", "rstd", "var")


def _known(
    packed: tuple[str, Sequence[int], float, float],
    names: Sequence[str],
    operands: Sequence[Tensor | None],  # x, weight, bias, *extras, and then those that are only checked
    given: bool,
    track: bool,
    check: Callable[[NormProblem], None],
) -> Launchers:
    """The launchers for an op's operands, which are checked and bound once for each kind: on a CPU that leaves 85 µs of 573."""
    require_memory(names, operands)
    words, sizes, *numbers = packed
    x, weight, bias = operands[:3]
    assert x is not None
    key = (
        names, words, *sizes, *numbers, given, track, options_in_context.get(), batch_invariant.on, x.stride(),
        *[None if t is None else (t.shape, t.dtype, t.device) for t in operands],
    )  # fmt: skip
    found = known.get(key)
    if found is None:
        spec, extras = NormSpec.unpack(words, sizes, *numbers), OptionalOperands(*operands[3:10])
        check_sizes(spec)
        check(bind(spec, x, weight, bias, given, track, extras))
        found = known[key] = launchers_of(spec, x, weight, bias, given, track, extras)
    return found


# Defined by schema, not by torch.library.custom_op, which wraps and checks every call: a third of its time, by a profile on a CPU.
_library = torch.library.Library("onepass", "FRAGMENT")


def _define(name: str, function: Callable[..., Any]) -> None:
    schema = torch.library.infer_schema(function, mutates_args=())
    _library.define(name + schema, tags=torch.Tag.pt2_compliant_tag)
    _library.impl(name, function, "CompositeExplicitAutograd")


def _norm_op(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor | None,
    var: Tensor | None,
    words: str,
    sizes: Sequence[int],
    eps: float,
    weight_offset: float,
    track: bool,
    residual: Tensor | None,
    scale: Tensor | None,
    shift: Tensor | None,
    mean_weight: Tensor | None,
    var_weight: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """y, mean, rstd, var, sum; empty where there is none: no mean without centering or where it was given, var only with `track`."""
    given, extras = var is not None, OptionalOperands(residual, scale, shift, mean_weight, var_weight, running_mean, running_var)
    operands = x, weight, bias, *extras, mean, var
    check = partial(check_forward, x=x, weight=weight, bias=bias, mean=mean, var=var, extras=extras)
    ready = _known((words, sizes, eps, weight_offset), _OF_NORM, operands, given, track, check)
    result = ready.forward(x, weight, bias, mean, var, extras)
    mean = result.rstd.new_empty(0) if result.mean is None or given else result.mean.contiguous()
    var = result.rstd.new_empty(0) if result.var is None or not track else result.var.contiguous()
    return result.y, mean, result.rstd.contiguous(), var, result.y.new_empty(0) if result.sum is None else result.sum


_define("norm", _norm_op)


@torch.library.register_fake("onepass::norm", lib=_library)
def _(x, weight, bias, mean, var, words, sizes, eps, weight_offset, track, residual, *_):
    compiled_graphs.install()  # someone traces: the first moment at which it is known that inductor may come
    total = x if residual is None else torch.empty_like(x, dtype=torch.promote_types(x.dtype, residual.dtype))
    spec, acc = NormSpec.unpack(words, sizes, eps, weight_offset), accumulator(total.dtype)
    kept, none = spec.kept_shape(x.shape), [0]
    return (
        torch.empty_like(total),
        x.new_empty(kept if spec.centered and var is None else none, dtype=acc),
        x.new_empty(kept, dtype=acc),
        x.new_empty(kept if track else none, dtype=acc),
        total.new_empty(none) if residual is None else torch.empty_like(total),
    )


def _norm_backward_op(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor | None,
    rstd: Tensor,
    words: str,
    sizes: Sequence[int],
    eps: float,
    weight_offset: float,
    given: bool,
    needs: Sequence[bool],
    var: Tensor | None,
    dsum: Tensor | None,
    scale: Tensor | None,
    shift: Tensor | None,
    mean_weight: Tensor | None,
    var_weight: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The Gradients; empty where `needs` is false. With a residual, x is the sum, and dsum the gradient that arrives there; with `from_y`
    among the words, x is y, and mean is not looked at."""
    extras = OptionalOperands(dsum, scale, shift, mean_weight, var_weight, running_mean, running_var)
    if dsum is not None or words.endswith("from_y"):  # x is a sum or y, which are dense
        require_memory(("x",), (x,))
        x = laid_out(x, dense_stride(x))
    operands = x, weight, bias, *extras, dy, mean, rstd, var
    check = partial(check_backward, dy=dy, x=x, weight=weight, bias=bias, mean=mean, rstd=rstd, extras=extras, var=var)
    ready = _known((words, sizes, eps, weight_offset), _OF_BACKWARD, operands, given, False, check)
    grads = ready.backward(dy, x, weight, bias, mean, rstd, needs, extras, var)
    wanted = zip(grads, Needs(*needs))
    return tuple([grad if grad is not None and needed else x.new_empty(0) for grad, needed in wanted])  # pyright: ignore[reportReturnType]


_define("norm_backward", _norm_backward_op)


@torch.library.register_fake("onepass::norm_backward", lib=_library)
def _(dy, x, weight, bias, mean, rstd, words, sizes, eps, weight_offset, given, needs, var, *extras):
    operands = differentiable(x, weight, bias, OptionalOperands(*extras))
    wanted = wanted_gradients(needs, x, weight, bias, OptionalOperands(*extras))
    dx = torch.empty_like(x) if wanted[0] else x.new_empty(0)
    return dx, *[t.new_empty(t.shape) if t is not None and needed else x.new_empty(0) for t, needed in zip(operands[1:], wanted[1:])]


def _save(ctx, inputs, output) -> None:
    x, weight, bias, mean, var, words, sizes, eps, weight_offset, _, residual, *extras = inputs
    pending = pending_updates.get([])
    if pending:
        pending.pop()(Result(output[0], output[1], output[2], output[3], None))
    ctx.set_materialize_grads(False)
    ctx.spec, ctx.given = NormSpec.unpack(words, sizes, eps, weight_offset), var is not None
    ctx.dtypes = x.dtype, None if residual is None else residual.dtype
    mean = None if ctx.spec.from_y else mean if ctx.given else output[1] if ctx.spec.centered else None
    normalized = output[0] if ctx.spec.from_y else x if residual is None else output[4]
    ctx.drops_bias = bias_is_not_read(ctx.spec, weight, bias, extras[0] is not None or extras[1] is not None)
    bias = None if ctx.drops_bias else bias
    ctx.saved = signatures((normalized, weight, bias))
    ctx.save_for_backward(normalized, weight, bias, mean, output[2], output[3] if ctx.spec.mix else None, *extras)


def _op_backward(ctx, dy, _mean, _rstd, _var, dsum):
    needed = ctx.needs_input_grad
    wanted = needs_of([*needed[:5], *needed[10:]])
    dsum = None if ctx.dtypes[1] is None else dsum  # without a residual, the sum is an empty tensor
    grads = Gradients(dsum)
    if dy is not None:  # else what was saved is not looked at: users may have changed it in place
        x, weight, bias, mean, rstd, var, *extras = ctx.saved_tensors
        x, weight, bias = as_saved(ctx.spec, (x, weight, bias), ctx.saved)
        bias = weight if ctx.drops_bias else bias
        way = route_backward(dy, x, weight)
        grads = backward_by_spec(way, ctx.spec, ctx.given, dy, x, weight, bias, mean, rstd, wanted, OptionalOperands(dsum, *extras), var)
    grads = in_operand_order(grads, *ctx.dtypes)
    return *grads[:5], None, None, None, None, None, *grads[5:]


torch.library.register_autograd("onepass::norm", _op_backward, setup_context=_save, lib=_library)
