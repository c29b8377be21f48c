"""The routes from a call to a kernel, and the registered ops.

- direct: plain tensors outside compile go straight to a ready launcher, through a classic autograd.Function if a gradient is needed;
- op: compile, export, tensor subclasses and dispatch modes see `torch.ops.onepass.norm` and `norm_backward`, which do not mutate;
- reference: functorch transforms, forward-mode AD and jit.trace see the definition itself, as does a backward that is to be differentiated.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from importlib import import_module
from typing import Any, overload

import torch
from torch import Tensor
from torch.autograd import forward_ad

from . import reference
from .device import describe
from .families import BACKWARD, FORWARD
from .plan import Asked, Options, Plan, current, plan
from .problem import NormProblem, accumulator, bind
from .reference import Gradients, Result
from .spec import NormSpec

Define = Callable[..., NormSpec]

DIRECT, OP, REFERENCE = "direct", "op", "reference"
PLAIN = {Tensor, torch.nn.Parameter, type(None)}

_functorch_active = torch._C._are_functorch_transforms_active
_dispatch_modes = torch._C._len_torch_dispatch_stack
_jit_tracing = torch._C._get_tracing_state
_compiling = torch.compiler.is_dynamo_compiling  # non-strict export, which this misses, shows as a dispatch mode


def route(x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None) -> str:
    """Which route a call with these tensors takes now."""
    if _compiling():
        return REFERENCE if _functorch_active() else OP
    if _functorch_active() or forward_ad._current_level >= 0 or _jit_tracing() is not None:
        return REFERENCE
    if _dispatch_modes() or type(x) not in PLAIN or type(weight) not in PLAIN or type(bias) not in PLAIN:
        return OP
    return DIRECT


class Ready:
    """A problem with its launchers: planned once, then called."""

    def __init__(self, problem: NormProblem, device: torch.device, options: Options) -> None:
        self.problem, self.device, self.options = problem, describe(device), options
        self.planned = plan(problem, self.device, FORWARD, options)

    @cached_property
    def infer(self) -> Callable[..., Tensor]:
        """The forward where no statistics are wanted; a family may have a shorter way to it."""
        shorter = getattr(_module(self.planned), "infer", None)
        launch = shorter(self.planned, self.problem) if shorter else None
        return launch or (lambda *operands: self.forward(*operands).y)

    @cached_property
    def forward(self) -> Callable[..., Result]:
        return _module(self.planned).forward(self.planned, self.problem)

    @cached_property
    def backward(self) -> Callable[..., Gradients]:
        planned = plan(self.problem, self.device, BACKWARD, self.options)
        return _module(planned).backward(planned, self.problem)


def _module(planned: Plan) -> Any:
    return import_module(f".{planned.module}", __package__)


_ready: dict[tuple[Any, ...], Ready] = {}
_MOST = 4096  # kinds of call kept ready; serving with ever new shapes must not grow without bound


def _prepare(key: tuple[Any, ...], problem: NormProblem, device: torch.device) -> Ready:
    options = current.get()
    if options.explain:
        raise Asked(problem, describe(device))
    if len(_ready) >= _MOST:
        _ready.clear()
    found = _ready[key] = Ready(problem, device, options)
    return found


@overload
def norm(define: Define, args: tuple[Any, ...], x: Tensor, weight: Tensor | None = ..., bias: Tensor | None = ...,
         mean: Tensor | None = ..., var: Tensor | None = ...) -> Tensor: ...  # fmt: skip


@overload
def norm(define: Define, args: tuple[Any, ...], x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: None, var: None,
         track: bool) -> tuple[Tensor, Tensor, Tensor]: ...  # fmt: skip


def norm(define, args, x, weight=None, bias=None, mean=None, var=None, track=False):
    """Normalize x, by `mean` and `var` where they are given. With `track`, returns also the mean and biased variance of each set, through
    which no gradient flows.

    `define(x, weight, bias, *args)` checks what it must and returns the spec. It runs once per kind of call, and is part of the kind: a
    lasting function, not a lambda made for each call.
    """
    # route(x, weight, bias) is not DIRECT, written out: this is the hot path.
    if (
        _compiling() or _functorch_active() or _dispatch_modes() or _jit_tracing() is not None or forward_ad._current_level >= 0
        or type(x) not in PLAIN or type(weight) not in PLAIN or type(bias) not in PLAIN
    ):  # fmt: skip
        way = route(x, weight, bias)
        result = _by_spec(way, define(x, weight, bias, *args), x, weight, bias, mean, var, track)
        return result if track else result[0]
    key = (
        define, args, current.get(), track, var is None, x.shape, x.stride(), x.dtype, x.device,
        None if weight is None else (weight.shape, weight.dtype),
        None if bias is None else (bias.shape, bias.dtype),
    )  # fmt: skip
    ready = _ready.get(key)
    if ready is None:
        ready = _prepare(key, bind(define(x, weight, bias, *args), x, weight, bias, var is not None, track), x.device)
    try:
        if track or (
            torch.is_grad_enabled()
            and (x.requires_grad or (weight is not None and weight.requires_grad) or (bias is not None and bias.requires_grad))
        ):
            result = _Norm.apply(x, weight, bias, mean, var, ready)
            return result if track else result[0]  # pyright: ignore[reportOptionalSubscript]
        return ready.infer(x, weight, bias, mean, var)
    except RuntimeError:
        define(x, weight, bias, *args)  # devices are not in the key: a parameter on another one is explained here
        raise


def _by_spec(
    way: str,
    spec: NormSpec,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor | None,
    var: Tensor | None,
    track: bool,
) -> tuple[Tensor, Any, Any]:
    if way is OP:
        y, mean, _, var = torch.ops.onepass.norm(x, weight, bias, mean, var, *spec.pack(), track)
        return y, mean, var
    result = reference.forward(spec, x, weight, bias, mean, var)
    mean, var = (None if stat is None else stat.detach() for stat in (result.mean, result.var))
    return result.y, mean, var


class _Norm(torch.autograd.Function):
    """Saves x and the statistics, nothing else of x's size."""

    @staticmethod
    def forward(ctx, x, weight, bias, mean, var, ready: Ready):  # pyright: ignore[reportIncompatibleMethodOverride]
        result = ready.forward(x, weight, bias, mean, var)
        ctx.ready = ready
        # A given mean is a running one: training may go on before this backward comes.
        mean = result.mean.clone() if ready.problem.given and result.mean is not None else result.mean
        ctx.save_for_backward(x, weight, bias, mean, result.rstd)
        if not ready.problem.track:
            return result.y, None, None
        ctx.mark_non_differentiable(result.mean, result.var)
        return result.y, result.mean, result.var

    @staticmethod
    def backward(ctx, dy, *_):  # pyright: ignore[reportIncompatibleMethodOverride]
        x, weight, bias, mean, rstd = ctx.saved_tensors
        problem, needs = ctx.ready.problem, ctx.needs_input_grad[:3]
        way = _route_back(dy, x, weight)
        if way is DIRECT:
            grads = ctx.ready.backward(dy, x, weight, bias, mean, rstd, needs)
        else:
            grads = _backward(way, problem.spec, problem.given, dy, x, weight, bias, mean, rstd, needs)
        return *grads, None, None, None


def _route_back(dy: Tensor, x: Tensor, weight: Tensor | None) -> str:
    """Which route a backward takes: the definition where it is itself to be differentiated or dy is a batch of gradients.

    (`is_grads_batched` runs a backward under a vmap that is not functorch's.)
    """
    batched = torch._C._functorch.is_legacy_batchedtensor(dy)  # pyright: ignore[reportAttributeAccessIssue]
    return REFERENCE if torch.is_grad_enabled() or batched else route(dy, x, weight)


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
    needs: Sequence[bool],
) -> Gradients:
    """The backward of the routes that know a spec but no problem."""
    if way is REFERENCE:
        return reference.backward(spec, dy, x, weight, bias, (mean, rstd) if given else None, needs)
    needs = [needs[0], needs[1] and weight is not None, needs[2] and bias is not None]
    grads = torch.ops.onepass.norm_backward(dy, x, weight, bias, mean, rstd, *spec.pack(), given, needs)
    dx, dweight, dbias = (grad if needed else None for grad, needed in zip(grads, needs))
    return dx, dweight, dbias


def _bound(spec: NormSpec, x: Tensor, weight: Tensor | None, bias: Tensor | None, given: bool, track: bool) -> Ready:
    """The launchers for an op's operands, without the checks that its caller has made."""
    problem = bind(spec, x, weight, bias, given, track)
    key = (problem, x.device, current.get())
    return _ready.get(key) or _prepare(key, problem, x.device)


@torch.library.custom_op("onepass::norm", mutates_args=())
def _norm_op(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor | None,
    var: Tensor | None,
    words: str,
    sizes: Sequence[int],
    eps: float,
    track: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """y, mean, rstd, var; empty where there is none: no mean without centering or where it was given, var only with `track`."""
    given = var is not None
    result = _bound(NormSpec.unpack(words, sizes, eps), x, weight, bias, given, track).forward(x, weight, bias, mean, var)
    none = x.new_empty(0, dtype=accumulator(x.dtype))
    mean = none if result.mean is None or given else result.mean.contiguous()
    var = none.clone() if result.var is None or not track else result.var.contiguous()
    return result.y, mean, result.rstd.contiguous(), var


@_norm_op.register_fake
def _(x, weight, bias, mean, var, words, sizes, eps, track):
    spec, acc = NormSpec.unpack(words, sizes, eps), accumulator(x.dtype)
    kept, none = spec.kept_shape(x.shape), [0]
    return (
        torch.empty_like(x),
        x.new_empty(kept if spec.centered and var is None else none, dtype=acc),
        x.new_empty(kept, dtype=acc),
        x.new_empty(kept if track else none, dtype=acc),
    )


@torch.library.custom_op("onepass::norm_backward", mutates_args=())
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
    given: bool,
    needs: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor]:
    """dx, dweight, dbias; empty where `needs` is false."""
    grads = _bound(NormSpec.unpack(words, sizes, eps), x, weight, bias, given, False).backward(dy, x, weight, bias, mean, rstd, needs)
    dx, dweight, dbias = (x.new_empty(0) if grad is None else grad for grad in grads)
    return dx, dweight, dbias


@_norm_backward_op.register_fake
def _(dy, x, weight, bias, mean, rstd, words, sizes, eps, given, needs):
    dx = torch.empty_like(x) if needs[0] else x.new_empty(0)
    dweight, dbias = (
        param.new_empty(param.shape) if needed and param is not None else x.new_empty(0)
        for param, needed in ((weight, needs[1]), (bias, needs[2]))
    )
    return dx, dweight, dbias


def _save(ctx, inputs, output) -> None:
    x, weight, bias, mean, var, words, sizes, eps, _ = inputs
    ctx.spec, ctx.given = NormSpec.unpack(words, sizes, eps), var is not None
    ctx.save_for_backward(x, weight, bias, mean if ctx.given else output[1] if ctx.spec.centered else None, output[2])


def _op_backward(ctx, dy, *_):
    x, weight, bias, mean, rstd = ctx.saved_tensors
    way = _route_back(dy, x, weight)
    grads = _backward(way, ctx.spec, ctx.given, dy, x, weight, bias, mean, rstd, ctx.needs_input_grad[:3])
    return *grads, None, None, None, None, None, None


_norm_op.register_autograd(_op_backward, setup_context=_save)
