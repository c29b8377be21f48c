"""Patched models on a GPU agree with the unpatched ones: eager, under autocast, and compiled with our pass."""

import copy

import pytest
import torch
from torch import nn

import onepass
from onepass.dispatch import compiled as compiled_graphs
from tests.patching.test_patch import Block, Promoted, Residual, Upcast

pytestmark = pytest.mark.gpu


class Unread(nn.Module):
    """An activation and a sum that only the graph shows, since the source does not say what is called.

    The tensors are large enough that the compiled model uses our kernels. A norm of ours follows the sum, since inductor's
    own are as fast.
    """

    def __init__(self):
        super().__init__()
        self.first, self.second, self.apply_to = nn.GroupNorm(8, 64), onepass.nn.LayerNorm(64), nn.functional.silu

    def forward(self, x, h):
        y = self.apply_to(self.first(x))
        total = (lambda a, b: a + b)(y.flatten(2).transpose(1, 2), h)
        return self.second(total) + total


def outcome(model, *inputs, autocast=False):
    with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
        y = model(*inputs)
    torch.manual_seed(1)
    return [y.detach(), *torch.autograd.grad(y, list(model.parameters()), torch.randn_like(y))]


def no_further(model, inputs, patched, old=None, slack=1.2, autocast=False):
    """The output and all gradients together are not further from an fp64 run than the original's."""
    exact = outcome(copy.deepcopy(model).double(), *[x.double() for x in inputs])
    found, before = outcome(patched, *inputs, autocast=autocast), outcome(old or model, *inputs, autocast=autocast)
    assert [t.dtype for t in found] == [t.dtype for t in before]
    off, theirs = (sum(((a - b).norm() / b.norm()) ** 2 for a, b in zip(each, exact)).sqrt() for each in (found, before))
    assert off <= slack * theirs + 1e-6


MODELS = {
    "block": (lambda: nn.Sequential(nn.Conv2d(8, 24, 3, padding=1), Block(), Block()), lambda: [torch.randn(4, 8, 32, 32)]),
    "residual": (lambda: Residual(), lambda: [torch.randn(4, 128, 24)]),
    "dtypes": (lambda: nn.Sequential(Upcast(24), nn.Linear(24, 24), Promoted(24), nn.Linear(24, 24)), lambda: [torch.randn(4, 128, 24)]),
    "unread": (lambda: Unread(), lambda: [torch.randn(8, 64, 192, 192), torch.randn(8, 192 * 192, 64)]),
}


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("make, inputs", MODELS.values(), ids=MODELS.keys())
def test_a_patched_model(make, inputs, dtype, autocast):
    if autocast and dtype != torch.float32:
        pytest.skip("autocast is for float32")
    model = make().to("cuda", dtype)
    patched = copy.deepcopy(model)
    onepass.patch(patched, channels_last=True)
    no_further(model, [x.to("cuda", dtype) for x in inputs()], patched, autocast=autocast)


@pytest.mark.parametrize("make, inputs", MODELS.values(), ids=MODELS.keys())
def test_a_compiled_patched_model(make, inputs, monkeypatch):
    model = make().to("cuda", torch.bfloat16)
    patched, merged, merge = copy.deepcopy(model), [], compiled_graphs.fuse_neighbours
    onepass.patch(patched)
    monkeypatch.setattr(compiled_graphs, "fuse_neighbours", lambda g: merged.append(merge(g)))
    torch._dynamo.reset()
    compiled = torch.compile(patched, fullgraph=True)
    no_further(model, [x.to("cuda", torch.bfloat16) for x in inputs()], compiled)
    if isinstance(model, Unread):  # the others are left to inductor
        assert sum(merged) == 2
