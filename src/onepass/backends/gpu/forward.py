"""Launchers of a forward on a GPU: functions from the tensors of a call to y, and to statistics if they are asked for."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from math import prod
from typing import Any

import torch
from torch import Tensor
from triton.errors import TritonError

from onepass.backends.family import Forward, Launches, PlannedLaunches
from onepass.backends.gpu.launch.chain import Chain, Part, Step
from onepass.backends.gpu.launch.counters import Counters
from onepass.backends.gpu.launch.kernel import Kernel, dense
from onepass.backends.gpu.launch.occupancy import NotResident
from onepass.backends.gpu.launch.signature import ALIGNMENT
from onepass.backends.gpu.launch.source import INTERPRETED
from onepass.backends.gpu.launch.stream import allocate, current_device, current_raw_stream
from onepass.backends.gpu.ring.launch import RESET
from onepass.core.operands import OptionalOperands, Result
from onepass.core.problem import NormProblem
from onepass.core.view import laid_out

from .arguments import statistic
from .launches import FLIP, ForwardOptions
from .mix.launch import operand_names, operands_of, workspace_sizes

COUNTERS = {FLIP: Counters(), RESET: Counters()}


def kernels(
    problem: NormProblem,
    launches: Launches,
    statistics: bool = True,
    residual: bool = False,
    stress: str | None = None,
    momentum: float | None = None,
) -> list[Kernel]:
    """Return the kernels of the launches, in order.

    Without `statistics`, a kernel stores none, unless the next one reads them. With a `residual`, the first kernel adds
    it. With a `momentum`, running statistics are updated. `stress` is for stress tests of `ring`: see ring/stress.py.
    """
    options = ForwardOptions(statistics, residual, momentum, stress)
    return [launch.kernel(problem, options) for launch in launches]


def forward(problem: NormProblem, launches: Launches, statistics: bool = True, stress: str | None = None) -> Forward:
    """Return the launcher for all operands. Its Result has statistics if `statistics`, and the sum if there is a residual."""
    odd = for_odd_address(problem, launches, lambda unaligned, planned: forward(unaligned, planned, statistics, stress))
    kept = _statistics(problem, statistics)
    plain = chain_for(problem, launches, kept, statistics, stress=stress)
    adding = chain_for(problem, launches, kept, statistics, residual=True) if problem.addends else plain

    def launch(
        x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor | None, var: Tensor | None, optional: OptionalOperands, /
    ) -> Result:
        device = x.get_device()
        if device != current_device():
            with torch.cuda.device(device):
                return launch(x, weight, bias, mean, var, optional)
        if odd and x.data_ptr() % ALIGNMENT:
            return odd()(x, weight, bias, mean, var, optional)
        residual, total = optional[0], None
        inputs = [*[dense(t) for t in (weight, bias, optional[1], optional[2]) if t is not None], *operands_of(problem, optional)]
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
        outputs += counters_for(launches, device)
        if residual is None:
            plain.launch(device, [readable(problem, launches, x), *inputs], outputs)
        else:
            total = allocate(problem.shape, problem.stride, problem.dtype)
            if x.stride() == residual.stride() == problem.stride:
                adding.launch(device, [x, residual, *inputs], [*outputs, total])
            else:
                plain.launch(device, [torch.add(x, residual, out=total), *inputs], outputs)
        return Result(y, mean, rstd, var, total)  # pyright: ignore[reportArgumentType]

    return launch


def check_launchable(problem: NormProblem, launches: Launches, device: torch.device) -> str:
    """Return why programs that wait for each other cannot run here, or why a kernel in Gluon cannot be compiled here, or "".

    The kernels are compiled to find out.
    """
    experimental = launches[0].experimental
    checked = [kernel for kernel in kernels(problem, launches, statistics=False) if kernel.cooperative or experimental]
    return why_not_launchable(checked, experimental, device)


def why_not_launchable(made: Sequence[Kernel], experimental: bool, device: torch.device) -> str:
    """Compile these kernels. Return why they cannot run, or ""."""
    try:
        for kernel in [] if INTERPRETED else made:
            with torch.cuda.device(device):
                kernel.load(current_device())
    except NotResident as reason:
        return str(reason)
    except (ImportError, AttributeError, TritonError) as reason:
        if not experimental:
            raise
        return f"this version of Triton has an unknown version of Gluon: {reason}"
    return ""


def _statistics(problem: NormProblem, wanted: bool) -> tuple[str, ...]:
    """Return the names of the statistics that the kernels compute for the caller."""
    if problem.spec.mix:
        return "mean", "rstd", "var"
    if problem.given or not wanted:
        return ()
    return (*["mean"] * problem.spec.centered, "rstd", *["var"] * problem.track)


def _named(names: Sequence[str], tensors: Sequence[Tensor]) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Return (mean, rstd, var) from the tensors with these names; None for a name that is missing."""
    found = dict(zip(names, tensors))
    return found.get("mean"), found.get("rstd"), found.get("var")


def for_odd_address(problem: NormProblem, launches: Launches, make: Callable[[NormProblem, Launches], Any]) -> Callable[[], Any] | None:
    """Return a function that returns the launcher for an x at an odd address. It plans and makes it on first use.

    Return None if these launches are for any address, or if x is copied first.
    """
    if problem.copied or not isinstance(launches, PlannedLaunches):
        return None
    return cache(lambda: make(*launches.for_odd_address()))


def readable(problem: NormProblem, launches: Launches, x: Tensor) -> Tensor:
    """Return x, or a copy if the kernels cannot read the strides or the address of x."""
    if problem.copied:
        return laid_out(x, problem.y_stride)
    if launches[0].needs_aligned_x(problem) and x.data_ptr() % ALIGNMENT:  # few tensors are not aligned
        return _aligned(problem, x)
    return x


def _aligned(problem: NormProblem, x: Tensor) -> Tensor:
    """Return a copy of x at a multiple of ALIGNMENT bytes.

    `copy_` would call cudaMemcpy, which takes up to three times as long for such an x as a kernel of torch (H200, 2026-11-18).
    """
    target, bits = allocate(problem.shape, problem.stride, problem.dtype), torch.int16 if problem.dtype.itemsize == 2 else torch.int32
    torch.bitwise_or(x.view(bits), 0, out=target.view(bits))
    return target


def counters_for(launches: Launches, device: int) -> list[Tensor]:
    """Return a list with the counters of the first launch, or an empty list if it needs none."""
    take = counters_of(launches)
    return [take(device, 0 if INTERPRETED else current_raw_stream(device))] if take else []


def counters_of(launches: Launches) -> Callable[[int, int], Tensor] | None:
    """Return (device, stream) -> the counters of the first launch, or None if it needs none."""
    n = launches[0].counters
    if not n:
        return None
    take = COUNTERS[launches[0].counter_protocol].take
    return lambda device, stream: take((device, stream), n)


def chain_for(
    problem: NormProblem, launches: Launches, kept: Sequence[str], statistics: bool, residual: bool = False, stress: str | None = None
) -> Chain:
    """Return the chain of the launches on x, the residual, the parameters and given statistics.

    Outputs are y, the statistics that are `kept`, counters, and the sum. Other statistics are part of the workspace.
    """
    made = kernels(problem, launches, statistics, residual, stress)
    inputs = ["x", *["residual"] * residual, *parameters(problem), *_given(problem)]
    return chain_of(problem, launches, made, inputs, ["y", *kept], residual)


def chain_of(
    problem: NormProblem,
    launches: Launches,
    made: Sequence[Kernel],
    inputs: Sequence[str],
    outputs: Sequence[str],
    residual: bool = False,
    parts: Mapping[str, Part] | None = None,
) -> Chain:
    """Return a chain with these outputs, then counters if the launch needs them, then the sum if there is a `residual`."""
    steps = []
    for launch, kernel in zip(launches, made):
        names: list[str] = list(kernel.pointers)
        if launch.reads_statistics:
            renamed = {**({"x": "sum"} if residual else {}), **({"mean": "mixed_mean"} if problem.spec.mix else {})}
            names = [renamed.get(name, name) for name in names]
        steps.append(Step(kernel, [*kernel.descriptors, *names]))
    outputs = *outputs, *["counters"] * bool(launches[0].counters), *["sum"] * residual
    sizes = (
        {name: prod(problem.stat_shape) for name in ("mean", "rstd", "var")}
        | {"parts": launches[0].partial_moments}
        | workspace_sizes(problem)
    )
    used, known = dict.fromkeys(name for step in steps for name in step.operands), {*inputs, *outputs, *(parts or {})}
    return Chain(steps, inputs, outputs, {name: sizes[name] for name in used if name in sizes and name not in known}, parts)


def parameters(problem: NormProblem) -> list[str]:
    return [name for name in ("weight", "bias", "scale", "shift") if getattr(problem, name)]


def _given(problem: NormProblem) -> list[str]:
    """Return the names of the statistics that the caller passes, or of the operands of a mix."""
    return [*["mean"] * problem.spec.centered, "var"] if problem.given else operand_names(problem)
