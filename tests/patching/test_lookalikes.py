"""Models that look like what `onepass.patch` knows, but differ. Each once gave a wrong answer or an error."""

import contextlib
import copy
import functools

import pytest
import torch
from torch import nn
from torch.nn.functional import relu
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

import onepass
import onepass.functional as F
from onepass.dispatch import compiled as compiled_graphs
from tests.patching.test_patch import Rms, agree

X = torch.randn(2, 24, 5, 3)
ROWS = torch.randn(2, 3, 24)


class Applies(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


class Quiet(nn.Module):
    """A module that differs in training."""

    def forward(self, x):
        return relu(x) * (2 if self.training else 1)


class Wide(nn.Module):
    def forward(self, x):
        return relu(x.float())


class Counts(nn.Module):
    calls = 0

    def forward(self, x):
        self.calls = self.calls + 1
        return relu(x)


ACTIVATIONS = {
    "known by what it calls": (lambda: [Applies(relu), Applies(torch.tanh)], 1),
    "bounded far out": (lambda: [nn.Hardtanh(0, 20), Applies(lambda x: x.clamp(0, 255))], 0),
    "other in training": (lambda: [Quiet()], 0),
    "of another dtype": (lambda: [Wide()], 0),
    "with a state": (lambda: [Counts()], 0),
}


@pytest.mark.parametrize("make, fused", ACTIVATIONS.values(), ids=ACTIVATIONS.keys())
def test_an_activation_is_what_it_does(make, fused):
    model = nn.Sequential(*[module for act in make() for module in (nn.BatchNorm2d(24), act)])
    nn.init.constant_(model[0].weight, 300)
    assert agree(model, X).counts["fused"] == fused


class Twice(nn.InstanceNorm2d):
    def forward(self, x):
        return super().forward(x) * 2


class Detached(Rms):
    def forward(self, signal):
        return signal * torch.rsqrt(signal.square().mean(-1, keepdim=True) + self.tiny).detach() * self.gain


class Clamped(Rms):
    def forward(self, signal):
        return super().forward(signal).clamp(-10, 10)


class OtherOnTwoDimensions(Rms):
    def forward(self, signal):
        return super().forward(signal) * (2 if signal.dim() == 2 else 1)


class Remembers(Rms):
    def __init__(self, size):
        super().__init__(size)
        self.log = []

    def forward(self, signal):
        self.log.append(1)
        return super().forward(signal)


class WithActivation(nn.BatchNorm2d):
    def __init__(self, size):
        super().__init__(size)
        self.activation = nn.ReLU()

    def forward(self, x):
        return self.activation(super().forward(x))


class TakesResidual(Rms):
    def forward(self, signal, residual=None):
        return super().forward(signal if residual is None else signal + residual)


class ScaleNorm(nn.Module):
    def __init__(self, shape=()):
        super().__init__()
        self.weight = nn.Parameter(torch.full(shape, 4.0))

    def forward(self, x):
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * self.weight


class AssertsNorm(Rms):
    def forward(self, signal):
        if signal.dtype != self.gain.dtype:
            raise AssertionError
        return super().forward(signal)


NORMS = {
    "a subclass with a forward": (lambda: Twice(24), X, 0),
    "statistics without gradient": (lambda: Detached(24), ROWS, 0),
    "clamped": (lambda: Clamped(24), ROWS, 0),
    "two dimensions": (lambda: OtherOnTwoDimensions(24), ROWS, 0),
    "with a state": (lambda: Remembers(24), ROWS, 0),
    "with a module where ours has a word": (lambda: WithActivation(24), X, 0),
    "with a residual of its own": (lambda: TakesResidual(24), ROWS, 0),
    "a scalar": (lambda: ScaleNorm(), ROWS, 0),
    "one gain for all": (lambda: ScaleNorm((1,)), ROWS, 0),
    "particular about dtypes": (lambda: AssertsNorm(24), ROWS, 1),
}


@pytest.mark.parametrize("make, x, replaced", NORMS.values(), ids=NORMS.keys())
def test_a_norm_is_what_it_does(make, x, replaced):
    assert agree(nn.Sequential(make(), nn.ReLU()), x).counts["replaced"] == replaced


def test_a_trial_leaves_no_trace():
    norm = Remembers(24)
    onepass.patch(norm)
    assert norm.log == []
    with torch.device("meta"):
        assert onepass.patch(nn.Sequential(Rms(24), nn.BatchNorm2d(3))).counts["replaced"] == 2
    assert onepass.patch(nn.Sequential(Rms(24)).to("meta")).counts["replaced"] == 1


def test_one_more_than_the_weight():
    class OneMore(nn.LayerNorm):
        def forward(self, x):
            return nn.functional.layer_norm(x, self.normalized_shape, self.weight + 1, self.bias, self.eps)

    assert agree(nn.Sequential(OneMore(24)), ROWS).counts["replaced"] == 1


def test_channels_first_of_any_rank():
    class AnyNorm(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight, self.eps = nn.Parameter(torch.rand(24)), 1e-5

        def forward(self, x):
            y = (x - x.mean(1, keepdim=True)) * torch.rsqrt(x.var(1, keepdim=True, unbiased=False) + self.eps)
            return y * self.weight.view(-1, *[1] * (x.dim() - 2))

    model = nn.Sequential(AnyNorm())
    for x in (X, torch.randn(2, 24, 5), torch.randn(2, 24, 3, 2, 2)):
        assert agree(model, x).rows[0].became == "LayerNorm2d"


@pytest.mark.parametrize("norm", [lambda: onepass.nn.GroupNorm(4, 24, activation="silu"), lambda: onepass.nn.BatchNorm2d(24, save="y")])
def test_an_activation_after_an_activation(norm):
    assert agree(nn.Sequential(norm(), nn.ReLU()), X).counts["fused"] == 0


class Base(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.act = nn.LayerNorm(24), nn.ReLU()


class Shadowed(Base):
    def forward(self, x, relu=torch.tanh):
        return relu(self.norm(x))


class Deleted(Base):
    def forward(self, x):
        h = self.norm(x)
        y = self.act(h)
        del h
        return y


class Raised(Base):
    def forward(self, x):
        h = self.norm(x)
        y = self.act(h)
        h += 1
        return y + h


class Names(Base):
    def forward(self, x):
        h = self.norm(x)
        y = self.act(h)
        return y + locals()["h"]


class Text(Base):
    def forward(self, x):
        text = """
        indented
        """
        h = self.norm(x)
        h = self.act(h)
        return h * len(text)


class Property(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.gate = nn.LayerNorm(24), True

    @property
    def act(self):
        return nn.ReLU() if self.training else nn.Tanh()

    def forward(self, x):
        return self.act(self.norm(x))


def doubled(function):
    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        return 2 * function(*args, **kwargs)

    return wrapper


class Decorated(Base):
    @doubled
    @torch.no_grad()
    def forward(self, x):
        h = self.norm(x)
        h = self.act(h)
        return h


class Assigned(Base):
    def forward(self, x):
        h = self.norm(x)
        h = self.act(h)
        return h


Assigned.forward = doubled(Assigned.forward)

SOURCES = {Shadowed: 0, Deleted: 0, Raised: 0, Names: 0, Text: 1, Property: 0, Assigned: 1}


@pytest.mark.parametrize("make", SOURCES)
def test_a_source_is_what_it_does(make):
    assert agree(make(), ROWS).counts["fused"] == SOURCES[make]


def test_wrappers_stay():
    model = Decorated()
    expected = model(ROWS)
    assert onepass.patch(model).counts["fused"] == 1
    torch.testing.assert_close(model(ROWS.requires_grad_()), expected)
    assert not model(ROWS).requires_grad


@pytest.mark.parametrize("change", ["act", "norm", "hook", "slice", "item", "forward"])
def test_what_changes_later_is_seen(change, monkeypatch):
    model, x, seen = nn.Sequential(nn.BatchNorm1d(24), nn.ReLU(), nn.BatchNorm1d(24), nn.GELU(), Deep()).eval(), torch.randn(2, 24), []
    onepass.patch(model)
    if change == "act":
        model[4].act = nn.Tanh()
    elif change == "norm":
        model[4].norm = nn.Identity()
    elif change == "hook":
        model[4].act.register_forward_hook(lambda *_: seen.append(1))
    elif change == "slice":
        model = model[2:]
    elif change == "item":
        model[1] = nn.Tanh()
    else:
        monkeypatch.setattr(Deep, "forward", Deep.other)
        onepass.patch(onepass.unpatch(model))
    found = model(x)
    torch.testing.assert_close(found, onepass.unpatch(model)(x))
    assert bool(seen) == (change == "hook")


class Acting(nn.BatchNorm1d):
    def __init__(self):
        super().__init__(24)
        self.act = nn.ReLU()

    def forward(self, x):
        return self.act(super().forward(x))


class Summed(Base):
    def forward(self, x):
        return self.norm(x + x)


@contextlib.contextmanager
def hooked(kind, seen):
    """With hooks on all modules: which modules were called, with how many inputs and outputs."""

    def note(module, *values):
        keywords = [value for value in values if isinstance(value, dict)]
        counts = [len(value) if isinstance(value, tuple) else 1 for value in values if not isinstance(value, dict)]
        seen.append((type(module).__name__, counts, *keywords))

    handle = getattr(nn.modules.module, f"register_module_{kind}")(note)
    try:
        yield
    finally:
        handle.remove()


@pytest.mark.parametrize("kind", ["forward_hook", "forward_pre_hook", "full_backward_hook", "full_backward_pre_hook"])
@pytest.mark.parametrize("when", ["before the patch", "after it"])
def test_hooks_on_all_modules_see_all_modules(kind, when):
    """Nothing is fused while such hooks exist. Fusion returns when they are removed."""
    model = nn.Sequential(nn.BatchNorm1d(24), nn.ReLU(), Deep(), Summed(), Acting(), nn.LayerNorm(24), nn.Identity(), nn.SiLU())
    patched, x, expected, found = copy.deepcopy(model), torch.randn(4, 24, requires_grad=True), [], []
    if when == "before the patch":
        with hooked(kind, []):
            counts = onepass.patch(patched).counts
    else:
        counts = onepass.patch(patched).counts
        patched(x)
    assert counts == {"found": 5, "replaced": 5, "fused": 5, "left": 0, "already": 0}
    for module, seen in ((model, expected), (patched, found)):
        with hooked(kind, seen):
            module(x).sum().backward()
    assert found == expected and len(expected) == 13
    called = []
    patched[1].forward = lambda x: called.append(x) or relu(x)
    patched(x)
    assert not called


def test_a_module_inside_a_norm_is_looked_at_again():
    norm, seen = Acting(), []
    onepass.patch(norm)
    norm.act.register_forward_hook(lambda *_: seen.append(1))
    norm(torch.randn(4, 24))
    assert seen == [1]
    norm.act = nn.Tanh()
    assert norm(torch.randn(4, 24)).min() < 0


class Deep(Base):
    def forward(self, x):
        return self.act(self.norm(x))

    def other(self, x):
        return self.act(self.norm(x)) + 1


@pytest.mark.parametrize("early", [True, False])
@pytest.mark.parametrize("block", [
    lambda: nn.Sequential(nn.BatchNorm2d(24), nn.ReLU()),
    lambda: nn.Sequential(nn.Conv2d(24, 24, 1), nn.BatchNorm2d(24)),
    lambda: nn.Sequential(nn.InstanceNorm2d(24, track_running_stats=True), nn.ReLU()),
    lambda: nn.Sequential(nn.BatchNorm2d(24), nn.Conv2d(24, 24, 1), nn.InstanceNorm2d(24, track_running_stats=True)),
])  # fmt: skip
def test_checkpointing_updates_statistics_as_often(block, early):
    model = block()
    patched = copy.deepcopy(model)
    onepass.patch(patched)
    for module in (model, patched):
        with set_checkpoint_early_stop(early):
            for _ in range(2):
                checkpoint(module, X.clone().requires_grad_(), use_reentrant=False).sum().backward()
    torch.testing.assert_close(dict(patched.named_buffers()), dict(model.named_buffers()))


def test_nested_tensors_go_where_they_went():
    nested = torch.nested.nested_tensor([torch.randn(2, 24), torch.randn(3, 24)], layout=torch.jagged)
    norm = nn.LayerNorm(24)
    expected = norm(nested)
    onepass.patch(norm)
    torch.testing.assert_close(norm(nested).values(), expected.values())


def test_views_of_what_is_channels_last():
    class Flat(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.norm = nn.Conv2d(24, 8, 3), nn.BatchNorm2d(8)

        def forward(self, x):
            h = self.norm(self.conv(x))
            return h.view(h.shape[0], -1)

    agree(Flat(), torch.randn(2, 24, 5, 5), channels_last=True)
    onepass.patch(nn.Sequential(nn.LazyConv2d(3, 3), nn.utils.parametrizations.weight_norm(nn.Conv2d(3, 3, 3))), channels_last=True)


def test_a_class_changed_since_is_not_unpatched():
    model = nn.Sequential(nn.LayerNorm(24))
    onepass.patch(model)
    model[0].__class__ = type("Sharded", (type(model[0]),), {})
    with pytest.raises(RuntimeError, match="then became a Sharded"):
        onepass.unpatch(model)


def merged(function, *args):
    """What a function returns when compiled with the pass, and how many operations were merged into norms."""
    counts = []

    def backend(module, _):
        counts.append(compiled_graphs.fuse_neighbours(module.graph))
        module.recompile()
        return module.forward

    torch._dynamo.reset()
    return torch.compile(function, backend=backend, fullgraph=True)(*args), sum(counts)


def plain(x, h, w):
    return relu(F.layer_norm(x + h, (24,), w))


def kept_sum(x, h, w):
    s = x + h
    y = F.layer_norm(s, (24,), w)
    return nn.functional.gelu(y, approximate="tanh") + s


def functional(x, h, w):
    y = F.rms_norm(x, (24,), w)
    return nn.functional.silu(nn.functional.group_norm(y, 3)) + h


def mutated(x, h, w):
    s = x + h
    s.mul_(2)
    return F.layer_norm(s, (24,), w)


def view_mutated(x, h, w):
    s = x + h
    s[:, 0] = 5
    return F.layer_norm(s, (24,), w)


def broadcast(x, h, w):
    return F.layer_norm(x + w, (24,), w)


def used_twice(x, h, w):
    y = F.layer_norm(x, (24,), w)
    return relu(y) + y


def gradless_sum(x, h, w):
    with torch.no_grad():
        s = x + h
    return F.layer_norm(s, (24,), w)


PASSES = {plain: 2, kept_sum: 2, functional: 2, mutated: 0, view_mutated: 0, broadcast: 0, used_twice: 0, gradless_sum: 0}


@pytest.mark.parametrize("function", PASSES, ids=lambda function: function.__name__)
def test_the_graph_pass(function):
    operands = [torch.randn(2, 3, 24, requires_grad=True), torch.randn(2, 3, 24, requires_grad=True), torch.rand(24, requires_grad=True)]
    expected = function(*operands)
    found, count = merged(function, *operands)
    assert count == PASSES[function]
    torch.testing.assert_close(found, expected)
    grads = [torch.autograd.grad(y.square().sum(), operands, allow_unused=True) for y in (expected, found)]
    torch.testing.assert_close(*grads)
