"""Runs the launches of a forward: from the tensors of a problem to y and its statistics."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from triton.errors import TritonError

from onepass.backends.family import Forward, Launches
from onepass.backends.gpu.launch.counters import Counters
from onepass.backends.gpu.launch.launcher import Kernel, dense
from onepass.backends.gpu.launch.occupancy import NotResident
from onepass.backends.gpu.launch.signature import ALIGNMENT
from onepass.backends.gpu.launch.stream import allocate, stream_of
from onepass.backends.gpu.ring.launch import RESET
from onepass.core.mixing import mix_statistics
from onepass.core.moments import Moments
from onepass.core.operands import OptionalOperands, Result
from onepass.core.problem import NormProblem
from onepass.core.view import laid_out

from .arguments import statistic
from .launches import FLIP, ForwardOptions

COUNTERS = {FLIP: Counters(), RESET: Counters()}


def kernels(
    problem: NormProblem, launches: Launches, statistics: bool = True, residual: bool = False, stress: str | None = None
) -> list[Kernel]:
    """The kernels of the launches, in order.

    Without `statistics`, a kernel stores none, unless the next one reads them. With a `residual`, the first kernel adds
    it. `stress` is for stress tests of `ring`: see ring/stress.py.
    """
    options = ForwardOptions(statistics, residual, stress)
    return [launch.kernel(problem, options) for launch in launches]


def forward(problem: NormProblem, launches: Launches, statistics: bool = True, stress: str | None = None) -> Forward:
    spec, first = problem.spec, launches[0]
    plain = kernels(problem, launches, statistics, stress=stress)
    adding = kernels(problem, launches, statistics, residual=True) if problem.addends else plain
    parts, counters = first.partial_moments, first.counters
    computed: list[str] = []
    if not problem.given and (statistics or len(launches) > 1):
        computed = [*["mean"] * spec.centered, *(["var"] if spec.mix else ["rstd", *["var"] * problem.track])]

    def launch(
        x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor | None, var: Tensor | None, optional: OptionalOperands, /
    ) -> Result:
        run, total = plain, None
        with stream_of(x.device) as stream:
            if optional.residual is not None:
                total = allocate(problem.shape, problem.stride, problem.dtype, x.device)
                if x.stride() == optional.residual.stride() == problem.stride:
                    run = adding
                else:
                    x = torch.add(x, optional.residual, out=total)
            elif problem.copied:
                x = laid_out(x, problem.y_stride)
            elif first.needs_aligned_x and x.data_ptr() % ALIGNMENT:  # rare
                x = allocate(problem.shape, problem.stride, problem.dtype, x.device).copy_(x)
            y = allocate(problem.shape, problem.y_stride, problem.dtype, x.device)
            t: dict[str, Any] = {
                "x": x, "residual": optional.residual, "sum": total, "y": y, "weight": dense(weight), "bias": dense(bias),
                "scale": dense(optional.scale), "shift": dense(optional.shift), "mean": None, "rstd": None, "var": None,
            }  # fmt: skip
            if problem.given:
                t |= {"mean": statistic(mean, problem), "var": statistic(var, problem)}
            for name in computed:
                t[name] = allocate(problem.stat_shape, problem.stat_stride, torch.float32, x.device)
            if parts:
                t["parts"] = allocate((parts,), (1,), torch.float32, x.device)
            own_mean, own_var = t["mean"], t["var"]
            if counters:
                t["counters"] = COUNTERS[first.counter_protocol].take(stream, counters)
            for step, kernel in zip(launches, run):
                if step.reads_statistics:
                    t["x"] = x if total is None else total
                    if spec.mix:
                        t |= _mixed(problem, own_mean, own_var, optional)
                kernel(stream, t)
        if problem.given and statistics and own_var is not None:
            t["rstd"] = torch.rsqrt(own_var + spec.eps)
        return Result(y, own_mean, t["rstd"], own_var, total)  # pyright: ignore[reportArgumentType]

    return launch


def check_launchable(problem: NormProblem, launches: Launches, device: torch.device) -> str:
    """The reason why the cooperative kernels of a plan cannot run on this device, or "" if they can.

    Compiles them to find out.
    """
    try:
        for kernel in kernels(problem, launches, statistics=False):
            if kernel.cooperative:
                with stream_of(device) as stream:
                    kernel.load(stream.device)
    except NotResident as reason:
        return str(reason)
    except (ImportError, AttributeError, TritonError) as reason:
        if not launches[0].experimental:
            raise
        return f"this version of Triton has an unknown version of Gluon: {reason}"
    return ""


def _mixed(problem: NormProblem, mean: Tensor | None, var: Tensor | None, optional: OptionalOperands) -> dict[str, Tensor]:
    """Mix the statistics of the sets. Returns the mean and rstd to apply."""
    assert problem.x is not None and mean is not None and var is not None
    count = problem.x.reps * problem.x.run
    mixed = mix_statistics(problem.spec, problem.shape, Moments(count, mean, var * count), optional)
    stats = {"mean": mixed.mean, "rstd": torch.rsqrt(mixed.var + problem.spec.eps)}
    return {name: laid_out(stat, problem.stat_stride) for name, stat in stats.items()}


def infer(problem: NormProblem, launches: Launches) -> Callable[..., Tensor] | None:
    """A launcher that returns only y and takes very little host time.

    None if the problem needs more than one plain launch: a copy of x, a residual, modulation, given statistics, or a
    cooperative launch.
    """
    if len(launches) > 1 or problem.copied or problem.addends or problem.scale or problem.shift or problem.given:
        return None
    (kernel,) = kernels(problem, launches, statistics=False)
    kernel.output = problem.shape, problem.y_stride, problem.dtype
    return None if kernel.cooperative else kernel.launch_minimal
