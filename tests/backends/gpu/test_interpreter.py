"""The GPU families on small problems in Triton's interpreter. They need TRITON_INTERPRET=1, which `make test` sets."""

import os
from typing import NamedTuple

import pytest
import torch

import onepass
import onepass.functional as O
from onepass.backends.family import BACKWARD
from onepass.backends.gpu.tile import schedule
from onepass.backends.gpu.walk import walk
from onepass.bench.suite import Row, problem_of
from onepass.core.device import KNOWN_DEVICES, describe
from onepass.planning.choose import plan
from onepass.planning.options import CannotForce, Options
from onepass.verify import oracle, tensors
from onepass.verify.cases import Case
from tests.recorder import GPU_FAMILIES, recorded_runs, require_ran

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="needs TRITON_INTERPRET=1")


class Runs(NamedTuple):
    """The families that run a case."""

    both: str  # forward and backward
    forward: str = ""  # forward only


ROWS = Runs("row row_reread")
ROW_FORWARD = Runs("row_reread", "row")
FOLDED = Runs("row_reread", "row whole_set")  # a set is one run, long enough to be read as rows
TILES = Runs("tile tile_reread", "whole_set team row_reread")
GATHERED_TILES = Runs("tile tile_reread", "whole_set team row_reread row")  # runs have 32 bytes or more
ALL = Runs("tile row_reread tile_reread", "whole_set team")
APPLY = Runs("apply")

# Every family that is not named must refuse the case. `ring` needs a Hopper GPU.
SMALL = {
    Case("layer_norm", (5, 33)): ROWS,
    Case("layer_norm", (3, 1152), affine="weight"): ROWS,
    Case("layer_norm", (2, 9001), wide=True): ROW_FORWARD,
    Case("layer_norm", (1, 66001)): Runs("row_reread"),
    Case("layer_norm", (3, 15001)): ROWS,
    Case("layer_norm", (2, 9000)): FOLDED,
    Case("rms_norm", (3, 5120)): Runs("row row_reread", "whole_set"),
    Case("rms_norm", (2, 9216), affine="weight", activation="silu"): FOLDED,
    Case("layer_norm", (2, 3, 8704), modulate=True): FOLDED,
    Case("layer_norm", (2, 8704), residual=True, init="shifted"): FOLDED,
    Case("group_norm", (2, 6, 48, 96), groups=3, activation="silu"): Runs("row_reread whole_set", "row"),
    Case("group_norm", (1, 6, 73, 72), groups=2, modulate=True): FOLDED,
    Case("instance_norm", (2, 2, 15001)): ROWS,
    Case("layer_norm", (2, 4, 24), save="y", modulate=True): ROWS,
    Case("layer_norm", (3, 2, 40), "transposed", affine="bias"): ROWS,
    Case("layer_norm", (3, 16), "strided", affine="none"): ALL,
    Case("layer_norm", (4, 24), "sliced"): ROWS,
    Case("layer_norm", (4, 16), "expanded"): ROWS,
    Case("layer_norm", (7, 1)): ROWS,
    Case("layer_norm", (4, 64), init="shifted"): ROWS,
    Case("layer_norm", (4, 64), init="inf"): ROWS,
    Case("layer_norm", (4, 64), init="const"): ROWS,
    Case("layer_norm", (2, 3, 4, 5), "channels_last", rank=3, granularity="channel", activation="gelu"): TILES,
    Case("layer_norm", (2, 3, 4, 5), rank=3, granularity="channel", modulate=True): ROW_FORWARD,
    Case("layer_norm", (2, 3, 40), modulate=True, activation="silu", offset=1.0): ROWS,
    Case("layer_norm", (2, 3, 40), residual=True, activation="gelu_tanh"): ROWS,
    Case("layer_norm", (3, 4, 5, 6), "channels_last", rank=3): Runs("tile_reread", "tile whole_set team row_reread"),
    Case("layer_norm", (3, 4, 5, 6), "channels_last", rank=2): ALL,
    Case("rms_norm", (5, 130), eps=1e-6): ROWS,
    Case("rms_norm", (2, 3, 40), "sliced", residual=True, offset=1.0, eps=1e-6): ROWS,
    Case("rms_norm", (2, 3, 2, 16), "sliced", wide=True): ROWS,
    Case("group_norm", (2, 12, 5, 7), groups=4, activation="silu"): ROW_FORWARD,
    Case("group_norm", (2, 20, 5, 7), "channels_last", groups=2, activation="silu", modulate=True): GATHERED_TILES,
    Case("group_norm", (2, 12, 5, 7), "channels_last", groups=4, init="shifted", wide=True): TILES,
    Case("group_norm", (2, 12, 5, 7), groups=3, modulate=True, affine="none"): ROW_FORWARD,
    Case("group_norm", (2, 12, 5), "channels_last", groups=4, residual=True, modulate=True): TILES,
    Case("group_norm", (7, 20, 3, 5), "channels_last", groups=2, modulate=True): GATHERED_TILES,  # more units than teams
    Case("group_norm", (1, 12, 90, 61), "channels_last", groups=4, residual=True): Runs(
        "tile_reread", "team row_reread"
    ),  # a team reads again
    Case("group_norm", (3, 8), groups=2): ROWS,
    Case("group_norm", (2, 12, 5, 7), groups=4, save="y"): ROW_FORWARD,
    Case("group_norm", (2, 12, 5, 7), "sliced", groups=4): ROW_FORWARD,
    Case("instance_norm", (2, 3, 6, 7), "channels_last", running=True, activation="relu"): ALL,
    Case("instance_norm", (2, 3, 40), running=True): ROWS,
    Case("batch_norm", (4, 5), running=True): ALL,
    Case("batch_norm", (3, 5, 6, 6), running=True): Runs("tile row_reread tile_reread", "whole_set team row"),
    Case("batch_norm", (3, 5, 6, 6), "channels_last", running=True, wide=True): ALL,
    Case("batch_norm", (3, 5, 6, 6), modulate=True): Runs("row_reread tile_reread", "tile whole_set team row"),
    Case("batch_norm", (4, 5, 40, 41), evaluate=True): APPLY,
    Case("batch_norm", (3, 5, 6, 6), evaluate=True, activation="relu"): APPLY,
    Case("batch_norm", (3, 5, 6, 6), "channels_last", evaluate=True, wide=True): APPLY,
    Case("layer_norm2d", (2, 24, 3, 5), modulate=True): ALL,
    Case("layer_norm2d", (2, 24, 3, 5), init="shifted"): ALL,
    Case("switchable_norm", (2, 3, 4, 5), running=True): Runs("row_reread"),
    Case("switchable_norm", (2, 3, 4, 5), "channels_last", evaluate=True, activation="silu"): Runs("row_reread tile_reread"),
    Case("switchable_norm", (9, 10, 30), running=True, modulate=True): Runs("row_reread"),  # more groups than one program merges
    Case("switchable_norm", (5, 7), running=True): Runs("row_reread"),
    Case("switchable_norm", (2, 12, 5), last=True, using_bn=False, init="shifted"): Runs("row_reread tile_reread"),
    Case("switchable_norm", (1, 131, 2)): Runs("row_reread"),  # a group has more sets than a block
}


def _evaluate(case, operands, dy, family):
    """The outcome of a call, with gradients if there is a dy. Fails if another family runs any part of it."""
    with recorded_runs() as runs, onepass.force(family):
        outcome = oracle.evaluate(case, operands, dy)
    require_ran(runs, family, "forward", *(() if dy is None else ("backward",)))
    return outcome


@pytest.mark.parametrize("case", SMALL, ids=lambda case: case.name)
def test_every_family_within_the_budget(case):
    operands = tensors.make(case, (torch.float32, torch.float16)[list(SMALL).index(case) % 2])
    dy = tensors.make_dy(operands)
    exact = oracle.exact(case, operands, dy)
    both, forward = SMALL[case].both.split(), SMALL[case].forward.split()
    for family in both + forward:
        outcome = _evaluate(case, operands, dy if family in both else None, family)
        assert outcome.y.stride() == torch.empty_like(operands.x if outcome.sum is None else outcome.sum).stride(), family
        worst = oracle.worst(outcome, exact.value, exact.allowed)
        assert worst.forward <= 1, family
        assert worst.backward is None if family in forward else worst.backward <= 1, family
    for family in GPU_FAMILIES:
        for refused in [*([dy] if family not in both else []), *([None] if family not in both + forward else [])]:
            with pytest.raises(CannotForce):
                _evaluate(case, operands, refused, family)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=str)
@pytest.mark.parametrize("mix", ["-, k, n", "n k, -", "k, n g", "n g k", "-"])
def test_mixes_along_any_axes(mix, layout):
    """With three kept axes, the sets that a norm merges may lie apart in memory."""
    spec = onepass.NormSpec("n (g k) *l", "*l", "g k", (("k", 3),), eps=1e-5, mix=mix)
    x, dy = (torch.randn(4, 6, 3, 5).to(memory_format=layout) for _ in range(2))
    weights = [torch.rand(len(mix.split(","))).softmax(0) for _ in range(2)]

    def run(dtype):
        x_, *others = operands = [t.to(dtype).requires_grad_() for t in (x, torch.rand(6), torch.rand(6), *weights)]
        y = onepass.custom_norm(x_, spec, *others[:2], mean_weight=others[2], var_weight=others[3])
        return y, *torch.autograd.grad(y, operands, dy.to(dtype))

    torch.manual_seed(0)
    expected = run(torch.float64)
    torch.manual_seed(0)
    with onepass.force("row_reread"):
        found = run(torch.float32)
    for ours, exact in zip(found, expected):
        assert (ours - exact).abs().max() <= 1e-4 * exact.abs().max()  # terms of the gradients of weights cancel


def test_mixes_of_many_norms_are_left_to_torch():
    spec = onepass.NormSpec("n (g k) *l", "*l", "g k", (("k", 3),), eps=1e-5, mix="n, g, k")
    x, weights = torch.randn(4, 6, 3), torch.ones(3) / 3
    with onepass.force("row_reread"), pytest.raises(CannotForce, match="a mix of more than one norm that merges no sets"):
        onepass.custom_norm(x, spec, mean_weight=weights, var_weight=weights)


def test_every_family_runs_in_both_directions():
    """`ring` needs a Hopper GPU, and `team` has no backward."""
    assert {family for runs in SMALL.values() for family in runs.both.split()} == {*GPU_FAMILIES} - {"ring", "team"}
    assert {family for runs in SMALL.values() for family in " ".join(runs).split()} == {*GPU_FAMILIES} - {"ring"}


@pytest.mark.parametrize("family", ["whole_set", "row", "row_reread", "team", "tile", "tile_reread"])
def test_bfloat16(family):
    """The interpreter truncates bfloat16 where a GPU rounds, so allow a whole ulp."""
    x = torch.randn(2, 12, 5, 7).to(torch.bfloat16)
    x = x if family.startswith("row") else x.to(memory_format=torch.channels_last)
    with onepass.force(family), torch.no_grad():
        y = O.group_norm(x, 4)
    torch.testing.assert_close(y.double(), torch.nn.functional.group_norm(x.double(), 4), rtol=2**-7, atol=1e-4)


@pytest.mark.parametrize("length", [40, 9001])
@pytest.mark.parametrize("family", ["row", "row_reread"])
def test_a_row_does_not_depend_on_its_neighbours(family, length):
    x = torch.randn(37 if length < 100 else 3, length)
    with onepass.batch_invariant(True), onepass.force(family), torch.no_grad():
        together = O.layer_norm(x, (length,))
        for row in (0, len(x) - 1):
            assert torch.equal(O.layer_norm(x[row : row + 1].clone(), (length,)), together[row : row + 1])


def test_statistics_are_those_of_the_reference():
    x = torch.randn(2, 12, 5, 7).to(memory_format=torch.channels_last)
    expected = O.group_norm(x, 4, return_stats=True)
    for family in ("whole_set", "team", "tile", "tile_reread", "row_reread"):
        with onepass.force(family):
            result = O.group_norm(x, 4, return_stats=True)
        torch.testing.assert_close(tuple(result), tuple(expected))


def test_parameters_that_are_not_contiguous():
    x, params = torch.randn(4, 24), torch.randn(24, 2)
    with onepass.force("row"), torch.no_grad():
        y = O.layer_norm(x, (24,), params[:, 0], params[:, 1])
    torch.testing.assert_close(y, torch.nn.functional.layer_norm(x, (24,), *params.T.contiguous()))


@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize("momentum", [0.25, 0.75])
def test_kernels_update_running_statistics(momentum, train, monkeypatch):
    monkeypatch.delattr(onepass.functional.running, "update_running")  # which torch operations would call
    x = torch.randn(3, 5, 6, 6).to(memory_format=torch.channels_last).requires_grad_(train)
    expected = [torch.randn(5), torch.rand(5)]
    start = [t.clone() for t in expected]
    torch.nn.functional.batch_norm(x, *expected, training=True, momentum=momentum)
    for family in ("tile", "row_reread", "tile_reread", *([] if train else ["whole_set", "team"])):
        found = [t.clone() for t in start]
        with onepass.force(family):
            O.batch_norm(x, *found, training=True, momentum=momentum)
        torch.testing.assert_close(found, expected)


LARGEST = torch.finfo(torch.float32).max
LARGE = {
    "the largest": lambda x: torch.full_like(x, LARGEST),
    "near the largest": lambda x: 0.9 * LARGEST * (1 + 1e-4 * x).clamp(0.99, 1.01),
    "0 and the largest": lambda x: torch.where(x > 0, 0.9 * LARGEST, 0.0),
    "one large": lambda x: torch.where(x == x.max(), LARGEST, x),
    "squares overflow": lambda x: 1e25 * x,
}
NORMS = {
    "row": lambda module, x: module.layer_norm(x.flatten(1), (150,)),
    "rms": lambda module, x: module.rms_norm(x.flatten(1), (150,), eps=1e-6),
    "tail": lambda module, x: module.layer_norm(x.flatten(1).repeat(1, 8)[:, :1152], (1152,)),
    "tile": lambda module, x: module.instance_norm(x.to(memory_format=torch.channels_last)),
    "across samples": lambda module, x: module.batch_norm(x, None, None, training=True),
}
ALONG, ACROSS = ("row", "row_reread"), ("tile", "whole_set", "team", "row_reread", "tile_reread")
RUNS_ON = {"row": ALONG, "rms": ALONG, "tail": ALONG, "tile": ACROSS, "across samples": (*ACROSS, "row")}


@pytest.mark.parametrize("values", LARGE)
@pytest.mark.parametrize("name", NORMS)
@pytest.mark.parametrize("family", GPU_FAMILIES)
def test_large_numbers(family, name, values):
    """Where torch's result is finite, so is ours, although sums and squares of the values overflow."""
    x = LARGE[values](torch.randn(2, 6, 5, 5))
    with onepass.force(family), torch.no_grad(), recorded_runs() as runs:
        if family not in RUNS_ON[name]:
            with pytest.raises(CannotForce):
                NORMS[name](O, x)
            return
        y = NORMS[name](O, x)
    require_ran(runs, family, "forward")
    expected = NORMS[name](torch.nn.functional, x)
    assert y[expected.isfinite()].isfinite().all()


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("save", ["x", "y"])
def test_dx_by_given_statistics_knows_no_x(save, layout):
    x, dy = torch.randn(2, 6, 5, 5), torch.randn(2, 6, 5, 5)
    x[1, 2, 3, 1], x[0, 4, 1, 1] = torch.inf, torch.nan
    x = x.to(memory_format=layout).requires_grad_()
    mean, var, weight = torch.randn(6), torch.rand(6) + 0.5, torch.rand(6)
    weight[3] = 0.0
    with onepass.force("apply"):
        dx = torch.autograd.grad(O.batch_norm(x, mean, var, weight, save=save), x, dy)[0]
    torch.testing.assert_close(dx, torch.autograd.grad(torch.nn.functional.batch_norm(x, mean, var, weight), x, dy)[0])


@pytest.mark.parametrize("family", ["row", "row_reread"])
def test_one_value_has_no_gradient(family):
    """dx is 0 even if the compiler rounds only one of wdy and c1."""
    x, weight = torch.randn(5, 1, requires_grad=True), torch.randn(1, requires_grad=True)
    with onepass.force(family):
        dx, dweight = torch.autograd.grad(O.layer_norm(x, (1,), weight), (x, weight), torch.randn(5, 1))
    assert not dx.any() and not dweight.any()


ABREAST = {  # whether rows lie abreast. The last rows of some cases lack a part
    Case("group_norm", (2, 3, 97, 89), "channels_last", groups=1, activation="gelu"): True,
    Case("group_norm", (3, 12, 31, 67), "channels_last", groups=4, modulate=True, init="shifted"): True,
    Case("group_norm", (1, 20, 80, 48), "channels_last", groups=2, residual=True): True,
    Case("instance_norm", (1, 7, 80, 81), "channels_last", wide=True): True,
    Case("batch_norm", (3, 5, 41, 67), "channels_last", running=True): True,
    Case("batch_norm", (2, 40, 41, 67), "channels_last", evaluate=True, activation="silu"): True,
    Case("group_norm", (2, 8, 41, 67), "channels_last", groups=2): False,  # a row fills a vector, and rows fill a block
    Case("layer_norm", (2, 7, 80, 81), "channels_last", rank=3): False,  # each element has a weight of its own
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("case", ABREAST, ids=lambda case: case.name)
def test_rows_abreast(case, dtype, monkeypatch):
    monkeypatch.setattr(schedule, "LEAST_UNALIGNED", 0)
    monkeypatch.setattr(schedule, "LEAST_ALIGNED", 0)
    problem = problem_of(Row(case, dtype))
    assert (schedule.rows_abreast(problem, walk(problem)) > 1) == ABREAST[case]
    operands = tensors.make(case, dtype)
    exact = oracle.exact(case, operands, tensors.make_dy(operands))
    outcome = _evaluate(case, operands, None, "apply" if case.evaluate else "tile_reread")
    assert oracle.worst(outcome, exact.value, exact.allowed).forward <= 1


# Runs that begin anywhere between multiples of 16 bytes: one for each set, several for each set, and runs cut by channel.
PEELED = (
    Case("layer_norm", (3, 4099), init="shifted"),
    Case("rms_norm", (2, 9001), activation="gelu"),
    Case("layer_norm", (2, 5, 1001), modulate=True),
    Case("layer_norm", (2, 2053), residual=True),
    Case("layer_norm", (17, 1031)),
    Case("batch_norm", (3, 5, 29, 31), running=True),
    Case("group_norm", (8, 8, 17, 17), groups=8, activation="silu"),
    Case("group_norm", (2, 6, 29, 31), groups=3, activation="silu"),
    Case("instance_norm", (1, 3, 145, 147), wide=True),
    Case("batch_norm", (19, 2, 17, 17), running=True),
    Case("batch_norm", (2, 3, 103, 103), running=True, init="shifted"),
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("case", PEELED, ids=lambda case: case.name)
def test_runs_whose_ends_are_peeled_off(case, dtype):
    chosen = plan(problem_of(Row(case, dtype)), describe(torch.device("cpu")), options=Options("row_reread"))
    assert any(launch.peel == 16 // dtype.itemsize for launch in chosen.launches if launch.name == "row")
    operands = tensors.make(case, dtype)
    exact = oracle.exact(case, operands, tensors.make_dy(operands))
    outcome = _evaluate(case, operands, None, "row_reread")
    assert oracle.worst(outcome, exact.value, exact.allowed).forward <= 1


PEELED_BACKWARD = (
    Case("layer_norm", (21, 517), activation="silu"),
    Case("layer_norm", (3, 1031), init="shifted"),  # fewer rows than places where they may begin: only the first launch peels
    Case("layer_norm", (1, 2051)),
    Case("layer_norm", (35, 261), residual=True),  # several rows of a program begin at the same place
    Case("rms_norm", (18, 518), offset=1.0, save="y"),
    Case("batch_norm", (3, 5, 29, 31)),
    Case("batch_norm", (19, 2, 17, 17), modulate=True),
    Case("batch_norm", (2, 3, 103, 103), init="shifted"),
    Case("group_norm", (8, 8, 17, 17), groups=8, activation="silu"),
    Case("group_norm", (2, 6, 29, 31), groups=3, activation="silu"),
    Case("group_norm", (1, 4, 181, 203), groups=2),  # one launch reduces, another applies
    Case("instance_norm", (1, 3, 145, 147), wide=True, affine="weight"),
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("case", PEELED_BACKWARD, ids=lambda case: case.name)
def test_a_backward_peels_off_the_ends_of_runs(case, dtype):
    problem = problem_of(Row(case, dtype)).for_direction(BACKWARD)
    for invariant in (False, True):
        launches = plan(problem, describe(torch.device("cpu")), BACKWARD, Options("row_reread", invariant=invariant)).launches
        peels = [launch.peel for launch in launches if launch.name == "row"]
        assert peels[0] == max(peels) == (0 if invariant else 16 // dtype.itemsize)
    operands = tensors.make(case, dtype)
    dy = tensors.make_dy(operands)
    exact = oracle.exact(case, operands, dy)
    assert oracle.worst(_evaluate(case, operands, dy, "row_reread"), exact.value, exact.allowed).backward <= 1


PEELED_ROWS_BACKWARD = (
    Case("layer_norm", (67, 517), activation="silu"),
    Case("layer_norm", (35, 1025), residual=True, init="shifted"),
    Case("rms_norm", (34, 1026), offset=1.0, save="y"),
    Case("layer_norm", (17, 2003), affine="bias"),
    Case("layer_norm", (9, 3999), affine="weight"),
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("case", PEELED_ROWS_BACKWARD, ids=lambda case: case.name)
def test_a_backward_of_rows_peels_off_their_ends(case, dtype):
    problem = problem_of(Row(case, dtype)).for_direction(BACKWARD)
    for invariant in (False, True):
        launch, *_ = plan(problem, describe(torch.device("cpu")), BACKWARD, Options("row", invariant=invariant)).launches
        assert launch.peel == (0 if invariant else 16 // dtype.itemsize)
    operands = tensors.make(case, dtype)
    dy = tensors.make_dy(operands)
    exact = oracle.exact(case, operands, dy)
    assert oracle.worst(_evaluate(case, operands, dy, "row"), exact.value, exact.allowed).backward <= 1


TEAMS_BACKWARD = {
    Case("group_norm", (1, 12, 24, 24), groups=1, activation="silu", modulate=True): torch.float16,
    Case("group_norm", (2, 12, 64, 12), groups=2, save="y"): torch.float32,
}


@pytest.mark.parametrize("case", TEAMS_BACKWARD, ids=lambda case: case.name)
def test_teams_of_several_members_in_a_backward(case, monkeypatch):
    """Interpreted programs run one after another, so members cannot wait. But if a kernel runs twice, they find each other's sums."""
    from onepass.backends.gpu.launch.counters import Counters
    from onepass.backends.gpu.launch.kernel import Kernel
    from onepass.backends.gpu.whole_set import kernel_backward, schedule_backward

    interpret = Kernel.interpret

    def twice(made, operands):
        interpret(made, operands)
        if made.cooperative:
            interpret(made, operands)

    monkeypatch.setattr(Kernel, "interpret", twice)
    monkeypatch.setattr(Counters, "take", lambda _, stream, n: torch.zeros(n, dtype=torch.int32))
    monkeypatch.setattr(kernel_backward, "wait_for_team", lambda counter, member, members: None)
    dtype = TEAMS_BACKWARD[case]
    problem = problem_of(Row(case, dtype)).for_direction(BACKWARD)
    found = schedule_backward.candidates(problem, walk(problem), KNOWN_DEVICES["h200"])
    launch = next(launch for launch in found if launch.members in (2, 3))
    launches = schedule_backward.with_sums(problem, launch, describe(torch.device("cpu")))
    monkeypatch.setattr(schedule_backward, "whole_set_backward_launches", lambda *_: launches)
    operands = tensors.make(case, dtype)
    dy = tensors.make_dy(operands)
    exact = oracle.exact(case, operands, dy)
    assert oracle.worst(_evaluate(case, operands, dy, "whole_set"), exact.value, exact.allowed).backward <= 1


# Some programs have two rows, which begin equally far from a multiple of 16 bytes. The first block of a row is full, or it is not.
PEELED_ROWS = (
    Case("layer_norm", (33, 2051), init="shifted"),
    Case("layer_norm", (17, 4101), residual=True),
    Case("rms_norm", (10, 8999)),
    Case("instance_norm", (3, 23, 35, 35), wide=True),
    Case("group_norm", (20, 9, 27, 27), groups=3, activation="gelu"),
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("case", PEELED_ROWS, ids=lambda case: case.name)
def test_rows_whose_ends_are_peeled_off(case, dtype):
    (launch,) = plan(problem_of(Row(case, dtype)), describe(torch.device("cpu")), options=Options("row")).launches
    assert launch.peel == 16 // dtype.itemsize and launch.programs < launch.walk.total
    operands = tensors.make(case, dtype)
    exact = oracle.exact(case, operands, tensors.make_dy(operands))
    assert oracle.worst(_evaluate(case, operands, None, "row"), exact.value, exact.allowed).forward <= 1


@pytest.mark.parametrize("step", [9001, 9004])
@pytest.mark.parametrize("family", ["row", "row_reread"])
def test_an_odd_row_does_not_depend_on_where_it_begins(family, step):
    """Ends of runs are not peeled off then: the first vector would decide in which order elements are added."""
    x = torch.randn(5, step)[:, :9001]
    with onepass.batch_invariant(True), onepass.force(family), torch.no_grad():
        together = O.layer_norm(x, (9001,))
        assert all(torch.equal(O.layer_norm(x[row : row + 1], (9001,)), together[row : row + 1]) for row in range(5))


@pytest.mark.parametrize("shape", [(3, 2, 29, 31), (2, 3, 103, 103)])  # a block has several runs, or a part of one
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_evaluation_of_odd_runs(shape, dtype):
    case = Case("batch_norm", shape, evaluate=True, activation="silu", wide=dtype == torch.float16)
    assert plan(problem_of(Row(case, dtype)), describe(torch.device("cpu")), options=Options("apply")).launches[0].peel
    operands = tensors.make(case, dtype)
    exact = oracle.exact(case, operands, tensors.make_dy(operands))
    assert oracle.worst(_evaluate(case, operands, None, "apply"), exact.value, exact.allowed).forward <= 1


def test_without_eps_other_families_run():
    """Without an eps, a constant set needs an exact mean, which the kernels do not have: y would be 0/0."""
    x = torch.full((2, 6, 5, 5), 0.1)
    with onepass.force("row"), pytest.raises(CannotForce, match="without an eps"):
        O.instance_norm(x, eps=0.0)
