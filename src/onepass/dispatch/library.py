"""Registers `torch.ops.onepass.norm` and `norm_backward`, with autograd and fakes. The ops change no operand in place."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from onepass.check.operands import check_backward, check_forward, check_sizes
from onepass.check.saved import as_saved, signatures
from onepass.core.memory import require_memory
from onepass.core.operands import Gradients, Needs, OptionalOperands, Result, SavedTensors
from onepass.core.problem import accumulator, bind, bind_backward
from onepass.core.spec import NormSpec
from onepass.core.view import dense_stride, laid_out

from . import decomposition
from .autograd import backward_by_spec, differentiable, in_operand_order, needs_of, pending_updates, wanted_gradients
from .inductor_install import install
from .launchers import Launchers, bias_is_not_read, find, kind_of, prepare, signatures_of
from .route import route_backward

FORWARD_NAMES = ("x", "weight", "bias", "mean", "var", *OptionalOperands._fields)
BACKWARD_NAMES = ("dy", "dsum", *SavedTensors._fields)


def _define(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, words: str, sizes: tuple[int, ...], eps: float, offset: float
) -> NormSpec:
    spec = NormSpec.unpack(words, sizes, eps, offset)
    check_sizes(spec)
    return spec


def forward_launchers(
    args: tuple[Any, ...],
    operands: tuple[Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor | None],
    optional: OptionalOperands,
    track: bool,
) -> Launchers:
    """Return the launchers of a call of the op. `args` is a packed spec, `operands` are x, weight, bias, mean and var."""
    x, weight, bias, mean, var = operands
    kind = kind_of(_define, args, x, weight, bias, ("op", track, signatures_of((*operands[1:], *optional))))
    launchers = find(kind)
    if launchers is None:
        problem = bind(_define(x, weight, bias, *args), x, weight, bias, var is not None, track, optional)
        check_forward(problem, x, weight, bias, mean, var, optional)
        launchers = prepare(kind, problem, x, weight, bias)
    return launchers


def backward_launchers(args: tuple[Any, ...], dy: Tensor, dsum: Tensor | None, saved: SavedTensors, given: bool) -> Launchers:
    """Return the launchers of a call of the backward op. `args` is a packed spec."""
    x, weight, bias = saved[:3]
    kind = kind_of(_define, args, x, weight, bias, ("op backward", given, signatures_of((dy, dsum, *saved))))
    launchers = find(kind)
    if launchers is None:
        problem = bind_backward(_define(x, weight, bias, *args), dsum, saved, given)
        check_backward(problem, dy, dsum, saved)
        launchers = prepare(kind, problem, x, weight, bias)
    return launchers


def as_results(result: Result, given: bool, track: bool) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the results of the op: contiguous statistics, and an empty tensor in the place of each that is missing."""
    mean = result.rstd.new_empty(0) if result.mean is None or given else result.mean.contiguous()
    var = result.rstd.new_empty(0) if result.var is None or not track else result.var.contiguous()
    return result.y, mean, result.rstd.contiguous(), var, result.y.new_empty(0) if result.sum is None else result.sum


def as_gradients(grads: Gradients, needs: Sequence[bool], x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the results of the backward op: an empty tensor in the place of each gradient that is not needed."""
    wanted = zip(grads, Needs(*needs))
    return tuple([grad if grad is not None and needed else x.new_empty(0) for grad, needed in wanted])  # pyright: ignore[reportReturnType]


def dense_if_derived(x: Tensor, dsum: Tensor | None, words: str) -> Tensor:
    """Return the saved x with the strides that it had in the forward. If it is a sum or y, the forward made it dense."""
    if dsum is None and not NormSpec.packs_from_y(words):
        return x
    require_memory(("x",), (x,))
    return laid_out(x, dense_stride(x))


# Do not use torch.library.custom_op: its wrapper checks every call, which took a third of the call's time on a CPU.
_library = torch.library.Library("onepass", "FRAGMENT")


def _register(name: str, function: Callable[..., Any]) -> None:
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
    """Return (y, mean, rstd, var, sum).

    Mean is empty if it was given or is not subtracted. Var is empty without `track`, sum without a residual.
    """
    optional = OptionalOperands(residual, scale, shift, mean_weight, var_weight, running_mean, running_var)
    operands, args = (x, weight, bias, mean, var), (words, tuple(sizes), eps, weight_offset)
    require_memory(FORWARD_NAMES, (*operands, *optional))
    result = forward_launchers(args, operands, optional, track).forward(*operands, optional)
    return as_results(result, var is not None, track)


_register("norm", _norm_op)


@torch.library.register_fake("onepass::norm", lib=_library)
def _(x, weight, bias, mean, var, words, sizes, eps, weight_offset, track, residual, *_):
    install()  # this call is traced, so inductor may compile it
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
    """Return the Gradients. A gradient for which `needs` is false is an empty tensor.

    With a residual, x is the sum that was normalized, and dsum is the incoming gradient of the sum. If `words` contain
    `from_y`, x is y, and mean is not read.
    """
    x = dense_if_derived(x, dsum, words)
    others = scale, shift, mean_weight, var_weight, running_mean, running_var
    saved, args = SavedTensors(x, weight, bias, mean, rstd, var, *others), (words, tuple(sizes), eps, weight_offset)
    require_memory(BACKWARD_NAMES, (dy, dsum, *saved))
    return as_gradients(backward_launchers(args, dy, dsum, saved, given).backward(dy, dsum, saved, needs), needs, x)


_register("norm_backward", _norm_backward_op)


@torch.library.register_fake("onepass::norm_backward", lib=_library)
def _(dy, x, weight, bias, mean, rstd, words, sizes, eps, weight_offset, given, needs, var, dsum, *others):
    saved = SavedTensors(x, weight, bias, mean, rstd, var, *others)
    wanted = wanted_gradients(needs, saved)
    dx = torch.empty_like(x) if wanted[0] else x.new_empty(0)
    return dx, *[t.new_empty(t.shape) if t is not None and n else x.new_empty(0) for t, n in zip(differentiable(saved)[1:], wanted[1:])]


def _save(ctx, inputs, output) -> None:
    x, weight, bias, mean, var, words, sizes, eps, weight_offset, _, residual, *others = inputs
    pending = pending_updates.get([])
    if pending:
        pending.pop()(Result(output[0], output[1], output[2], output[3], None))
    ctx.set_materialize_grads(False)
    ctx.spec, ctx.given = NormSpec.unpack(words, sizes, eps, weight_offset), var is not None
    ctx.dtypes = x.dtype, None if residual is None else residual.dtype
    mean = None if ctx.spec.from_y else mean if ctx.given else output[1] if ctx.spec.centered else None
    normalized = output[0] if ctx.spec.from_y else x if residual is None else output[4]
    ctx.drops_bias = bias_is_not_read(ctx.spec, weight, bias, others[0] is not None or others[1] is not None)
    bias = None if ctx.drops_bias else bias
    ctx.saved = signatures((normalized, weight, bias))
    ctx.save_for_backward(normalized, weight, bias, mean, output[2], output[3] if ctx.spec.mix else None, *others)


def _op_backward(ctx, dy, _mean, _rstd, _var, dsum):
    needed = ctx.needs_input_grad
    needs = needs_of([*needed[:5], *needed[10:]])
    dsum = None if ctx.dtypes[1] is None else dsum  # without a residual, the sum is an empty tensor
    grads = Gradients(dsum)
    if dy is not None:  # without dy, saved tensors are not needed, and users may have changed them in place
        tensors = ctx.saved_tensors
        saved = SavedTensors(*as_saved(ctx.spec, tensors[:3], ctx.saved), *tensors[3:])
        if ctx.drops_bias:
            saved = saved._replace(bias=saved.weight)
        way = route_backward(dy, saved.x, saved.weight)
        grads = backward_by_spec(way, ctx.spec, ctx.given, dy, dsum, saved, needs)
    grads = in_operand_order(grads, *ctx.dtypes)
    return *grads[:5], None, None, None, None, None, *grads[5:]


def _decomposed_norm(x, weight, bias, mean, var, words, sizes, eps, weight_offset, track, *optional):
    spec = NormSpec.unpack(words, sizes, eps, weight_offset)
    return as_results(decomposition.forward(spec, (x, weight, bias, mean, var), OptionalOperands(*optional)), var is not None, track)


def _decomposed_backward(dy, x, weight, bias, mean, rstd, words, sizes, eps, weight_offset, given, needs, var, dsum, *others):
    spec, saved = NormSpec.unpack(words, sizes, eps, weight_offset), SavedTensors(x, weight, bias, mean, rstd, var, *others)
    return as_gradients(decomposition.backward(spec, dy, dsum, saved, needs, given), needs, x)


decomposition.register(torch.ops.onepass.norm.default, _decomposed_norm)
decomposition.register(torch.ops.onepass.norm_backward.default, _decomposed_backward)
torch.library.register_autograd("onepass::norm", _op_backward, setup_context=_save, lib=_library)
