"""The native family: C kernels for the row and the tile walk, called by pointers.

`build` compiles and loads them. The structures here are those of c/problem.h: a problem is packed once, the pointers of a call each time.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from ctypes import CDLL, c_char_p, c_double, c_int64, c_void_p
from functools import cache
from math import prod
from pathlib import Path
from struct import Struct
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from ..allocate import on_cpu
from ..device import Process
from ..memory import LOWEST, require_memory
from ..moments import Mix, Moments
from ..plan import Plan
from ..problem import NONE, Extras, NormProblem, ParamMap, contiguous_stride, laid_out
from ..reference import Gradients, Needs, Result, mix
from . import build

TYPES = {None: 0, torch.float32: 1, torch.bfloat16: 2, torch.float16: 3}
ACTIVATIONS = ("", "silu", "relu", "gelu", "gelu_tanh")
_small = 1 << 15  # elements; fewer stay on one thread


def share_from(elements: int) -> None:
    """From how many elements on work is shared among threads, for tests: problems that are bound later go by it."""
    global _small
    _small = elements


_pack_problem = Struct("@20q2d16q").pack
_pack_tensors = Struct("@20P").pack


class _Library(NamedTuple):
    forward: Callable[..., int]
    track: Callable[..., int]
    backward: Callable[..., int]
    threads: Callable[[], int]  # how many may work
    one_thread: str  # why no more than one may, or ""
    path: str


@cache
def _library() -> _Library:
    library = build.library()
    forward, track, backward = library.onepass_forward, library.onepass_track, library.onepass_backward
    forward.argtypes, backward.argtypes = [c_char_p, c_char_p, c_int64], [c_char_p, c_char_p, c_int64, c_int64]
    track.argtypes = [c_char_p, c_char_p, c_int64, c_void_p, c_void_p, c_double]
    parallel, reason = _openmp()
    library.onepass_threads(parallel)
    if reason:
        return _Library(forward, track, backward, lambda: 1, reason, library._name)
    return _Library(forward, track, backward, _threads, "", library._name)


def _openmp() -> tuple[c_void_p, str]:
    """GOMP_parallel of the OpenMP runtime that torch works with: its threads are ours, and there are never more than torch has."""
    linked = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"  # a look-up here finds the runtime that this library is linked with
    for name in (str(linked), None):  # None: what the process shows to all, where torch lies elsewhere
        with suppress(AttributeError, OSError, TypeError):
            return c_void_p.from_buffer(CDLL(name).GOMP_parallel), ""
    return c_void_p(None), "torch's threads cannot be shared: it has no OpenMP runtime with GOMP_parallel"


def _threads() -> int:
    # The OpenMP runtime's threads do not come along in a fork, and it would wait for them.
    return 1 if Process.forked else torch.get_num_threads()


def settle(plan: Plan, problem: NormProblem, device: torch.device) -> str:
    """Why the kernels cannot be used here, or "". They are compiled to know."""
    try:
        _library()
    except build.Unavailable as reason:
        if os.environ.get("ONEPASS_CPU") == "native":
            raise RuntimeError(f"ONEPASS_CPU=native, but {reason}") from None
        if reason.first:
            warnings.warn(f"onepass works without its C kernels in this process: {reason} (ONEPASS_CPU=off hides this)", stacklevel=2)
        return str(reason)
    return ""


def state() -> str:
    """In words: whether the kernels can be used, from where and with how many threads; or why not."""
    try:
        library = _library()
    except build.Unavailable as reason:
        return f"cannot be used: {reason}"
    shared = "one thread, since this process was forked" if Process.forked else f"{_threads()} threads, torch's own"
    return f"{library.path}; {library.one_thread or shared}"


class _Map(NamedTuple):
    every: int
    period: int
    a: int
    b: int
    c: int
    channel_run: int
    d: int
    size: int

    @staticmethod
    def of(map_: ParamMap, size: int) -> _Map:
        return _Map(map_.every, map_.period, map_.a, map_.b, map_.c, map_.channel_run, map_.d, size)


class _Walk(NamedTuple):
    """The view as the kernels walk it."""

    sizes: tuple[int, int, int, int]
    strides: tuple[int, int, int]  # of x
    param: _Map
    modulation: _Map
    tile: bool
    copies: bool  # x is laid out like y first
    fold: int = 1  # narrow rows of a tile that are walked as one


SHORT = 64  # a run that is walked across rather than along
NARROW = 1024  # elements; rows that are not half as wide are walked several at a time


def _walk(problem: NormProblem) -> _Walk:
    x, p, m = problem.x, problem.param, problem.modulation
    assert x is not None and p is not None and m is not None
    (o, r, s, t), (xo, xr, xs, _) = x.sizes, x.strides
    maps = _Map.of(p, problem.param_size), _Map.of(m, problem.modulation_size)
    copies = bool(problem.copied) or (r > 1 and t < SHORT and s > 1 and xs != t) or (r > 1 and s == 1 and t < SHORT and xr != t)
    if copies:
        xo, xr, xs = r * s * t, s * t, t
    if s == 1 and r > 1 and xr == t:  # a set is one stretch of memory
        flat = [_flat(map_, t) for map_ in maps]
        if None not in flat:
            return _Walk((o, 1, 1, r * t), (xo, 0, 0), *flat, tile=False, copies=copies)  # pyright: ignore[reportArgumentType]
    tile, fold = r > 1 and t < SHORT, 1
    if tile and xr == s * t and not maps[0].b and not maps[1].b:
        fold = max(k for k in range(1, max(min(NARROW // (s * t), r // 16), 1) + 1) if r % k == 0)
    return _Walk((o, r // fold, s, t), (xo, xr * fold, xs), *maps, tile, copies, fold)


def _flat(map_: _Map, run: int) -> _Map | None:
    """The map of rows of `run` that follow one another, seen as one row; None where it is not of the form (1)."""
    if map_.b == 0 == map_.d:
        return map_
    if map_.d == 0:
        return map_._replace(b=0, channel_run=run, d=map_.b)
    if map_.b == run // map_.channel_run * map_.d:
        return map_._replace(b=0)
    return None


class _Call:
    """A problem as the kernels take it, and what its calls have in common."""

    def __init__(self, problem: NormProblem) -> None:
        self.problem, self.library = problem, _library()
        self.walk = _walk(problem)
        self.small = prod(problem.shape) < _small
        self.count = self.walk.sizes[1] * self.walk.fold * self.walk.sizes[3]

    def packed(self, given: bool, residual: bool) -> bytes:
        problem, walk, spec = self.problem, self.walk, self.problem.spec
        x, other = problem.addends if residual and problem.addends else (problem.dtype, None)
        types = [TYPES[t] for t in (x, other, problem.dtype, problem.weight, problem.bias, problem.scale, problem.shift)]
        flags = ACTIVATIONS.index(spec.activation), spec.centered, given, problem.from_y, walk.tile, walk.fold
        offset = spec.weight_offset if problem.weight else 0.0
        return _pack_problem(*walk.sizes, *walk.strides, *types, *flags, spec.eps, offset, *walk.param, *walk.modulation)

    def threads(self) -> int:
        return 1 if self.small else self.library.threads()

    def stat(self, stat: Tensor | None) -> Tensor | None:
        """A statistic as (outer, sets)."""
        if stat is None:
            return None
        _on_cpu(stat)
        return laid_out(stat.to(torch.float32).reshape(self.problem.stat_shape), self.problem.stat_stride)

    def new_stat(self) -> Tensor:
        return on_cpu(self.problem.stat_shape, self.problem.stat_stride, torch.float32)


def _on_cpu(t: Tensor) -> None:
    if not t.is_cpu:
        raise RuntimeError(f"Expected all tensors to be on the same device, but found one on {t.device} and x on cpu")


def _dense(t: Tensor | None) -> Tensor | None:
    """A parameter as the kernels index it."""
    if t is None:
        return None
    _on_cpu(t)
    if t.is_contiguous():
        return t
    require_memory(("parameter",), (t,))
    return t.contiguous()


def _new_gradient(param: Tensor) -> Tensor:
    shape = tuple(param.shape)
    return on_cpu(shape, (1,) if len(shape) == 1 else contiguous_stride(shape), param.dtype)


def _pointers(*tensors: Tensor | None) -> list[int]:
    return [0 if t is None else t.data_ptr() for t in tensors]


def _checked(names: Sequence[str], *tensors: Tensor | None) -> list[int]:
    """As `_pointers`, where nobody has seen yet that there is memory behind them."""
    pointers = []
    for t in tensors:
        at = 0 if t is None else t.data_ptr()
        if at < LOWEST and t is not None:
            require_memory(names, tensors)
        pointers.append(at)
    return pointers


def _check(failed: int) -> None:
    if failed:
        raise MemoryError("onepass could not allocate its buffers")


def forward(plan: Plan, problem: NormProblem, statistics: bool = True) -> Callable[..., Result]:
    call, spec = _Call(problem), problem.spec
    run, copies, track = call.library.forward, call.walk.copies, problem.track or bool(spec.mix)
    plain, adding = call.packed(problem.given, False), call.packed(problem.given, True)
    mixing = call.packed(True, False) if spec.mix else b""

    def launch(
        x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor | None, var: Tensor | None, extras: Extras = NONE
    ) -> Result:
        packed, residual, total = plain, extras.residual, None
        if residual is not None:
            _on_cpu(residual)
            total = on_cpu(problem.shape, problem.stride, problem.dtype)
            if x.stride() == residual.stride() == problem.stride:
                packed = adding
            else:
                x, residual = torch.add(x, residual, out=total), None
        elif copies:
            x = laid_out(x, problem.y_stride)
        y = on_cpu(problem.shape, problem.y_stride, problem.dtype)
        if problem.given:
            mean, var, rstd = call.stat(mean), call.stat(var), call.new_stat()
        else:
            mean, rstd = call.new_stat() if spec.centered else None, call.new_stat()
            var = call.new_stat() if track else None
        params = [_dense(t) for t in (weight, bias, extras.scale, extras.shift)]
        operands, threads = _pointers(x, residual, *params), call.threads()
        stats, outs = _pointers(mean, rstd, var), (y.data_ptr(), 0 if residual is None or total is None else total.data_ptr())
        if not mixing:
            _check(run(packed, _pack_tensors(*operands, *stats, *outs, *_NO_GRADIENTS), threads))
            return Result(y, mean, rstd, var, total)
        _check(run(packed, _pack_tensors(*operands, *stats, 0, outs[1], *_NO_GRADIENTS), threads))
        mixed = _mixed(call, mean, var, extras)
        stats = [laid_out(t, problem.stat_stride) for t in (mixed.mean, mixed.var)]
        operands[0] = (x if residual is None else total).data_ptr()  # pyright: ignore[reportOptionalMemberAccess]
        pointers = stats[0].data_ptr(), rstd.data_ptr(), stats[1].data_ptr(), y.data_ptr(), 0
        _check(run(mixing, _pack_tensors(operands[0], 0, *operands[2:], *pointers, *_NO_GRADIENTS), threads))
        return Result(y, mean, rstd, var, total)

    return launch


_NO_GRADIENTS = (0,) * 9


def infer(plan: Plan, problem: NormProblem) -> Callable[..., Tensor] | None:
    """y alone, where nothing must be copied, added, modulated or mixed: the call that must cost no more than torch's own."""
    call = _Call(problem)
    if call.walk.copies or problem.addends or problem.scale or problem.shift or problem.spec.mix:
        return None
    run, threads, given = call.library.forward, call.library.threads, problem.given
    packed, shape, stride, dtype, small = call.packed(given, False), problem.shape, problem.y_stride, problem.dtype, call.small
    pack = _pack_tensors

    def launch(x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor | None, var: Tensor | None) -> Tensor:
        w = b = m = v = 0
        if weight is not None:
            if not (weight.is_cpu and weight.is_contiguous()):
                weight = _dense(weight)
            w = weight.data_ptr()  # pyright: ignore[reportOptionalMemberAccess]
            if w < LOWEST:
                require_memory(("weight",), (weight,))
        if bias is not None:
            if not (bias.is_cpu and bias.is_contiguous()):
                bias = _dense(bias)
            b = bias.data_ptr()  # pyright: ignore[reportOptionalMemberAccess]
            if b < LOWEST:
                require_memory(("bias",), (bias,))
        if given:
            mean, var = _as_given(call, mean), _as_given(call, var)
            m, v = 0 if mean is None else mean.data_ptr(), var.data_ptr()  # pyright: ignore[reportOptionalMemberAccess]
            if v < LOWEST or (mean is not None and m < LOWEST):
                require_memory(("running_mean", "running_var"), (mean, var))
        at = x.data_ptr()
        if at < LOWEST:
            require_memory(("input",), (x,))
        y = on_cpu(shape, stride, dtype)
        if run(packed, pack(at, 0, w, b, 0, 0, m, 0, v, y.data_ptr(), 0, 0, 0, 0, 0, 0, 0, 0, 0, 0), 1 if small else threads()):
            _check(1)
        return y

    return launch


def _as_given(call: _Call, stat: Tensor | None) -> Tensor | None:
    """As `call.stat`, with a short way for what evaluation hands over: one float for each channel."""
    if stat is None or (stat.is_cpu and stat.dtype is torch.float32 and stat.dim() == 1 and stat.is_contiguous()):
        return stat
    require_memory(("running statistic",), (stat,))
    return call.stat(stat)


def track(plan: Plan, problem: NormProblem) -> Callable[..., Tensor] | None:
    """As `infer`, and running statistics are updated in place."""
    call = _Call(problem)
    if call.walk.copies or problem.scale or problem.shift or problem.spec.mix or len(problem.stat_shape) != 1:
        return None
    run, packed = call.library.track, call.packed(False, False)

    def launch(x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, var: Tensor, momentum: float) -> Tensor:
        y = on_cpu(problem.shape, problem.y_stride, problem.dtype)
        weight, bias = _dense(weight), _dense(bias)
        x_at, w, b, m, v = _checked(("input", "weight", "bias", "running_mean", "running_var"), x, weight, bias, mean, var)
        tensors = _pack_tensors(x_at, 0, w, b, 0, 0, 0, 0, 0, y.data_ptr(), 0, *_NO_GRADIENTS)
        _check(run(packed, tensors, call.threads(), m, v, momentum))
        increment_version((mean, var))  # as any change in place
        return y

    return launch


class Train(NamedTuple):
    """A forward that remembers, and its backward, where there is nothing but x, weight and bias: the calls of small training steps."""

    forward: Callable[..., tuple[Tensor, Tensor]]  # of x, weight, bias: y, and mean and rstd in one tensor
    backward: Callable[..., tuple[Tensor | None, ...]]  # of dy, x, weight, bias, those statistics, and which gradients are needed
    statistics: Callable[[Tensor], tuple[Tensor | None, Tensor]]  # mean and rstd
    stat_stride: tuple[int, ...]  # of those statistics as the kernels read them


def train(problem: NormProblem) -> Train | None:
    call, spec = _Call(problem), problem.spec
    operands = problem.addends or problem.scale or problem.shift or problem.given or problem.track or spec.mix or problem.from_y
    if call.walk.copies or operands:
        return None
    run, run_back, packed, threads = call.library.forward, call.library.backward, call.packed(False, False), call.threads
    shape, stride, dtype, sets = problem.shape, problem.y_stride, problem.dtype, prod(problem.stat_shape)
    second, f32 = 4 * sets, torch.float32
    # Their order in memory is this problem's, and a recomputed forward may be another's: shape and strides tell.
    stat_shape, stat_stride = (2, *problem.stat_shape), (sets, *problem.stat_stride)

    def forward(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> tuple[Tensor, Tensor]:
        weight, bias = _dense(weight), _dense(bias)
        x_at, w, b = _checked(("input", "weight", "bias"), x, weight, bias)
        y, stats = on_cpu(shape, stride, dtype), on_cpu(stat_shape, stat_stride, f32)
        at = stats.data_ptr()
        mean = at if spec.centered else 0
        _check(run(packed, _pack_tensors(x_at, 0, w, b, 0, 0, mean, at + second, 0, y.data_ptr(), 0, *_NO_GRADIENTS), threads()))
        return y, stats

    def backward(
        dy: Tensor, x: Tensor, weight: Tensor | None, bias: Tensor | None, stats: Tensor, needs: Sequence[bool]
    ) -> tuple[Tensor | None, ...]:
        dx = on_cpu(shape, stride, dtype) if needs[0] else None
        dweight = _new_gradient(weight) if needs[1] and weight is not None else None
        dbias = _new_gradient(bias) if needs[2] and bias is not None else None
        weight, bias = _dense(weight), _dense(bias)
        x_at, w, b, at, dy_at = _checked(("input", "weight", "bias", "statistics", "dy"), x, weight, bias, stats, dy)
        mean = at if spec.centered else 0
        operands = x_at, 0, w, b, 0, 0, mean, at + second, 0, 0, 0, dy_at, 0, *_pointers(dx, dweight, dbias)
        _check(run_back(packed, _pack_tensors(*operands, 0, 0, 0, 0), threads(), 1))
        return dx, dweight, dbias

    def statistics(stats: Tensor) -> tuple[Tensor | None, Tensor]:
        return stats[0] if spec.centered else None, stats[1]

    return Train(forward, backward, statistics, stat_stride)


def _mixed(call: _Call, mean: Tensor | None, var: Tensor | None, extras: Extras) -> Mix:
    assert mean is not None and var is not None
    return mix(call.problem.spec, call.problem.shape, Moments(call.count, mean, var * call.count), extras)


def backward(plan: Plan, problem: NormProblem) -> Callable[..., Gradients]:
    call, spec = _Call(problem), problem.spec
    run, packed = call.library.backward, call.packed(problem.given, False)

    def launch(
        dy: Tensor,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        mean: Tensor | None,
        rstd: Tensor,
        needs: Sequence[bool],
        extras: Extras = NONE,
        var: Tensor | None = None,
    ) -> Gradients:
        needs, mixed = Needs(*needs), None
        x = laid_out(x, problem.y_stride) if call.walk.copies else x
        dy, dsum = laid_out(dy, problem.y_stride), extras.residual
        dsum = None if dsum is None else laid_out(dsum.to(problem.dtype), problem.y_stride)
        mean, own_rstd = call.stat(mean), call.stat(rstd)
        if spec.mix:
            mixed = _mixed(call, mean, call.stat(var), extras)
            mean = laid_out(mixed.mean, problem.stat_stride)
        params = [_dense(t) for t in (weight, bias, extras.scale, extras.shift)]
        dx = on_cpu(problem.shape, problem.y_stride, problem.dtype) if needs.x else None
        grads = [_new_gradient(t) if t is not None and n else None for t, n in zip(params, needs[1:5])]
        operands, threads = (*_pointers(x, None, *params, mean, own_rstd), 0, 0, 0), call.threads()
        into = _pointers(dy, dsum, dx, *grads)
        if mixed is None:
            _check(run(packed, _pack_tensors(*operands, *into, 0, 0), threads, 1))
            return Gradients(dx, *grads[:4])
        c1, c2 = call.new_stat(), call.new_stat()
        _check(run(packed, _pack_tensors(*operands, *into[:2], 0, *into[3:], c1.data_ptr(), c2.data_ptr()), threads, 1))
        c1, c2, *weights = mixed.gradient(c1, c2, rstd)
        if dx is not None:
            c1, c2 = laid_out(c1, problem.stat_stride), laid_out(c2, problem.stat_stride)
            _check(run(packed, _pack_tensors(*operands, *into[:3], 0, 0, 0, 0, c1.data_ptr(), c2.data_ptr()), threads, 0))
        dweight, dbias, dscale, dshift = grads
        return Gradients(dx, dweight, dbias, dscale, dshift, *weights)

    return launch


adds = True  # the residual, in the kernel
by_address = True  # the short ways look at addresses, and see where there is no memory
