"""Runs the passes of a plan: from a problem's tensors to y and its statistics."""

from __future__ import annotations

from collections.abc import Callable
from math import ceil
from typing import Any

import torch
from torch import Tensor
from triton.errors import TritonError

from onepass.backends.family import Forward, Launches
from onepass.backends.gpu.launch.counters import Counters
from onepass.backends.gpu.launch.launcher import Described, Kernel, dense
from onepass.backends.gpu.launch.occupancy import NotResident
from onepass.backends.gpu.launch.source import ALIGNED
from onepass.backends.gpu.launch.stream import allocate, stream_of
from onepass.backends.gpu.partials.combine_kernel import combine
from onepass.backends.gpu.row.kernel import row_forward
from onepass.backends.gpu.team.kernel import team_forward
from onepass.backends.gpu.tile.kernel import tile_forward
from onepass.backends.gpu.whole_set.kernel import whole_set_forward
from onepass.core.mixing import mix_statistics
from onepass.core.moments import Moments
from onepass.core.operands import OptionalOperands, Result
from onepass.core.problem import NormProblem
from onepass.core.view import laid_out

from .arguments import near, scalar_args, statistic, wide, wide_parameters
from .launches import REGISTERS, Pass, power_of_two
from .walk import COMBINE, RING, ROW, TEAM, TILE, WHOLE_SET, axis_mask

_WALKS = {ROW: row_forward, TILE: tile_forward, TEAM: team_forward, WHOLE_SET: whole_set_forward}


_TEAMS = Counters()


_COUNTERS = {TEAM: _TEAMS, WHOLE_SET: _TEAMS, RING: Counters()}


def kernels(
    problem: NormProblem, launches: Launches, statistics: bool = True, residual: bool = False, stress: str | None = None
) -> list[Kernel]:
    """The kernels of the launches, in order.

    Without `statistics`, a kernel stores none, unless the next one reads them. With a `residual`, the first kernel adds it.

    `stress` is for tests of `ring`: see `ring_stress`.
    """
    return [_kernel(step, problem, statistics, residual, stress) for step in launches]


def _kernel(step: Pass, problem: NormProblem, statistics: bool, residual: bool, stress: str | None) -> Kernel:
    if step.kernel == COMBINE:
        return _combine(step, problem)
    return _ring(step, problem, statistics, stress) if step.kernel == RING else _walk(step, problem, statistics, residual)


def _walk(step: Pass, problem: NormProblem, statistics: bool, residual: bool) -> Kernel:
    w, spec, dtype, function = step.walk, problem.spec, problem.dtype, _WALKS[step.kernel]
    by_teams = step.kernel in (TEAM, WHOLE_SET)
    shared = by_teams and step.parts_r > 1
    flat = w.reps == 1 if step.kernel == ROW else w.dense and (by_teams or not step.resident or step.block_run == w.run)
    first, second = problem.addends if problem.addends and residual and step.reduce else (dtype, None)
    fp32 = torch.float32 if step.apply and (statistics or not step.reduce) else None
    pointers = {
        "x": first,
        "residual": second,
        "sum": dtype if second else None,
        "y": dtype if step.apply else None,
        **{name: getattr(problem, name) if step.apply else None for name in ("weight", "bias", "scale", "shift")},
        "mean": fp32 if spec.centered else None,
        "rstd": None if problem.given else fp32,
        "var": fp32 if problem.given or (step.reduce and problem.track) else None,
        "parts": torch.float32 if shared or not step.apply else None,
        **({"counters": torch.int32 if shared else None} if by_teams else {}),
    }
    scalars = {"eps": float(spec.eps), **scalar_args(w, flat and step.kernel != ROW), **_parts(step), "columns": w.columns}
    scalars |= _of(function, {"teams": step.teams, "units": step.units, "each": step.sets, "width": step.sets * w.run})
    constants = {
        **{"PARAM": axis_mask(w.param, w), "MODULATION": axis_mask(w.modulation, w), "OFFSET": float(spec.weight_offset)},
        **{"CENTERED": spec.centered, "ACTIVATION": spec.activation},
        **{"RESIDENT": step.resident, "REDUCE": step.reduce, "APPLY": step.apply, "WIDE": wide(step), "FLAT": flat},
        **{"BLOCK_I": step.block_i, "BLOCK_J": step.block_j, "BLOCK_RUN": step.block_run, "TAIL": step.tail},
        **{"TILES": step.tiles, "RUN": w.run},
        **{"STAGES": step.stages, "SHORT": step.block_j >= w.run, "LEADS": step.leads, "FOLLOWS": step.follows},
        **{"ALIKE": w.x == w.y, "NEAR": near(w), "EVEN": _even(step)},
        **{"SETS": power_of_two(step.sets), "MEMBERS": power_of_two(step.parts_r)},
    }
    return Kernel(
        *(function, step.programs, step.warps, pointers, scalars, _of(function, constants), wide_parameters(w), shared),
        registers=REGISTERS if shared and step.kernel == WHOLE_SET else 0,
    )


def _of(function: Any, known: dict[str, Any]) -> dict[str, Any]:
    """Those of the known arguments that a kernel takes, in its order."""
    return {name: known[name] for name in function.arg_names if name in known}


def _even(step: Pass) -> bool:
    """Whether all lanes of a step that keeps its rows have an element."""
    w = step.walk
    if step.kernel == WHOLE_SET:
        return step.parts_r * step.chunk_r == w.reps and step.chunk_r * w.run == step.tiles * step.block_i * step.block_j
    return step.resident and step.parts_r * step.block_i == w.reps and step.chunk_t * step.block_j == w.columns


def _ring(step: Pass, problem: NormProblem, statistics: bool, stress: str | None = None) -> Kernel:
    from onepass.backends.gpu.ring.kernel import ring_forward  # Gluon is experimental, and no other kernel needs it

    w, spec, fp32 = step.walk, problem.spec, torch.float32
    pointers = {
        "y": problem.dtype,
        **{name: getattr(problem, name) for name in ("weight", "bias", "scale", "shift")},
        "mean": fp32 if spec.centered and statistics else None,
        "rstd": fp32 if statistics else None,
        "var": fp32 if problem.track and statistics else None,
        **{"parts": fp32, "counters": torch.int32},
    }
    scalars = {"eps": float(spec.eps), **scalar_args(w, True), "members": step.parts_r, "teams": step.teams}
    scalars |= {"spans": step.chunk_t, "columns": w.columns}
    sets, rows = power_of_two(max(step.sets, 2)), ceil(w.reps / step.block_i)
    constants = {
        **{"PARAM": axis_mask(w.param, w), "MODULATION": axis_mask(w.modulation, w), "OFFSET": float(spec.weight_offset)},
        **{"CENTERED": spec.centered, "ACTIVATION": spec.activation},
        "RAGGED": bool(w.reps % step.block_i or w.columns % (step.tiles * step.block_j)),
        **{"BLOCK_I": step.block_i, "BLOCK_J": step.block_j, "SETS": sets, "NEAR": step.block_run},
        "PARTS": max(min(power_of_two(step.parts_r), 512 // sets), 32),
        **{"TILES": step.tiles, "SLOTS": step.stages, "KEEP": step.keep, "BACK": step.back},
        "AT_ONCE": 1 if rows % (2 * step.parts_r) or step.back else 2,  # two where every member has an even number of blocks
        "WARPS": step.warps,
        **({"STRESS": stress} if stress else {}),
    }
    return Described(
        *(problem.dtype, w.outer * w.reps, w.columns, w.x[1], (step.block_i, step.block_j)),
        *(ring_forward, step.programs, step.warps, pointers, scalars, constants, wide_parameters(w), True),
    )


def _parts(step: Pass) -> dict[str, int]:
    m2_at = step.walk.total * step.parts_r * step.parts_t
    return {"parts_r": step.parts_r, "parts_t": step.parts_t, "chunk_r": step.chunk_r, "chunk_t": step.chunk_t, "m2_at": m2_at}


def _combine(step: Pass, problem: NormProblem) -> Kernel:
    w, spec, fp32 = step.walk, problem.spec, torch.float32
    pointers = {
        "parts": fp32,
        "mean": fp32 if spec.centered else None,
        "rstd": None if spec.mix else fp32,
        "var": fp32 if spec.mix or problem.track else None,
    }
    scalars = {"eps": float(spec.eps), "reps": w.reps, "sets": w.sets, "run": w.run, **_parts(step)}
    constants = {"CENTERED": spec.centered, "BLOCK_I": step.block_i, "BLOCK_J": step.block_j, "LEADS": step.leads, "FOLLOWS": step.follows}
    return Kernel(combine, step.programs, step.warps, pointers, scalars, constants)


def forward(problem: NormProblem, launches: Launches, statistics: bool = True, stress: str | None = None) -> Forward:
    spec, passes = problem.spec, launches
    first = passes[0]
    plain = kernels(problem, launches, statistics, stress=stress)
    adding = kernels(problem, launches, statistics, residual=True) if problem.addends else plain
    several, counters = len(passes) > 1, _counters(first)
    parts = 2 * first.walk.total * first.parts_r * first.parts_t if several or counters else 0
    if first.kernel == RING:
        parts = 2 * first.units * power_of_two(max(first.sets, 2)) * first.parts_r
    computed: list[str] = []
    if not problem.given and (statistics or several):
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
            elif first.kernel == RING and x.data_ptr() % ALIGNED:  # as no descriptor may be, and few tensors are
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
                t["counters"] = _COUNTERS[first.kernel].take(stream, counters)
            for step, kernel in zip(passes, run):
                if step.apply and not step.reduce:
                    t["x"] = x if total is None else total
                    if spec.mix:
                        t |= _mixed(problem, own_mean, own_var, optional)
                kernel(stream, t)
        if problem.given and statistics and own_var is not None:
            t["rstd"] = torch.rsqrt(own_var + spec.eps)
        return Result(y, own_mean, t["rstd"], own_var, total)  # pyright: ignore[reportArgumentType]

    return launch


def _counters(step: Pass) -> int:
    """How many a launch needs: a ring one for each unit, since several are under way; else each team has one at a time."""
    if step.kernel == RING:
        return step.units
    return step.teams if step.kernel in (TEAM, WHOLE_SET) and step.parts_r > 1 else 0


def check_launchable(problem: NormProblem, launches: Launches, device: torch.device) -> str:
    """Why a plan whose programs wait for one another cannot run here, or "". It is compiled to know."""
    try:
        for kernel in kernels(problem, launches, statistics=False):
            if kernel.cooperative:
                with stream_of(device) as stream:
                    kernel.load(stream.device)
    except NotResident as reason:
        return str(reason)
    except (ImportError, AttributeError, TritonError) as reason:
        if launches[0].kernel != RING:
            raise
        return f"this version of Triton has another Gluon than those that are known: {reason}"
    return ""


def _mixed(problem: NormProblem, mean: Tensor | None, var: Tensor | None, optional: OptionalOperands) -> dict[str, Tensor]:
    """The statistics that a mix applies, from the sets' own."""
    assert problem.x is not None and mean is not None and var is not None
    count = problem.x.reps * problem.x.run
    mixed = mix_statistics(problem.spec, problem.shape, Moments(count, mean, var * count), optional)
    stats = {"mean": mixed.mean, "rstd": torch.rsqrt(mixed.var + problem.spec.eps)}
    return {name: laid_out(stat, problem.stat_stride) for name, stat in stats.items()}


def infer(problem: NormProblem, launches: Launches) -> Callable[..., Tensor] | None:
    """y alone in one launch, where nothing must be copied, added or modulated: the call that must cost little more than torch's own."""
    if len(launches) > 1 or problem.copied or problem.addends or problem.scale or problem.shift or problem.given:
        return None
    (kernel,) = kernels(problem, launches, statistics=False)
    kernel.output = problem.shape, problem.y_stride, problem.dtype
    return None if kernel.cooperative else kernel.quick
