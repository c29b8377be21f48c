"""Tools of torch do to our modules what they do to torch.nn's: TorchScript, torch.fx, lazy modules, SyncBatchNorm, jagged tensors, …"""

import copy
import io
import warnings

import pytest
import torch
from torch import nn
from torch.ao.quantization import get_default_qat_qconfig_mapping
from torch.ao.quantization.quantize_fx import prepare_qat_fx
from torch.fx.experimental import optimization

import onepass
from onepass import nn as ours

X = torch.randn(3, 8, 6, 6, generator=torch.Generator().manual_seed(0))
MODULES = {
    "LayerNorm": (lambda: ours.LayerNorm((6, 6), activation="gelu"), X),
    "LayerNorm by channel": (lambda: ours.LayerNorm((8, 6, 6), granularity="channel", weight_offset=0.5), X),
    "LayerNorm, global": (lambda: ours.LayerNorm((8, 6, 6), granularity="global"), X),
    "RMSNorm": (lambda: ours.RMSNorm(6, weight_offset=1.0, activation="gelu_tanh"), X),
    "GroupNorm": (lambda: ours.GroupNorm(4, 8, activation="silu"), X),
    "GroupNorm, channels last": (lambda: ours.GroupNorm(3, 6, channel_dim=-1), X),
    "LayerNorm2d": (lambda: ours.LayerNorm2d(8, activation="relu"), X),
    "BatchNorm": (lambda: ours.BatchNorm2d(8), X),
    "BatchNorm, cumulative": (lambda: ours.BatchNorm2d(8, momentum=None, affine=False), X),
    "BatchNorm1d": (lambda: ours.BatchNorm1d(8, activation="relu"), X[..., 0, 0]),
    "BatchNorm, own statistics": (lambda: ours.BatchNorm2d(8, track_running_stats=False), X),
    "InstanceNorm": (lambda: ours.InstanceNorm2d(8, affine=True, track_running_stats=True), X),
    "InstanceNorm, no batch": (lambda: ours.InstanceNorm2d(8), X[0]),
    "SwitchableNorm": (lambda: ours.SwitchableNorm2d(8), X),
    "SwitchableNorm1d": (lambda: ours.SwitchableNorm1d(8), X[..., 0, 0]),
    "SwitchableNorm without BatchNorm": (lambda: ours.SwitchableNorm2d(8, using_bn=False), X),
}


def module(name: str, training: bool) -> nn.Module:
    made = MODULES[name][0]().train(training)
    for param in made.parameters():
        nn.init.normal_(param)
    return made


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("name", MODULES)
def test_scripted_modules_compute_the_same(name, training):
    eager, x = module(name, training), MODULES[name][1]
    scripted = torch.jit.script(copy.deepcopy(eager))
    for _ in range(2):
        torch.testing.assert_close(scripted(x), eager(x))
    torch.testing.assert_close(dict(scripted.named_buffers()), dict(eager.named_buffers()))


@pytest.mark.parametrize("name", ["LayerNorm by channel", "GroupNorm", "LayerNorm2d", "BatchNorm", "SwitchableNorm"])
def test_scripted_modules_modulate(name):
    eager, modulate = module(name, False), (torch.randn(3, 8), torch.randn(3, 8))
    scripted = torch.jit.script(eager)
    torch.testing.assert_close(scripted(X, modulate, "relu"), eager(X, modulate, "relu"))


def test_a_scripted_module_can_be_saved():
    eager, file = module("GroupNorm", False), io.BytesIO()
    torch.jit.save(torch.jit.script(eager), file)
    file.seek(0)
    torch.testing.assert_close(torch.jit.load(file)(X), eager(X))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.conv, self.activation = nn.GroupNorm(4, 8), nn.Conv2d(8, 8, 3, padding=1), nn.SiLU()
        self.instance, self.rms = nn.InstanceNorm2d(8, affine=True, track_running_stats=True), nn.RMSNorm(6)
        self.branch = nn.Sequential(nn.Conv2d(8, 8, 1), nn.BatchNorm2d(8), nn.ReLU())

    def forward(self, x):
        y = self.conv(nn.functional.silu(self.norm(x))) + self.branch(x)
        return self.rms(self.instance(self.activation(self.norm(y))))


@pytest.mark.parametrize("training", [False, True])
def test_a_patched_model_can_be_scripted(training):
    model = Block().train(training)
    report = onepass.patch(model)
    assert len(report.rows) == 4
    scripted = torch.jit.script(copy.deepcopy(model))
    torch.testing.assert_close(scripted(X), model(X))
    assert isinstance(model.norm, nn.GroupNorm) and type(model.norm) is not nn.GroupNorm  # it is still patched


@pytest.mark.parametrize("dims", [1, 2, 3])
@pytest.mark.parametrize("norm", ["BatchNorm", "InstanceNorm"])
def test_lazy_modules(norm, dims):
    name, x = f"{norm}{dims}d", torch.randn(4, 8, *[3, 4, 5][:dims])
    reference, lazy = getattr(nn, f"Lazy{name}")(), getattr(ours, f"Lazy{name}")(activation="relu")
    last = getattr(ours, f"Lazy{name}")(channel_dim=-1)
    expected = reference(x)
    torch.testing.assert_close(lazy(x), expected.relu())
    torch.testing.assert_close(last(x.movedim(1, -1)).movedim(-1, 1), expected)
    assert type(lazy) is getattr(ours, name) and type(last) is getattr(ours, name)
    torch.testing.assert_close(lazy.state_dict(), reference.state_dict())
    torch.testing.assert_close(lazy(x), reference(x).relu())


def test_a_lazy_module_loads_a_state_dict():
    trained, lazy = ours.BatchNorm2d(8), ours.LazyBatchNorm2d()
    trained(X)
    lazy.load_state_dict(trained.state_dict())
    torch.testing.assert_close(lazy.eval()(X), trained.eval()(X))


@pytest.mark.parametrize("extra", [{"activation": "relu"}, {"channel_dim": -1}], ids=str)
def test_sync_batchnorm_is_refused_if_it_would_lose_an_extra(extra):
    model = nn.Sequential(ours.BatchNorm2d(8, **extra))
    with pytest.raises(TypeError, match=r"SyncBatchNorm, which has no activation and no channel_dim"):
        nn.SyncBatchNorm.convert_sync_batchnorm(model)
    assert not list(model[0].named_children())


def test_other_batchnorms_become_sync_batchnorms():
    model = nn.SyncBatchNorm.convert_sync_batchnorm(nn.Sequential(ours.BatchNorm2d(8)))
    assert type(model[0]) is nn.SyncBatchNorm


@pytest.mark.parametrize("cls", [ours.LayerNorm, ours.RMSNorm])
def test_a_state_dict_carries_the_offset_of_the_weight(cls):
    file, weight = io.BytesIO(), torch.randn(8)
    saved = nn.Sequential(cls(8, weight_offset=1.0))
    saved[0].weight.data.copy_(weight)
    torch.save(saved.state_dict(), file)
    file.seek(0)
    state = torch.load(file)
    same, other = nn.Sequential(cls(8, weight_offset=1.0)), nn.Sequential(cls(8))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        same.load_state_dict(state)
        other.load_state_dict(
            nn.Sequential(getattr(nn, cls.__name__)(8)).state_dict()
        )  # torch's norms have no offset, and neither has this
    assert same[0].weight.equal(weight)
    with pytest.raises(RuntimeError, match=r"0\.weight was saved .* weight_offset=1\.0.* create it with weight_offset=1\.0"):
        other.load_state_dict(state)
    assert other[0].weight.eq(1).all()
    with pytest.warns(UserWarning, match="does not say with which offset"):
        same.load_state_dict(dict(nn.Sequential(getattr(nn, cls.__name__)(8)).state_dict()))


@pytest.mark.parametrize("cls", ["LayerNorm", "RMSNorm"])
def test_jagged_tensors(cls):
    reference, module = getattr(nn, cls)(8), getattr(ours, cls)(8)
    results = []
    for norm in (reference, module):
        rows = [torch.randn(n, 8, generator=torch.Generator().manual_seed(n)).requires_grad_() for n in (3, 5)]
        x = torch.nested.as_nested_tensor(rows, layout=torch.jagged)
        y = norm(x)
        (y + x).values().square().sum().backward()  # the sum needs equal lengths
        results.append([y.values(), norm.weight.grad, *(row.grad for row in rows)])
    torch.testing.assert_close(*results)
    activated = getattr(ours, cls)(8, activation="relu")(x)
    torch.testing.assert_close(activated.values(), y.values().relu())


def test_jagged_tensors_that_cannot_be_normalized():
    x = torch.nested.nested_tensor([torch.randn(3, 8), torch.randn(5, 8)], layout=torch.jagged)
    with pytest.raises(RuntimeError, match="whose length varies"):
        ours.LayerNorm((3, 8))(x)
    with pytest.raises(NotImplementedError, match="return_stats=True"):
        onepass.functional.layer_norm(x, (8,), return_stats=True)


class Stack(nn.Module):
    """Convolutions and norms, of torch.nn or of onepass.nn."""

    def __init__(self, library):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(8, 8, 3), library.BatchNorm2d(8), nn.ReLU(), library.GroupNorm(2, 8), nn.SiLU())
        self.conv, self.batch, self.activation, self.last = nn.Conv2d(8, 8, 1), library.BatchNorm2d(8), nn.ReLU(), library.LayerNorm(4)

    def forward(self, x):
        return self.last(self.activation(self.batch(self.conv(self.body(x)))))


def stacks() -> dict[str, nn.Module]:
    """The same model with torch.nn's norms, with ours, and patched."""
    reference = Stack(nn)
    for norm in (reference.body[1], reference.batch):
        norm.running_mean.normal_()
        norm.running_var.uniform_(0.5, 2)
    made = {"torch": reference, "onepass.nn": Stack(ours), "patched": copy.deepcopy(reference)}
    made["onepass.nn"].load_state_dict(reference.state_dict())
    onepass.patch(made["patched"])
    return made


@pytest.mark.parametrize("name", ["onepass.nn", "patched"])
def test_torch_fx_sees_the_graph_of_torch_nn(name):
    models = stacks()
    expected, traced = torch.fx.symbolic_trace(models["torch"].eval()), torch.fx.symbolic_trace(models[name].eval())
    assert [(node.op, node.target, node.kwargs) for node in traced.graph.nodes] == [
        (node.op, node.target, node.kwargs) for node in expected.graph.nodes
    ]
    assert list(traced.state_dict()) == list(expected.state_dict())
    torch.testing.assert_close(traced(X), models["torch"](X))
    traced.train()(X)  # updates the running statistics of the model
    assert traced.batch.running_mean.equal(models[name].batch.running_mean)
    assert not models[name].batch.running_mean.equal(models["torch"].batch.running_mean)


@pytest.mark.parametrize("name", ["onepass.nn", "patched"])
def test_torch_fx_folds_batch_norms_into_convolutions(name):
    models = stacks()
    folded = optimization.fuse(models[name].eval())
    assert [node.target for node in folded.graph.nodes] == [node.target for node in optimization.fuse(models["torch"].eval()).graph.nodes]
    assert not any(isinstance(module, nn.BatchNorm2d) for module in folded.modules())
    torch.testing.assert_close(folded(X), models["torch"](X))
    assert type(models[name].batch) is not nn.BatchNorm2d  # the model itself is unchanged


@pytest.mark.parametrize("name", ["onepass.nn", "patched"])
def test_quantization_aware_training_folds_batch_norms(name):
    prepared = [
        prepare_qat_fx(model.train(), get_default_qat_qconfig_mapping(), (X,)) for key, model in stacks().items() if key in ("torch", name)
    ]
    assert type(prepared[1].conv) is type(prepared[0].conv) and "Bn" in type(prepared[0].conv).__name__


def test_torch_fx_keeps_extras_of_a_call():
    class Calls(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = ours.BatchNorm2d(8)

        def forward(self, x):
            return self.norm(x, activation="relu")

    model = Calls().eval()
    torch.testing.assert_close(torch.fx.symbolic_trace(model)(X), model(X))


def test_torch_fx_keeps_extras():
    model = nn.Sequential(nn.Conv2d(8, 8, 3), ours.BatchNorm2d(8, activation="relu"), ours.SwitchableNorm2d(8), ours.InstanceNorm2d(8))
    traced = torch.fx.symbolic_trace(model.eval())
    assert isinstance(traced.get_submodule("1"), ours.BatchNorm2d)
    torch.testing.assert_close(traced(X), model(X))
    torch.testing.assert_close(optimization.fuse(model)(X), model(X))
