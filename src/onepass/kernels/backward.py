"""Runs the passes of a backward: from dy and what was saved to the gradients that are wanted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import prod
from typing import Any

import torch
from torch import Tensor

from ..moments import Mix, Moments
from ..plan import Plan
from ..problem import NONE, Extras, NormProblem, laid_out
from ..reference import Gradients, Needs, mix
from ..tiling import ROW, TILE, Pass
from ..tiling_backward import Step, Sums, bits
from .arguments import numbers, statistic, wide, wide_parameters
from .launch import Kernel, current, dense
from .row_backward import row_backward
from .sums import add_up
from .tile_backward import tile_backward

_WALKS = {ROW: row_backward, TILE: tile_backward}
_PARAMS, _SAMPLES = ("weight", "bias"), ("scale", "shift")
_SETS = ("c1", "c2")


def backward(plan: Plan, problem: NormProblem) -> Callable[..., Gradients]:
    made: dict[tuple[bool, ...], _Run] = {}

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
        key = *needs, extras.residual is not None
        run = made.get(key)
        if run is None:
            run = made[key] = _Run(plan, problem, Needs(*needs), extras.residual is not None)
        return run(dy, x, weight, bias, mean, rstd, extras, var)

    return launch


def kernels(plan: Plan, problem: NormProblem, needs: Needs, dsum: bool = False) -> list[tuple[Step, Kernel]]:
    """The steps of a plan that these gradients need, each with its kernel; chained, if the plan's are."""
    wants = {"param": needs.weight or needs.bias, "modulation": needs.scale or needs.shift, "sets": _wants_sets(problem, needs)}
    passes = [step for step in plan.passes if isinstance(step, Pass)]
    writer = next((step for step in passes if step.across), passes[0])  # of the cells of parameters
    kept: list[tuple[Step, bool]] = []
    for step in plan.passes:
        writes = step is writer and (wants["param"] or wants["modulation"])
        if isinstance(step, Sums):
            wanted = wants[step.what]
        else:
            wanted = writes or (step.apply and needs.x) or (step.reduce and wants["sets"])
        kept += [(step, writes)] if wanted else []
    found: list[tuple[Step, Kernel]] = []
    for i, (step, writes) in enumerate(kept):
        if any(step.leads for step in plan.passes):
            step = replace(step, leads=i + 1 < len(kept), follows=i > 0)
        found.append((step, _sums(step, problem, needs) if isinstance(step, Sums) else _walk(step, problem, needs, dsum, writes)))
    return found


def _wants_sets(problem: NormProblem, needs: Needs) -> bool:
    return not problem.given and (needs.x or needs.mean_weight or needs.var_weight)


def _walk(step: Pass, problem: NormProblem, needs: Needs, dsum: bool, writes: bool) -> Kernel:
    w, spec, dtype, fp32 = step.walk, problem.spec, problem.dtype, torch.float32
    param, modulation = bits(problem, w)
    flat = bool(8 & (param | modulation)) if step.kernel == ROW else w.dense and (not step.resident or step.block_run == w.run)
    hands_on = step.reduce != step.apply and _wants_sets(problem, needs)
    dx = step.apply and needs.x
    pointers = {
        **{"x": dtype, "dy": dtype, "dsum": dtype if dsum and dx else None, "dx": dtype if dx else None},
        **{name: getattr(problem, name) for name in (*_PARAMS, *_SAMPLES)},
        **{"mean": fp32 if spec.centered and not problem.from_y else None, "rstd": fp32},
        **{"c1": fp32 if hands_on and spec.centered else None, "c2": fp32 if hands_on else None},
        **{f"d{name}": fp32 if writes and getattr(needs, name) else None for name in (*_PARAMS, *_SAMPLES)},
    }
    found = step.across
    scalars = {
        **{"count": float(w.reps * w.run), **numbers(w, flat and step.kernel == TILE)},
        **{"every": found.every if found else 1, "period": found.period if found else 1, "members": found.members if found else 1},
        **{"parts_r": step.parts_r, "parts_t": step.parts_t, "chunk_r": step.chunk_r, "chunk_t": step.chunk_t, "columns": w.columns},
    }
    constants = {
        **{"PARAM": param, "MODULATION": modulation, "OFFSET": float(spec.weight_offset), "ACTIVATION": spec.activation},
        **{"FROM_Y": problem.from_y, "CENTERED": spec.centered, "GIVEN": problem.given},
        **{"RESIDENT": step.resident, "REDUCE": step.reduce, "APPLY": step.apply},
        **{
            "ACROSS": found is not None,
            "BY_SET": found is not None and found.by_set,
            "BLOCKS": step.parts_t if step.resident else 1,
            "WIDE": wide(step),
            "FLAT": flat,
        },
        **{"BLOCK_I": step.block_i, "BLOCK_J": step.block_j, "BLOCK_RUN": step.block_run, "TAIL": step.tail, "STAGES": step.stages},
        **{"SHORT": step.block_j >= w.run, "LEADS": step.leads, "FOLLOWS": step.follows},
    }
    return Kernel(_WALKS[step.kernel], step.programs, step.warps, pointers, scalars, constants, wide_parameters(w))


def _names(step: Sums) -> tuple[str, str]:
    return {"param": _PARAMS, "modulation": _SAMPLES, "sets": _SETS}[step.what]


def _sums(step: Sums, problem: NormProblem, needs: Needs) -> Kernel:
    if step.what == "sets":
        targets: list[torch.dtype | None] = [torch.float32 if problem.spec.centered else None, torch.float32]
    else:
        targets = [getattr(problem, name) if getattr(needs, name) else None for name in _names(step)]
    sources = [torch.float32 if target else None for target in targets]
    kept = step.sizes[1] * step.sizes[3]
    pointers: dict[str, torch.dtype | None] = dict(zip(("cells1", "cells2", "sum1", "sum2"), (*sources, *targets)))
    scalars = {
        **dict(zip(("across", "kept1", "between", "kept2", "within"), step.sizes)),
        **{"to1": step.to[0], "to2": step.to[1], "kept": kept, "reduced": step.cells // kept},
    }
    constants = {
        "WIDE": step.cells >= 2**30,
        "BLOCK_I": step.block_i,
        "BLOCK_J": step.block_j,
        "LEADS": step.leads,
        "FOLLOWS": step.follows,
    }
    return Kernel(add_up, step.programs, step.warps, pointers, scalars, constants)


class _Run:
    """The backward of a plan for gradients that are wanted. Beside those, it allocates cells."""

    def __init__(self, plan: Plan, problem: NormProblem, needs: Needs, dsum: bool) -> None:
        there = (problem.dtype, problem.weight, problem.bias, problem.scale, problem.shift, problem.spec.mix, problem.spec.mix)
        needs = Needs(*(bool(needed and operand) for needed, operand in zip(needs, there)))
        self.problem, self.needs = problem, needs
        self.steps = kernels(plan, problem, needs, dsum)
        sums = [step for step, _ in self.steps if isinstance(step, Sums)]
        total = prod(problem.stat_shape)
        self.parted = any(step.what == "sets" for step in sums)  # c1 and c2 are first left in parts
        self.buffers: dict[str, int] = {}  # by name, in elements
        for step in sums:
            names = _names(step) if step.what == "sets" else [name for name in _names(step) if getattr(needs, name)]
            self.buffers |= {f"{name} cells": step.cells for name in names}
        if any(isinstance(step, Pass) and step.reduce != step.apply for step, _ in self.steps):
            self.buffers |= dict.fromkeys(_SETS, total)
        self.size = -(-max(self.buffers.values(), default=0) // 4) * 4  # each aligned

    def __call__(self, dy: Tensor, x: Tensor, weight, bias, mean, rstd: Tensor, extras: Extras, var: Tensor | None) -> Gradients:
        problem, needs = self.problem, self.needs
        if problem.copied:
            x = laid_out(x, problem.y_stride)
        t: dict[str, Any] = {"x": x, "dy": laid_out(dy, problem.y_stride), "dsum": extras.residual, "dx": None}
        if extras.residual is not None:
            t["dsum"] = laid_out(extras.residual, problem.y_stride)
        t |= {"weight": dense(weight), "bias": dense(bias), "scale": dense(extras.scale), "shift": dense(extras.shift)}
        t |= {"mean": statistic(mean, problem), "rstd": statistic(rstd, problem)}
        mixed = None
        if problem.spec.mix:
            mixed = _mix(problem, t["mean"], statistic(var, problem), extras)
            t["mean"] = laid_out(mixed.mean, problem.stat_stride)
        if needs.x:
            t["dx"] = torch.empty_strided(problem.shape, problem.y_stride, dtype=problem.dtype, device=x.device)
        if self.buffers:
            t |= dict(zip(self.buffers, x.new_empty((len(self.buffers), self.size), dtype=torch.float32).unbind()))
        grads = {name: torch.empty(t[name].shape, dtype=t[name].dtype, device=x.device) for name in self._parameters(t)}
        weights: Sequence[Tensor | None] = (None, None)
        with current(x.device) as stream:
            for step, kernel in self.steps:
                if isinstance(step, Sums):
                    names = _names(step)
                    sums = [t[name] for name in names] if step.what == "sets" else [grads.get(name) for name in names]
                    cells = [t.get(f"{name} cells") for name in names]
                    kernel(stream, dict(zip(("cells1", "cells2", "sum1", "sum2"), (*cells, *sums))))
                    continue
                if mixed is not None and step.apply:
                    c1, c2, *weights = self._mixed(mixed, t)
                    t |= {"c1": c1, "c2": c2}
                own = {f"d{name}": t.get(f"{name} cells") for name in (*_PARAMS, *_SAMPLES)}
                if self.parted and not step.apply:
                    own |= {name: t[f"{name} cells"] for name in _SETS}
                kernel(stream, t | own)
            if mixed is not None and not needs.x and (needs.mean_weight or needs.var_weight):
                _, _, *weights = self._mixed(mixed, t)
        return Gradients(t["dx"], *[grads.get(name) for name in (*_PARAMS, *_SAMPLES)], *weights)  # pyright: ignore[reportCallIssue]

    def _parameters(self, t: dict[str, Any]) -> list[str]:
        return [name for name in (*_PARAMS, *_SAMPLES) if getattr(self.needs, name)]

    def _mixed(self, mixed: Mix, t: dict[str, Any]) -> tuple[Tensor, ...]:
        """c1 and c2 as a mix applies them, in sums, and the gradients of its weights."""
        problem, count = self.problem, mixed.sets.count
        c1, c2 = (t[name][: prod(problem.stat_shape)].as_strided(problem.stat_shape, problem.stat_stride) / count for name in _SETS)
        c1, c2, *weights = mixed.gradient(c1, c2, t["rstd"])
        return laid_out(c1 * count, problem.stat_stride), laid_out(c2 * count, problem.stat_stride), *weights


def _mix(problem: NormProblem, mean: Tensor | None, var: Tensor | None, extras: Extras) -> Mix:
    assert problem.x is not None and mean is not None and var is not None
    count = problem.x.reps * problem.x.run
    return mix(problem.spec, problem.shape, Moments(count, mean, var * count), extras)
