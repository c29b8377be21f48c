"""Runs the passes of a backward: from dy and what was saved to the gradients that are wanted."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from math import prod
from typing import Any, cast

import torch
from torch import Tensor

from onepass.backends.family import Backward, Launches
from onepass.backends.gpu.launch.launcher import Kernel, dense
from onepass.backends.gpu.launch.source import ALIGNED, INTERPRETED
from onepass.backends.gpu.launch.stream import Stream, allocate, stream_of
from onepass.backends.gpu.partials.parameters import maps, varying_axes
from onepass.backends.gpu.partials.sums import Step, Sums
from onepass.backends.gpu.partials.sums_kernel import add_up
from onepass.backends.gpu.row.kernel_backward import row_backward
from onepass.backends.gpu.tile.kernel_backward import tile_backward
from onepass.core.mixing import MixedStatistics, mix_statistics
from onepass.core.moments import Moments
from onepass.core.operands import Gradients, Needs, SavedTensors
from onepass.core.problem import NormProblem
from onepass.core.view import laid_out

from .arguments import scalar_args, statistic, wide, wide_parameters
from .launches import Pass
from .walk import ROW, TILE

_WALKS = {ROW: row_backward, TILE: tile_backward}


_PARAMS, _SAMPLES = ("weight", "bias"), ("scale", "shift")


_SETS = ("c1", "c2")


def backward(problem: NormProblem, launches: Launches) -> Backward:
    made: dict[tuple[bool, ...], _Run] = {}

    def launch(dy: Tensor, dsum: Tensor | None, saved: SavedTensors, needs: Sequence[bool], /) -> Gradients:
        key = *needs, dsum is not None
        run = made.get(key)
        if run is None:
            run = made[key] = _Run(problem, launches, Needs(*needs), dsum is not None)
        return run(dy, dsum, saved)

    return launch


def kernels(problem: NormProblem, launches: Launches, needs: Needs, dsum: bool = False) -> list[tuple[Step, Kernel]]:
    """The launches that these gradients need, each with its kernel; chained, if the plan's are."""
    needs = _possible(problem, needs)
    wants = {"param": needs.weight or needs.bias, "modulation": needs.scale or needs.shift, "sets": _wants_sets(problem, needs)}
    passes = [step for step in launches if isinstance(step, Pass)]
    writer = next((step for step in passes if step.across), passes[0])  # of the cells of parameters
    kept: list[tuple[Step, bool]] = []
    for step in launches:
        writes = step is writer and (wants["param"] or wants["modulation"])
        if isinstance(step, Sums):
            wanted = wants[step.what] and not step.none
        else:
            wanted = writes or (step.apply and needs.x) or (step.reduce and wants["sets"])
        kept += [(step, writes)] if wanted else []
    sums = [step for step in launches if isinstance(step, Sums)]
    assert all(any(step.what == what for step in sums) for what, _ in maps(problem, writer.walk)), (
        "a parameter's cells are added up by no launch"
    )
    alone = {name for step in sums if step.none for name in _names(step)}
    found: list[tuple[Step, Kernel]] = []
    for i, (step, writes) in enumerate(kept):
        if any(step.leads for step in launches):
            step = replace(step, leads=i + 1 < len(kept), follows=i > 0)
        found.append((step, _sums(step, problem, needs) if isinstance(step, Sums) else _walk(step, problem, needs, dsum, writes, alone)))
    return found


def _possible(problem: NormProblem, needs: Needs) -> Needs:
    """The gradients of operands that there are."""
    there = (problem.dtype, problem.weight, problem.bias, problem.scale, problem.shift, problem.spec.mix, problem.spec.mix)
    return Needs(*(bool(needed and operand) for needed, operand in zip(needs, there)))


def _wants_sets(problem: NormProblem, needs: Needs) -> bool:
    return not problem.given and (needs.x or needs.mean_weight or needs.var_weight)


def _walk(step: Pass, problem: NormProblem, needs: Needs, dsum: bool, writes: bool, alone: Collection[str]) -> Kernel:
    """`writes`: it leaves cells of parameters, of those that are `alone` the gradients themselves."""
    w, spec, dtype, fp32 = step.walk, problem.spec, problem.dtype, torch.float32
    param, modulation = varying_axes(problem, w)
    flat = bool(8 & (param | modulation)) if step.kernel == ROW else w.dense and (not step.resident or step.block_run == w.run)
    hands_on = step.reduce != step.apply and _wants_sets(problem, needs)
    dx = step.apply and needs.x
    pointers = {
        **{"x": dtype, "dy": dtype, "dsum": dtype if dsum and dx else None, "dx": dtype if dx else None},
        **{name: getattr(problem, name) for name in (*_PARAMS, *_SAMPLES)},
        **{"mean": fp32 if spec.centered and not problem.from_y else None, "rstd": fp32},
        **{"c1": fp32 if hands_on and spec.centered else None, "c2": fp32 if hands_on else None},
        **dict.fromkeys([f"d{name}" for name in (*_PARAMS, *_SAMPLES)]),
    }
    if writes:
        wanted = [name for name in (*_PARAMS, *_SAMPLES) if getattr(needs, name)]
        pointers |= {f"d{name}": getattr(problem, name) if name in alone else fp32 for name in wanted}
    found = step.across
    scalars = {
        **{"count": float(w.reps * w.run), **scalar_args(w, flat and step.kernel == TILE)},
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
            "TWO": found is not None and step.resident and step.parts_t == 2,
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


_GIVEN = ("x", "dy", "dsum", *_PARAMS, *_SAMPLES, "mean", "rstd")  # what comes from outside


_GRADIENTS = ("dx", *(f"d{name}" for name in (*_PARAMS, *_SAMPLES)))


class _Run:
    """The backward of a plan for the gradients that are wanted. Beside those, it allocates one buffer, for cells and sums.

    Every launch knows at which places of a list its operands are: those from outside, the gradients, and the buffer's parts.
    """

    def __init__(self, problem: NormProblem, launches: Launches, needs: Needs, dsum: bool) -> None:
        self.problem, self.needs = problem, _possible(problem, needs)
        x = problem.x
        self.constant = x is not None and x.reps * x.run == 1 and problem.spec.centered and not problem.given and not problem.spec.mix
        steps = kernels(problem, launches, needs, dsum)
        self.total = prod(problem.stat_shape)
        sums = [step for step, _ in steps if isinstance(step, Sums)]
        parts = {f"{name} cells": step.cells for step in sums for name in self._summed(step)}  # of the buffer, with their sizes
        if any(isinstance(step, Pass) and step.reduce != step.apply for step, _ in steps):
            parts |= dict.fromkeys(_SETS, self.total)
        self.launches: list[tuple[Kernel, list[str], bool]] = []
        for step, kernel in steps:
            if isinstance(step, Sums):
                names = _names(step)
                to = names if step.what == "sets" else [f"d{name}" for name in names]
                self.launches.append((kernel, [*(f"{name} cells" for name in names), *to], False))
                continue
            left = {f"d{name}": f"{name} cells" for name in (*_PARAMS, *_SAMPLES)} | {
                name: f"{name} cells" for name in _SETS if not step.apply
            }
            left = {name: cells for name, cells in left.items() if cells in parts}
            self.launches.append((kernel, [left.get(name, name) for name in kernel.pointers], step.apply))
        self.size = 0
        self.parts: dict[str, tuple[int, int]] = {}  # first and last element
        for name, size in parts.items():
            self.parts[name] = self.size, self.size + size
            self.size += -(-size // 4) * 4  # each aligned
        order = {name: at for at, name in enumerate((*_GIVEN, *_GRADIENTS, *self.parts))}
        self.places = [
            [order[name] if dtype else -1 for name, dtype in zip(names, kernel.pointers.values())] for kernel, names, _ in self.launches
        ]

    def _summed(self, step: Sums) -> list[str]:
        """Of the two that a launch may sum, those it does."""
        if step.what == "sets":
            return ["c1", "c2"] if self.problem.spec.centered else ["c2"]
        return [name for name in _names(step) if getattr(self.needs, name)]

    def __call__(self, dy: Tensor, dsum: Tensor | None, saved: SavedTensors) -> Gradients:
        x, weight, bias, mean, rstd, var, scale, shift = saved[:8]
        problem, needs, device = self.problem, self.needs, x.device
        if problem.copied:
            x = laid_out(x, problem.y_stride)
        dsum = None if dsum is None else laid_out(dsum, problem.y_stride)
        params = dense(weight), dense(bias), dense(scale), dense(shift)
        mean, rstd, mixed = statistic(mean, problem), cast(Tensor, statistic(rstd, problem)), None
        if problem.spec.mix:
            mixed = _mix(problem, mean, statistic(var, problem), saved)
            mean = laid_out(mixed.mean, problem.stat_stride)
        if self.constant:  # sets of one value: dx is 0, which wdy - c1 is not if the compiler rounds one of them and not the other
            rstd = torch.zeros_like(rstd)
        dy = laid_out(dy, problem.y_stride)
        weights: Sequence[Tensor | None] = (None, None)
        with stream_of(device) as stream:
            dx = allocate(problem.shape, problem.y_stride, problem.dtype, device) if needs.x else None
            grads = [
                allocate(tuple(p.shape), p.stride(), p.dtype, device) if n and p is not None else None for p, n in zip(params, needs[1:5])
            ]
            tensors = [x, dy, dsum, *params, mean, rstd, dx, *grads]
            buffer = allocate((self.size,), (1,), torch.float32, device) if self.size else None
            if mixed is not None or INTERPRETED:
                weights = self._one_by_one(stream, tensors, buffer, mixed, rstd)
            else:
                self._at_once(stream, tensors, buffer)
        return Gradients(dx, *grads, *weights)

    def _at_once(self, stream: Stream, tensors: Sequence[Tensor | None], buffer: Tensor | None) -> None:
        """By addresses, which cost the host least. `ops` has seen that all are on x's device, with memory behind them."""
        addresses = [None if t is None else t.data_ptr() for t in tensors]
        low = 0
        for address in addresses:
            low |= address or 0
        aligned = low % ALIGNED == 0
        first = 0 if buffer is None else buffer.data_ptr()
        addresses += [first + 4 * start for start, _ in self.parts.values()]
        addresses.append(None)  # the place of what is missing
        for (kernel, _, _), places in zip(self.launches, self.places):
            kernel.at(stream, [addresses[place] for place in places], aligned)

    def _one_by_one(
        self, stream: Stream, tensors: Sequence[Tensor | None], buffer: Tensor | None, mixed: MixedStatistics | None, rstd: Tensor
    ) -> Sequence[Tensor | None]:
        """By tensors: with a mix between sums and dx, or by the interpreter. The gradients of a mix's weights."""
        t: dict[str, Any] = dict(zip((*_GIVEN, *_GRADIENTS), tensors))
        t |= {name: buffer[start:end] for name, (start, end) in self.parts.items() if buffer is not None}
        weights: Sequence[Tensor | None] = (None, None)
        wanted = mixed is not None and (self.needs.x or self.needs.mean_weight or self.needs.var_weight)
        for kernel, names, applies in self.launches:
            if mixed is not None and wanted and applies:
                t["c1"], t["c2"], *weights = self._mixed(mixed, t["c1"], t["c2"], rstd)
                wanted = False
            kernel(stream, dict(zip(kernel.pointers, (t.get(name) for name in names))))
        if mixed is not None and wanted:
            _, _, *weights = self._mixed(mixed, t["c1"], t["c2"], rstd)
        return weights

    def _mixed(self, mixed: MixedStatistics, c1: Tensor, c2: Tensor, rstd: Tensor) -> tuple[Tensor, ...]:
        """c1 and c2 as a mix applies them, in sums, and the gradients of its weights."""
        problem, count = self.problem, mixed.sets.count
        own = (c.as_strided(problem.stat_shape, problem.stat_stride, c.storage_offset()) / count for c in (c1, c2))
        c1, c2, *weights = mixed.gradient(*own, rstd)  # pyright: ignore[reportCallIssue]
        return laid_out(c1 * count, problem.stat_stride), laid_out(c2 * count, problem.stat_stride), *weights


def _mix(problem: NormProblem, mean: Tensor | None, var: Tensor | None, saved: SavedTensors) -> MixedStatistics:
    assert problem.x is not None and mean is not None and var is not None
    count = problem.x.reps * problem.x.run
    return mix_statistics(problem.spec, problem.shape, Moments(count, mean, var * count), saved)
