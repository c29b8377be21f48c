"""Builds the arguments that several kernels take, from a problem and its Walk.

The Walk (walk.py) has the sizes and strides of x[o, r, s, t].
"""

from __future__ import annotations

from math import prod

import torch
from torch import Tensor

from onepass.backends.gpu.device.groups import Affine, Maps, ModulationMap, Norm, ParamMap, Statistics, Tensors, View
from onepass.backends.gpu.launch.fields import Wide
from onepass.core.memory import require_memory
from onepass.core.problem import NormProblem
from onepass.core.view import ParamMap as ProblemMap
from onepass.core.view import laid_out

from .launches import ForwardOptions
from .walk import Walk, axis_mask

LARGEST_INT32 = 2**31


def forward_pointers(
    problem: NormProblem, options: ForwardOptions, reduce: bool = True, apply: bool = True
) -> tuple[Tensors, Affine, Statistics]:
    """Return the dtype of each operand of a forward launch, or None for an operand that the launch does not have.

    With `reduce`, the launch computes statistics. With `apply`, it computes y.
    """
    dtype, fp32, centered = problem.dtype, torch.float32, problem.spec.centered
    x, residual = problem.addends if problem.addends and options.residual and reduce else (dtype, None)
    tensors = Tensors(x, residual, dtype if residual else None, dtype if apply else None)
    if not apply:
        return tensors, Affine(None, None, None, None), Statistics()
    affine = Affine(problem.weight, problem.bias, problem.scale, problem.shift)
    if reduce:
        return tensors, affine, computed_statistics(problem, options)
    mean = fp32 if centered else None
    return tensors, affine, Statistics(mean, var_ptr=fp32) if problem.given else Statistics(mean, fp32)


def computed_statistics(problem: NormProblem, options: ForwardOptions) -> Statistics:
    """Return the statistics that a launch computes and stores, and the running ones that it updates."""
    spec, fp32 = problem.spec, torch.float32
    found = Statistics()
    if options.statistics:
        var = fp32 if spec.mix or (problem.track and options.momentum is None) else None
        found = Statistics(fp32 if spec.centered else None, None if spec.mix else fp32, var)
    if options.momentum is None:
        return found
    n = prod(problem.shape) // prod(problem.stat_shape)
    return found._replace(running_mean_ptr=fp32, running_var_ptr=fp32, momentum=options.momentum, unbiased=n / max(n - 1, 1))


def norm_of(problem: NormProblem, axes: tuple[int, int]) -> Norm:
    """Return the Norm of a problem. `axes` is two masks: the axes along which weight and bias vary, and scale and shift."""
    spec = problem.spec
    return Norm(*axes, float(spec.weight_offset), spec.centered, spec.activation)


def forward_norm(problem: NormProblem, w: Walk) -> Norm:
    return norm_of(problem, (axis_mask(w.param, w), axis_mask(w.modulation, w)))


def view_of(w: Walk, dense: bool = False) -> View:
    """Return the sizes and strides of x and y. With `dense`, the strides of s are 0, because the kernel does not use them."""
    x_s, y_s = (0, 0) if dense else (w.x[2], w.y[2])
    return View(w.reps, w.sets, w.run, *w.x[:2], x_s, *w.y[:2], y_s)


def maps_of(w: Walk) -> Maps:
    return Maps(ParamMap(*_map(w.param, w)), ModulationMap(*_map(w.modulation, w)))


def _map(p: ProblemMap, w: Walk) -> tuple[int, ...]:
    number = Wide if p.largest(*w.in_maps) >= LARGEST_INT32 else int
    return p.every, p.period, number(p.a), number(p.b), number(p.c), p.channel_run, number(p.d)


def needs_wide_programs(w: Walk, programs: int, block_i: int) -> bool:
    """Return whether programs need 64-bit numbers: whether a number, or an index computed from it, may reach 2³⁰."""
    return max(programs * block_i, w.total, w.reps, w.run, w.columns) >= 2**30


def offsets_fit_int32(w: Walk) -> bool:
    """Return whether offsets into x and y fit in 32 bits, also those that a block computes past the end of x or y."""
    return all(o * w.outer + 2 * r * w.reps + 2 * s * w.sets + 2 * w.run < LARGEST_INT32 for o, r, s in (w.x, w.y))


def statistic(stat: Tensor | None, problem: NormProblem) -> Tensor | None:
    """Return a statistic in float32, contiguous as [outer, sets]; None if `stat` is None."""
    if stat is None or (stat.dtype == torch.float32 and stat.stride() == problem.stat_stride and stat.shape == problem.stat_shape):
        return stat
    require_memory(("statistic",), (stat,))
    return laid_out(stat.to(torch.float32).reshape(problem.stat_shape), problem.stat_stride)
