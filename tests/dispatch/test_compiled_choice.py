"""Who computes a norm in a compiled graph, and what patched modules add to it."""

import os
import shutil
import subprocess
import sys

import pytest
import torch
from torch import nn
from torch._dynamo.eval_frame import _debug_get_cache_entry_list

import onepass
import onepass.functional as O
from onepass.core import norms
from onepass.core.device import KNOWN_DEVICES, Device
from onepass.core.problem import bind
from onepass.dispatch import compiled, compiled_choice
from onepass.patching.under_compile import original_when_compiling
from onepass.planning.compiled import choose
from onepass.planning.options import DEFAULT
from tests.dispatch.test_inductor_cache import QUICK

F = nn.functional
H200, CPU = KNOWN_DEVICES["h200"], Device("cpu")


def problem(spec, *shape, channels_last=False):
    x = torch.empty(shape, dtype=torch.bfloat16, device="meta")
    x = x.to(memory_format=torch.channels_last) if channels_last else x
    weight = x.new_empty(shape[1 if len(shape) == 4 else -1])
    return bind(spec, x, weight, weight)


CHOICES = {
    "GroupNorm of images": (problem(norms.group_norm(32), 8, 320, 64, 64, channels_last=True), False, 0, True),
    "its training": (problem(norms.group_norm(32), 8, 320, 64, 64, channels_last=True), True, 0, True),
    "a small GroupNorm": (problem(norms.group_norm(32), 2, 320, 64, 64), False, 0, True),
    "the same after a sum that inductor fuses": (problem(norms.group_norm(32), 2, 320, 64, 64), False, 2, False),
    "a large image after a sum that inductor fuses": (problem(norms.group_norm(32), 1, 256, 512, 512, channels_last=True), False, 2, True),
    "LayerNorm of one sentence": (problem(norms.layer_norm(1), 1, 32, 768), False, 0, False),
    "LayerNorm between elementwise operations": (problem(norms.layer_norm(1), 8192, 4096), False, 4, False),
    "its training without neighbours": (problem(norms.layer_norm(1), 8192, 4096), True, 0, True),
}


@pytest.mark.parametrize("name", CHOICES)
def test_the_choice_on_an_h200(name):
    norm, training, moved, ours = CHOICES[name]
    assert choose(norm, H200, DEFAULT, training, moved).ours is ours


def test_the_choice_says_why():
    words = str(choose(problem(norms.group_norm(32), 2, 320, 64, 64), H200, DEFAULT, moved=2))
    assert words.startswith("inductor: onepass is estimated at 1") and "neighbours that inductor would fuse" in words
    assert choose(problem(norms.layer_norm(1), 64, 64), CPU, DEFAULT).ours


def test_the_bias_of_a_convolution_counts_where_inductor_has_one_kernel():
    layer, group = problem(norms.layer_norm(1), 12544, 512), problem(norms.group_norm(32), 8, 320, 64, 64, channels_last=True)
    assert choose(layer, H200, DEFAULT, True).ours and not choose(layer, H200, DEFAULT, True, bias_before=True).ours
    assert choose(group, H200, DEFAULT, True) == choose(group, H200, DEFAULT, True, bias_before=True)


class Net(nn.Module):
    """Norms that inductor would fuse with their neighbours, and one that has none."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.group, self.layer, self.rms = nn.Conv2d(8, 8, 1), nn.GroupNorm(2, 8), nn.LayerNorm(4), nn.RMSNorm(4)

    def forward(self, x):
        h = F.silu(self.group(self.conv(x)))
        h = self.layer(h.cumsum(-1).sin()).cos()
        return self.rms(h.cumsum(-1)).cumsum(-1)


def norms_in_graph(function, *args):
    """Return what a compiled function computes, and the names of the norms in its graph after our passes."""
    found = []

    def backend(module, _):
        compiled_choice.adopt(module.graph)
        compiled.fuse_neighbours(module.graph)
        compiled_choice.give_back(module.graph)
        module.recompile()
        targets = [str(getattr(node.target, "__name__", node.target)) for node in module.graph.nodes if node.op == "call_function"]
        found.extend(name.removesuffix(".default") for name in targets if "norm" in name)
        return module.forward

    torch._dynamo.reset()
    return torch.compile(function, backend=backend, fullgraph=True)(*args), found


@pytest.mark.parametrize("grad", [False, True])
def test_patched_norms_without_neighbours_are_ours(grad):
    model, x = Net(), torch.randn(2, 8, 4, 4)
    onepass.patch(model)
    with torch.set_grad_enabled(grad):
        y, found = norms_in_graph(model, x)
        assert found == ["norm", "layer_norm", "norm"]  # LayerNorm is between sin and cos
        torch.testing.assert_close(y, onepass.unpatch(model)(x))
        assert norms_in_graph(model, x)[1] == ["group_norm", "layer_norm", "rms_norm"]


class ChannelsLast(nn.Module):
    """A block of ConvNeXt up to its norm."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(8, 8, 3), nn.LayerNorm(8)

    def forward(self, x):
        return self.norm(self.conv(x).permute(0, 2, 3, 1)).cumsum(-1)


def test_in_training_a_norm_of_a_permuted_image_is_inductors():
    """Inductor would save x as channels-last by the wrong dimensions, with a copy before and one after the norm."""
    model, x = ChannelsLast(), torch.randn(2, 8, 6, 6)
    onepass.patch(model)
    y, found = norms_in_graph(model, x)
    assert found == ["layer_norm"]
    torch.testing.assert_close(y, model(x))
    with torch.no_grad():
        assert norms_in_graph(model, x)[1] == ["norm"]
    model.conv = nn.Identity()  # without a convolution, inductor saves x as it is
    assert norms_in_graph(model, x)[1] == ["norm"]


def test_our_functions_become_torchs_with_residual_and_activation():
    x, weight = torch.randn(2, 6, 8, requires_grad=True), torch.randn(8, requires_grad=True)

    def function(x):
        y, total = O.add_layer_norm(x.sin(), x.cos(), (8,), weight, activation="gelu_tanh")
        z = O.instance_norm(total.exp()).exp()
        return y.sin() + z, O.add_rms_norm(x.sin(), x.exp(), (8,), weight)[0].cos()

    found, names = norms_in_graph(function, x)
    assert names == ["layer_norm", "instance_norm", "rms_norm"]
    expected = function(x)
    torch.testing.assert_close(found, expected)
    grads = [torch.autograd.grad(sum(y.square().sum() for y in each), (x, weight)) for each in (found, expected)]
    torch.testing.assert_close(*grads)


def test_a_forced_family_and_what_torch_lacks_stay_ours():
    x = torch.randn(2, 6, 8)
    with onepass.force("aten"):
        assert norms_in_graph(lambda x: O.layer_norm(x.sin(), (8,)).sin(), x)[1] == ["norm"]
    statistics = norms_in_graph(lambda x: O.layer_norm(x.sin(), (8,), return_stats=True), x)
    offset = norms_in_graph(lambda x: O.layer_norm(x.sin(), (8,), x[0, 0], weight_offset=1.0).sin(), x)
    modulated = norms_in_graph(lambda x: O.layer_norm(x.sin(), (8,), modulate=(x[:, 0], None)).sin(), x)
    assert statistics[1] == offset[1] == modulated[1] == ["norm"]


def test_under_autocast_patched_norms_stay_torchs():
    model = nn.Sequential(nn.GroupNorm(2, 8))
    onepass.patch(model)
    with torch.autocast("cpu", torch.bfloat16):
        assert norms_in_graph(model, torch.randn(2, 8, 4, 4))[1] == ["group_norm"]


class Blocks(nn.Module):
    """A model of which `patch` changes the norms, the activations after them, the sums before them, and this class."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.act, self.second, self.third = nn.GroupNorm(2, 8), nn.SiLU(), nn.LayerNorm(4), nn.RMSNorm(4)

    def forward(self, x):
        h = self.act(self.first(x))
        x = x + h
        return self.third(self.second(x)) + x


def guards(model, x):
    """Return the lines of the guards of a compiled model, without the numbers of objects."""
    torch._dynamo.reset()
    torch.compile(model, backend="eager", fullgraph=True)(x)
    (entry,) = _debug_get_cache_entry_list(Blocks.forward.__code__)
    return [line for line in str(entry.guard_manager).splitlines() if "check_obj_id" not in line and "builtins_dict" not in line]


def test_a_patched_model_adds_no_guards():
    model, x = Blocks(), torch.randn(2, 8, 4, 4)
    before = guards(model, x)
    assert str(onepass.patch(model)).count("fused")
    after = guards(model, x)
    assert len(after) == len(before)
    assert sum("TYPE_MATCH" in line for line in after) == sum("TYPE_MATCH" in line for line in before) > 3


def test_a_method_with_a_closure_and_defaults():
    factor, offset = 7.0, 9.0

    class Original(nn.Module):
        def forward(self, x, y=1, *, z=2):
            return (x * factor + offset * y + z) if super().extra_repr() == "" else None

    forward = original_when_compiling(lambda self, x, **_: x, Original.forward)
    model, x = type("Patched", (Original,), {"forward": forward})(), torch.ones(2)
    torch._dynamo.reset()
    for compiled_model in (torch.compile(model, backend="eager", fullgraph=True), torch.compile(nn.Sequential(model), backend="eager")):
        torch.testing.assert_close(compiled_model(x), 18 * x)
    torch.testing.assert_close(torch.compile(model, backend="eager")(x, z=3), 19 * x)
    assert model(x, z=3) is x


def test_code_that_was_compiled_runs_where_nothing_may_be_compiled():
    model, x, ran = Blocks(), torch.randn(2, 8, 4, 4), []
    onepass.patch(model)
    torch._dynamo.reset()

    def backend(module, _):
        return lambda *args: (ran.append(1), module.forward(*args))[1]

    compiled_model = torch.compile(model, backend=backend, fullgraph=True)
    expected = compiled_model(x)
    with torch.compiler.set_stance("eager_on_recompile"):
        torch.testing.assert_close(compiled_model(x), expected)
    assert len(ran) == 2
    with torch.compiler.set_stance("force_eager"):
        torch.testing.assert_close(compiled_model(x), expected)
    assert len(ran) == 2


def test_a_closure_and_keywords_may_have_any_names():
    args = kwargs = compiling = 2.0

    class Original(nn.Module):
        def forward(self, x, *, _method=1.0, **others):
            return x * (args + kwargs + compiling + _method + others.get("_original", 0.0))

    model = type("Patched", (Original,), {"forward": original_when_compiling(Original.forward, Original.forward)})()
    compiled_model, x = torch.compile(model, backend="eager"), torch.ones(2)
    for function in (model, compiled_model):
        torch.testing.assert_close(function(x), 7 * x)
        torch.testing.assert_close(function(x, _method=2.0, _original=3.0), 11 * x)


_library = torch.library.Library("onepass_tests", "FRAGMENT")
_library.define("negate(Tensor(a!) x) -> ()")
_library.impl("negate", lambda x: (x.neg_(), None)[1], "CompositeExplicitAutograd")

CHANGES = {
    "F.relu(x, inplace=True)": lambda x: F.relu(x, inplace=True),
    "F.leaky_relu(x, 0.1, True)": lambda x: F.leaky_relu(x, 0.1, True),
    "x.__imul__(2)": lambda x: x.__imul__(2),
    "an op by its name": lambda x: torch.ops.onepass_tests.negate(x),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_sum_that_changes_in_place_is_not_merged(name):
    def function(x, residual):
        total = x + residual
        CHANGES[name](total)
        return O.layer_norm(total, (8,), eps=1.0), total

    x, residual = torch.randn(4, 8), torch.randn(4, 8)
    torch.testing.assert_close(norms_in_graph(function, x, residual)[0], function(x, residual))


@pytest.mark.parametrize("inner", [torch.cumsum, lambda x, _: x.sin()])
def test_symbolic_groups(inner):
    """The number of groups is a node of the graph. With sin, inductor computes the norm."""

    def function(x, residual):
        return inner(F.silu(O.group_norm(inner(x + residual, -1), x.shape[1] // 2)), -1)

    def compiled_function(x, residual):
        return torch.compile(function, dynamic=True)(x, residual)

    torch._dynamo.reset()
    for channels in (8, 12):
        x, residual = torch.randn(3, channels, 5), torch.randn(3, channels, 5)
        torch.testing.assert_close(compiled_function(x, residual), function(x, residual), atol=1e-4, rtol=1e-4)


def test_a_norm_is_ours_if_torch_would_change_its_layout():
    def function(x):  # the view needs the strides of x, which torch's layer_norm does not keep
        return O.layer_norm(x.sin().transpose(1, 2), (6,)).transpose(1, 2).view(2, -1).cos()

    y, found = norms_in_graph(function, x := torch.randn(2, 6, 5))
    assert found == ["norm"]
    torch.testing.assert_close(y, function(x))


def test_a_sum_keeps_its_layout():
    def function(x, residual):  # torch.add follows the strides of the residual, since x is expanded
        total = x.expand(2, 5, 6) + residual.transpose(1, 2)
        return O.layer_norm(total, (6,)), total.transpose(1, 2).view(2, -1)

    operands = torch.randn(1, 1, 6), torch.randn(2, 6, 5)
    torch.testing.assert_close(norms_in_graph(function, *operands)[0], function(*operands))


@pytest.mark.parametrize("function", [lambda y: y.view(2, -1), lambda y: y.sin().transpose(0, 1).transpose(0, 1).view(2, -1)])
def test_a_patched_norm_stays_torchs_if_a_view_needs_its_layout(function):
    norm, x = nn.LayerNorm(6), torch.randn(2, 6, 5)
    expected = function(norm(x.transpose(1, 2)))
    onepass.patch(nn.Sequential(norm))
    y, found = norms_in_graph(lambda x: function(norm(x.transpose(1, 2))), x)
    assert found == ["layer_norm"]
    torch.testing.assert_close(y, expected)
    assert norms_in_graph(lambda x: norm(x.transpose(1, 2)).reshape(2, -1), x)[1] == ["norm"]


IMPORT = """
import sys, torch
{first}
from torch._inductor import config
from torch._inductor.codecache import FxGraphHashDetails
assert config.pre_grad_custom_pass is None, config.pre_grad_custom_pass
{quick}
torch.compile(torch.sin)(torch.ones(3))
from torch._dynamo.utils import counters
print(sorted(counters["inductor"].items()), sum("onepass" in str(finder) for finder in sys.meta_path))
"""


@pytest.mark.skipif(not shutil.which("g++"), reason="inductor needs a C++ compiler")
def test_importing_onepass_changes_nothing_for_torch_compile(tmp_path):
    """A process without onepass fills inductor's cache. One that imports onepass finds the entry."""
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    codes = [IMPORT.format(first=first, quick=QUICK) for first in ("", "import onepass")]
    runs = [subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True) for code in codes]
    assert [run.returncode for run in runs] == [0, 0], runs[0].stderr[-2000:] + runs[1].stderr[-2000:]
    assert "fxgraph_cache_miss" in runs[0].stdout and "fxgraph_cache_hit" in runs[1].stdout
    assert runs[1].stdout.endswith(" 0\n") and len(runs[1].stderr.splitlines()) == len(runs[0].stderr.splitlines())


def test_the_pass_is_installed_when_inductor_is_imported():
    code = """
import sys, torch, onepass
onepass.patch(torch.nn.Sequential(torch.nn.LayerNorm(4)))
assert "torch._inductor.config" not in sys.modules
from torch._inductor import config
from onepass.dispatch.inductor_pass import NormPass
assert isinstance(config.pre_grad_custom_pass, NormPass)
assert not any("onepass" in str(finder) for finder in sys.meta_path)
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-2000:]


ROOTS = {
    "Sequential": (lambda: nn.Sequential(nn.Conv2d(8, 8, 3), nn.GroupNorm(4, 8), nn.SiLU()), (2, 8, 6, 6)),
    "LayerNorm": (lambda: nn.LayerNorm(8), (2, 8)),
    "TransformerEncoderLayer": (lambda: nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True), (2, 4, 8)),
}


@pytest.mark.parametrize("name", ROOTS)
def test_a_model_that_is_a_class_of_torch_nn_is_compiled_whole(name):
    """torch.compile treats such models differently: it does not begin to trace in files of torch.nn."""
    make, shape = ROOTS[name]
    model, x, graphs = make(), torch.randn(shape), []
    expected = model(x)
    onepass.patch(model)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend=lambda graph, _: graphs.append(graph) or graph.forward, fullgraph=True)
    torch.testing.assert_close(compiled(x), expected)
    assert len(graphs) == 1
