"""Times of a problem's forward or backward by given launches, on this GPU: a common part of fit.py, variants.py and shared_backward.py."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from onepass.backends.family import BACKWARD, Launches
from onepass.bench import timing
from onepass.bench.suite import Row, problem_of
from onepass.core.device import Device
from onepass.core.operands import NO_OPTIONAL, Gradients, Needs, SavedTensors
from onepass.core.problem import NormProblem
from onepass.planning.choose import plan
from onepass.verify import tensors

CLOSE = 2.0**-5  # the largest difference between the results of two launches, for numbers of size 1


def launch_times(row: Row, choices: Sequence[Launches], names: Sequence[str]) -> tuple[float, list[float]]:
    """Return the microseconds of a copy of x, and of a forward by each choice of launches.

    The choices run in turn. Raise RuntimeError if the result of a choice differs from the result of the first.
    """
    from onepass.backends.gpu import forward

    problem, operands = problem_of(row), tensors.make(row.case, row.dtype, "cuda", on_device=True)
    runs = []
    for launches in choices:
        run = forward.forward(problem, launches, row.case.running)
        runs.append(partial(run, operands.x, operands.weight, operands.bias, None, None, NO_OPTIONAL))
    first = runs[0]().y.float()
    for name, run in zip(names[1:], runs[1:]):
        off = ((run().y.float() - first).abs() / (1 + first.abs())).max().item()
        if not off < CLOSE:
            raise RuntimeError(f"{row.name}: the result of {name} differs from {names[0]} by {off:.3g}")
    with timing.capturable_stream("cuda"):
        return times_of(operands.x, runs, 12)


def backward_launch_times(row: Row, choices: Sequence[Launches], names: Sequence[str], device: Device) -> tuple[float, list[float]]:
    """Return the microseconds of a copy of x, and of a backward by each choice of launches, with those that add up its cells.

    The choices run in turn. Raise RuntimeError if the gradients of a choice differ from those of the planner's launches.
    """
    planned = plan(problem_of(row), device, BACKWARD).launches
    with torch.no_grad(), timing.capturable_stream("cuda"):
        x, (reference, *runs) = backward_runs(row, [planned, *choices], device)
        expected = reference()
        for name, run in zip(names, runs):
            off = distance(run(), expected)
            if not off < CLOSE:
                raise RuntimeError(f"{row.name}: the gradients of {name} differ from those of the planner's launches by {off:.3g}")
        return times_of(x, runs, 12)


def backward_runs(row: Row, choices: Sequence[Launches], device: Device) -> tuple[Tensor, list[partial[Gradients]]]:
    """Return x, and calls that run its backward by each choice of launches. Use it inside `timing.capturable_stream`."""
    from onepass.backends.gpu import backward, forward

    problem, operands = problem_of(row), tensors.make(row.case, row.dtype, "cuda", on_device=True)
    dy = tensors.make_dy(operands, on_device=True)
    run = forward.forward(problem, plan(problem, device).launches)
    result = run(operands.x, operands.weight, operands.bias, None, None, NO_OPTIONAL)
    saved = SavedTensors(operands.x, operands.weight, operands.bias, result.mean, result.rstd)
    needs = needs_of(problem)
    return operands.x, [partial(backward.backward(problem, launches), dy, None, saved, needs) for launches in choices]


def needs_of(problem: NormProblem) -> Needs:
    return Needs(True, problem.weight is not None, problem.bias is not None)


def distance(found: Gradients, expected: Gradients) -> float:
    """Return the largest difference between two gradients, divided by the largest number of that gradient."""
    return max(_distance(a, b) for a, b in zip(found, expected) if a is not None and b is not None)


def _distance(a: Tensor, b: Tensor) -> float:
    return ((a.float() - b.float()).abs().max() / b.float().abs().max()).item()


def times_of(x: Tensor, runs: Sequence[Callable[[], Any]], samples: int) -> tuple[float, list[float]]:
    """Return the microseconds of a copy of x, and of each run in a graph. Use it inside `timing.capturable_stream`."""
    target = torch.empty_like(x)
    copy, *times = timing.device_times([partial(target.copy_, x), *(timing.capture(run)[0] for run in runs)], samples)
    return copy.median * 1e6, [time.median * 1e6 for time in times]
