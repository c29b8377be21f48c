"""Modules: torch's constructors, state_dicts and reprs; training, evaluation, memory format, pickling."""

import copy
import pickle

import pytest
import torch
from torch.testing import assert_close

import onepass.nn

MODULES = [
    ("LayerNorm", (8,), (4, 8)),
    ("LayerNorm", ((5, 8), 1e-3, False), (4, 5, 8)),
    ("LayerNorm", (8, 1e-5, True, False), (4, 8)),
    ("RMSNorm", (8,), (4, 8)),
    ("RMSNorm", ((5, 8), 1e-3, False), (4, 5, 8)),
    ("GroupNorm", (4, 8), (3, 8, 5, 5)),
    ("GroupNorm", (4, 8, 1e-3, False), (3, 8, 5, 5)),
    ("InstanceNorm1d", (8,), (3, 8, 6)),
    ("InstanceNorm1d", (8,), (8, 6)),
    ("InstanceNorm2d", (8, 1e-3, 0.3, True, True), (3, 8, 6, 5)),
    ("InstanceNorm3d", (8,), (3, 8, 2, 3, 4)),
    ("BatchNorm1d", (8,), (6, 8)),
    ("BatchNorm1d", (8, 1e-3, None), (6, 8, 3)),
    ("BatchNorm2d", (8, 1e-5, 0.3, False), (3, 8, 4, 4)),
    ("BatchNorm2d", (8, 1e-5, 0.1, True, False), (3, 8, 4, 4)),
    ("BatchNorm3d", (8,), (2, 8, 2, 3, 4)),
]


@pytest.mark.parametrize("name, args, shape", MODULES)
def test_same_as_torch(name, args, shape):
    torchs, ours = getattr(torch.nn, name)(*args), getattr(onepass.nn, name)(*args)
    assert isinstance(ours, getattr(torch.nn, name)) and repr(ours) == repr(torchs)
    assert list(ours.state_dict()) == list(torchs.state_dict())
    for parameter in torchs.parameters():
        torch.nn.init.normal_(parameter)
    ours.load_state_dict(torchs.state_dict())
    for _ in range(3):
        x = torch.randn(shape)
        assert_close(ours(x), torchs(x))
    assert_close(dict(ours.state_dict()), dict(torchs.state_dict()))
    ours.eval(), torchs.eval()
    for model in (ours, copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):
        assert_close(model(x), torchs(x))
    torchs.load_state_dict(ours.state_dict())


def test_layer_norm2d():
    ours = onepass.nn.LayerNorm2d(12)
    assert repr(ours) == repr(torch.nn.LayerNorm(12, eps=1e-6)).replace("LayerNorm", "LayerNorm2d")
    torch.nn.init.normal_(ours.weight), torch.nn.init.normal_(ours.bias)
    x = torch.randn(2, 12, 5, 7)
    expected = torch.nn.functional.layer_norm(x.permute(0, 2, 3, 1), (12,), ours.weight, ours.bias, 1e-6).permute(0, 3, 1, 2)
    assert_close(ours(x), expected)
    last = x.contiguous(memory_format=torch.channels_last)
    assert_close(ours(last), expected)
    assert ours(last).is_contiguous(memory_format=torch.channels_last) and ours(x).is_contiguous()
    with pytest.raises(RuntimeError, match="channels"):
        onepass.nn.LayerNorm2d(6, elementwise_affine=False)(x)


def test_layer_norm2d_makes_no_permuting_copy():
    x = torch.randn(2, 12, 5, 7)
    assert "x is copied" not in str(onepass.explain(onepass.nn.LayerNorm2d(12), x))


@pytest.mark.parametrize("dims, name", [(4, "channels_last"), (5, "channels_last_3d")])
def test_memory_format_is_kept(dims, name):
    memory_format = getattr(torch, name)
    kind = {4: "2d", 5: "3d"}[dims]
    x = torch.randn(2, 8, *(3, 4, 5)[: dims - 2]).contiguous(memory_format=memory_format).requires_grad_()
    modules = [onepass.nn.GroupNorm(4, 8), getattr(onepass.nn, f"InstanceNorm{kind}")(8), getattr(onepass.nn, f"BatchNorm{kind}")(8)]
    modules.append(onepass.nn.LayerNorm(x.shape[1:]))
    for module in modules:
        y = module(x)
        assert y.is_contiguous(memory_format=memory_format), module
        (dx,) = torch.autograd.grad(y, x, torch.randn(y.shape))
        assert dx.is_contiguous(memory_format=memory_format), module


def test_explain_a_module_does_not_train_it():
    module = onepass.nn.BatchNorm2d(8)
    before = copy.deepcopy(module.state_dict())
    onepass.explain(module, torch.randn(4, 8, 3, 3))
    assert_close(dict(module.state_dict()), dict(before))


def test_half_running_statistics():
    module = onepass.nn.BatchNorm2d(8).bfloat16()
    expected = torch.nn.BatchNorm2d(8)
    for _ in range(4):
        x = torch.randn(4, 8, 5, 5).bfloat16()
        module(x), expected(x.float())
    assert module.running_mean.dtype == torch.bfloat16
    assert_close(module.running_var.float(), expected.running_var, rtol=2e-2, atol=2e-2)
