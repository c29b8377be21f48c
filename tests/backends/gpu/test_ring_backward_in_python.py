"""The backward kernel of ring, run in Python (gluon_in_python.py), with few programs and few slots."""

import os
from dataclasses import replace
from math import ceil

import pytest
import torch

pytest.importorskip("triton.experimental.gluon")

from triton.backends.compiler import GPUTarget

from onepass.backends.family import BACKWARD
from onepass.backends.gpu import backward
from onepass.backends.gpu.partials.sums import NAMES
from onepass.backends.gpu.ring.launch_backward import BLOCKS, COLUMNS, ELEMENTS, SET
from onepass.backends.gpu.ring.schedule_backward import ring_backward_launches, ring_backward_unsupported, with_sums
from onepass.bench.suite import Row, problem_of
from onepass.core import reference
from onepass.core.device import KNOWN_DEVICES
from onepass.core.view import laid_out
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
    (Case("group_norm", (3, 128, 16, 16), LAST, groups=2, modulate=True, activation="silu"), BFLOAT),
    (Case("group_norm", (3, 64, 40, 40), LAST, groups=4, init="shifted"), HALF),
    (Case("group_norm", (4, 64, 20, 20), LAST, groups=8, save="y"), HALF),
    (Case("group_norm", (3, 320, 20, 20), LAST, groups=32, activation="silu"), HALF),  # units of 12 sets, and at last of 8
    (Case("group_norm", (5, 320, 15, 15), LAST, groups=16), BFLOAT),  # units of 6 sets, and at last of 4
    (Case("instance_norm", (6, 72, 13, 13), LAST), BFLOAT),  # each column is a set
    (Case("instance_norm", (5, 40, 20, 20), LAST, init="shifted"), FULL),
    (Case("instance_norm", (3, 8, 30, 30), LAST, affine="none"), HALF),
    (Case("batch_norm", (6, 72, 13, 13), LAST), BFLOAT),
    (Case("batch_norm", (9, 200, 10, 10), LAST, activation="relu"), HALF),
    (Case("batch_norm", (100, 5, 28, 28)), HALF),  # each unit is a set
    (Case("batch_norm", (70, 5, 20, 22), affine="weight", activation="silu"), BFLOAT),
    (Case("batch_norm", (90, 3, 20, 24)), FULL),
    (Case("batch_norm", (8, 4, 56, 56)), BFLOAT),  # few rows, and many blocks side by side; the last block is not full
    (Case("batch_norm", (8, 6, 40, 48), save="y"), FULL),
    (Case("batch_norm", (20, 7, 28, 28), activation="relu"), HALF),
    (Case("batch_norm", (16, 3, 64, 64)), FULL),  # all blocks are full
    (Case("batch_norm", (3, 5, 16, 20), affine="none"), HALF),
    (Case("batch_norm", (33, 4, 14, 14)), FULL),
    (Case("group_norm", (5, 256, 9, 11), LAST, groups=2, affine="none"), BFLOAT),  # a set has rows of other o below it
    (Case("group_norm", (2, 32, 64, 64), groups=2, activation="silu"), HALF),  # from here on, a set is one long run
    (Case("group_norm", (3, 8, 128, 64), groups=2, modulate=True), BFLOAT),
    (Case("instance_norm", (3, 2, 128, 160)), FULL),
    (Case("layer_norm", (5, 32768), activation="silu"), HALF),
    (Case("layer_norm", (3, 33024), init="shifted"), FULL),
    (Case("layer_norm", (9, 20480), affine="none"), BFLOAT),
    (Case("rms_norm", (7, 33024), offset=1.0), BFLOAT),
    (Case("rms_norm", (3, 24640), affine="none", activation="gelu"), HALF),
]


def over(problems):
    return pytest.mark.parametrize("case, dtype", problems, ids=lambda value: value.name if isinstance(value, Case) else str(value))


def _planned(case, dtype):
    problem = problem_of(Row(case, dtype)).for_direction(BACKWARD)
    assert not ring_backward_unsupported(problem, SMALL)
    return problem, ring_backward_launches(problem, SMALL, False)


def _check(case, dtype, problem, launches):
    """Run the kernel, and compare dx and the sums of the cells with float64. All counters must be 0 again."""
    operands = tensors.make(case, dtype, "cpu")
    dy = tensors.make_dy(operands)
    exact, wide = oracle.exact(case, operands, dy), oracle.in_float64(operands)
    statistics = reference.forward(replace(calls.spec_of(case), activation=""), wide.x, None, None)
    x = exact.value.y.to(dtype) if problem.from_y else operands.x
    memory = {name: flat(t.contiguous()) for name in ("weight", "bias", "scale", "shift") if (t := getattr(operands, name)) is not None}
    memory |= {name: flat(laid_out(t, problem.y_stride)) for name, t in (("x", x), ("dy", dy))}
    for name in ("mean", "rstd") if problem.spec.centered else ("rstd",):
        found = getattr(statistics, name).float().reshape(problem.stat_shape)
        memory[name] = flat(torch.empty_strided(problem.stat_shape, problem.stat_stride).copy_(found))
    steps, workspace, gradients = backward.steps_of(problem, launches, backward.ALL, False)
    memory |= {name: torch.full((size,), torch.nan) for name, size in workspace.items()}
    likes = {f"d{name}": t for name in ("x", "weight", "bias", "scale", "shift") if (t := getattr(operands, name)) is not None}
    memory |= {name: torch.full((likes[name].numel(),), torch.nan, dtype=likes[name].dtype) for name in gradients}
    memory["counters"] = torch.zeros(launches[0].counters, dtype=torch.int32)
    kernel, names = steps[0]
    gluon_in_python.run(kernel, memory | {pointer: memory[name] for pointer, name in zip(kernel.pointers, names[2:])})
    assert not memory["counters"].any()
    for name in gradients:
        actual = memory[name].as_strided(problem.shape, problem.y_stride) if name == "dx" else _sum(name[1:], memory, launches, problem)
        ratio = oracle.error_ratio(actual.reshape(likes[name].shape), getattr(exact.value, name), getattr(exact.allowed, name))
        assert ratio <= 1, f"{name}: {ratio:.3g} of the error budget"


def _sum(name, memory, launches, problem):
    """Return the gradient of a parameter, added up as the launches after the kernel would."""
    if f"{name} cells" not in memory:
        return memory[f"d{name}"]
    step = next(step for step in launches[1:] if name in NAMES[step.of])
    _, kept1, between, kept2, within = step.sizes
    sums = memory[f"{name} cells"].reshape(-1, kept1, between, kept2, within).sum((0, 2, 4))
    at = torch.arange(kept1)[:, None] * step.strides[0] + torch.arange(kept2) * step.strides[1]
    return torch.empty(sums.numel()).scatter_(0, at.flatten(), sums.flatten()).to(memory[f"d{name}"].dtype)


@over(PROBLEMS)
def test_as_planned(case, dtype):
    _check(case, dtype, *_planned(case, dtype))


@over(PROBLEMS[::2])
def test_few_slots(case, dtype):
    """Slots are refilled at once. A team has one to three programs, or as many as a unit needs."""
    problem, (main, *_) = _planned(case, dtype)
    of_tile = ceil(main.walk.reps / main.block_i) * main.across
    members = min(max(1 + PROBLEMS.index((case, dtype)) % 3, ceil(main.tiles * of_tile / 12)), of_tile)
    blocks = main.tiles * ceil(of_tile / members)
    cut = replace(main, members=members, programs=max(min(4 // members, main.units), 1) * members, slots=max(blocks, 2))
    _check(case, dtype, problem, with_sums(problem, cut, SMALL))


KINDS = {
    COLUMNS: (Case("group_norm", (8, 512, 256, 256), LAST, groups=32, activation="silu"), HALF),
    BLOCKS: (Case("group_norm", (8, 512, 256, 256), groups=32, activation="silu"), HALF),
    SET: (Case("batch_norm", (256, 512, 28, 28), wide=True), HALF),
    ELEMENTS: (Case("layer_norm", (1024, 131072)), BFLOAT),
}


@pytest.mark.skipif(bool(os.environ.get("TRITON_INTERPRET")), reason="interpreted functions are not compiled")
@pytest.mark.parametrize("kind", KINDS)
def test_it_compiles_for_hopper(kind):
    case, dtype = KINDS[kind]
    launches = ring_backward_launches(problem_of(Row(case, dtype)), KNOWN_DEVICES["h200"], False)
    assert launches[0].kind == kind
    (_, kernel), *_ = backward.kernels(problem_of(Row(case, dtype)), launches, backward.ALL)
    assert kernel.source().compile(GPUTarget("cuda", 90, 32)).metadata.shared <= KNOWN_DEVICES["h200"].shared
