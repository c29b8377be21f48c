"""Calls with a residual or a modulation run launchers in C++, and unusual ones give the same results."""

from types import BuiltinFunctionType

import pytest
import torch
import torch.nn.functional as F

import onepass.functional as O
from onepass.backends.front_door import ByNeeds, FrontDoor
from onepass.core.device import describe
from onepass.dispatch.launchers import known

C = 24
pytestmark = [
    pytest.mark.skipif(bool(describe(torch.device("cpu")).no_c), reason="there are no C kernels here"),
    pytest.mark.skipif(FrontDoor.launcher is None, reason="the front door is closed"),
]


def _operands(*dtypes, grad=False):
    """x, residual, weight, bias, scale and shift."""
    dtypes = dtypes or (torch.float32,) * 6
    shapes = (2, 3, C), (2, 3, C), (C,), (C,), (2, C), (2, C)
    return [torch.randn(shape).to(dtype).requires_grad_(grad) for shape, dtype in zip(shapes, dtypes)]


def _add(x, residual, weight, bias, scale, shift):
    return O.add_layer_norm(x, residual, (C,), weight, bias, modulate=(scale, shift))


def _plainly(x, residual, weight, bias, scale, shift):
    total = x + residual
    return F.layer_norm(total, (C,), weight, bias) * (1 + scale[:, None]) + shift[:, None], total


def _last():
    return known()[-1]


def test_inference_runs_a_launcher_in_cpp():
    operands = _operands()
    with torch.no_grad():
        for _ in range(3):
            found = O.add_layer_norm(*operands[:2], (C,), *operands[2:4])
    total = operands[0] + operands[1]
    torch.testing.assert_close(found, (F.layer_norm(total, (C,), *operands[2:4]), total))
    assert isinstance(_last().infer_extras, BuiltinFunctionType)


@pytest.mark.parametrize("use_sum", [True, False])
def test_training_runs_launchers_in_cpp(use_sum):
    operands, (dy, dsum) = _operands(grad=True), torch.randn(2, 2, 3, C)
    expected = _plainly(*operands)
    wanted = torch.autograd.grad(expected[: 1 + use_sum], operands, (dy, dsum)[: 1 + use_sum])
    for _ in range(3):
        found = _add(*operands)
        gradients = torch.autograd.grad(found[: 1 + use_sum], operands, (dy, dsum)[: 1 + use_sum])
        torch.testing.assert_close((*found, *gradients), (*expected, *wanted), rtol=1e-4, atol=1e-5)
    launchers = _last()
    assert isinstance(launchers.train_extras, BuiltinFunctionType) and isinstance(launchers.train_extras_backward, ByNeeds)
    needs = (True,) * 5
    launch = launchers.train_extras_backward.launcher(dy, expected[1], *operands[2:4], None, *operands[4:], dsum, needs)
    assert isinstance(launch, BuiltinFunctionType)


def _spread(t):
    """The same values with gaps between them."""
    return torch.stack([t, t], -1)[..., 0]


@pytest.mark.parametrize("spread", range(6))
def test_operands_with_gaps(spread):
    """They are not what a launcher expects, so it hands the call over."""
    operands = _operands()
    with torch.no_grad():
        expected = _plainly(*operands)
        _add(*operands)
        operands[spread] = _spread(operands[spread])
        for _ in range(2):
            torch.testing.assert_close(_add(*operands), expected)


@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16])
def test_mixed_dtypes(low):
    operands = [t.requires_grad_() for t in _operands(low, torch.float32, torch.float32, torch.float32, low, low)]
    expected = _plainly(*[t.detach().double().requires_grad_() for t in operands])
    for _ in range(3):
        found = _add(*operands)
        gradients = torch.autograd.grad(found, operands, [torch.ones_like(t) for t in found])
        assert [t.dtype for t in gradients] == [t.dtype for t in operands]
    torch.testing.assert_close(found, tuple(t.to(found[0].dtype) for t in expected), rtol=2e-2, atol=2e-2)


def test_a_tensor_without_memory_is_named():
    operands = _operands()
    with torch.no_grad():
        _add(*operands)
        operands[1].untyped_storage().resize_(0)
        with pytest.raises(RuntimeError, match="residual"):
            _add(*operands)
