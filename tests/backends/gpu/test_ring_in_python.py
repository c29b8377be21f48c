"""The ring kernel, run in Python (gluon_in_python.py): how it cuts sets and exchanges moments, with few programs and few slots."""

from dataclasses import replace
from math import ceil, prod

import pytest
import torch

pytest.importorskip("triton.experimental.gluon")

from onepass.backends.gpu import forward
from onepass.bench.suite import Row, problem_of
from onepass.core.device import KNOWN_DEVICES
from onepass.planning.choose import plan
from onepass.planning.options import Options
from onepass.verify import oracle, tensors
from onepass.verify.cases import Case

from . import gluon_in_python

HALF, BFLOAT, FULL = torch.float16, torch.bfloat16, torch.float32
SMALL = replace(KNOWN_DEVICES["h200"], sms=10)  # few programs, so that each has several units
LAST = "channels_last"

PROBLEMS = [
    (Case("group_norm", (5, 64, 20, 20), LAST, groups=8, activation="silu"), HALF),
    (Case("group_norm", (3, 60, 21, 19), LAST, groups=6), FULL),  # the tiles of a unit share sets
    (Case("group_norm", (4, 96, 13, 17), LAST, groups=32, affine="weight"), BFLOAT),  # rows that do not fill blocks
    (Case("group_norm", (3, 64, 40, 40), LAST, groups=1, init="shifted"), HALF),
    (Case("instance_norm", (6, 72, 13, 13), LAST), BFLOAT),  # each column is a set
    (Case("instance_norm", (5, 40, 20, 20), LAST, init="shifted"), FULL),
    (Case("instance_norm", (3, 8, 30, 30), LAST, affine="none"), HALF),
    (Case("batch_norm", (6, 72, 13, 13), LAST), BFLOAT),
    (Case("batch_norm", (5, 40, 20, 20), LAST, init="shifted"), FULL),
    (Case("batch_norm", (9, 200, 10, 10), LAST), HALF),
    (Case("layer_norm2d", (3, 200, 20, 20)), FULL),  # and each row has parameters
    (Case("layer_norm2d", (5, 96, 20, 22), activation="silu"), BFLOAT),
    (Case("layer_norm2d", (4, 130, 8, 9), modulate=True, affine="none"), HALF),
    (Case("batch_norm", (100, 5, 28, 28)), HALF),  # each unit is a set
    (Case("batch_norm", (70, 5, 20, 22), affine="weight"), BFLOAT),
    (Case("batch_norm", (90, 3, 36, 40)), FULL),
    (Case("batch_norm", (200, 7, 8, 9)), BFLOAT),
    (Case("group_norm", (4, 320, 13, 13), LAST, groups=4, activation="silu"), HALF),
    (Case("group_norm", (4, 200, 17, 17), LAST, groups=1), HALF),
    (Case("group_norm", (3, 96, 30, 30), LAST, groups=1), FULL),
    (Case("group_norm", (8, 256, 16, 16), LAST, groups=4, modulate=True), BFLOAT),
    (Case("group_norm", (20, 320, 8, 8), LAST, groups=32), HALF),
    (Case("group_norm", (2, 32, 64, 64), groups=2, activation="silu"), HALF),  # from here on, a set is one long run
    (Case("group_norm", (2, 24, 64, 48), groups=2, affine="bias"), FULL),
    (Case("group_norm", (3, 32, 40, 40), groups=1, modulate=True), BFLOAT),
    (Case("layer_norm", (5, 32776), activation="silu"), HALF),
    (Case("layer_norm", (3, 33000), init="shifted"), FULL),
    (Case("layer_norm", (9, 33001)), BFLOAT),  # runs begin between multiples of 16 bytes
    (Case("layer_norm", (1, 65535), affine="none", wide=True), HALF),
    (Case("rms_norm", (3, 33002), modulate=True), HALF),
]
EVERY_PROBLEM = pytest.mark.parametrize("case, dtype", PROBLEMS, ids=lambda value: value.name if isinstance(value, Case) else str(value))


def flat(t):
    return t.detach().as_strided((1 + sum((n - 1) * step for n, step in zip(t.shape, t.stride())),), (1,))


def _check(case, dtype, launch, problem):
    """Run a launch, and compare y with float64. All statistics must be stored, and all counters must be 0 again."""
    operands = tensors.make(case, dtype, "cpu")
    (kernel,) = forward.kernels(problem, (launch,))
    sets = prod(problem.stat_shape)
    given = {"x": operands.x, "weight": operands.weight, "bias": operands.bias, "scale": operands.scale, "shift": operands.shift}
    memory = {name: flat(t.contiguous() if name != "x" else t) for name, t in given.items() if t is not None}
    memory |= {name: torch.full((n,), torch.nan) for name, n in (("mean", sets), ("rstd", sets), ("parts", launch.partial_moments))}
    memory |= {"y": torch.full((operands.x.numel(),), torch.nan, dtype=dtype), "counters": torch.zeros(launch.counters, dtype=torch.int32)}
    gluon_in_python.run(kernel, memory)
    y = memory["y"].as_strided(problem.shape, problem.y_stride)
    exact = oracle.exact(case, operands, tensors.make_dy(operands))
    error = ((y.double() - exact.value.y).abs() / exact.allowed.y).max().item()
    assert error <= 1, f"{error:.3g} of the error budget"
    assert not memory["counters"].any() and not memory["rstd"].isnan().any()


def _planned(case, dtype):
    problem = problem_of(Row(case, dtype))
    (launch,) = plan(problem, SMALL, options=Options("ring")).launches
    return problem, launch


@EVERY_PROBLEM
def test_as_planned(case, dtype):
    problem, launch = _planned(case, dtype)
    _check(case, dtype, launch, problem)


@EVERY_PROBLEM
def test_few_slots(case, dtype):
    """Slots are refilled at once, and some blocks of a unit are read again. A team has one to three programs."""
    problem, launch = _planned(case, dtype)
    number = PROBLEMS.index((case, dtype))
    members, keep = min(1 + number % 3, ceil(launch.walk.reps / launch.block_i)), (2, 5)[number % 2]
    cut = replace(launch, members=members, programs=max(min(4 // members, launch.units), 1) * members, slots=5, keep=keep, back=3)
    _check(case, dtype, replace(cut, keep=5, back=0) if cut.blocks <= 5 else cut, problem)


def test_a_member_without_elements():
    """Each member has one block of a run. The last one has no element of the first run, which is read from its own start."""
    case = Case("layer_norm", (3, 36863))
    problem, launch = _planned(case, BFLOAT)
    launch = replace(launch, block_i=64)
    rows = ceil(launch.walk.reps / launch.block_i)
    assert launch.phases == 8 and launch.walk.folded <= (rows - 1) * launch.block_i * launch.block_j
    _check(case, BFLOAT, replace(launch, members=rows, programs=rows, tiles=1, sets=1, kept=False), problem)


def test_unset_memory_and_accesses_beyond_a_tensor_are_noticed(monkeypatch):
    problem, launch = _planned(*PROBLEMS[0])
    monkeypatch.setattr(gluon_in_python.Matrix, "copy", lambda *_: None)  # shared memory stays nan
    with pytest.raises(AssertionError, match="of the error budget"):
        _check(*PROBLEMS[0], launch, problem)
    with pytest.raises(AssertionError, match="beyond the end"):
        gluon_in_python.store(gluon_in_python.Pointer(torch.zeros(4), torch.arange(5)), 1.0)
