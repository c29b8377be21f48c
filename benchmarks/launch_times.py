"""Times of a problem's forward by given launches, on this GPU: a common part of fit.py and variants.py."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from onepass.backends.family import Launches
from onepass.bench import timing
from onepass.bench.suite import Row, problem_of
from onepass.core.operands import NO_OPTIONAL
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
    target = torch.empty_like(operands.x)
    with timing.capturable_stream("cuda"):
        copy, *times = timing.device_times([partial(target.copy_, operands.x), *(timing.capture(run)[0] for run in runs)], 12)
    return copy.median * 1e6, [time.median * 1e6 for time in times]
