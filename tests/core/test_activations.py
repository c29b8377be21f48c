"""Every list of activations has the same names, so that a new one is not forgotten somewhere."""

import re

import pytest
import torch

from onepass.backends.c import build, problem
from onepass.core.activations import ACTIVATION_FUNCTIONS
from onepass.core.spec import ACTIVATIONS
from onepass.dispatch import compiled
from onepass.verify.cases import CASES


def test_every_list_has_every_activation():
    assert tuple(ACTIVATION_FUNCTIONS) == ACTIVATIONS
    assert tuple(problem.ACTIVATION_CODES) == ("", *ACTIVATIONS)
    assert set(compiled.ACTIVATION_CALLS) == set(ACTIVATIONS)
    assert {case.activation for case in CASES} >= set(ACTIVATIONS)


def test_the_c_sources_have_every_activation_in_order():
    (listed,) = re.findall(r"#define ACTIVATIONS\(X, ARGUMENT\)(.*)", (build.SOURCES / "numbers.h").read_text())
    pairs = re.findall(r"X\((\w+), (\w+), ARGUMENT\)", listed)
    assert pairs == [(name.upper(), name) for name in ACTIVATIONS]


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_the_budget_holds_for_it(name):
    """`verify/oracle.py` assumes |act(z)| <= |z| and a slope of at most 1.13."""
    z = torch.linspace(-40, 40, 200001, dtype=torch.float64, requires_grad=True)
    y = ACTIVATION_FUNCTIONS[name].apply(z)
    assert (y.abs() <= z.abs()).all()
    assert torch.autograd.grad(y.sum(), z)[0].abs().max() < 1.13
