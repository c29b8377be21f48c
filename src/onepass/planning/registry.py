"""The kernel families: what each can do, its reasons where it cannot, and what it would cost.

A family is data: a name, the module that runs it, `unsupported` and `cost`. A new one joins by standing in FAMILIES; no caller changes. Its
module is imported on first use and offers `forward` and `backward` (and `infer`, if it knows a shorter way to y alone), each of which takes
a Plan and a NormProblem and returns a callable on tensors. The callable is kept for calls of the same kind; that parameters are on x's
device is for it to notice.

A GPU family is a walk and a residency: `row` and `tile` keep a set in one program and read x once, `alone` does too or shares it among
several that run at the same time, as `team` and `ring` do, `row_reread` and `tile_reread` read it twice, whatever its size, `apply` has its
statistics given.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod

import torch

from onepass.backends.gpu import tiling, tiling_alone, tiling_backward, tiling_ring, tiling_team
from onepass.backends.gpu.tiling import Pass
from onepass.backends.gpu.tiling_backward import Step
from onepass.core.device import Device
from onepass.core.problem import NormProblem
from onepass.core.view import contiguous_stride

FORWARD, BACKWARD = "forward", "backward"


Cost = Callable[[NormProblem, Device, str, bool], float]  # microseconds, roughly: only their order counts


Passes = Callable[[NormProblem, Device, bool], tuple[Step, ...]]  # the last: see plan.batch_invariant


@dataclass(frozen=True)
class Family:
    name: str
    what: str  # in words
    module: str  # relative to onepass
    unsupported: Callable[[NormProblem, Device, str], list[str]]
    cost: Cost
    variant: Callable[[NormProblem], str] = lambda problem: ""
    passes: Passes = lambda problem, device, invariant: ()
    back: Passes = lambda problem, device, invariant: ()  # as `passes`, of the backward
    module_back: str = ""  # where `backward` is, if not in `module`

    def steps(self, problem: NormProblem, device: Device, direction: str, invariant: bool) -> tuple[Step, ...]:
        return (self.back if direction == BACKWARD else self.passes)(problem, device, invariant)


def aten_variant(problem: NormProblem) -> str:
    """Which of torch's kernels computes this view and parameter map: "rows", "row_groups", "channels", "given"; "" for none."""
    x, p = problem.x, problem.param
    if x is None or p is None:
        return ""
    if any(size > 1 and stride != dense for size, stride, dense in zip(x.sizes, x.strides, contiguous_stride(x.sizes))):
        return ""
    if x.outer == 1 and x.sets > 1 and (p.a, p.b, p.c, p.d) == (0, 0, 1, 0):
        return "given" if problem.given else "channels"
    if problem.given or x.reps > 1 or x.sets > 1:
        return ""
    if not problem.affine or (p.a == 0 and problem.param_size == x.run):
        return "rows"
    per_row = p.per_row(x)
    grouped = p.every == 1 and p.a == (per_row if p.period > 1 else 0) and p.d == (1 if per_row > 1 else 0)
    return "row_groups" if grouped and problem.spec.centered else ""


def _aten(problem: NormProblem, device: Device, direction: str) -> list[str]:
    """torch's own kernels, where they meet the error budget. The budget was measured on 2026-11-15, torch 2.13, x86-64."""
    if device.kind != "cpu":
        return [f"torch's kernels were held against the error budget on the CPU only, this is {device.kind}"]
    if problem.x is None:
        return [_no_view(problem)]
    if problem.spec.mix:
        return ["none of torch's kernels mixes the statistics of several norms"]
    variant = aten_variant(problem)
    p = problem.param
    if not variant and p and problem.x.reps > 1 and (p.a, p.b, p.c) == (0, 0, problem.x.run) and not problem.given:
        return ["torch's channels-last kernel takes E[x²] - E[x]²: 27000 times the error budget where the mean is 10⁴·std"]
    if not variant:
        return ["none of torch's kernels walks this view with this parameter map"]
    half = problem.dtype in (torch.float16, torch.bfloat16) and not problem.tail  # with a tail the kernel sees a float32 copy
    reasons = []
    if variant == "channels":
        if problem.x.run == 1:
            reasons.append("torch's channels-last batch statistics exceed the error budget (8.8x in float32)")
        if problem.dtype == torch.float64:
            reasons.append("torch sums float64 batch statistics one by one, beyond the error budget (4.4x at 540800 values)")
        if half:
            reasons.append("torch's half-type batch statistics exceed the error budget (1.7x with float32 parameters)")
        if prod(problem.shape) == problem.x.sets:
            reasons.append("torch hands out the unbiased variance, and one value per set has none")
    elif problem.track:
        reasons.append("torch's row kernels hand out rstd, not the variance that running statistics need")
    if variant in ("rows", "row_groups") and not problem.spec.eps:
        reasons.append("without an eps, torch's row kernels make NaN of a constant set, where its batch_norm has 0")
    if direction == BACKWARD and variant == "rows" and half:
        reasons.append("torch's half-type parameter gradients exceed the error budget (over 1000x)")
    if direction == BACKWARD and problem.addends and half:
        reasons.append("torch rounds dx to the half type before the gradient of the sum is added")
    if direction == BACKWARD and not problem.spec.centered:
        reasons.append("torch has no CPU kernel for the backward of rows without a mean")
    if direction == BACKWARD and variant == "given":
        reasons.append("torch's backward by given statistics needs the variance, and rstd is what is saved")
    if direction == BACKWARD and problem.from_y:
        reasons.append("torch's backward takes x, and y is what is saved")
    return reasons


def _native(problem: NormProblem, device: Device, direction: str) -> list[str]:
    if device.no_c:
        return [device.no_c]
    if problem.x is None:
        return [_no_view(problem)]
    if problem.acc == torch.float64:
        return ["C kernels compute in float32, and float64 asks for more"]
    known = (None, torch.float32, torch.bfloat16, torch.float16)
    dtypes = (problem.dtype, problem.weight, problem.bias, problem.scale, problem.shift, *(problem.addends or ()))
    return [f"C kernels know no {dtype}" for dtype in dict.fromkeys(dtypes) if dtype not in known]


def _formula(problem: NormProblem, device: Device, direction: str) -> list[str]:
    return [] if problem.x is not None else [_no_view(problem)]


def _no_view(problem: NormProblem) -> str:
    return "x has no elements" if 0 in problem.shape else f"no four-axis view of strides {problem.stride}"


def _reference(problem: NormProblem, device: Device, direction: str) -> list[str]:
    return []


def _triton(problem: NormProblem, device: Device, direction: str) -> list[str]:
    """What no GPU family can do."""
    if device.no_triton:
        return [device.no_triton]
    if problem.x is None:
        return [_no_view(problem)]
    reasons = []
    if problem.acc == torch.float64:
        reasons.append("kernels compute in float32, and float64 asks for more")
    if not problem.spec.eps and not problem.given:
        reasons.append("without an eps, a constant set needs a mean without rounding, which kernels do not take")
    return reasons


def _resident(problem: NormProblem, device: Device, direction: str) -> list[str]:
    """What no family can do that reads x from memory once."""
    if problem.spec.mix:
        return [*_reread(problem, device, direction), "a mix needs the statistics of all sets before it applies any"]
    return _reread(problem, device, direction)


def _row(problem: NormProblem, device: Device, direction: str) -> list[str]:
    reasons, x = _resident(problem, device, direction), problem.x
    if reasons or x is None:
        return reasons
    if x.reps > 1:
        return [f"a set is {x.reps} runs, and a row is one"]
    longest = tiling_backward.LONGEST_ROW if direction == BACKWARD else tiling.LONGEST_ROW
    if x.run > longest:
        return [f"a row of {x.run} is longer than the {longest} that one program keeps"]
    return tiling_backward.row_cannot(problem, device) if direction == BACKWARD else []


def _tile(problem: NormProblem, device: Device, direction: str) -> list[str]:
    reasons, x = _resident(problem, device, direction), problem.x
    if reasons or x is None:
        return reasons
    if x.reps == 1:
        return ["a set is one run: there is nothing to read across"]
    size, largest = tiling.tile_size(problem), tiling.LARGEST_TILE
    if direction == BACKWARD:
        size, largest = tiling_backward.tile_size(problem), tiling_backward.LARGEST_TILE
    if size > largest:
        return [f"sets of {x.reps} x {x.run} are larger than the {largest} elements that one program keeps"]
    return tiling_backward.tile_cannot(problem, device) if direction == BACKWARD else []


def _shared(cannot: Callable[[NormProblem, Device], list[str]]) -> Callable[[NormProblem, Device, str], list[str]]:
    """Of the families whose programs share a set."""

    def unsupported(problem: NormProblem, device: Device, direction: str) -> list[str]:
        if direction == BACKWARD:
            return ["its backward is not built yet"]
        return _resident(problem, device, direction) or cannot(problem, device)

    return unsupported


def _reread(problem: NormProblem, device: Device, direction: str) -> list[str]:
    """What no family can do that takes statistics."""
    reasons = _triton(problem, device, direction)
    return reasons or (["the statistics are given: there is nothing to reduce"] if problem.given else [])


def _row_reread(problem: NormProblem, device: Device, direction: str) -> list[str]:
    reasons = _reread(problem, device, direction)
    return reasons or (tiling_backward.row_reread_cannot(problem, device) if direction == BACKWARD else [])


def _tile_reread(problem: NormProblem, device: Device, direction: str) -> list[str]:
    reasons, x = _reread(problem, device, direction), problem.x
    if not reasons and x is not None and x.reps == 1:
        return ["a set is one run: there is nothing to reduce across"]
    return reasons or (tiling_backward.tile_reread_cannot(problem, device) if direction == BACKWARD else [])


def _apply(problem: NormProblem, device: Device, direction: str) -> list[str]:
    reasons = _triton(problem, device, direction)
    if not reasons and not problem.given:
        return ["the statistics are not given"]
    return reasons or (tiling_backward.apply_cannot(problem, device) if direction == BACKWARD else [])


def _torch_cost(passes: float) -> Cost:
    """Of chained torch operations: so many times the bytes that must be moved."""

    def cost(problem: NormProblem, device: Device, direction: str, invariant: bool) -> float:
        return 10 * passes + passes * problem.min_bytes(direction) / (1e4 if device.kind == "cpu" else 3e6)

    return cost


def _triton_cost(passes: Passes, back: Passes, *walks: str) -> Cost:
    """x, in a backward dy too, is read once for each kernel that reduces or applies, through the lines of memory that the walk touches, and
    one tensor is written once."""

    def cost(problem: NormProblem, device: Device, direction: str, invariant: bool) -> float:
        if device.kind == "cpu":  # Triton's interpreter, for tests: never but where it is pinned
            return float("inf")
        steps, tensors = (back, 2) if direction == BACKWARD else (passes, 1)
        steps = steps(problem, device, invariant)
        reads = sum(step.reduce + step.apply - step.resident for step in steps if isinstance(step, Pass))
        used = max(tiling.used(problem, walk) for walk in walks)
        if direction != BACKWARD and isinstance(steps[0], Pass) and steps[0].resident:
            used *= tiling.filled(steps[0]) * (0.5 if tiling.divides(problem) else 1.0)
        traffic = (tensors * reads + 1) / (tensors + 1) / used
        if invariant:  # the choice must not depend on how much there is
            return traffic / 1e3
        launches = sum(isinstance(step, Pass) or not step.none for step in steps)
        return 3 * launches + problem.min_bytes(direction) * traffic / 3e6

    return cost


def _gpu(name: str, what: str, unsupported: Callable[[NormProblem, Device, str], list[str]], *walks: str) -> Family:
    passes, back = getattr(tiling, name), getattr(tiling_backward, name)
    return Family(
        name,
        what,
        "backends.gpu.forward",
        unsupported,
        _triton_cost(passes, back, *walks),
        lambda _: "",
        passes,
        back,
        "backends.gpu.backward",
    )


# Of equal cost, the first runs.
FAMILIES = (
    Family("c", "C kernels, set by set or row by row, while they are in the cache", "backends.c.launch", _native, _torch_cost(0.5)),
    Family("aten", "torch's own kernel on the view", "backends.torch_ops.aten", _aten, _torch_cost(1), aten_variant),
    _gpu("row", "programs keep whole sets, each one run: x is read once", _row, tiling.ROW),
    _gpu("tile", "programs keep whole sets and read across them: x is read once", _tile, tiling.TILE),
    Family(
        *(
            "whole_set",
            "programs take one set at a time, large ones by several that run at the same time: x is read once",
            "backends.gpu.forward",
        ),
        *(_shared(tiling_alone.alone_cannot), lambda problem, device, _, invariant: tiling_alone.alone_cost(problem, device, invariant)),
        passes=tiling_alone.alone,
    ),
    Family(
        *("ring", "programs that run at the same time share sets and keep them in shared memory: x is read once", "backends.gpu.forward"),
        *(_shared(tiling_ring.ring_cannot), lambda problem, device, _, invariant: tiling_ring.ring_cost(problem, device, invariant)),
        passes=tiling_ring.ring,
    ),
    Family(
        *("team", "programs that run at the same time share sets and read across them, x from memory once", "backends.gpu.forward"),
        *(_shared(tiling_team.team_cannot), lambda problem, device, _, invariant: tiling_team.team_cost(problem, device, invariant)),
        passes=tiling_team.team,
    ),
    _gpu("apply", "the statistics are given: x is read once", _apply, tiling.ROW, tiling.TILE),
    _gpu("row_reread", "sets are read along their runs, twice, large ones by several programs", _row_reread, tiling.ROW),
    _gpu("tile_reread", "programs read across sets, once to reduce and once to apply", _tile_reread, tiling.TILE),
    Family(
        "blockwise",
        "reduce, combine and apply by torch operations on the view, block by block",
        "backends.torch_ops.blockwise",
        _formula,
        _torch_cost(8),
    ),
    Family("reference", "the definition on logical axes", "backends.torch_ops.reference", _reference, _torch_cost(20)),
)
