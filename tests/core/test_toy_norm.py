"""A norm that is defined by a spec only: GroupNorm whose statistics span pairs of samples."""

import os
from dataclasses import replace

import pytest
import torch
from torch.testing import assert_close

import onepass
from onepass.core.spec import NormSpec
from onepass.dispatch import launchers
from onepass.planning.registry import FAMILIES
from onepass.verify import calls, oracle, tensors
from onepass.verify.cases import Case
from onepass.verify.tensors import lay_out
from tests.conftest import CPU_FAMILIES, compiled
from tests.recorder import GPU_FAMILIES, recorded_runs, require_ran

GROUPS = 3
PAIRED = onepass.NormSpec("(n p) (g k) *l", reduced="p k *l", params="g k", sizes=(("p", 2), ("g", GROUPS)))


def paired_group_norm(x, weight, bias):
    return onepass.custom_norm(x, PAIRED, weight, bias)


def definition(x, weight, bias):
    n, c = x.shape[:2]
    pairs = x.reshape(n // 2, 2, GROUPS, c // GROUPS, -1)
    var, mean = torch.var_mean(pairs, dim=(1, 3, 4), correction=0, keepdim=True)
    x_hat = ((pairs - mean) / torch.sqrt(var + 1e-5)).reshape(x.shape)
    shape = (1, c, *(1 for _ in x.shape[2:]))
    return x_hat * weight.view(shape) + bias.view(shape)


@pytest.mark.parametrize("layout", ["contiguous", "channels_last", "strided", "transposed"])
@pytest.mark.parametrize("family", ["blockwise", "reference"])
def test_matches_its_definition(family, layout):
    x = lay_out(torch.randn(6, 12, 4, 5, dtype=torch.float64), layout).requires_grad_()
    weight, bias = (torch.randn(12, dtype=torch.float64, requires_grad=True) for _ in range(2))
    with onepass.force(family):
        y = paired_group_norm(x, weight, bias)
        expected = definition(x, weight, bias)
        assert_close(y, expected)
        dy = torch.randn(y.shape, dtype=y.dtype)
        grads, wanted = (torch.autograd.grad(out, (x, weight, bias), dy) for out in (y, expected))
        assert_close(grads, wanted)


# Which families run the toy norm. A new family joins one of these tables.
BOTH = {"c", "tile", "tile_reread", "blockwise", "reference"}  # they run the forward and the backward
FORWARD = {"whole_set", "team", "row_reread"}  # they run the forward only; row_reread also runs the backward of a transposed x
REFUSES = {"aten", "row", "ring", "apply"}
interpreted = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="needs TRITON_INTERPRET=1")
ALL_FAMILIES = [*CPU_FAMILIES, *(pytest.param(family, marks=interpreted) for family in GPU_FAMILIES)]


def test_every_family_is_in_a_table():
    names = {family.name for family in FAMILIES}
    assert names == BOTH | FORWARD | REFUSES, "add your family to the table BOTH, FORWARD or REFUSES"


@pytest.fixture
def verified(monkeypatch):
    """The paired norm as a Case, which `oracle` can check against its error budget."""

    def spec(case, **clauses):
        return replace(PAIRED, eps=case.eps, **clauses)

    monkeypatch.setitem(calls.OPS, "paired_group_norm", calls.Op(lambda case, t: (t.weight, t.bias), definition, spec))
    monkeypatch.setattr(onepass.functional, "paired_group_norm", paired_group_norm, raising=False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("layout", ["contiguous", "channels_last", "strided", "transposed"])
@pytest.mark.parametrize("family", ALL_FAMILIES)
def test_every_family_within_the_budget(verified, family, layout, dtype):
    """The families run a norm that they do not know, or refuse it."""
    if family == "c" and not compiled():
        pytest.skip("there are no C kernels")
    case = Case("paired_group_norm", (6, 12, 4, 5), layout)
    operands = tensors.make(case, dtype)
    dy = tensors.make_dy(operands)
    exact = oracle.exact(case, operands, dy)
    assert exact.disagreement <= 1
    backward = family in BOTH or (family, layout) == ("row_reread", "transposed")
    with recorded_runs() as runs, onepass.force(family):
        if not backward:
            with pytest.raises(onepass.CannotForce):
                oracle.evaluate(case, operands, dy)
            runs.clear()
        if family not in BOTH | FORWARD:
            return
        outcome = oracle.evaluate(case, operands, dy if backward else None)
    require_ran(runs, family, "forward", *(["backward"] if backward else []))
    worst = oracle.worst(outcome, exact.value, exact.allowed)
    assert worst.forward <= 1
    assert worst.backward <= 1 if backward else worst.backward is None


def test_second_derivative_compile_and_explain():
    inputs = [torch.randn(s, dtype=torch.float64, requires_grad=True) for s in ((2, 3, 2), (3,), (3,))]
    assert torch.autograd.gradgradcheck(paired_group_norm, inputs)
    torch._dynamo.reset()
    assert_close(torch.compile(paired_group_norm, fullgraph=True, backend="aot_eager")(*inputs), definition(*inputs))
    assert "outer 1, reps 2, sets 3, run 2" in str(onepass.explain(paired_group_norm, *inputs))


def test_planned_once():
    x = torch.randn(4, 6, 2)
    paired_group_norm(x, None, None)
    kinds = len(launchers._known)
    paired_group_norm(x, None, None)
    assert len(launchers._known) == kinds


@pytest.mark.parametrize(
    "spec, message",
    [
        (("n c *l", "x", "c"), "reduced='x' names 'x', which is no axis of 'n c [*]l'"),
        (("n c *l", "*l", "g"), "params='g' names 'g'"),
        (("*n *l", "*l", "*l"), "several starred words"),
        (("n (g k)", "k", "g k"), "give the size of all but one"),
    ],
)
def test_a_mistyped_spec(spec, message):
    with pytest.raises(ValueError, match=message):
        NormSpec(*spec)


def test_a_shape_that_does_not_match():
    with pytest.raises(ValueError, match="do not match the axes"):
        NormSpec("n c", "c", "c").factor((2, 3, 4))
    with pytest.raises(ValueError, match="do not match the axes"):
        PAIRED.factor((2,))


@pytest.mark.parametrize("size", [2, 5, 100])
def test_a_weight_of_another_size(size):
    """A norm without checks of its own must not read past its weight."""
    x, memory = torch.randn(4, 6, 5), torch.ones(200)
    with pytest.raises(ValueError, match=r"weight has shape \[\d+\], expected 6 elements"):
        paired_group_norm(x, memory[:size], None)
    with pytest.raises(ValueError, match="bias has shape"):
        paired_group_norm(x, torch.ones(6), memory[:size])


def test_a_shape_that_does_not_factor():
    with pytest.raises(ValueError, match=r"dimension 0 of shape .* is not divisible by 2"):
        paired_group_norm(torch.randn(5, 12, 4), None, None)
