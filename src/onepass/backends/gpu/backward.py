"""Launchers of a backward on a GPU: functions from dy and the saved tensors to the gradients that are needed.

Programs store partial gradients of parameters, called cells. A later launch adds them up.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from onepass.backends.family import Backward, Launches
from onepass.backends.gpu.launch.chain import Chain
from onepass.backends.gpu.launch.chain import Step as ChainStep
from onepass.backends.gpu.launch.kernel import Kernel, dense
from onepass.backends.gpu.launch.signature import ALIGNMENT
from onepass.backends.gpu.launch.stream import allocate, current_device
from onepass.backends.gpu.partials.gradient import PARAMETERS, BackwardLaunch, BackwardOptions, needs_set_sums
from onepass.backends.gpu.partials.parameters import maps
from onepass.backends.gpu.partials.sums import NAMES, JointSums, SumsLaunch, parts_of
from onepass.core.operands import Gradients, Needs, SavedTensors
from onepass.core.problem import NormProblem
from onepass.core.view import laid_out

from .arguments import statistic
from .forward import counters_for, why_not_launchable
from .mix.launch import MixingLaunch, MixWeightsLaunch, operand_names, operands_of, workspace_sizes

SET_SUMS = NAMES["sets"]  # c1 and c2

WEIGHTS = "mean_weight", "var_weight"  # of a mix

Step = BackwardLaunch | SumsLaunch | JointSums | MixingLaunch

ALL = Needs(*[True] * len(Needs._fields))


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
    """Return the launches that these gradients need, each with its kernel.

    They overlap by programmatic dependent launch (PDL) if the launches of the plan do.
    """
    needs = _possible(problem, needs)
    wanted = {"param": needs.weight or needs.bias, "modulation": needs.scale or needs.shift, "sets": needs_set_sums(problem, needs)}
    sums = [part for step in launches for part in parts_of(step)]
    passes = [step for step in launches if isinstance(step, BackwardLaunch)]
    writer = next((step for step in passes if step.segments), passes[0])  # stores the partial gradients (cells) of parameters
    assert all(any(step.of == of for step in sums) for of, _ in maps(problem, writer.walk)), "no launch adds up the cells of a parameter"
    single = frozenset(name for step in sums if not step.needed for name in NAMES[step.of])
    kept: list[tuple[Step, BackwardOptions]] = []
    for step in launches:
        options = BackwardOptions(needs, dsum, step is writer and (wanted["param"] or wanted["modulation"]), single)
        if parts := parts_of(step):
            used = [part for part in parts if wanted[part.of] and part.needed]
            step = step if len(used) == len(parts) else next(iter(used), step)
        elif isinstance(step, MixWeightsLaunch):
            used = needs.mean_weight or needs.var_weight
        elif isinstance(step, MixingLaunch):
            used = wanted["sets"] or not step.on_gradients
        else:
            used = options.writes_cells or (step.apply and needs.x) or (step.reduce and wanted["sets"])
        kept += [(step, options)] if used else []
    if any(step.pdl_trigger for step in launches):
        last = len(kept) - 1
        kept = [(replace(step, pdl_trigger=at < last, pdl_wait=at > 0), options) for at, (step, options) in enumerate(kept)]
    return [(step, step.kernel(problem, options)) for step, options in kept]


def check_launchable(problem: NormProblem, launches: Launches, device: torch.device) -> str:
    """Return why programs that wait for each other cannot run here, or why a kernel in Gluon cannot be compiled here, or "".

    Such kernels are compiled to find out, for all gradients.
    """
    experimental = launches[0].experimental
    if not (experimental or launches[0].cooperative):
        return ""
    checked = [kernel for _, kernel in kernels(problem, launches, ALL) if kernel.cooperative or experimental]
    return why_not_launchable(checked, experimental, device)


def aligned(launches: Launches, t: Tensor) -> Tensor:
    """Return t, or a copy at a multiple of 16 bytes if the launches copy it by descriptor."""
    return t.clone() if launches[0].experimental and t.data_ptr() % ALIGNMENT else t


def _possible(problem: NormProblem, needs: Needs) -> Needs:
    """`needs`, without the operands that the problem does not have."""
    there = (problem.dtype, problem.weight, problem.bias, problem.scale, problem.shift, problem.spec.mix, problem.spec.mix)
    return Needs(*(bool(needed and operand) for needed, operand in zip(needs, there)))


class _Steps(NamedTuple):
    """The kernels that compute some gradients, with the names of their tensors."""

    steps: list[ChainStep]
    workspace: dict[str, int]  # the sizes of cells, and of the sums of sets if one launch passes them to another
    gradients: list[str]


def steps_of(problem: NormProblem, launches: Launches, needs: Needs, dsum: bool) -> _Steps:
    made, needs = kernels(problem, launches, needs, dsum), _possible(problem, needs)
    summed = [(part, name) for step, _ in made for part in parts_of(step) for name in _summed(problem, part, needs)]
    sizes = {_cells(name): step.cells for step, name in summed}
    if any(isinstance(step, BackwardLaunch) and step.reduce != step.apply for step, _ in made):
        sizes |= dict.fromkeys(SET_SUMS, prod(problem.stat_shape))
    if parts := sum(step.partial_sums for step, _ in made if isinstance(step, BackwardLaunch)):
        sizes["parts"] = parts
    sizes |= workspace_sizes(problem)
    steps = [ChainStep(kernel, [*kernel.descriptors, *(_operand(step, name, sizes) for name in kernel.pointers)]) for step, kernel in made]
    gradients = [f"d{name}" for name in ("x", *PARAMETERS, *WEIGHTS) if getattr(needs, name)]
    return _Steps(steps, sizes, gradients)


def _operand(step: Step, pointer: str, workspace: Mapping[str, int]) -> str:
    """Return the name of the tensor that a pointer of a kernel gets."""
    if isinstance(step, (SumsLaunch, JointSums)):
        parts = parts_of(step)
        part, number = divmod(int(pointer[-1]) - 1, 2)  # cells1, cells2, sum1 and sum2 belong to the first part
        name = NAMES[parts[part].of][number]
        return _cells(name) if pointer.startswith("cells") else name if parts[part].of == "sets" else f"d{name}"
    if isinstance(step, MixingLaunch):
        return pointer
    if pointer in SET_SUMS and not step.apply:
        return _cells(pointer) if _cells(pointer) in workspace else pointer
    if pointer in ("mean", *SET_SUMS):
        return f"mixed_{pointer}" if f"mixed_{pointer}" in workspace else pointer
    return _cells(pointer[1:]) if _cells(pointer[1:]) in workspace else pointer


def _summed(problem: NormProblem, step: SumsLaunch, needs: Needs) -> list[str]:
    """Return the names of the sums that a launch computes: at most two."""
    if step.of == "sets":
        return ["c1", "c2"] if problem.spec.centered else ["c2"]
    return [name for name in NAMES[step.of] if getattr(needs, name)]


def _cells(name: str) -> str:
    return f"{name} cells"


def has_sets_of_one(problem: NormProblem) -> bool:
    """Return whether a set is one element. Then dx is 0, but wdy - c1 may not be 0 if the compiler rounds only one of them."""
    x = problem.x
    return x is not None and x.reps * x.run == 1 and problem.spec.centered and not problem.given and not problem.spec.mix


def new_gradient(param: Tensor) -> Tensor:
    return allocate(tuple(param.shape), param.stride(), param.dtype)


class _Run:
    """The launches that compute the gradients of `needs`.

    A call allocates these gradients, and one workspace for cells and for the sums of sets.
    """

    def __init__(self, problem: NormProblem, launches: Launches, needs: Needs, dsum: bool) -> None:
        self.problem, self.launches, self.needs, self.constant = problem, launches, _possible(problem, needs), has_sets_of_one(problem)
        steps, workspace, gradients = steps_of(problem, launches, needs, dsum)
        own = [*["mean"] * (problem.spec.centered and not problem.from_y), *["var"] * bool(problem.spec.mix), "rstd"]
        inputs = ["x", "dy", *["dsum"] * dsum, *(name for name in PARAMETERS if getattr(problem, name)), *own, *operand_names(problem)]
        self.chain = Chain(steps, inputs, [*gradients, *["counters"] * bool(launches[0].counters)], workspace)

    def __call__(self, dy: Tensor, dsum: Tensor | None, saved: SavedTensors) -> Gradients:
        x, weight, bias, mean, rstd, var, scale, shift = saved[:8]
        problem, device = self.problem, x.get_device()
        if device != current_device():
            with torch.cuda.device(device):
                return self(dy, dsum, saved)
        mean, var, rstd = statistic(mean, problem), statistic(var, problem), statistic(rstd, problem)
        if self.constant and rstd is not None:
            rstd = torch.zeros_like(rstd)
        x = laid_out(x, problem.y_stride) if problem.copied else x
        dy, dsum = laid_out(dy, problem.y_stride), None if dsum is None else laid_out(dsum, problem.y_stride)
        x, dy = aligned(self.launches, x), aligned(self.launches, dy)
        params = [dense(t) for t in (weight, bias, scale, shift)]
        own = None if problem.from_y else mean, var, rstd
        inputs = [*[t for t in (x, dy, dsum, *params, *own) if t is not None], *operands_of(problem, saved)]
        grads = self._gradients(params, saved)
        outputs = [t for t in grads if t is not None]
        self.chain.launch(device, inputs, [*outputs, *counters_for(self.launches, device)])
        weights = (t if t is None or w is None else t.to(w.dtype) for t, w in zip(grads[5:], (saved.mean_weight, saved.var_weight)))
        return Gradients(*grads[:5], *weights)

    def _gradients(self, params: Sequence[Tensor | None], saved: SavedTensors) -> list[Tensor | None]:
        """Return new tensors for dx and the gradients of the parameters and of the weights of a mix; None for those not needed."""
        problem, needs = self.problem, self.needs
        grads: list[Tensor | None] = [allocate(problem.shape, problem.y_stride, problem.dtype) if needs[0] else None]
        for param, needed in zip(params, needs[1:5]):
            grads.append(new_gradient(param) if needed and param is not None else None)
        for weight, needed in zip((saved.mean_weight, saved.var_weight), needs[5:7]):
            grads.append(allocate((len(weight),), (1,), torch.float32) if needed and weight is not None else None)
        return grads
