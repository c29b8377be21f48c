"""First and second derivatives by finite differences, on every family."""

import pytest
import torch

import onepass
from onepass.bench import cases
from onepass.bench.cases import Case, Operands

SMALL = [
    Case("layer_norm", (3, 4)),
    Case("layer_norm", (2, 2, 3), rank=2, affine="bias"),
    Case("layer_norm", (2, 3, 2), "transposed", affine="weight"),
    Case("rms_norm", (3, 4), eps=1e-3),
    Case("rms_norm", (2, 4), "strided", affine="none", eps=1e-3),
    Case("group_norm", (2, 4, 3), groups=2),
    Case("group_norm", (2, 4, 3), "channels_last", groups=2, affine="bias"),
    Case("instance_norm", (2, 2, 4), running=True),
    Case("instance_norm", (2, 2, 4), "channels_last", affine="weight"),
    Case("batch_norm", (3, 2, 2), running=True),
    Case("batch_norm", (3, 2, 2), "channels_last"),
    Case("batch_norm", (3, 2, 2), evaluate=True),
    Case("layer_norm2d", (2, 3, 2, 2)),
]


@pytest.mark.parametrize("family", [None, *(family.name for family in onepass.families())])
@pytest.mark.parametrize("case", SMALL, ids=lambda case: case.name)
def test_gradcheck_and_gradgradcheck(case, family):
    x, weight, bias, mean, var = cases.make(case, torch.float64)
    inputs = [t.requires_grad_() for t in (x, weight, bias) if t is not None]

    def f(*given):
        values = iter(given)
        x_, w, b = next(values), *(None if t is None else next(values) for t in (weight, bias))
        running = (None if t is None else t.clone() for t in (mean, var))
        return cases.call(case, Operands(x_, w, b, *running))

    try:
        with onepass.force(family):
            assert torch.autograd.gradcheck(f, inputs, check_batched_grad=True, check_forward_ad=True)
            assert torch.autograd.gradgradcheck(f, inputs, check_batched_grad=True)
    except onepass.CannotForce as reason:
        pytest.skip(str(reason))


def test_only_what_is_needed():
    x, weight, bias = torch.randn(4, 6, 5), torch.randn(6, requires_grad=True), torch.randn(6)
    for family in onepass.families():
        with onepass.force(family.name):
            y = onepass.functional.group_norm(x, 3, weight, bias)
            y.sum().backward()
    assert weight.grad is not None and x.grad is None and bias.grad is None


def test_double_backward_of_a_bias_without_a_weight():
    """torch's own is wrong here."""
    x, bias = torch.randn(3, 4, dtype=torch.float64, requires_grad=True), torch.randn(4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradgradcheck(lambda x, b: onepass.functional.layer_norm(x, (4,), None, b), (x, bias))


def test_third_derivative():
    x = torch.randn(2, 3, dtype=torch.float64, requires_grad=True)
    y = onepass.functional.layer_norm(x, (3,)).pow(3).sum()
    for _ in range(3):
        (y,) = torch.autograd.grad(y, x, create_graph=True)
        y = y.pow(2).sum()
    assert y.isfinite()


def test_in_place_changes_are_caught():
    x = torch.randn(4, 8, requires_grad=True)
    copy = x * 1
    y = onepass.functional.layer_norm(copy, (8,))
    copy.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()
