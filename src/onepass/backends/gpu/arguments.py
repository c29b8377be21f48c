"""Builds the arguments that several kernels take, from a problem and its Walk.

The Walk (walk.py) has the sizes and strides of x[o, r, s, t].
"""

from __future__ import annotations

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
        return tensors, Affine(None, None, None, None), Statistics(None, None, None)
    affine = Affine(problem.weight, problem.bias, problem.scale, problem.shift)
    if reduce and not options.statistics:
        return tensors, affine, Statistics(None, None, None)
    var = fp32 if problem.given or (reduce and problem.track) else None
    return tensors, affine, Statistics(fp32 if centered else None, None if problem.given else fp32, var)


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
