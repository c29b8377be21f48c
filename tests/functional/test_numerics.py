"""Values and gradients agree with both oracles on every family: the case list, random problems, adversarial data."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import onepass
from onepass.core import problem
from onepass.core.device import describe
from onepass.core.spec import ACTIVATIONS, GRANULARITIES
from onepass.dispatch import launchers
from onepass.planning.registry import FAMILIES, family_named
from onepass.verify import calls, cases, matrix, oracle, tensors
from onepass.verify.cases import CASES, Case
from tests.conftest import CPU_FAMILIES, compiled

DTYPES = [pytest.param(d, id=str(d).removeprefix("torch.")) for d in matrix.DTYPES]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_case_on_every_family(case, dtype):
    cells = list(matrix.verify([case], [dtype]))
    assert [cell for cell in cells if not cell.ok] == []
    assert {cell.family for cell in cells} == {family.name for family in FAMILIES}


def test_every_family_runs_somewhere(by_torch, monkeypatch):
    """The planner chooses every family somewhere, with and without the C kernels."""
    chosen = {name for name in CPU_FAMILIES if not family_named(name).only_forced}
    ran = {plan.family for case in CASES for plan in _plans(case)}
    assert ran == chosen - {"c"}
    monkeypatch.delenv("ONEPASS_CPU")
    describe.cache_clear()
    ran = {plan.family for case in CASES for plan in _plans(case)}
    assert ran == ({"c", "reference"} if compiled() else chosen - {"c"})


def _plans(case: Case):
    explanation = onepass.explain(calls.by_onepass, case, tensors.make(case))
    return explanation.forward, explanation.backward


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", [case for case in CASES if case.init == "normal" and case.save == "x"], ids=lambda case: case.name)
def test_no_worse_than_twice_torch(case, dtype):
    """Where torch is well conditioned, our largest error is at most twice torch's, up to the rounding of the result.

    (With save="y", the rounding of y affects the gradients. It has its own budget, (36)-(38).)
    """
    operands = tensors.make(case, dtype)
    dy = torch.randn(case.shape).to(dtype)
    value = oracle.exact(case, operands, dy).value
    ours, torchs = (oracle.evaluate(case, operands, dy, run) for run in (calls.by_onepass, calls.by_torch))
    for name, exact, mine, other in zip(value._fields, value, ours, torchs):
        if exact is None or mine is None or other is None or not exact.numel():
            continue
        if name in ("dmean_weight", "dvar_weight"):  # each is a small difference of large sums
            continue
        rounding = oracle.half_ulp(exact, mine.dtype).max() + 2 * torch.finfo(problem.accumulator(dtype)).eps * exact.abs().max()
        assert (mine.double() - exact).abs().max() <= 2 * (other.double() - exact).abs().max() + rounding, name


@st.composite
def problems(draw):
    """Draws any norm, shape, layout, dtype, grouping and affine parameters."""
    op = draw(st.sampled_from(list(calls.OPS)))
    trailing, channelwise = op in ("layer_norm", "rms_norm"), op in ("group_norm", "instance_norm", "batch_norm", "switchable_norm")
    groups = draw(st.integers(1, 4)) if op == "group_norm" else 1
    channels = groups * draw(st.integers(1, 5))
    spatial = 2 if op == "layer_norm2d" else draw(st.integers(1 if op == "instance_norm" else 0, 3))
    last = channelwise and draw(st.booleans())
    positions = [draw(st.integers(2, 6)) for _ in range(spatial)]
    shape = (draw(st.integers(2, 5)), *positions, channels) if last else (draw(st.integers(2, 5)), channels, *positions)
    rank = draw(st.integers(1, len(shape))) if trailing else 1
    tracks = op in ("batch_norm", "instance_norm", "switchable_norm")
    affine, using_bn = draw(st.sampled_from(cases.AFFINES)), op != "switchable_norm" or draw(st.booleans())
    case = Case(
        op,
        shape,
        layout=draw(st.sampled_from(cases.LAYOUTS)),
        groups=groups,
        rank=rank,
        affine=affine,
        wide=draw(st.booleans()),
        init=draw(st.sampled_from(["normal", "uniform", "int", "shifted"])),
        eps=draw(st.sampled_from([1e-5, 1e-3, 0.5])),
        running=tracks and draw(st.booleans()),
        evaluate=tracks and using_bn and draw(st.booleans()),
        momentum=draw(st.sampled_from([0.0, 0.1, 1.0])),
        residual=op in ("layer_norm", "rms_norm", "group_norm") and draw(st.booleans()),
        modulate=rank < len(shape) and draw(st.booleans()),
        activation=draw(st.sampled_from(["", "", *ACTIVATIONS])),
        offset=1.0 if trailing and affine in ("both", "weight") and draw(st.booleans()) else 0.0,
        granularity=draw(st.sampled_from(GRANULARITIES)) if op == "layer_norm" else "element",
        last=last,
        using_bn=using_bn,
    )
    return case, draw(st.sampled_from(matrix.DTYPES)), draw(st.integers(0, 1000))


@settings(max_examples=400, deadline=None, derandomize=True)
@given(problems())
def test_random_problems(problem):
    case, dtype, seed = problem
    bad = [cell for cell in matrix.verify([case], [dtype], seed=seed) if not cell.ok]
    assert bad == []


@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
def test_channels_last_group_norm_far_from_zero(layout):
    """mean = 10⁴·std in fp32. torch's channels-last kernel is off by 10³ and more."""
    case = Case("group_norm", (2, 64, 32, 32), layout, groups=8, init="shifted")
    (cell,) = (c for c in matrix.verify([case], [torch.float32]) if c.family == "blockwise")
    assert cell.forward is not None and cell.forward < 1 and cell.backward is not None and cell.backward < 1


def test_blocks_and_merged_moments(monkeypatch):
    """Sets are much larger than a block, so moments and gradients are merged over many blocks."""
    monkeypatch.setattr("onepass.backends.torch_ops.blockwise.BLOCK", 64)
    launchers._known.clear()
    some = [case for case in CASES if 0 < torch.Size(case.shape).numel() < 30000]
    cells = list(matrix.verify(some, [torch.float32, torch.bfloat16], families=["blockwise"]))
    launchers._known.clear()
    assert cells and [cell for cell in cells if not cell.ok] == []


@pytest.mark.parametrize("family", CPU_FAMILIES)
def test_bitwise_repeatable(family):
    for case in CASES:
        operands, dy = tensors.make(case, torch.bfloat16), torch.randn(case.shape).bfloat16()
        try:
            with onepass.force(family):
                first, second = (oracle.evaluate(case, operands, dy) for _ in range(2))
        except onepass.CannotForce:
            continue
        assert all(a is b is None or torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(first, second)), case.name


def test_strides_do_not_depend_on_earlier_calls():
    """Dimensions of size one may have any stride. The output keeps it."""
    group_norm = onepass.functional.group_norm
    x = torch.randn(2, 6, 1, 1)
    odd = x.as_strided((2, 6, 1, 1), (6, 1, 6, 6))
    assert group_norm(x, 3).stride() == x.stride() and group_norm(odd, 3).stride() == odd.stride()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_gradients_do_not_change_the_output(case, dtype):
    operands = tensors.make(case, dtype)
    with_grad, without = (oracle.evaluate(case, operands, dy).y for dy in (torch.randn(case.shape).to(dtype), None))
    assert torch.equal(with_grad.nan_to_num(), without.nan_to_num())
    assert with_grad.stride() == without.stride() == torch.empty_like(operands.x).stride()


def test_inputs_are_untouched():
    for case in CASES:
        operands = tensors.make(case, torch.float32)
        before = [None if t is None else t.clone() for t in operands]
        oracle.evaluate(case, operands, torch.randn(case.shape))
        assert all(a is b is None or torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(operands, before)), case.name


@pytest.mark.parametrize("dtype", DTYPES)
def test_default_eps(dtype):
    """The values are so small that eps decides the result."""
    x = torch.full((2, 8), 1e-4).to(dtype)
    torch.testing.assert_close(onepass.functional.rms_norm(x, (8,)), torch.nn.functional.rms_norm(x, (8,)))
    torch.testing.assert_close(onepass.functional.layer_norm(x, (8,)), torch.nn.functional.layer_norm(x, (8,)))


@pytest.mark.slow
def test_more_than_2_31_elements():
    x = torch.zeros(2**31 + 64, dtype=torch.bfloat16).view(-1, 64)
    x[-1] = torch.arange(64)
    y = onepass.functional.layer_norm(x, (64,))
    torch.testing.assert_close(y[-1], torch.nn.functional.layer_norm(x[-1], (64,)))
    assert not y[:-1].any()
