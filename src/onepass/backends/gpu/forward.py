"""Launchers of a forward on a GPU: functions from the tensors of a call to y, and to statistics if they are asked for."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from triton.errors import TritonError

from onepass.backends.family import Forward, Launches, Tracking, TrainingForward
from onepass.backends.gpu.launch.chain import DESCRIPTOR, Chain, Part, Step
from onepass.backends.gpu.launch.counters import Counters
from onepass.backends.gpu.launch.kernel import Kernel, dense
from onepass.backends.gpu.launch.occupancy import NotResident
from onepass.backends.gpu.launch.prepared import Layout, New, prepared
from onepass.backends.gpu.launch.signature import ALIGNMENT
from onepass.backends.gpu.launch.source import INTERPRETED
from onepass.backends.gpu.launch.stream import allocate, current_device, current_raw_stream
from onepass.backends.gpu.ring.launch import RESET
from onepass.backends.gpu.running.launch import update_step
from onepass.core.memory import require_memory
from onepass.core.mixing import mix_statistics
from onepass.core.moments import Moments
from onepass.core.operands import NO_OPTIONAL, OptionalOperands, Result
from onepass.core.problem import NormProblem
from onepass.core.statistics import packed_shape, packed_stride
from onepass.core.view import laid_out

from .arguments import statistic
from .launches import FLIP, ForwardOptions

COUNTERS = {FLIP: Counters(), RESET: Counters()}


def kernels(
    problem: NormProblem, launches: Launches, statistics: bool = True, residual: bool = False, stress: str | None = None
) -> list[Kernel]:
    """Return the kernels of the launches, in order.

    Without `statistics`, a kernel stores none, unless the next one reads them. With a `residual`, the first kernel adds
    it. `stress` is for stress tests of `ring`: see ring/stress.py.
    """
    options = ForwardOptions(statistics, residual, stress)
    return [launch.kernel(problem, options) for launch in launches]


def forward(problem: NormProblem, launches: Launches, statistics: bool = True, stress: str | None = None) -> Forward:
    """Return the launcher for all operands. Its Result has statistics if `statistics`, and the sum if there is a residual."""
    if problem.spec.mix:
        return _mixed_forward(problem, launches)
    kept = _statistics(problem, statistics)
    plain = _chain(problem, launches, kept, statistics, stress=stress)
    adding = _chain(problem, launches, kept, statistics, residual=True) if problem.addends else plain

    def launch(
        x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor | None, var: Tensor | None, optional: OptionalOperands, /
    ) -> Result:
        device = x.get_device()
        if device != current_device():
            with torch.cuda.device(device):
                return launch(x, weight, bias, mean, var, optional)
        residual, total = optional[0], None
        inputs = [dense(t) for t in (weight, bias, optional[1], optional[2]) if t is not None]
        y, rstd = allocate(problem.shape, problem.y_stride, problem.dtype), None
        outputs = [y]
        if problem.given:
            mean, var = statistic(mean, problem), statistic(var, problem)
            inputs += [t for t in (mean, var) if t is not None]
            if statistics and var is not None:
                rstd = torch.rsqrt(var + problem.spec.eps)
        else:
            outputs += [allocate(problem.stat_shape, problem.stat_stride, torch.float32) for _ in kept]
            mean, rstd, var = _named(kept, outputs[1:])
        outputs += _counters(launches, device)
        if residual is None:
            plain.launch(device, [_readable(problem, launches, x), *inputs], outputs)
        else:
            total = allocate(problem.shape, problem.stride, problem.dtype)
            if x.stride() == residual.stride() == problem.stride:
                adding.launch(device, [x, residual, *inputs], [*outputs, total])
            else:
                plain.launch(device, [torch.add(x, residual, out=total), *inputs], outputs)
        return Result(y, mean, rstd, var, total)  # pyright: ignore[reportArgumentType]

    return launch


def infer(problem: NormProblem, launches: Launches) -> Callable[..., Tensor] | None:
    """Return a launcher of y alone. Return None if x must be copied or added to a residual, or with a modulation or a mix."""
    if problem.copied or problem.addends or problem.scale or problem.shift or problem.spec.mix:
        return None
    general = forward(problem, launches, False)

    def careful(x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor | None, var: Tensor | None) -> Tensor:
        return general(x, weight, bias, mean, var, NO_OPTIONAL).y

    chain, names = _chain(problem, launches, (), False), ("x", "weight", "bias", "mean", "var")
    given = Layout(problem.stat_stride, problem.stat_shape, torch.float32)
    layouts = {"mean": given, "var": given} if problem.given else None
    return prepared(chain, names, {"y": _like_y(problem)}, "y", careful, layouts, _counters_of(launches))


def infer_extras(problem: NormProblem, launches: Launches) -> Callable[..., tuple[Tensor, Tensor | None]] | None:
    """Return a launcher (x, weight, bias, residual, scale, shift) -> (y, x + residual), or None if `forward` must prepare x."""
    if problem.copied or problem.given or problem.spec.mix:
        return None
    adds, general = problem.addends is not None, forward(problem, launches, False)

    def careful(x: Tensor, weight: Tensor | None, bias: Tensor | None, *extras: Tensor | None) -> tuple[Tensor, Tensor | None]:
        require_memory(("input", "weight", "bias", "residual", "scale", "shift"), (x, weight, bias, *extras))
        result = general(x, weight, bias, None, None, OptionalOperands(*extras))
        return result.y, result.sum

    chain, names = _chain(problem, launches, (), False, residual=adds), ("x", "weight", "bias", "residual", "scale", "shift")
    total = New(problem.shape, problem.stride, problem.dtype)
    outputs = {"y": _like_y(problem), "sum": total} if adds else {"y": _like_y(problem)}
    layouts = {"x": Layout(problem.stride), "residual": Layout(problem.stride)} if adds else None
    return prepared(chain, names, outputs, "y, sum" if adds else "y, None", careful, layouts, _counters_of(launches))


def train_forward(problem: NormProblem, launches: Launches) -> TrainingForward | None:
    """Return a launcher of (y, statistics), or None if the call has more operands than x, weight and bias."""
    if problem.track or _has_extras(problem) or not _can_train(problem):
        return None
    return _own_statistics(problem, launches, None, True)


def train_extras(problem: NormProblem, launches: Launches) -> Callable[..., tuple[Tensor, Tensor, Tensor | None]] | None:
    """Return a launcher (x, weight, bias, residual, scale, shift) -> (y, statistics, x + residual), or None if it cannot."""
    if problem.track or not _has_extras(problem) or not _can_train(problem):
        return None
    return _own_statistics(problem, launches, None, True)


def track(problem: NormProblem, launches: Launches) -> Tracking | None:
    """Return a launcher of y that updates running statistics, or None if they are not one per channel or there are more operands."""
    return _tracking(problem, launches, False)


def train_track(problem: NormProblem, launches: Launches) -> Tracking | None:
    """As `track`, but the launcher returns (y, mean and rstd in one tensor)."""
    return _tracking(problem, launches, True)


def _tracking(problem: NormProblem, launches: Launches, train: bool) -> Tracking | None:
    if not problem.track or _has_extras(problem) or not _can_train(problem) or len(problem.stat_shape) != 1:
        return None
    made: dict[float, Callable[..., Any]] = {}

    def launch(x: Tensor, weight: Tensor | None, bias: Tensor | None, running_mean: Tensor, running_var: Tensor, momentum: float, /) -> Any:
        run = made.get(momentum)
        if run is None:
            with torch.cuda.device(x.device) if x.is_cuda else nullcontext():
                run = made[momentum] = _own_statistics(problem, launches, momentum, train)
        result = run(x, weight, bias, running_mean, running_var)
        increment_version((running_mean, running_var))  # tells autograd that both tensors were changed in place
        return result

    return launch


def _has_extras(problem: NormProblem) -> bool:
    return bool(problem.addends or problem.scale or problem.shift)


def _can_train(problem: NormProblem) -> bool:
    """Return whether the kernels compute the statistics and can read x, and the backward reads x."""
    return not (problem.given or problem.spec.mix or problem.from_y or problem.copied)


def _own_statistics(problem: NormProblem, launches: Launches, momentum: float | None, train: bool) -> Callable[..., Any]:
    """Return a launcher (x, weight, bias) -> y, or with `train` -> (y, statistics).

    With extras, it also takes residual, scale and shift, and also returns x + residual or None. With a momentum, it also takes
    running_mean and running_var, and updates them in place.
    """
    adds, extras = bool(problem.addends), _has_extras(problem)
    running, updates = ([], []) if momentum is None else (["running_mean", "running_var"], [update_step(problem, momentum)])
    outputs, parts = {"y": _like_y(problem)}, {}
    if train:
        count, second = prod(problem.stat_shape), packed_stride(problem)[0]
        outputs["statistics"] = New(packed_shape(problem), packed_stride(problem), torch.float32)
        parts = {"mean": Part("statistics", 0, count), "rstd": Part("statistics", second, second + count)}
    names = ["x", *["residual"] * adds, *_parameters(problem), *running]
    chain = _chain_of(problem, launches, kernels(problem, launches, residual=adds), names, list(outputs), adds, parts, updates)
    arguments = "x", "weight", "bias", *(["residual", "scale", "shift"] if extras else running)

    def careful(*tensors: Tensor | None) -> Any:
        given = dict(zip(arguments, tensors))
        x: Any = given["x"]
        device, residual = x.get_device(), given.get("residual")
        if device != current_device():
            with torch.cuda.device(device):
                return careful(*tensors)
        if residual is not None and not x.stride() == residual.stride() == problem.stride:
            return _add_first(problem, launches, given)
        params = [dense(given[name]) for name in _parameters(problem)]
        inputs = [_readable(problem, launches, x), *[residual] * adds, *params, *[given[name] for name in running]]
        made = [allocate(*new) for new in outputs.values()]
        total = [allocate(problem.shape, problem.stride, problem.dtype)] * adds
        chain.launch(device, inputs, [*made, *_counters(launches, device), *total])  # pyright: ignore[reportArgumentType]
        return (*made, *(total or [None])) if extras else tuple(made) if train else made[0]

    layouts = dict.fromkeys(running, Layout((1,), problem.stat_shape, torch.float32))
    layouts |= {"x": Layout(problem.stride), "residual": Layout(problem.stride)} if adds else {}
    returned = ", ".join([*outputs, "sum" if adds else "None"] if extras else outputs)
    written = outputs | ({"sum": New(problem.shape, problem.stride, problem.dtype)} if adds else {})
    return prepared(chain, arguments, written, returned, careful, layouts, _counters_of(launches))


def _add_first(problem: NormProblem, launches: Launches, given: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
    """Return (y, statistics, x + residual) where kernels cannot add x and the residual, because their strides differ."""
    require_memory(("input", "residual"), (given["x"], given["residual"]))
    total = torch.add(given["x"], given["residual"], out=allocate(problem.shape, problem.stride, problem.dtype))
    summed = replace(problem, addends=None)
    launch = _own_statistics(summed, launches, None, True)
    extras = (None, given["scale"], given["shift"]) if _has_extras(summed) else ()
    y, statistics, *_ = launch(total, given["weight"], given["bias"], *extras)
    return y, statistics, total


def check_launchable(problem: NormProblem, launches: Launches, device: torch.device) -> str:
    """Return why programs that wait for each other cannot run here, or "". The kernels are compiled to find out."""
    try:
        for kernel in kernels(problem, launches, statistics=False):
            if kernel.cooperative and not INTERPRETED:
                with torch.cuda.device(device):
                    kernel.load(current_device())
    except NotResident as reason:
        return str(reason)
    except (ImportError, AttributeError, TritonError) as reason:
        if not launches[0].experimental:
            raise
        return f"this version of Triton has an unknown version of Gluon: {reason}"
    return ""


def _statistics(problem: NormProblem, wanted: bool) -> tuple[str, ...]:
    """Return the names of the statistics that the kernels compute for the caller."""
    if problem.given or not wanted:
        return ()
    return (*["mean"] * problem.spec.centered, "rstd", *["var"] * problem.track)


def _named(names: Sequence[str], tensors: Sequence[Tensor]) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Return (mean, rstd, var) from the tensors with these names; None for a name that is missing."""
    found = dict(zip(names, tensors))
    return found.get("mean"), found.get("rstd"), found.get("var")


def _readable(problem: NormProblem, launches: Launches, x: Tensor) -> Tensor:
    """Return x, or a copy if the kernels cannot read the strides or the address of x."""
    if problem.copied:
        return laid_out(x, problem.y_stride)
    if launches[0].needs_aligned_x and x.data_ptr() % ALIGNMENT:  # few tensors are not aligned
        return allocate(problem.shape, problem.stride, problem.dtype).copy_(x)
    return x


def _like_y(problem: NormProblem) -> New:
    return New(problem.shape, problem.y_stride, problem.dtype)


def _counters(launches: Launches, device: int) -> list[Tensor]:
    """Return a list with the counters of the first launch, or an empty list if it needs none."""
    take = _counters_of(launches)
    return [take(device, 0 if INTERPRETED else current_raw_stream(device))] if take else []


def _counters_of(launches: Launches) -> Callable[[int, int], Tensor] | None:
    """Return (device, stream) -> the counters of the first launch, or None if it needs none."""
    n = launches[0].counters
    if not n:
        return None
    take = COUNTERS[launches[0].counter_protocol].take
    return lambda device, stream: take((device, stream), n)


def _chain(
    problem: NormProblem, launches: Launches, kept: Sequence[str], statistics: bool, residual: bool = False, stress: str | None = None
) -> Chain:
    """Return the chain of the launches on x, the residual, the parameters and given statistics.

    Outputs are y, the statistics that are `kept`, counters, and the sum. Other statistics are part of the workspace.
    """
    made = kernels(problem, launches, statistics, residual, stress)
    inputs = ["x", *["residual"] * residual, *_parameters(problem), *_given(problem)]
    return _chain_of(problem, launches, made, inputs, ["y", *kept], residual)


def _chain_of(
    problem: NormProblem,
    launches: Launches,
    made: Sequence[Kernel],
    inputs: Sequence[str],
    outputs: Sequence[str],
    residual: bool = False,
    parts: Mapping[str, Part] | None = None,
    then: Sequence[Step] = (),
) -> Chain:
    """Return a chain with these outputs, then counters if the launch needs them, then the sum if there is a `residual`.

    `then` are steps that follow those of the launches.
    """
    steps = []
    for launch, kernel in zip(launches, made):
        names = ["sum" if name == "x" and residual and launch.reads_statistics else name for name in kernel.pointers]
        steps.append(Step(kernel, [*[DESCRIPTOR] * bool(kernel.descriptor), *names]))
    steps += then
    outputs = *outputs, *["counters"] * bool(launches[0].counters), *["sum"] * residual
    sizes = {name: prod(problem.stat_shape) for name in ("mean", "rstd", "var")} | {"parts": launches[0].partial_moments}
    used, known = dict.fromkeys(name for step in steps for name in step.operands), {DESCRIPTOR, *inputs, *outputs, *(parts or {})}
    return Chain(steps, inputs, outputs, {name: sizes[name] for name in used if name not in known}, parts)


def _parameters(problem: NormProblem) -> list[str]:
    return [name for name in ("weight", "bias", "scale", "shift") if getattr(problem, name)]


def _given(problem: NormProblem) -> list[str]:
    """Return the names of the statistics that the caller passes."""
    return [*["mean"] * problem.spec.centered, "var"] if problem.given else []


def _mixed_forward(problem: NormProblem, launches: Launches) -> Forward:
    """Return a launcher that mixes the statistics of several norms after one chain computed them and before another applies them."""
    made = kernels(problem, launches, True)
    last = next(at for at, launch in enumerate(launches) if launch.reads_statistics)
    inputs, own = _parameters(problem), [*["mean"] * problem.spec.centered, "var"]
    reduce = _chain_of(problem, launches[:last], made[:last], ["x"], own)
    apply = _chain_of(problem, launches[last:], made[last:], ["x", *inputs, "mean", "rstd"], ["y"])

    def launch(
        x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor | None, var: Tensor | None, optional: OptionalOperands, /
    ) -> Result:
        device = x.get_device()
        if device != current_device():
            with torch.cuda.device(device):
                return launch(x, weight, bias, mean, var, optional)
        params = [dense(t) for t in (weight, bias, optional.scale, optional.shift) if t is not None]
        y, x = allocate(problem.shape, problem.y_stride, problem.dtype), _readable(problem, launches, x)
        found = [allocate(problem.stat_shape, problem.stat_stride, torch.float32) for _ in own]
        reduce.launch(device, [x], found)
        own_mean, _, own_var = _named(own, found)
        mixed_mean, rstd = _mixed(problem, own_mean, own_var, optional)
        apply.launch(device, [x, *params, mixed_mean, rstd], [y])
        return Result(y, own_mean, rstd, own_var)

    return launch


def _mixed(problem: NormProblem, mean: Tensor | None, var: Tensor | None, optional: OptionalOperands) -> tuple[Tensor, Tensor]:
    """Return the (mean, rstd) that a mix applies, from the mean and variance of each set."""
    assert problem.x is not None and mean is not None and var is not None
    count = problem.x.reps * problem.x.run
    mixed = mix_statistics(problem.spec, problem.shape, Moments(count, mean, var * count), optional)
    return laid_out(mixed.mean, problem.stat_stride), laid_out(torch.rsqrt(mixed.var + problem.spec.eps), problem.stat_stride)
