"""Check all operands of a kernel against the problem that the kernel was planned for.

Kernels compute addresses from the sizes in the problem and check nothing themselves. For calls of onepass.functional, norms.py
and extras.py have already checked the arguments, with better messages. Direct calls of a registered op are checked only here.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

import torch
from torch import Tensor

from onepass.core.operands import OptionalOperands, SavedTensors
from onepass.core.problem import NormProblem
from onepass.core.spec import NormSpec
from onepass.core.view import ParamMap, View

from .tensors import FLOATS


def check_forward(
    problem: NormProblem,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor | None,
    var: Tensor | None,
    extras: OptionalOperands,
) -> None:
    """Raise if an operand of a forward does not fit the problem."""
    _check_common(problem, x, weight, bias, extras)
    sets = prod(problem.stat_shape)
    _sized("mean", mean, sets, "one for each set")
    _sized("var", var, sets, "one for each set")
    if problem.given and problem.spec.centered and mean is None:
        raise ValueError("mean is None but var is not; expected both, or neither to compute them")
    if mean is not None and not problem.given:
        raise ValueError("var is None but mean is not; expected both, or neither to compute them")
    _shaped("residual", extras.residual, x)
    _on_device(x, {"mean": mean, "var": var})


def check_backward(problem: NormProblem, dy: Tensor, dsum: Tensor | None, saved: SavedTensors) -> None:
    """Raise if an operand of a backward does not fit the problem."""
    x = saved.x
    _check_common(problem, x, saved.weight, saved.bias, saved.optional)
    sets = prod(problem.stat_shape)
    for name, t in {"mean": saved.mean, "rstd": saved.rstd, "var": saved.var}.items():
        _sized(name, t, sets, "one for each set")
    if problem.spec.centered and not problem.from_y and saved.mean is None:
        raise ValueError("mean is None, expected the mean of each set, which the forward returned")
    if problem.spec.mix and saved.var is None:
        raise ValueError("var is None, expected the variance of each set, which the forward returned")
    _shaped("dy", dy, x)
    _shaped("dsum", dsum, x)
    if dy.dtype != x.dtype:
        raise RuntimeError(f"dy has dtype {dy.dtype}, expected {x.dtype}, the dtype of x: convert it with dy.to({x.dtype})")
    _on_device(x, {"dy": dy, "dsum": dsum, "mean": saved.mean, "rstd": saved.rstd, "var": saved.var})


def check_sizes(spec: NormSpec) -> None:
    """Raise if an axis size in the spec is below 1. A direct call of a registered op can pass any number."""
    for name, size in spec.sizes:
        if size < 1:
            raise ValueError(f"sizes gives {name} = {size}, expected at least 1")


def _check_common(problem: NormProblem, x: Tensor, weight: Tensor | None, bias: Tensor | None, extras: OptionalOperands) -> None:
    _floating("x", x)
    _indexed("weight", weight, problem.param, problem.x, problem.param_size)
    _indexed("bias", bias, problem.param, problem.x, problem.param_size)
    _indexed("scale", extras.scale, problem.modulation, problem.x, problem.modulation_size)
    _indexed("shift", extras.shift, problem.modulation, problem.x, problem.modulation_size)
    norms = len(problem.spec.mix.split(",")) if problem.spec.mix else 0
    for name in ("mean_weight", "var_weight"):
        weights = getattr(extras, name)
        _sized(name, weights, norms, "one for each norm of the mix")
        if norms and weights is None:
            raise ValueError(f"{name} is None, expected {norms} elements, one for each norm of the mix")
    if (extras.running_mean is None) != (extras.running_var is None):
        raise ValueError("one of running_mean and running_var is None; expected both, or neither")
    if norms:
        merged = problem.spec.mixed_dims(problem.shape)[-1]
        groups = prod(size for dim, size in enumerate(problem.stat_shape) if dim not in merged)
        for name in ("running_mean", "running_var"):
            _sized(name, getattr(extras, name), groups, "one for each mean of the last norm of the mix")
    _on_device(x, {"weight": weight, "bias": bias, **extras._asdict()})


def _indexed(name: str, t: Tensor | None, map_: ParamMap | None, view: View | None, size: int) -> None:
    """Raise unless the parameter has `size` elements and every index that the map yields is below `size`."""
    _sized(name, t, size, "as the spec says")
    if t is None or map_ is None or view is None:
        return
    largest = map_.largest(view.reps, view.sets, view.run)
    if largest >= size:
        raise ValueError(f"{name} has {size} elements, but the spec indexes element {largest}: it names an axis twice")


def _sized(name: str, t: Tensor | None, size: int, why: str) -> None:
    if t is None:
        return
    if t.numel() != size:
        raise ValueError(f"{name} has shape {list(t.shape)}, expected {size} elements, {why}")
    _floating(name, t)


def _shaped(name: str, t: Tensor | None, x: Tensor) -> None:
    if t is None:
        return
    if t.shape != x.shape:
        raise ValueError(f"{name} has shape {list(t.shape)}, expected {list(x.shape)}, the shape of x")
    _floating(name, t)


def _floating(name: str, t: Tensor) -> None:
    if t.layout != torch.strided or t.dtype not in FLOATS:
        raise NotImplementedError(
            f"{name} has layout {t.layout} and dtype {t.dtype}, expected a strided tensor of float64, float32, bfloat16 or float16"
        )


def _on_device(x: Tensor, operands: Mapping[str, Tensor | None]) -> None:
    for name, t in operands.items():
        if t is not None and t.device != x.device:
            raise RuntimeError(f"{name} is on {t.device}, expected {x.device}, the device of x: move it with .to({str(x.device)!r})")
