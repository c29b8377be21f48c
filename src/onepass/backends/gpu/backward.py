"""Runs the launches of a backward: from dy and what the forward saved to the gradients that are needed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import prod
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from onepass.backends.family import Backward, Launches
from onepass.backends.gpu.launch.launcher import Kernel, dense
from onepass.backends.gpu.launch.signature import ALIGNMENT
from onepass.backends.gpu.launch.source import INTERPRETED
from onepass.backends.gpu.launch.stream import Stream, allocate, stream_of
from onepass.backends.gpu.partials.gradient import PARAMETERS, BackwardLaunch, BackwardOptions, needs_set_sums
from onepass.backends.gpu.partials.parameters import maps
from onepass.backends.gpu.partials.sums import NAMES, Step, SumsLaunch
from onepass.core.mixing import MixedStatistics, mix_statistics
from onepass.core.moments import Moments
from onepass.core.operands import Gradients, Needs, SavedTensors
from onepass.core.problem import NormProblem
from onepass.core.view import laid_out

from .arguments import statistic

SET_SUMS = NAMES["sets"]  # c1 and c2

INPUTS = ("x", "dy", "dsum", *PARAMETERS, "mean", "rstd")

GRADIENTS = ("dx", *(f"d{name}" for name in PARAMETERS))


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
    """The launches that these gradients need, each with its kernel. They overlap by PDL if the plan's launches do."""
    needs = _possible(problem, needs)
    wanted = {"param": needs.weight or needs.bias, "modulation": needs.scale or needs.shift, "sets": needs_set_sums(problem, needs)}
    sums = [step for step in launches if isinstance(step, SumsLaunch)]
    passes = [step for step in launches if isinstance(step, BackwardLaunch)]
    writer = next((step for step in passes if step.segments), passes[0])  # stores the partial gradients (cells) of parameters
    assert all(any(step.of == of for step in sums) for of, _ in maps(problem, writer.walk)), "no launch adds up the cells of a parameter"
    single = frozenset(name for step in sums if not step.needed for name in NAMES[step.of])
    kept: list[tuple[Step, BackwardOptions]] = []
    for step in launches:
        options = BackwardOptions(needs, dsum, step is writer and (wanted["param"] or wanted["modulation"]), single)
        if isinstance(step, SumsLaunch):
            used = wanted[step.of] and step.needed
        else:
            used = options.writes_cells or (step.apply and needs.x) or (step.reduce and wanted["sets"])
        kept += [(step, options)] if used else []
    if any(step.pdl_trigger for step in launches):
        last = len(kept) - 1
        kept = [(replace(step, pdl_trigger=at < last, pdl_wait=at > 0), options) for at, (step, options) in enumerate(kept)]
    return [(step, step.kernel(problem, options)) for step, options in kept]


def _possible(problem: NormProblem, needs: Needs) -> Needs:
    """`needs`, without the operands that the problem does not have."""
    there = (problem.dtype, problem.weight, problem.bias, problem.scale, problem.shift, problem.spec.mix, problem.spec.mix)
    return Needs(*(bool(needed and operand) for needed, operand in zip(needs, there)))


class _PreparedStep(NamedTuple):
    kernel: Kernel
    operands: list[str]  # for each pointer of the kernel: the name of an input, of a gradient, or of a part of the buffer
    applies: bool  # it computes dx
    places: list[int]  # the same operands, as indices into the list of all operands


class _Run:
    """The launches for the gradients that are needed.

    A call allocates these gradients, and one buffer for cells and for the sums of sets.
    """

    def __init__(self, problem: NormProblem, launches: Launches, needs: Needs, dsum: bool) -> None:
        self.problem, self.needs = problem, _possible(problem, needs)
        x = problem.x
        self.constant = x is not None and x.reps * x.run == 1 and problem.spec.centered and not problem.given and not problem.spec.mix
        steps = kernels(problem, launches, needs, dsum)
        sizes = {_cells(name): step.cells for step, _ in steps if isinstance(step, SumsLaunch) for name in self._summed(step)}
        if any(isinstance(step, BackwardLaunch) and step.reduce != step.apply for step, _ in steps):
            sizes |= dict.fromkeys(SET_SUMS, prod(problem.stat_shape))
        self.size = 0  # of the buffer, in float32 elements
        self.parts: dict[str, tuple[int, int]] = {}  # where each part of the buffer starts and ends
        for name, size in sizes.items():
            self.parts[name] = self.size, self.size + size
            self.size += -(-size // 4) * 4  # so that the next part is aligned
        order = {name: at for at, name in enumerate((*INPUTS, *GRADIENTS, *self.parts))}
        self.steps: list[_PreparedStep] = []
        for step, kernel in steps:
            operands = [self._operand(step, name) for name in kernel.pointers]
            applies = isinstance(step, BackwardLaunch) and step.apply
            self.steps.append(_PreparedStep(kernel, operands, applies, [order[name] for name in operands]))

    def _operand(self, step: Step, pointer: str) -> str:
        """The name of the operand that a pointer of a kernel takes."""
        if isinstance(step, SumsLaunch):
            name = NAMES[step.of][int(pointer[-1]) - 1]
            return _cells(name) if pointer.startswith("cells") else name if step.of == "sets" else f"d{name}"
        if pointer in SET_SUMS:
            return _cells(pointer) if not step.apply and _cells(pointer) in self.parts else pointer
        return _cells(pointer[1:]) if _cells(pointer[1:]) in self.parts else pointer

    def _summed(self, step: SumsLaunch) -> list[str]:
        """Which of its two sums a launch computes."""
        if step.of == "sets":
            return ["c1", "c2"] if self.problem.spec.centered else ["c2"]
        return [name for name in NAMES[step.of] if getattr(self.needs, name)]

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
        if self.constant:  # dx of a set of one element is 0, but wdy - c1 may not be, if the compiler rounds only one of them
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
                weights = self._by_tensors(stream, tensors, buffer, mixed, rstd)
            else:
                self._by_addresses(stream, tensors, buffer)
        return Gradients(dx, *grads, *weights)

    def _by_addresses(self, stream: Stream, tensors: Sequence[Tensor | None], buffer: Tensor | None) -> None:
        """Launch with the least host time.

        The dispatcher has checked that all tensors are on x's device and have memory.
        """
        addresses = [0 if t is None else t.data_ptr() for t in tensors]
        low = 0
        for address in addresses:
            low |= address
        aligned = low % ALIGNMENT == 0
        first = 0 if buffer is None else buffer.data_ptr()
        addresses += [first + 4 * start for start, _ in self.parts.values()]
        for step in self.steps:
            step.kernel.launch(stream, [addresses[place] for place in step.places], aligned)

    def _by_tensors(
        self, stream: Stream, tensors: Sequence[Tensor | None], buffer: Tensor | None, mixed: MixedStatistics | None, rstd: Tensor
    ) -> Sequence[Tensor | None]:
        """Launch with a mix between the sums and dx, or in Triton's interpreter.

        Returns the gradients of the mix's weights.
        """
        t: dict[str, Any] = dict(zip((*INPUTS, *GRADIENTS), tensors))
        t |= {name: buffer[start:end] for name, (start, end) in self.parts.items() if buffer is not None}
        weights: Sequence[Tensor | None] = (None, None)
        wanted = mixed is not None and (self.needs.x or self.needs.mean_weight or self.needs.var_weight)
        for step in self.steps:
            if mixed is not None and wanted and step.applies:
                t["c1"], t["c2"], *weights = self._mixed(mixed, t["c1"], t["c2"], rstd)
                wanted = False
            step.kernel(stream, dict(zip(step.kernel.pointers, (t[name] for name in step.operands))))
        if mixed is not None and wanted:
            _, _, *weights = self._mixed(mixed, t["c1"], t["c2"], rstd)
        return weights

    def _mixed(self, mixed: MixedStatistics, c1: Tensor, c2: Tensor, rstd: Tensor) -> tuple[Tensor, ...]:
        """The sums c1 and c2 after the mix, and the gradients of the weights of the mix."""
        problem, count = self.problem, mixed.sets.count
        own = (c.as_strided(problem.stat_shape, problem.stat_stride, c.storage_offset()) / count for c in (c1, c2))
        c1, c2, *weights = mixed.gradient(*own, rstd)  # pyright: ignore[reportCallIssue]
        return laid_out(c1 * count, problem.stat_stride), laid_out(c2 * count, problem.stat_stride), *weights


def _cells(name: str) -> str:
    return f"{name} cells"


def _mix(problem: NormProblem, mean: Tensor | None, var: Tensor | None, saved: SavedTensors) -> MixedStatistics:
    assert problem.x is not None and mean is not None and var is not None
    count = problem.x.reps * problem.x.run
    return mix_statistics(problem.spec, problem.shape, Moments(count, mean, var * count), saved)
