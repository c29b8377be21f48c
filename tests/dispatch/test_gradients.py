"""First and second derivatives by finite differences, on every family."""

import pytest
import torch

import onepass
from onepass.core import norms
from onepass.core.operands import NO_OPTIONAL, SavedTensors
from onepass.core.problem import bind
from onepass.dispatch import launchers
from onepass.planning.options import current_options
from onepass.verify import calls, cases, tensors
from onepass.verify.cases import Case
from tests.conftest import CPU_FAMILIES

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
    Case("layer_norm", (2, 3, 4), modulate=True, activation="silu"),
    Case("layer_norm", (2, 3, 4), "transposed", modulate=True, offset=1.0),
    Case("layer_norm", (2, 3, 2, 2), "channels_last", rank=3, granularity="channel", activation="gelu"),
    Case("layer_norm", (2, 3, 2, 2), rank=3, granularity="global", activation="gelu_tanh"),
    Case("layer_norm", (2, 3, 4), residual=True, modulate=True, activation="gelu_tanh"),
    Case("rms_norm", (2, 3, 4), offset=1.0, modulate=True, activation="gelu", eps=1e-3),
    Case("rms_norm", (2, 4), residual=True, eps=1e-3),
    Case("group_norm", (2, 4, 3), "channels_last", groups=2, modulate=True, activation="silu"),
    Case("group_norm", (2, 3, 4), groups=2, last=True, activation="relu"),
    Case("group_norm", (2, 4, 3), groups=2, residual=True, activation="silu"),
    Case("instance_norm", (2, 4, 2), last=True, modulate=True, activation="gelu"),
    Case("batch_norm", (3, 2, 2), running=True, activation="silu"),
    Case("batch_norm", (3, 2, 2), evaluate=True, modulate=True, activation="silu"),
    Case("layer_norm2d", (2, 3, 2, 2), modulate=True, activation="silu"),
    Case("switchable_norm", (2, 3, 2, 2), running=True),
    Case("switchable_norm", (2, 3, 2, 2), "channels_last", modulate=True, activation="silu"),
    Case("switchable_norm", (3, 2, 2), evaluate=True),
    Case("switchable_norm", (2, 2, 3), using_bn=False, last=True),
    Case("switchable_norm", (3, 4)),
]


@pytest.mark.parametrize("family", [None, *CPU_FAMILIES])
@pytest.mark.parametrize("case", SMALL, ids=lambda case: case.name)
def test_gradcheck_and_gradgradcheck(case, family):
    operands = tensors.make(case, torch.float64)
    running = {name: t for name, t in operands._asdict().items() if name.startswith("running") and t is not None}
    inputs = {name: t.requires_grad_() for name, t in operands._asdict().items() if name not in running and t is not None}

    def f(*given):
        kept = {name: t.clone() for name, t in running.items()}
        return calls.by_onepass(case, operands._replace(**kept, **dict(zip(inputs, given))))

    try:
        with onepass.force(family):
            assert torch.autograd.gradcheck(f, tuple(inputs.values()), check_batched_grad=True, check_forward_ad=True)
            assert torch.autograd.gradgradcheck(f, tuple(inputs.values()), check_batched_grad=True)
    except onepass.CannotForce as reason:
        pytest.skip(str(reason))


def test_only_what_is_needed():
    x, weight, bias = torch.randn(4, 6, 5), torch.randn(6, requires_grad=True), torch.randn(6)
    dy = torch.randn(x.shape)
    (expected,) = torch.autograd.grad(torch.nn.functional.group_norm(x, 3, weight, bias), weight, dy)
    for family in CPU_FAMILIES:
        with onepass.force(family):
            ready = launchers.Launchers(bind(norms.group_norm(3), x, weight, bias), x.device, current_options())
            _, mean, rstd, *_ = ready.forward(x, weight, bias, None, None, NO_OPTIONAL)
            grads = ready.backward(dy, None, SavedTensors(x, weight.detach(), bias, mean, rstd), (False, True, False))
        assert grads[0] is None and grads[2] is None
        torch.testing.assert_close(grads[1], expected)


def test_double_backward_of_a_bias_without_a_weight():
    """torch's own double backward is wrong here."""
    x, bias = torch.randn(3, 4, dtype=torch.float64, requires_grad=True), torch.randn(4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradgradcheck(lambda x, b: onepass.functional.layer_norm(x, (4,), None, b), (x, bias))


def test_third_derivative():
    x = torch.randn(2, 3, dtype=torch.float64, requires_grad=True)

    def third(function):
        y = function(x, (3,), eps=0.1).pow(3).sum()
        for _ in range(3):
            (y,) = torch.autograd.grad(y, x, create_graph=True)
            y = y.pow(2).sum()
        return y

    def definition(x, shape, eps):
        var, mean = torch.var_mean(x, -1, correction=0, keepdim=True)
        return (x - mean) / torch.sqrt(var + eps)

    torch.testing.assert_close(third(onepass.functional.layer_norm), third(definition))  # torch's own is off by a fifth


def test_in_place_changes_are_caught():
    x = torch.randn(4, 8, requires_grad=True)
    copy = x * 1
    y = onepass.functional.layer_norm(copy, (8,))
    copy.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@pytest.mark.parametrize("layout", ["contiguous", "channels_last", "transposed"])
@pytest.mark.parametrize("case", [case for case in cases.CASES if len(case.shape) == 4 and case.save == "x"], ids=lambda case: case.name)
def test_outputs_may_be_changed_in_place(case, layout):
    """ReLU(inplace=True) after a norm gives what ReLU gives, and the same gradient."""

    def run(activation, dtype):
        operands = tensors.make(case, dtype)
        x = tensors.lay_out(operands.x.contiguous(), layout).detach().requires_grad_()
        output = calls.by_onepass(case, operands._replace(x=x))
        y = activation(output[0] if isinstance(output, tuple) else output)
        return y.detach(), *torch.autograd.grad(y, x, tensors.make_dy(operands))

    for dtype in (torch.float32, torch.bfloat16):
        for ours, expected in zip(run(torch.relu_, dtype), run(torch.relu, dtype)):
            torch.testing.assert_close(ours, expected, rtol=0, atol=0, equal_nan=True)
            assert not expected.numel() or expected.any()


def test_evaluation_then_training_then_backward():
    module = onepass.nn.BatchNorm2d(6)
    x = torch.randn(4, 6, 3, 3, requires_grad=True)
    y = module.eval()(x)
    module.train()(x.detach())
    (dx,) = torch.autograd.grad(y, x, torch.ones_like(y))
    torch.testing.assert_close(dx, torch.full_like(x, (1 + 1e-5) ** -0.5))
