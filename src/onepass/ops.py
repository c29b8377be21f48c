"""The routes from a call to a kernel, and the registered ops.

- direct: plain tensors outside compile go straight to a ready launcher, through a classic autograd.Function if a gradient is needed;
- op: compile, export, tensor subclasses and dispatch modes see `torch.ops.onepass.norm` and `norm_backward`, which do not mutate;
- reference: functorch transforms, forward-mode AD and jit.trace see the definition itself, as does a backward that is to be differentiated.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import replace
from functools import cached_property, partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from . import graph, reference
from .device import Device, describe
from .families import BACKWARD, FORWARD
from .memory import LOWEST, ZeroTensor, require_memory, require_memory_if_shown
from .operands import (
    SAVED,
    SAVED_BRIEFLY,
    as_saved,
    batched,
    check_backward,
    check_forward,
    check_gradient,
    check_sizes,
    has_negative_bit,
    signatures,
)
from .plan import Asked, Options, Plan, batch_invariant, current, plan, wishes
from .problem import NONE, Extras, NormProblem, accumulator, bind, dense_stride, laid_out, summed_like
from .reference import Gradients, Needs, Result
from .spec import NormSpec

Define = Callable[..., NormSpec]
Update = Callable[[Result], None]

DIRECT, OP, REFERENCE = "direct", "op", "reference"
_UNPACKED = ("dy", "dsum", *SAVED)
_OPERANDS = ("input", "weight", "bias", "running_mean", "running_var", *Extras._fields)
PLAIN = {Tensor, torch.nn.Parameter, type(None)}

_grad_enabled = torch.is_grad_enabled
_functorch_active = torch._C._are_functorch_transforms_active
_dispatch_modes = torch._C._len_torch_dispatch_stack
_jit_tracing = torch._C._is_tracing
_compiling = torch.compiler.is_dynamo_compiling  # non-strict export, which this misses, shows as a dispatch mode


def route(*operands: Tensor | None) -> str:
    """Which route a call with these tensors takes now."""
    if _compiling():
        return REFERENCE if _functorch_active() else OP
    if _functorch_active() or forward_ad._current_level >= 0 or _jit_tracing():
        return REFERENCE
    if _dispatch_modes() or not PLAIN.issuperset(map(type, operands)) or has_negative_bit(*operands):
        return OP  # torch's dispatcher resolves negative bits before it calls a registered op
    return DIRECT


class Ready:
    """A problem with its launchers: planned once, then called."""

    def __init__(self, problem: NormProblem, device: torch.device, options: Options) -> None:
        self.problem, self.options, self.where = problem, options, device
        self.saved_stride = problem.seen(BACKWARD).stride  # of what a backward is handed as x
        self.saved: list[Any] | None = None  # what calls of this kind save for their backward
        self.drops_bias = False  # the bias is not saved: in the backward, the weight stands for it
        self.planned, self.device = _settled(problem, device, options)

    @cached_property
    def infer(self) -> Callable[..., Tensor]:
        """The forward where no statistics are wanted; a family may have a shorter way to it."""
        module = _module(self.planned)
        shorter = getattr(module, "infer", None)
        launch = shorter(self.planned, self.problem) if shorter else None
        if launch and getattr(module, "by_address", False):
            return launch

        def checked(*operands: Tensor | None) -> Tensor:
            if min([t.data_ptr() for t in operands if t is not None]) < LOWEST:
                require_memory(_OPERANDS, operands)
            return launch(*operands) if launch else self.bare(*operands, NONE).y

        return checked

    @cached_property
    def track(self) -> Callable[..., Tensor] | None:
        """As `infer`, where running statistics are updated too; None if the family leaves that to others."""
        make = getattr(_module(self.planned), "track", None)
        return make(self.planned, self.problem) if make else None

    @cached_property
    def bare(self) -> Callable[..., Result]:
        """As `forward`; a family may save itself the statistics."""
        make = getattr(_module(self.planned), "bare", None)
        return make(self.planned, self.problem) if make else self.forward

    @cached_property
    def forward(self) -> Callable[..., Result]:
        module = _module(self.planned)
        launch = module.forward(self.planned, self.problem)
        if self.problem.addends is None or getattr(module, "adds", False):
            return launch

        def add_first(x: Tensor, weight, bias, mean, var, extras: Extras) -> Result:
            assert extras.residual is not None
            total = torch.empty_strided(x.shape, self.problem.stride, dtype=self.problem.dtype, device=x.device)
            torch.add(x, extras.residual, out=total)
            return launch(total, weight, bias, mean, var, extras._replace(residual=None))._replace(sum=total)

        return add_first

    @cached_property
    def planned_back(self) -> Plan:
        return plan(self.problem.seen(BACKWARD), self.device, BACKWARD, self.options)

    @cached_property
    def backward(self) -> Callable[..., Gradients]:
        return _module(self.planned_back).backward(self.planned_back, self.problem.seen(BACKWARD))

    @cached_property
    def train(self) -> Any:
        """A shorter way through forward and backward, if the family has both and one."""
        make = getattr(_module(self.planned), "train", None)
        return make(self.problem) if make and self.planned.family == self.planned_back.family else None


def _settled(problem: NormProblem, device: torch.device, options: Options) -> tuple[Plan, Device]:
    """The plan of the forward, and the device as it was planned for: without a family of which compiling shows that it cannot run here."""
    described = describe(device)
    while True:
        planned = plan(problem, described, FORWARD, options)
        settle = getattr(_module(planned), "settle", None)
        reason = settle(planned, problem, device) if settle else ""
        if not reason:
            return planned, described
        lacks = {"ring": "no_ring", "native": "no_native"}.get(planned.family, "no_team")
        described = replace(described, **{lacks: reason})


def _module(planned: Plan) -> Any:
    return import_module(f".{planned.module}", __package__)


_ready: dict[tuple[Any, ...], Ready] = {}
_MOST = 4096  # kinds of call kept ready; serving with ever new shapes must not grow without bound


def _prepare(
    key: tuple[Any, ...], problem: NormProblem, device: torch.device, weight: Tensor | None = None, bias: Tensor | None = None
) -> Ready:
    options = wishes()
    if options.explain:
        raise Asked(problem, _settled(problem, device, options)[1])
    if len(_ready) >= _MOST:
        _ready.clear()
    found = Ready(problem, device, options)
    found.drops_bias = _bias_is_not_read(problem.spec, weight, bias, problem.scale is not None or problem.shift is not None)
    _ready[key] = found
    return found


def _bias_is_not_read(spec: NormSpec, weight: Tensor | None, bias: Tensor | None, modulated: bool) -> bool:
    """Whether a backward needs no more of the bias than its shape and dtype, and the weight has the same.

    Then it is not saved, and users may change it in place. Its values are read to take z again, and to take x_hat from y.
    """
    if weight is None or bias is None or spec.activation or spec.from_y or modulated:
        return False
    return weight.dtype == bias.dtype and weight.shape == bias.shape


def norm(
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
        _compiling() or _functorch_active() or _dispatch_modes() or _jit_tracing() or forward_ad._current_level >= 0
        or type(x) not in PLAIN or type(weight) not in PLAIN or type(bias) not in PLAIN
        or x.is_neg() or (weight is not None and weight.is_neg()) or (bias is not None and bias.is_neg())
        or (var is not None and (type(mean) not in PLAIN or type(var) not in PLAIN))
        or (var is not None and (var.is_neg() or (mean is not None and mean.is_neg())))
    ):  # fmt: skip
        check()
        return full(define, args, x, weight, bias, mean, var).y
    key = (
        define, args, current.get(), batch_invariant.on, x.shape, x.stride(), x.dtype, x.is_cpu or x.device,
        weight is None or weight.shape, weight is None or weight.dtype, bias is None or bias.shape, bias is None or bias.dtype,
        None if var is None else (None if mean is None else (mean.shape, mean.dtype), var.shape, var.dtype),
    )  # fmt: skip
    try:
        ready = _ready.get(key)
        if ready is None:
            check()
            problem = bind(define(x, weight, bias, *args), x, weight, bias, var is not None, False, NONE)
            check_forward(problem, x, weight, bias, mean, var, NONE)
            ready = _prepare(key, problem, x.device, weight, bias)
        if _grad_enabled() and (
            x.requires_grad or (weight is not None and weight.requires_grad) or (bias is not None and bias.requires_grad)
        ):
            if ready.train:
                return _Plain.apply(ready, x, weight, bias)  # pyright: ignore[reportReturnType]
            return _Norm.apply(ready, False, x, weight, bias, mean, var, *NONE)[0]  # pyright: ignore[reportOptionalSubscript]
        return ready.infer(x, weight, bias, mean, var)
    except ZeroTensor:
        return _by_spec(OP, define(x, weight, bias, *args), (x, weight, bias, mean, var, *NONE), False, None).y
    except (RuntimeError, TypeError):
        check()
        define(x, weight, bias, *args)  # explains what is not in the key, a parameter on another device, or cannot be, a list
        raise


def tracked(
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
    if _grad_enabled() and any(t is not None and t.requires_grad for t in (x, weight, bias, *running)):
        return None
    ready = _ready.get(_kind_of_tracked(define, args, x, weight, bias, running_mean, running_var, momentum))
    if ready is None or ready.track is None:
        return None
    try:
        return ready.track(x, weight, bias, running_mean, running_var, momentum)
    except ZeroTensor:
        return None


def _kind_of_tracked(define: Define, args: tuple[Any, ...], x: Tensor, *operands: Any) -> tuple[Any, ...]:
    tensors = [None if t is None else (t.shape, t.dtype) for t in operands[:4]]
    return (define, args, current.get(), batch_invariant.on, operands[4], x.shape, x.stride(), x.dtype, x.is_cpu, *tensors)


def may_track(define: Define, args: tuple[Any, ...], x: Tensor, weight, bias, running_mean, running_var, momentum: Any) -> bool:
    """Whether a call that was checked, and with it all of its kind, may be `tracked`."""
    running = running_mean, running_var
    fits = type(momentum) is float and all(t.dtype == torch.float32 and t.is_cpu for t in running) and x.numel() > 0
    if not fits or route(x, weight, bias, *running) is not DIRECT or current.get().explain:
        return False
    ready = _bound(define(x, weight, bias, *args), x, weight, bias, False, True)
    _ready[_kind_of_tracked(define, args, x, weight, bias, *running, momentum)] = ready
    return True


def full(
    define: Define,
    args: tuple[Any, ...],
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    mean: Tensor | None = None,
    var: Tensor | None = None,
    extras: Extras = NONE,
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
        return _by_spec(way, define(summed_like(x, extras.residual), weight, bias, *args), operands, track, update)
    key = (
        define, args, current.get(), batch_invariant.on, track, x.stride(),
        *[None if t is None else (t.shape, t.dtype, t.device) for t in operands],
    )  # fmt: skip
    ready = _ready.get(key)
    if ready is None:
        spec = define(summed_like(x, extras.residual), weight, bias, *args)
        problem = bind(spec, x, weight, bias, var is not None, track, extras)
        check_forward(problem, x, weight, bias, mean, var, extras)
        ready = _prepare(key, problem, x.device, weight, bias)
    try:
        if _grad_enabled() and True in [t.requires_grad for t in present]:
            return Result(*_Norm.apply(ready, update or True, *operands))  # pyright: ignore[reportArgumentType, reportGeneralTypeIssues]
        if min([t.data_ptr() for t in present]) < LOWEST:
            require_memory(_OPERANDS, operands)
        result = (ready.forward if stats or track else ready.bare)(x, weight, bias, mean, var, extras)
    except ZeroTensor:
        return _by_spec(OP, define(summed_like(x, extras.residual), weight, bias, *args), operands, track, update)
    if update:
        update(result)
    return result


def _if_needed(total: Tensor, operands: Sequence[Tensor | None]) -> Tensor:
    """The sum, in the graph only if one of its terms is: a weight that needs a gradient has nothing to do with it."""
    x, residual = operands[0], operands[5]
    return total if (x is not None and x.requires_grad) or (residual is not None and residual.requires_grad) else total.detach()


_updates: ContextVar[list[Update]] = ContextVar("updates")  # what the op's autograd is to do before it saves


def _by_spec(way: str, spec: NormSpec, operands: Sequence[Tensor | None], track: bool, update: Update | None) -> Result:
    """The forward of the routes that know a spec but no problem."""
    require_memory_if_shown(_OPERANDS, operands)
    if way is OP:
        pending = [update] if update and not _compiling() else []
        token = _updates.set(pending) if pending else None
        try:
            y, mean, rstd, var, total = torch.ops.onepass.norm(*operands[:5], *spec.pack(), track, *operands[5:])
        finally:
            if token:
                _updates.reset(token)
        given, added = operands[4] is not None, operands[5] is not None
        mean, var = mean.detach() if spec.centered and not given else None, var.detach() if track else None
        result = Result(y, mean, rstd.detach(), var, _if_needed(total, operands) if added else None)
        if update and (pending or _compiling()):  # nothing was saved
            update(result)
        return result
    x, weight, bias, mean, var, *extras = operands
    assert x is not None
    result = reference.forward(spec, x, weight, bias, mean, var, Extras(*extras))
    mean, var = (None if stat is None else stat.detach() for stat in (result.mean, result.var))
    result = Result(result.y, mean, result.rstd.detach(), var, result.sum)
    if update:
        update(result)
    return result


class _Norm(torch.autograd.Function):
    """Saves what was normalized (x, or its sum with the residual), or y in its place, and the statistics, nothing else of x's size."""

    @staticmethod
    def forward(ctx, ready: Ready, stats: bool | Update, x, weight, bias, mean, var, *extras):  # pyright: ignore[reportIncompatibleMethodOverride]
        operands = x, weight, bias, mean, var, *extras
        if min([t.data_ptr() for t in operands if t is not None]) < LOWEST:
            require_memory(_OPERANDS, operands)
        given, from_y, extras = ready.problem.given, ready.problem.from_y, Extras(*extras)
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
            return None, None, *_to_operands(Gradients(dsum), *ctx.dtypes)
        ready, wanted = ctx.ready, _needs(ctx.needs_input_grad[2:])
        problem, saved = ready.problem, ctx.saved_tensors
        way = _route_back(dy, *saved)
        x, weight, bias, mean, rstd, *others = saved if signatures(saved) == ready.saved else as_saved(problem.spec, saved, ready.saved)
        bias = weight if ready.drops_bias else bias
        var, extras = (None, NONE) if ctx.plain else (others[0], Extras(dsum, *others[1:]))
        check_gradient("dy", dy, problem, ready.where)
        check_gradient("dsum", dsum, problem, ready.where)
        if way is DIRECT and x.stride() == ready.saved_stride:
            try:
                unpacked = dy, dsum, *saved
                if min([t.data_ptr() for t in unpacked if t is not None]) < LOWEST:
                    require_memory(_UNPACKED, unpacked)
                grads = ready.backward(dy, x, weight, bias, mean, rstd, wanted, extras, var)
                return None, None, *_to_operands(grads, *ctx.dtypes)
            except ZeroTensor:
                pass
        # A hook on saved tensors may have laid x out anew: the op binds what it is given.
        way = OP if way is DIRECT else way
        grads = _backward(way, problem.spec, problem.given, dy, x, weight, bias, mean, rstd, wanted, extras, var)
        return None, None, *_to_operands(grads, *ctx.dtypes)


class _Plain(torch.autograd.Function):
    """As _Norm, for x, weight and bias alone, by a family that has a short way: in a small step all else costs more than the norm."""

    @staticmethod
    def forward(ctx, ready: Ready, x, weight, bias):  # pyright: ignore[reportIncompatibleMethodOverride]
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
        way, problem = _route_back(dy, *saved), ready.problem
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
        return None, *_backward(way, problem.spec, False, dy, x, weight, bias, mean, rstd, Needs(*needed), NONE, None)[:3]


def _needs(needed: Sequence[bool]) -> Needs:
    """Which gradients the operands x, weight, bias, mean, var, *extras need: one for x and residual together, none for statistics."""
    x, weight, bias, _, _, residual, *others = needed
    return Needs(x or residual, weight, bias, *others[:4])


def _to_operands(grads: Gradients, x: torch.dtype, residual: torch.dtype | None) -> tuple[Tensor | None, ...]:
    """Gradients in the order of the operands x, weight, bias, mean, var, *extras."""
    dx, dweight, dbias, *others = grads
    dresidual = None if dx is None or residual is None else dx.to(residual)
    if dx is not None and dx.dtype != x:
        dx = dx.to(x)
    return dx, dweight, dbias, None, None, dresidual, *others, None, None


def _route_back(dy: Tensor, *saved: Tensor | None) -> str:
    """Which route a backward takes: the definition where it is itself to be differentiated or dy is a batch of gradients."""
    return REFERENCE if _grad_enabled() or batched(dy) else route(dy, *saved)


def _backward(
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
    extras: Extras,
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
    wanted = _wanted(needs, x, weight, bias, extras)
    grads = torch.ops.onepass.norm_backward(dy, x, weight, bias, mean, rstd, *spec.pack(), given, wanted, var, *extras)
    return Gradients(*[grad if needed else None for grad, needed in zip(grads, wanted)])


def _wanted(needs: Sequence[bool], x: Tensor, weight: Tensor | None, bias: Tensor | None, extras: Extras) -> list[bool]:
    """The gradients that are needed, of operands that are there."""
    return [needed and t is not None for needed, t in zip(Needs(*needs), _differentiable(x, weight, bias, extras))]


def _differentiable(x: Tensor, weight: Tensor | None, bias: Tensor | None, extras: Extras) -> tuple[Tensor | None, ...]:
    """The operands that have gradients, in the order of Gradients."""
    return x, weight, bias, extras.scale, extras.shift, extras.mean_weight, extras.var_weight


def _bound(spec: NormSpec, x: Tensor, weight: Tensor | None, bias: Tensor | None, given: bool, track: bool, extras: Extras = NONE) -> Ready:
    """The launchers for operands that were checked."""
    problem = bind(spec, x, weight, bias, given, track, extras)
    key = (problem, x.device, current.get(), batch_invariant.on)
    return _ready.get(key) or _prepare(key, problem, x.device)


_OF_NORM = ("x", "weight", "bias", *Extras._fields, "mean", "var")
_OF_BACKWARD = ("x", "weight", "bias", "dsum", *Extras._fields[1:], "dy", "mean", "rstd", "var")


def _known(
    packed: tuple[str, Sequence[int], float, float],
    names: Sequence[str],
    operands: Sequence[Tensor | None],  # x, weight, bias, *extras, and then those that are only checked
    given: bool,
    track: bool,
    check: Callable[[NormProblem], None],
) -> Ready:
    """The launchers for an op's operands, which are checked and bound once for each kind: on a CPU that leaves 85 µs of 573."""
    require_memory(names, operands)
    words, sizes, *numbers = packed
    x, weight, bias = operands[:3]
    assert x is not None
    key = (
        names, words, *sizes, *numbers, given, track, current.get(), batch_invariant.on, x.stride(),
        *[None if t is None else (t.shape, t.dtype, t.device) for t in operands],
    )  # fmt: skip
    found = _ready.get(key)
    if found is None:
        spec, extras = NormSpec.unpack(words, sizes, *numbers), Extras(*operands[3:10])
        check_sizes(spec)
        check(bind(spec, x, weight, bias, given, track, extras))
        found = _ready[key] = _bound(spec, x, weight, bias, given, track, extras)
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
    given, extras = var is not None, Extras(residual, scale, shift, mean_weight, var_weight, running_mean, running_var)
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
    graph.install()  # someone traces: the first moment at which it is known that inductor may come
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
    extras = Extras(dsum, scale, shift, mean_weight, var_weight, running_mean, running_var)
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
    operands = _differentiable(x, weight, bias, Extras(*extras))
    wanted = _wanted(needs, x, weight, bias, Extras(*extras))
    dx = torch.empty_like(x) if wanted[0] else x.new_empty(0)
    return dx, *[t.new_empty(t.shape) if t is not None and needed else x.new_empty(0) for t, needed in zip(operands[1:], wanted[1:])]


def _save(ctx, inputs, output) -> None:
    x, weight, bias, mean, var, words, sizes, eps, weight_offset, _, residual, *extras = inputs
    pending = _updates.get([])
    if pending:
        pending.pop()(Result(output[0], output[1], output[2], output[3], None))
    ctx.set_materialize_grads(False)
    ctx.spec, ctx.given = NormSpec.unpack(words, sizes, eps, weight_offset), var is not None
    ctx.dtypes = x.dtype, None if residual is None else residual.dtype
    mean = None if ctx.spec.from_y else mean if ctx.given else output[1] if ctx.spec.centered else None
    normalized = output[0] if ctx.spec.from_y else x if residual is None else output[4]
    ctx.drops_bias = _bias_is_not_read(ctx.spec, weight, bias, extras[0] is not None or extras[1] is not None)
    bias = None if ctx.drops_bias else bias
    ctx.saved = signatures((normalized, weight, bias))
    ctx.save_for_backward(normalized, weight, bias, mean, output[2], output[3] if ctx.spec.mix else None, *extras)


def _op_backward(ctx, dy, _mean, _rstd, _var, dsum):
    needed = ctx.needs_input_grad
    wanted = _needs([*needed[:5], *needed[10:]])
    dsum = None if ctx.dtypes[1] is None else dsum  # without a residual, the sum is an empty tensor
    grads = Gradients(dsum)
    if dy is not None:  # else what was saved is not looked at: users may have changed it in place
        x, weight, bias, mean, rstd, var, *extras = ctx.saved_tensors
        x, weight, bias = as_saved(ctx.spec, (x, weight, bias), ctx.saved)
        bias = weight if ctx.drops_bias else bias
        way = _route_back(dy, x, weight)
        grads = _backward(way, ctx.spec, ctx.given, dy, x, weight, bias, mean, rstd, wanted, Extras(dsum, *extras), var)
    grads = _to_operands(grads, *ctx.dtypes)
    return *grads[:5], None, None, None, None, None, *grads[5:]


torch.library.register_autograd("onepass::norm", _op_backward, setup_context=_save, lib=_library)
