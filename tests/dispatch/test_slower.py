"""The logger tells once when a slower path is taken, and why."""

import logging

import pytest
import torch

import onepass
import onepass.functional as O
from onepass.dispatch import launchers, slower
from tests.conftest import compiled


@pytest.fixture
def told(caplog, monkeypatch):
    monkeypatch.setattr(slower, "_told", set())
    launchers.forget_all()
    caplog.set_level(logging.INFO, logger="onepass")
    return lambda: [record.getMessage() for record in caplog.records if "slower" in record.getMessage()]


@pytest.mark.skipif(not compiled(), reason="there are no C kernels")
def test_a_fast_call_tells_nothing(told):
    O.layer_norm(torch.randn(2, 8, requires_grad=True), (8,)).square().sum().backward()
    O.layer_norm(torch.randn(0, 8), (8,))
    with onepass.force("reference"):
        O.layer_norm(torch.randn(2, 8), (8,))
    assert told() == []


def test_float64_tells_once(told):
    for rows in (2, 3):
        O.layer_norm(torch.randn(rows, 8, dtype=torch.float64), (8,))
    assert len(told()) == 1 and "float64" in told()[0] and "aten" in told()[0]


def test_without_c_kernels(told, by_torch):
    O.group_norm(torch.randn(2, 8, 3), 2)
    assert len(told()) == 1 and "ONEPASS_CPU=off" in told()[0]


def test_transforms_and_double_backwards(told):
    torch.func.vmap(lambda x: O.rms_norm(x, (8,)))(torch.randn(3, 2, 8))
    x = torch.randn(2, 8, requires_grad=True)
    (gradient,) = torch.autograd.grad(O.layer_norm(x, (8,)).square().sum(), x, create_graph=True)
    gradient.sum().backward()
    assert any("functorch" in line for line in told()) and any("differentiated" in line for line in told())
    assert len(told()) == len(set(told()))
