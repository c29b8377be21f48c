"""The modules have torch's constructors, state_dicts and reprs.

They train, evaluate, keep the memory format, and pickle.
"""

import contextlib
import copy
import functools
import pickle

import pytest
import torch
from torch import nn
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

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


EXTENDED = [
    (lambda m: m.LayerNorm(8, activation="gelu"), lambda x: x.movedim(1, -1)),
    (lambda m: m.LayerNorm((8, 4, 5), granularity="channel"), lambda x: x),
    (lambda m: m.LayerNorm((8, 4, 5), granularity="global", weight_offset=1.0), lambda x: x),
    (lambda m: m.RMSNorm(8, weight_offset=1.0, activation="silu"), lambda x: x.movedim(1, -1)),
    (lambda m: m.LayerNorm2d(8, activation="gelu"), lambda x: x),
    (lambda m: m.GroupNorm(4, 8, activation="silu"), lambda x: x),
    (lambda m: m.GroupNorm(4, 8, channel_dim=-1, activation="silu"), lambda x: x.movedim(1, -1)),
    (lambda m: m.InstanceNorm2d(8, affine=True, track_running_stats=True, channel_dim=-1), lambda x: x.movedim(1, -1)),
    (lambda m: m.BatchNorm2d(8, activation="relu"), lambda x: x),
    (lambda m: m.BatchNorm2d(8, channel_dim=-1), lambda x: x.movedim(1, -1)),
    (lambda m: m.SwitchableNorm2d(8, activation="silu"), lambda x: x),
]


@pytest.mark.parametrize("make, place", EXTENDED)
def test_extras_of_modules(make, place):
    """Create, train, evaluate, modulate, copy and pickle a module with extras. Its repr shows them."""
    module, x = make(onepass.nn), place(torch.randn(3, 8, 4, 5))
    assert any(word in repr(module) for word in ("activation=", "granularity=", "weight_offset=", "channel_dim="))
    scale, shift = torch.randn(2, 3, 8)
    for train in (True, True, False):
        module.train(train)
        y = module(x)
        y.square().sum().backward()
        assert y.shape == x.shape and all(p.grad is not None and p.grad.shape == p.shape for p in module.parameters())
    assert not torch.equal(module(x, modulate=(scale, shift)), y)
    assert torch.equal(module(x, modulate=(torch.zeros(3, 8), None)), y)
    twins = [copy.deepcopy(module), pickle.loads(pickle.dumps(module)), make(onepass.nn).eval()]
    twins[-1].load_state_dict(module.state_dict())
    assert all(torch.equal(twin(x), y) and repr(twin) == repr(module) for twin in twins)


def test_channels_last_modules_equal_channels_first():
    x = torch.randn(3, 4, 5, 8)
    for name, args in (("GroupNorm", (4, 8)), ("InstanceNorm2d", (8,)), ("BatchNorm2d", (8,))):
        last, first = getattr(onepass.nn, name)(*args, channel_dim=-1), getattr(torch.nn, name)(*args)
        assert_close(last(x), first(x.movedim(-1, 1)).movedim(1, -1))
        assert_close(dict(last.state_dict()), dict(first.state_dict()))
    sample = onepass.nn.InstanceNorm2d(8, channel_dim=-1)(x[0])
    assert_close(sample, torch.nn.InstanceNorm2d(8)(x[0].movedim(-1, 0)).movedim(0, -1))


def test_an_offset_weight_starts_where_the_sum_is_one():
    for module in (onepass.nn.RMSNorm(8, weight_offset=1.0), onepass.nn.LayerNorm((8, 2), weight_offset=1.0, granularity="channel")):
        assert not module.weight.any()
        nn_norm = (torch.nn.RMSNorm if isinstance(module, torch.nn.RMSNorm) else torch.nn.LayerNorm)(module.normalized_shape)
        x = torch.randn(3, *module.normalized_shape)
        assert_close(module(x), nn_norm(x))


def test_a_module_is_checked_when_it_is_made():
    for make, message in (
        (lambda: onepass.nn.GroupNorm(2, 4, activation="tanh"), "activation='tanh' is unknown; expected silu, relu, gelu, gelu_tanh"),
        (lambda: onepass.nn.LayerNorm(4, granularity="pixel"), "granularity='pixel' is unknown; expected one of element, channel, global"),
        (lambda: onepass.nn.RMSNorm(4, elementwise_affine=False, weight_offset=1.0), "weight_offset=1.0 was given without a weight"),
        (lambda: onepass.nn.GroupNorm(2, 4, channel_dim=2), "channel_dim=2"),
        (lambda: onepass.nn.SwitchableNorm2d(4, momentum=None), "momentum=None"),
    ):
        with pytest.raises(ValueError, match=message):
            make()


@pytest.mark.parametrize("bad", [{"modulate": (torch.zeros(3, 7), None)}, {"input": torch.randn(3, 7, 4, 5)}])
@pytest.mark.parametrize("name", ["BatchNorm2d", "SwitchableNorm2d"])
def test_a_call_that_fails_is_not_counted(name, bad):
    module = getattr(onepass.nn, name)(8)
    before = copy.deepcopy(module.state_dict())
    with pytest.raises(RuntimeError):
        module(**{"input": torch.randn(3, 8, 4, 5), **bad})
    assert_close(dict(module.state_dict()), dict(before))


@pytest.mark.parametrize("name, args, shape", MODULES)
def test_skip_init_and_meta(name, args, shape):
    module = torch.nn.utils.skip_init(getattr(onepass.nn, name), *args)
    assert [p.shape for p in module.parameters()] == [p.shape for p in getattr(torch.nn, name)(*args).parameters()]
    assert getattr(onepass.nn, name)(*args, device="meta")(torch.empty(shape, device="meta")).shape == shape


def test_a_torch_module_becomes_ours_by_its_class():
    module = torch.nn.GroupNorm(2, 4)
    module.__class__ = onepass.nn.GroupNorm
    x = torch.randn(2, 4, 3)
    assert_close(module(x), torch.nn.functional.group_norm(x, 2))


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


class Passes(torch.utils._python_dispatch.TorchDispatchMode):
    """Sees every op and changes nothing. In this mode, calls use the registered op."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


CHECKPOINTED = {
    "BatchNorm": (lambda lib: lib.BatchNorm2d(8), None),
    "BatchNorm, cumulative": (lambda lib: lib.BatchNorm2d(8, momentum=None), None),
    "BatchNorm without parameters": (lambda lib: lib.BatchNorm2d(8, affine=False), None),
    "BatchNorm, activated": (lambda lib: lib.BatchNorm2d(8), "relu"),
    "InstanceNorm": (lambda lib: lib.InstanceNorm2d(8, affine=True, track_running_stats=True), None),  # torch updates it late
    "InstanceNorm, activated": (lambda lib: lib.InstanceNorm2d(8, track_running_stats=True), "relu"),
}


def checkpointed(norm, activation, x, early, nested, mode, steps=2):
    """The buffers after steps with checkpointing, which recompute the norm, `nested` levels deep."""

    def block(x):
        if activation and not isinstance(norm, onepass.nn.extras.ExtrasMixin):
            return nn.functional.relu(norm(x))
        return norm(x) if activation is None else norm(x, activation=activation)

    def call(x, depth=nested):
        inner = functools.partial(call, depth=depth - 1) if depth else block
        return checkpoint(inner, x, use_reentrant=False, preserve_rng_state=early)

    with mode(), set_checkpoint_early_stop(early):
        for _ in range(steps):
            call(x).square().sum().backward()
    return [b.clone() for b in norm.buffers()]


@pytest.mark.parametrize("mode", [contextlib.nullcontext, Passes])
@pytest.mark.parametrize("early, nested", [(True, 0), (True, 1), (False, 0), (False, 1)])
@pytest.mark.parametrize("needs", ["x", "parameters", "both"])
@pytest.mark.parametrize("make, activation", CHECKPOINTED.values(), ids=CHECKPOINTED.keys())
def test_checkpointing_updates_as_often_as_torch(make, activation, needs, early, nested, mode):
    x = torch.randn(4, 8, 5, 3).requires_grad_(needs != "parameters")
    theirs, mine = make(nn), make(onepass.nn)
    if needs == "parameters" and not list(mine.parameters()):
        pytest.skip("it has no parameters")
    for norm in (theirs, mine):
        norm.requires_grad_(needs != "x")
    expected, found = (checkpointed(norm, activation, x, early, nested, mode) for norm in (theirs, mine))
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("mode", [contextlib.nullcontext, Passes])
def test_checkpointing_updates_a_switchable_norm_twice(mode):
    """The published code updates statistics in the forward, so it also updates them twice."""
    x = torch.randn(4, 8, 5, 3, requires_grad=True)
    early, whole = (checkpointed(onepass.nn.SwitchableNorm2d(8), None, x, stop, 0, mode) for stop in (True, False))
    torch.testing.assert_close(early, whole)
