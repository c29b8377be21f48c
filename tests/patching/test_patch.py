"""`onepass.patch` on modules of this file: what it recognizes, fuses, leaves alone and refuses."""

import copy
import io
import pickle
import re
import threading
import warnings

import pytest
import torch
from torch import nn

import onepass
from onepass.patching.class_swap import Swapped

TORCH_NORMS = {
    "LayerNorm": (lambda: nn.LayerNorm(24), (2, 3, 24)),
    "LayerNorm of two dimensions": (lambda: nn.LayerNorm((3, 24)), (2, 3, 24)),
    "LayerNorm without bias": (lambda: nn.LayerNorm(24, bias=False), (2, 3, 24)),
    "LayerNorm without parameters": (lambda: nn.LayerNorm(24, elementwise_affine=False), (2, 3, 24)),
    "RMSNorm": (lambda: nn.RMSNorm(24, eps=1e-6), (2, 3, 24)),
    "RMSNorm of no eps": (lambda: nn.RMSNorm(24), (2, 3, 24)),
    "GroupNorm": (lambda: nn.GroupNorm(4, 24), (2, 24, 5, 3)),
    "GroupNorm without parameters": (lambda: nn.GroupNorm(4, 24, affine=False), (2, 24, 5)),
    "BatchNorm1d": (lambda: nn.BatchNorm1d(24), (4, 24)),
    "BatchNorm2d": (lambda: nn.BatchNorm2d(24), (4, 24, 5, 3)),
    "BatchNorm2d, cumulative": (lambda: nn.BatchNorm2d(24, momentum=None), (4, 24, 5, 3)),
    "BatchNorm3d without statistics": (lambda: nn.BatchNorm3d(24, track_running_stats=False), (4, 24, 5, 3, 2)),
    "InstanceNorm1d": (lambda: nn.InstanceNorm1d(24), (4, 24, 7)),
    "InstanceNorm2d": (lambda: nn.InstanceNorm2d(24, affine=True, track_running_stats=True), (4, 24, 5, 3)),
    "InstanceNorm3d": (lambda: nn.InstanceNorm3d(24), (4, 24, 5, 3, 2)),
}


def outcome(model, x, *more):
    """Output, gradients of input and parameters, and buffers after a step."""
    x = x.clone().requires_grad_()
    y = model(x, *more)
    torch.manual_seed(5)
    grads = torch.autograd.grad(y, [x, *model.parameters()], torch.randn_like(y), allow_unused=True)
    return [y, *grads, *[b.clone() for b in model.buffers()]]


def agree(model, x, *more, off=2e-6, **options):
    """Patch a copy, compare it with the model, and return the report."""
    patched = copy.deepcopy(model)
    report = onepass.patch(patched, **options)
    for training in (True, False):
        model.train(training), patched.train(training)
        for a, b in zip(outcome(model, x, *more), outcome(patched, x, *more), strict=True):
            assert (a is None) == (b is None)
            if a is not None:
                assert a.dtype == b.dtype
                torch.testing.assert_close(b, a, rtol=0, atol=off * max(1.0, a.abs().max().item()))
    return report


@pytest.mark.parametrize("make, shape", TORCH_NORMS.values(), ids=TORCH_NORMS.keys())
def test_torchs_norms_are_replaced(make, shape):
    torch.manual_seed(0)
    report = agree(nn.Sequential(make()), torch.randn(shape) * 2 + 1)
    assert report.counts == {"found": 1, "replaced": 1, "fused": 0, "left": 0, "already": 0}


class Rms(nn.Module):
    """A class that `patch` does not know."""

    def __init__(self, size, tiny=1e-6):
        super().__init__()
        self.gain, self.tiny = nn.Parameter(torch.rand(size)), tiny

    def forward(self, signal):
        return signal * torch.rsqrt(signal.square().mean(-1, keepdim=True) + self.tiny) * self.gain


class Unnamed(Rms):
    """Its name gives no hint, and eps is a number in its code."""

    def forward(self, signal):
        return signal * torch.rsqrt(signal.square().mean(-1, keepdim=True) + 1e-8) * (1 + self.gain)


class ChannelsNorm(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.beta, self.gamma, self.eps = nn.Parameter(torch.rand(size)), nn.Parameter(torch.rand(size)), 1e-5

    def forward(self, x):
        mean, var = x.mean(1, keepdim=True), x.var(1, keepdim=True, unbiased=False)
        return (x - mean) / torch.sqrt(var + self.eps) * self.gamma[:, None, None] + self.beta[:, None, None]


class UnbiasedNorm(ChannelsNorm):
    def forward(self, x):
        mean, var = x.mean(1, keepdim=True), x.var(1, keepdim=True)
        return (x - mean) / torch.sqrt(var + self.eps) * self.gamma[:, None, None] + self.beta[:, None, None]


class EpsOutsideRmsNorm(Rms):
    def forward(self, signal):
        return signal / (signal.square().mean(-1, keepdim=True).sqrt() + self.tiny) * self.gain


class GatedNorm(Rms):
    def forward(self, signal, gate):
        return super().forward(signal) * gate


class CountingNorm(Rms):
    def __init__(self, size):
        super().__init__(size)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, signal):
        self.calls += 1
        return super().forward(signal)


class Scale(nn.Module):
    """It has the structure of a norm, but is none."""

    def __init__(self, size):
        super().__init__()
        self.gamma = nn.Parameter(torch.rand(size))

    def forward(self, x):
        return x * self.gamma


@pytest.mark.parametrize(
    "make, shape, became", [(Rms, (2, 3, 24), "RMSNorm"), (Unnamed, (2, 24), "RMSNorm"), (ChannelsNorm, (2, 24, 5, 3), "LayerNorm2d")]
)
def test_an_unknown_class_is_replaced_if_it_agrees(make, shape, became):
    report = agree(nn.Sequential(make(24)), torch.randn(shape))
    assert [row.became for row in report.rows] == [became]


@pytest.mark.parametrize("make", [UnbiasedNorm, EpsOutsideRmsNorm, GatedNorm, CountingNorm])
def test_an_unknown_class_is_left_alone_if_not(make):
    model = nn.Sequential(make(24))
    before = type(model[0])
    report = onepass.patch(model)
    assert report.counts["left"] == 1 and report.rows[0].why
    assert type(model[0]) is before


def test_what_is_no_norm_is_not_mentioned():
    assert onepass.patch(nn.Sequential(Scale(24), nn.Linear(24, 24), nn.PReLU(24), nn.Embedding(3, 24))).counts["found"] == 0


def test_a_class_is_registered_in_three_lines():
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Parameter(torch.rand(1, 24))

        def forward(self, x, mask=None):
            y = nn.functional.rms_norm(x, (24,), self.table[0], 1e-3)
            return y if mask is None else y * mask

    model = nn.Sequential(Odd())
    assert onepass.patch(model).counts["replaced"] == 0
    onepass.register(Odd, onepass.nn.RMSNorm, weight=lambda module: module.table[0], eps=1e-3)
    assert agree(model, torch.randn(2, 24)).counts["replaced"] == 1
    onepass.register(Odd, onepass.nn.RMSNorm, weight=lambda module: module.table[0], eps=1e-1)
    assert onepass.patch(model).counts["left"] == 1  # a wrong registration is noticed


@pytest.mark.parametrize("call, error, phrase", [
    (lambda: onepass.register(Rms(3), onepass.nn.RMSNorm), TypeError, "expected a subclass of torch.nn.Module"),
    (lambda: onepass.register(Rms, nn.RMSNorm), ValueError, "expected one of onepass.nn's"),
    (lambda: onepass.register(Rms, onepass.nn.RMSNorm, scale="g"), TypeError, "expected weight, bias, eps"),
    (lambda: onepass.register(Rms, onepass.nn.RMSNorm, result="y"), ValueError, 'expected "x", "weight" or "promoted"'),
])  # fmt: skip
def test_a_wrong_registration_is_refused(call, error, phrase):
    with pytest.raises(error, match=phrase):
        call()


class Block(nn.Module):
    """As in diffusion models: norm2 is in branches, the activation follows them, and is used elsewhere, too."""

    def __init__(self, act=None):
        super().__init__()
        self.norm1, self.norm2, self.conv1, self.conv2 = (
            nn.GroupNorm(4, 24),
            nn.GroupNorm(4, 24),
            nn.Conv2d(24, 24, 3, padding=1),
            nn.Conv2d(24, 24, 1),
        )
        self.act, self.drop, self.kind = act or nn.SiLU(), nn.Identity(), "default"

    def forward(self, x, emb=None):
        h = self.norm1(x)
        h = self.drop(h)
        h = self.act(h)
        h = self.conv1(h)
        if emb is not None:
            emb = self.act(emb)
            h = h + emb
        if self.kind == "default":
            h = self.norm2(h)
        elif self.kind == "scaled":
            h = self.norm2(h) * 2
        h = self.act(h)
        return x + self.conv2(h)


def test_a_block_is_fused_by_its_source():
    report = agree(nn.Sequential(Block()), torch.randn(2, 24, 5, 3))
    assert report.counts == {"found": 2, "replaced": 2, "fused": 2, "left": 0, "already": 0}
    assert {row.why for row in report.rows} == {"SiLU"}


@pytest.mark.parametrize("kind", ["default", "scaled", "neither"])
def test_a_fused_block_keeps_its_branches(kind):
    block = Block()
    block.kind = kind
    agree(block, torch.randn(2, 24, 5, 3), torch.randn(2, 24, 1, 1))


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.third = nn.LayerNorm(24), Rms(24), nn.LayerNorm(24)
        self.linear = nn.Linear(24, 24)

    def forward(self, x, by=None):
        branch = self.linear(self.first(x))
        x = x + branch
        residual = x
        x = self.second(x)
        x = self.linear(x) if by is None else x * by
        return self.third(residual + x) + residual


def test_sums_are_fused():
    report = agree(Residual(), torch.randn(2, 3, 24))
    assert [row.action for row in report.rows] == ["replaced", "fused", "fused"]
    agree(Residual(), torch.randn(2, 3, 24), torch.rand(24))


class UsedTwice(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.act = nn.LayerNorm(24), nn.ReLU()

    def forward(self, x):
        y = self.norm(x)
        z = self.act(y)
        return z + y


class Looped(UsedTwice):
    def forward(self, x):
        for _ in range(2):
            y = self.norm(x)
            z = self.act(y)
            x = x + z
        return x


class InPlace(UsedTwice):
    def forward(self, x):
        x = x * 2
        r = x
        x += 1
        y = self.norm(x)
        return y + r


class Broadcast(UsedTwice):
    def forward(self, x):
        return self.norm(x + x.mean(-1, keepdim=True)) + self.norm(x + 1.0)


class Deep(UsedTwice):
    scale = 3

    def forward(self, x, *, twice: bool = True, times=[1, 2]):  # noqa: B006
        """It has local names, defaults, closures and a method of a base class."""

        def inner(v):
            return self.act(self.norm(v))

        with torch.set_grad_enabled(True):
            try:
                x = nn.functional.relu(self.norm(x), inplace=True)
            finally:
                x = x * self.scale
        return inner(x) * len(times) if twice else super().forward(x)


@pytest.mark.parametrize("make, fused", [(UsedTwice, 0), (Looped, 1), (InPlace, 0), (Broadcast, 1), (Deep, 1)])
def test_the_source_is_read_with_care(make, fused):
    report = agree(make(), torch.randn(2, 3, 24))
    assert report.counts["fused"] == fused


SEQUENCES = {
    "fused": (lambda: nn.Sequential(nn.Conv2d(24, 24, 1), nn.BatchNorm2d(24), nn.ReLU(inplace=True)), 1, ""),
    "through what does nothing": (lambda: nn.Sequential(nn.GroupNorm(4, 24), nn.Dropout(0.0), nn.Identity(), nn.GELU("tanh")), 1, ""),
    "two": (lambda: nn.Sequential(nn.GroupNorm(4, 24), nn.SiLU(), nn.Conv2d(24, 24, 1), nn.GroupNorm(4, 24), nn.GELU()), 2, ""),
    "an activation of others": (lambda: nn.Sequential(nn.GroupNorm(4, 24), nn.LeakyReLU()), 0, "LeakyReLU"),
    "dropout between": (lambda: nn.Sequential(nn.GroupNorm(4, 24), nn.Dropout(0.5), nn.SiLU()), 0, ""),
    "shared": (lambda: (lambda act: nn.Sequential(nn.GroupNorm(4, 24), act, nn.GroupNorm(4, 24), act))(nn.SiLU()), 0, "shared"),
    "the norm shared": (lambda: (lambda norm: nn.Sequential(norm, nn.SiLU(), norm))(nn.GroupNorm(4, 24)), 0, "shared"),
}  # fmt: skip


def test_a_norm_that_reads_a_list_inside_a_tuple():
    class Norm(nn.LayerNorm):
        def __init__(self):
            super().__init__(24)
            self.options = ([True],)

        def forward(self, x):
            return super().forward(x) if self.options[0][0] else x

    model, x = nn.Sequential(Norm()), torch.randn(2, 24)
    onepass.patch(model)
    torch.testing.assert_close(model(x), nn.functional.layer_norm(x, (24,)))
    model[0].options[0][0] = False
    assert torch.equal(model(x), x)


def test_arguments_of_an_activation_may_change():
    model, x = nn.Sequential(nn.GroupNorm(4, 24), nn.GELU()), torch.randn(2, 24, 5, 3)
    assert onepass.patch(model).counts["fused"] == 1
    model[1].approximate = "tanh"
    expected = nn.functional.gelu(nn.functional.group_norm(x, 4), approximate="tanh")
    torch.testing.assert_close(model(x), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("make, fused, why", SEQUENCES.values(), ids=SEQUENCES.keys())
def test_sequential(make, fused, why):
    model = make()
    if any(isinstance(module, nn.Dropout) and module.p for module in model):
        report = onepass.patch(model)
    else:
        report = agree(model, torch.randn(2, 24, 5, 3))
    assert report.counts["fused"] == fused and report.counts["left"] == 0
    assert all(why in row.why for row in report.rows) or not why


@pytest.mark.parametrize("at", [0, 1])
def test_hooks_forbid_fusion_and_are_called(at):
    model, seen = nn.Sequential(nn.GroupNorm(4, 24), nn.SiLU()), []
    expected = nn.functional.group_norm(x := torch.randn(2, 24, 5), 4)
    model[at].register_forward_hook(lambda module, args, output: seen.append(output))
    report = onepass.patch(model)
    assert report.counts["fused"] == 0 and "hooks" in report.rows[0].why
    model(x)
    torch.testing.assert_close(seen[0], nn.functional.silu(expected) if at else expected)


def test_nothing_but_the_class_changes():
    model = nn.Sequential(Block(), nn.BatchNorm2d(24).requires_grad_(False), nn.ReLU()).eval()
    tensors = {name: id(t) for name, t in [*model.named_parameters(), *model.named_buffers()]}
    modules = {name: (id(module), type(module), dict(vars(module))) for name, module in model.named_modules()}
    keys, text, state = list(model.state_dict()), repr(model), torch.get_rng_state()
    assert onepass.patch(model, dry_run=True).counts["fused"] == 3
    assert repr(model) == text and not any(isinstance(module, Swapped) for module in model.modules())
    onepass.patch(model)
    assert torch.equal(state, torch.get_rng_state())
    assert tensors == {name: id(t) for name, t in [*model.named_parameters(), *model.named_buffers()]}
    assert keys == list(model.state_dict()) and not model.training and not model[1].weight.requires_grad
    assert {name: (id(module), dict(vars(module))) for name, module in model.named_modules()} == {
        k: (i, v) for k, (i, _, v) in modules.items()
    }
    assert all(
        isinstance(module, modules[name][1]) and type(module).__name__ == modules[name][1].__name__
        for name, module in model.named_modules()
    )
    assert "onepass.GroupNorm(4, 24" in repr(model)
    again = onepass.patch(model)
    assert again.counts == {"found": 3, "replaced": 0, "fused": 0, "left": 0, "already": 3}
    onepass.unpatch(model)
    assert repr(model) == text and {name: type(module) for name, module in model.named_modules()} == {
        k: t for k, (_, t, _) in modules.items()
    }


@pytest.mark.parametrize("through", ["deepcopy", "pickle", "torch.save"])
def test_copies_and_pickles_stay_patched(through):
    model, x = nn.Sequential(Block(), nn.GroupNorm(4, 24), nn.SiLU(), Residual()), torch.randn(2, 24, 5, 24)
    onepass.patch(model, channels_last=True)
    if through == "deepcopy":
        twin = copy.deepcopy(model)
    elif through == "pickle":
        twin = pickle.loads(pickle.dumps(model))
    else:
        torch.save(model, file := io.BytesIO())
        file.seek(0)
        twin = torch.load(file, weights_only=False)
    assert torch.equal(twin(x), model(x))
    assert [type(module) for module in twin.modules()] == [type(module) for module in model.modules()]
    assert onepass.patch(twin).counts["already"] == 6
    onepass.unpatch(twin)
    assert not any(isinstance(module, Swapped) for module in twin.modules())


def test_as_a_context():
    model = nn.Sequential(nn.GroupNorm(4, 24), nn.SiLU(), nn.LayerNorm(3))
    onepass.patch(model[2])
    with onepass.patch(model) as report:
        assert report.counts["replaced"] == 1 and isinstance(model[0], Swapped)
    assert type(model[0]) is nn.GroupNorm and type(model) is nn.Sequential
    assert isinstance(model[2], Swapped)  # patched by somebody else


def test_a_norm_that_acts_is_patched_once():
    class Acting(nn.BatchNorm2d):
        def __init__(self):
            super().__init__(24)
            self.act = nn.ReLU()

        def forward(self, x):
            return self.act(super().forward(x))

    model = nn.Sequential(Acting())
    assert onepass.patch(model).counts == {"found": 1, "replaced": 1, "fused": 1, "left": 0, "already": 0}
    assert onepass.patch(model).counts == {"found": 1, "replaced": 0, "fused": 0, "left": 0, "already": 1}


def test_fusing_may_come_later():
    model = nn.Sequential(nn.GroupNorm(4, 24), nn.SiLU())
    assert onepass.patch(model, fuse=False).counts == {"found": 1, "replaced": 1, "fused": 0, "left": 0, "already": 0}
    assert onepass.patch(model).counts["fused"] == 1


def test_modules_of_ours_are_fused():
    report = agree(nn.Sequential(onepass.nn.GroupNorm(4, 24), nn.SiLU()), torch.randn(2, 24, 5))
    assert report.counts == {"found": 1, "replaced": 1, "fused": 1, "left": 0, "already": 0}


def test_the_report_reads():
    text = str(onepass.patch(nn.Sequential(Block(), Block(), nn.SyncBatchNorm(3), UnbiasedNorm(4)), dry_run=True))
    assert re.search(r"^\{0-1\}\.norm\{1-2\} +×4 +GroupNorm +GroupNorm, fused with SiLU$", text, re.M)
    assert "left alone: onepass does not support statistics across processes yet" in text
    assert "left alone: no norm of onepass computes the same: the nearest, LayerNorm2d, differs by" in text
    assert text.endswith("6 norms: 4 would be replaced, 4 of them fused; 2 left alone")


def leaves(make, reason):
    report = onepass.patch(model := nn.Sequential(make))
    assert report.counts["left"] == 1 and reason in report.rows[0].why
    return model


def test_left_alone():
    leaves(nn.LocalResponseNorm(2), "no such norm")
    leaves(nn.LazyBatchNorm2d(), "run the model once")
    replaced = nn.LayerNorm(3)
    replaced.forward = lambda x: x
    leaves(replaced, "replaced on the instance")
    leaves(nn.utils.parametrizations.weight_norm(nn.LayerNorm((3, 3))), "parametrized")


def refused(model, error, phrase):
    for function in (onepass.patch, onepass.unpatch):
        with pytest.raises(error, match=phrase):
            function(model)


def test_bad_use_is_refused():
    refused("model", TypeError, "must be a torch.nn.Module, not str")
    refused(nn.LayerNorm, TypeError, "the class, not an instance")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        refused(torch.jit.script(nn.LayerNorm(3)), TypeError, "scripted or traced")
        refused(torch.jit.trace(nn.LayerNorm(3), torch.randn(3)), TypeError, "scripted or traced")


def test_a_quantized_model_is_refused(monkeypatch):
    monkeypatch.setattr(torch.backends.quantized, "engine", "qnnpack")  # the default engine does not support AArch64
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        quantized = torch.ao.quantization.quantize_dynamic(nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3)), {nn.Linear})
        refused(quantized, TypeError, "model is quantized: '0'")


@pytest.mark.parametrize("other_thread", [False, True])
def test_not_in_the_middle_of_a_forward(other_thread):
    class Midway(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.LayerNorm(3)

        def forward(self, x):
            if other_thread:
                entered.set(), left.wait(10)
            else:
                refused(self, RuntimeError, "in the middle of a forward")
            return self.norm(x)

    model, entered, left = nn.Sequential(Midway()), threading.Event(), threading.Event()
    if other_thread:
        thread = threading.Thread(target=model, args=(torch.randn(3),))
        thread.start(), entered.wait(10)
        refused(model, RuntimeError, "in the middle of a forward")
        left.set(), thread.join()
    else:
        model(torch.randn(3))
    assert type(model[0].norm) is nn.LayerNorm


def test_a_keyword_names_the_input():
    model = nn.Sequential(Rms(24))
    x, expected = torch.randn(2, 24), model[0](torch.ones(24))
    onepass.patch(model)
    torch.testing.assert_close(model[0](signal=torch.ones(24)), expected)
    with pytest.raises(TypeError):
        model[0](x, x)
    with pytest.raises(TypeError):
        model[0](wrong=x)


class Upcast(Rms):
    """As in T5: the result has the dtype of the weight."""

    def forward(self, signal):
        y = signal.float() * torch.rsqrt(signal.float().square().mean(-1, keepdim=True) + self.tiny)
        return y.to(self.gain.dtype) * self.gain


class Promoted(Rms):
    """As in Llama: weight·x."""

    def forward(self, signal):
        y = signal.float() * torch.rsqrt(signal.float().square().mean(-1, keepdim=True) + self.tiny)
        return self.gain * y.to(signal.dtype)


class AsInput(Rms):
    """As in Gemma."""

    def forward(self, signal):
        y = signal.float() * torch.rsqrt(signal.float().square().mean(-1, keepdim=True) + self.tiny)
        return (y * self.gain.float()).type_as(signal)


@pytest.mark.parametrize("make", [Upcast, Promoted, AsInput])
@pytest.mark.parametrize("of_x", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("of_weight", [torch.float32, torch.bfloat16, torch.float16])
def test_the_result_keeps_its_dtype(make, of_x, of_weight):
    norm, x = make(24).to(of_weight), torch.randn(8, 24).to(of_x)
    wide = x.double()  # not norm.double()(wide): these norms compute in float32 for every dtype
    expected, exact = norm(x), wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + norm.tiny) * norm.gain.double()
    assert onepass.patch(norm).counts["replaced"] == 1
    found = norm(x)
    assert found.dtype == expected.dtype
    assert (found - exact).abs().max() <= (expected - exact).abs().max() + torch.finfo(found.dtype).eps * exact.abs().max()


def test_channels_last_without_copies():
    """All 4-d activations are channels-last, and no operation changes a memory format."""
    model = nn.Sequential(nn.Conv2d(24, 24, 3, padding=1), Block(), nn.InstanceNorm2d(24), Contiguous(), nn.Conv2d(24, 24, 3)).eval()
    x = torch.randn(2, 24, 8, 8)
    expected = model(x)
    weights = [id(p) for p in model.parameters()]
    report = onepass.patch(model, channels_last=True)
    assert "3 convolutions channels-last" in str(report) and weights == [id(p) for p in model.parameters()]
    with torch.no_grad(), Layouts() as layouts:
        y = model(x.to(memory_format=torch.channels_last))
    torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-5)
    assert layouts.changed == []
    onepass.unpatch(model)
    assert all(p.is_contiguous() for p in model.parameters())
    with torch.no_grad(), Layouts() as layouts:
        model(x.to(memory_format=torch.channels_last))
    assert layouts.changed  # without `patch`, formats do change


class Contiguous(nn.Module):
    def forward(self, x):
        x = x.permute(0, 2, 3, 1).flatten(1, 2)
        x = x.view(2, 8, 8, 24).permute(0, 3, 1, 2).contiguous()
        return x


class Layouts(torch.utils._python_dispatch.TorchDispatchMode):
    """Records operations that return a 4-d tensor that is not channels-last."""

    def __enter__(self):
        self.changed = []
        return super().__enter__()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        y = func(*args, **(kwargs or {}))
        if isinstance(y, torch.Tensor) and y.dim() == 4 and y.shape[1] == 24 and not func.is_view:
            self.changed += [] if y.is_contiguous(memory_format=torch.channels_last) else [func]
        return y


@pytest.mark.parametrize(("heads", "batch_first", "bypassed"), [(2, True, True), (2, False, False), (1, True, False)])
def test_the_report_says_where_torchs_fast_path_runs_instead(heads, batch_first, bypassed, monkeypatch):
    layer, called = nn.TransformerEncoderLayer(8, heads, 16, 0.0, batch_first=batch_first).eval(), []
    report = onepass.patch(layer)
    assert ("fast path" in str(report)) == bypassed
    forward = type(layer.norm1).forward
    monkeypatch.setattr(type(layer.norm1), "forward", lambda *args, **keywords: called.append(1) or forward(*args, **keywords))
    with torch.no_grad():
        layer(torch.randn(2, 4, 8))
    assert bool(called) != bypassed
    monkeypatch.setattr(torch.backends.mha, "_is_fastpath_enabled", False)
    assert "fast path" not in str(onepass.patch(onepass.unpatch(layer), dry_run=True))


def test_a_kept_forward_works_after_unpatch():
    """accelerate keeps `module.forward` and calls it from a wrapper."""
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.GroupNorm(2, 8), nn.SiLU(), nn.Flatten(), nn.LayerNorm(8 * 4 * 4)).eval()
    x = torch.randn(2, 3, 6, 6)
    before = model(x)
    onepass.patch(model)
    for module in model.modules():
        module.forward = lambda *args, kept=module.forward: kept(*args)
    torch.testing.assert_close(model(x), before, rtol=1e-4, atol=1e-4)
    onepass.unpatch(model)
    assert torch.equal(model(x), before)


class PreNorm(nn.Module):
    """A block as most transformers have it. `first` chooses a branch."""

    def __init__(self, first=True):
        super().__init__()
        self.norm1, self.norm2, self.norm3 = nn.LayerNorm(8), nn.LayerNorm(8), nn.RMSNorm(8)
        self.attention, self.mlp, self.first = nn.Linear(8, 8), nn.Linear(8, 8), first

    def forward(self, x):
        if self.first:
            x = x + self.attention(self.norm1(x))
            x = x + self.mlp(self.norm2(x))
            return self.norm3(x) * 2 + x
        x = self.norm1(x + self.attention(x))
        return self.norm2(x + self.mlp(x))


@pytest.mark.parametrize("first, fused", [(True, ["norm2", "norm3"]), (False, ["norm1", "norm2"])])
def test_norms_inside_an_expression_are_fused_with_the_sum_before_it(first, fused):
    model, x = PreNorm(first), torch.randn(2, 3, 8)
    expected = outcome(copy.deepcopy(model), x)
    report = onepass.patch(model)
    assert [row.name for row in report.rows if row.action == "fused"] == fused
    for found, value in zip(outcome(model, x), expected, strict=True):
        torch.testing.assert_close(found, value, rtol=1e-4, atol=1e-5)


class Unclear(nn.Module):
    """Something else may run before the norm, or the norm may not run at all."""

    def __init__(self):
        super().__init__()
        self.norm1, self.norm2, self.norm3, self.linear = nn.LayerNorm(8), nn.LayerNorm(8), nn.LayerNorm(8), nn.Linear(8, 8)

    def forward(self, x, h):
        x = x + h
        x = self.linear(x).mul_(2) + self.norm1(x)
        x = x + h
        y = self.norm2(x) if h.sum() > 0 else x
        x = y + h
        return [self.norm3(x) for _ in range(2)][1] + x


def test_other_norms_inside_an_expression_are_not_fused():
    model, x, h = Unclear(), torch.randn(2, 3, 8), torch.randn(2, 3, 8)
    expected = model(x, h)
    assert onepass.patch(model).counts["fused"] == 0
    torch.testing.assert_close(model(x, h), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("norm_first, fused", [(True, 1), (False, 2)])
def test_the_report_counts_the_branch_that_runs(norm_first, fused):
    layer, x = nn.TransformerEncoderLayer(8, 2, 16, 0.0, norm_first=norm_first, batch_first=True), torch.randn(2, 4, 8)
    expected = layer(x)
    assert onepass.patch(layer).counts["fused"] == fused
    torch.testing.assert_close(layer(x), expected, rtol=1e-4, atol=1e-5)


class Counting(nn.LayerNorm):
    def forward(self, input):
        self.last = input.detach()
        return super().forward(input)


def test_the_report_names_state_that_a_norm_keeps():
    assert "left alone: it keeps state between calls: its forward sets 'last'" in str(onepass.patch(nn.Sequential(Counting(8))))


def test_the_report_of_a_model_without_norms():
    assert "Calls of functions, such as F.layer_norm(x, shape), are not replaced" in str(onepass.patch(nn.Linear(2, 2)))


class TwoBranches(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.act, self.mode = nn.GroupNorm(2, 8), nn.SiLU(), "a"

    def forward(self, x):
        if self.mode:
            return self.act(self.norm(x))
        return self.act(self.norm(x + 1))


def test_the_report_gives_a_reason_once():
    model = TwoBranches()
    model.norm.register_forward_hook(lambda *_: None)
    assert str(onepass.patch(model)).count("the norm has hooks") == 1
