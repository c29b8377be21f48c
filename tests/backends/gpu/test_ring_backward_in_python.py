"""The backward kernel of ring, run in Python (gluon_in_python.py), with few programs and few slots."""

from dataclasses import replace
from math import ceil

import pytest
import torch

pytest.importorskip("triton.experimental.gluon")

from onepass.backends.family import BACKWARD
from onepass.backends.gpu import backward
from onepass.backends.gpu.partials.sums import parameter_sums
from onepass.bench.suite import Row, problem_of
from onepass.core import reference
from onepass.core.device import KNOWN_DEVICES
from onepass.planning.choose import plan
from onepass.planning.options import Options
from onepass.verify import calls, oracle, tensors
from onepass.verify.cases import Case

from . import gluon_in_python
from .test_ring_in_python import BFLOAT, FULL, HALF, LAST, flat

SMALL = replace(KNOWN_DEVICES["h200"], sms=10)  # few programs, so that each has several units

PROBLEMS = [
    (Case("group_norm", (5, 64, 20, 20), LAST, groups=8, activation="silu"), HALF),
    (Case("group_norm", (3, 60, 21, 19), LAST, groups=6), FULL),  # the tiles of a unit share sets
    (Case("group_norm", (4, 96, 13, 17), LAST, groups=32, affine="weight"), BFLOAT),  # rows that do not fill blocks
    (Case("group_norm", (3, 320, 12, 12), LAST, groups=32, activation="gelu"), HALF),
    (Case("group_norm", (8, 256, 16, 16), LAST, groups=4, modulate=True, activation="silu"), BFLOAT),
    (Case("group_norm", (3, 64, 40, 40), LAST, groups=4, init="shifted"), HALF),
    (Case("group_norm", (4, 64, 20, 20), LAST, groups=8, save="y"), HALF),
    (Case("instance_norm", (6, 72, 13, 13), LAST), BFLOAT),  # each column is a set
    (Case("instance_norm", (5, 40, 20, 20), LAST, init="shifted"), FULL),
    (Case("instance_norm", (3, 8, 30, 30), LAST, affine="none"), HALF),
    (Case("batch_norm", (6, 72, 13, 13), LAST), BFLOAT),
    (Case("batch_norm", (9, 200, 10, 10), LAST, activation="relu"), HALF),
]
EVERY_PROBLEM = pytest.mark.parametrize("case, dtype", PROBLEMS, ids=lambda value: value.name if isinstance(value, Case) else str(value))


def _planned(case, dtype):
    problem = problem_of(Row(case, dtype)).for_direction(BACKWARD)
    return problem, plan(problem, SMALL, BACKWARD, Options("ring")).launches


def _check(case, dtype, problem, launches):
    """Run the kernel, and compare dx and the sums of the cells with float64. All counters must be 0 again."""
    operands = tensors.make(case, dtype, "cpu")
    dy = tensors.make_dy(operands)
    exact, wide = oracle.exact(case, operands, dy), oracle.in_float64(operands)
    statistics = reference.forward(replace(calls.spec_of(case), activation=""), wide.x, None, None)
    x = exact.value.y.to(dtype) if problem.from_y else operands.x
    memory = {name: flat(t.contiguous()) for name in ("weight", "bias", "scale", "shift") if (t := getattr(operands, name)) is not None}
    memory |= {name: flat(t.contiguous(memory_format=torch.channels_last)) for name, t in (("x", x), ("dy", dy))}
    for name in ("mean", "rstd"):
        found = getattr(statistics, name).float().reshape(problem.stat_shape)
        memory[name] = flat(torch.empty_strided(problem.stat_shape, problem.stat_stride).copy_(found))
    steps, workspace, gradients, _ = backward.steps_of(problem, launches, backward.ALL, False)
    memory |= {name: torch.full((size,), torch.nan) for name, size in workspace.items()}
    likes = {f"d{name}": t for name in ("x", "weight", "bias", "scale", "shift") if (t := getattr(operands, name)) is not None}
    memory |= {name: torch.full((likes[name].numel(),), torch.nan, dtype=likes[name].dtype) for name in gradients}
    memory["counters"] = torch.zeros(launches[0].counters, dtype=torch.int32)
    kernel, names = steps[0]
    gluon_in_python.run(kernel, memory | {pointer: memory[name] for pointer, name in zip(kernel.pointers, names[2:])})
    assert not memory["counters"].any()
    w = launches[0].walk
    for name in gradients:
        actual = memory[name]
        if name == "dx":
            actual = actual.as_strided(problem.shape, problem.y_stride)
        elif f"{name[1:]} cells" in memory:  # axes (o, member, column), and columns are channels
            cells = memory[f"{name[1:]} cells"].reshape(w.outer, -1, w.columns)
            actual = (cells.sum((0, 1)) if name in ("dweight", "dbias") else cells.sum(1)).to(likes[name].dtype)
        ratio = oracle.error_ratio(actual.reshape(likes[name].shape), getattr(exact.value, name), getattr(exact.allowed, name))
        assert ratio <= 1, f"{name}: {ratio:.3g} of the error budget"


@EVERY_PROBLEM
def test_as_planned(case, dtype):
    _check(case, dtype, *_planned(case, dtype))


@EVERY_PROBLEM
def test_few_slots(case, dtype):
    """Slots are refilled at once. A team has one to three programs, or as many as a unit needs."""
    problem, (main, *_) = _planned(case, dtype)
    rows = ceil(main.walk.reps / main.block_i)
    members = min(max(1 + PROBLEMS.index((case, dtype)) % 3, ceil(main.tiles * rows / 12)), rows)
    blocks = main.tiles * ceil(rows / members)
    cut = replace(main, members=members, programs=max(min(4 // members, main.units), 1) * members, slots=max(blocks, 2))
    axes = [("o", cut.walk.outer), ("part", members), ("s", cut.walk.sets), ("t", cut.walk.run)]
    _check(case, dtype, problem, (cut, *parameter_sums(problem, axes, cut.walk, 1, SMALL)))
