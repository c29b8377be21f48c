"""`onepass.patch` on models of timm: norms with an activation, norms over channels, and one that is left alone."""

import copy

import pytest
import torch

import onepass
from tests.load_timm import load_timm

MODELS = {  # found, replaced, fused, left
    "test_resnet": (15, 15, 8, 0),
    "test_efficientnet": (13, 13, 9, 0),
    "test_convnext": (14, 14, 0, 0),
    "test_vit": (13, 13, 6, 0),
    "convnextv2_atto": (13, 9, 0, 4),  # GlobalResponseNorm divides by a mean of norms
}
SMALL = {"convnextv2_atto": {"depths": (1, 1, 1, 1), "dims": (8, 8, 16, 16)}}


def outcome(model, x):
    y = model(x)
    y.square().sum().backward()
    return torch.cat([y.flatten(), *(param.grad.flatten() for param in model.parameters())]).detach()


@pytest.mark.parametrize("name", MODELS)
def test_timm(name):
    timm = load_timm()
    model, x = timm.create_model(name, **SMALL.get(name, {})), torch.randn(2, 3, 160, 160)
    with torch.no_grad():
        for param in model.parameters():
            if param.dim() == 1:  # norms start with ones and zeros, which hide mistakes
                param += torch.randn_like(param) / 5
    patched, exact = copy.deepcopy(model), outcome(copy.deepcopy(model).double(), x.double())
    counts = onepass.patch(patched, channels_last=True).counts
    assert tuple(counts[key] for key in ("found", "replaced", "fused", "left")) == MODELS[name]
    off, torchs = ((outcome(m, x) - exact).norm() / exact.norm() for m in (patched, model))
    assert off <= 4 * torchs
    onepass.unpatch(patched)
    assert [type(a) for a in patched.modules()] == [type(b) for b in model.modules()]
