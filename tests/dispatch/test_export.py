"""Exported programs decompose to torch's ops, so that they run in onnxruntime, and where onepass is not installed."""

import copy
import subprocess
import sys
from importlib.util import find_spec

import pytest
import torch
from torch import nn
from torch.export import Dim

import onepass
import onepass.functional as O

X = torch.randn(2, 8, 6, 6, generator=torch.Generator().manual_seed(0))


class Call(nn.Module):
    """Calls a function with x and parameters of these shapes."""

    def __init__(self, function, *shapes):
        super().__init__()
        self.function, self.params = function, nn.ParameterList([torch.linspace(-1, 2, torch.Size(s).numel()).view(s) for s in shapes])

    def forward(self, x):
        return self.function(x, *self.params)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(8, 8, 3, padding=1), nn.GroupNorm(4, 8)
        self.batch, self.last = nn.BatchNorm2d(8), nn.LayerNorm(8)

    def forward(self, x):
        y = self.conv(nn.functional.silu(self.norm(x)))
        return self.last(self.batch(x + y).permute(0, 2, 3, 1))


def patched() -> nn.Module:
    model = Block()
    onepass.patch(model)
    return model


CL = X.to(memory_format=torch.channels_last)
CASES = {
    "LayerNorm": (lambda: onepass.nn.LayerNorm((6, 6)), X),
    "LayerNorm, float32 parameters": (lambda: onepass.nn.LayerNorm(6), X.bfloat16()),
    "RMSNorm": (lambda: onepass.nn.RMSNorm(6), X),
    "weight_offset": (lambda: Call(lambda x, w: O.rms_norm(x, (6,), w, 1e-6, weight_offset=1.0), (6,)), X),
    "GroupNorm": (lambda: onepass.nn.GroupNorm(4, 8, activation="gelu"), X),
    "GroupNorm, half": (lambda: onepass.nn.GroupNorm(4, 8, activation="silu").half(), X.half()),
    "GroupNorm, channels-last": (lambda: onepass.nn.GroupNorm(4, 8), CL),
    "GroupNorm, channels as the last dimension": (lambda: onepass.nn.GroupNorm(2, 6, channel_dim=-1), X),
    "InstanceNorm": (lambda: onepass.nn.InstanceNorm2d(8, affine=True), X),
    "BatchNorm": (lambda: onepass.nn.BatchNorm2d(8), X),
    "BatchNorm in training": (lambda: onepass.nn.BatchNorm2d(8).train(), X),
    "LayerNorm2d": (lambda: onepass.nn.LayerNorm2d(8), CL),
    "SwitchableNorm": (lambda: onepass.nn.SwitchableNorm2d(8), X),
    "a sum": (lambda: Call(lambda x, w: O.add_rms_norm(x, x * 2, (6,), w, 1e-6), (6,)), X),
    "a modulation": (lambda: Call(lambda x, a, b: O.group_norm(x, 4, modulate=(a, b)), (2, 8), (2, 8)), X),
    "statistics": (lambda: Call(lambda x: O.layer_norm(x, (6,), return_stats=True)), X),
    "a patched model": (patched, X),
}


def made(name: str) -> tuple[nn.Module, torch.Tensor]:
    make, x = CASES[name]
    model = make()
    return (model if name.endswith("in training") else model.eval()), x


@pytest.mark.parametrize(("name", "strict"), [*((name, False) for name in CASES), ("GroupNorm", True), ("a patched model", True)])
def test_decomposed_programs_have_only_ops_of_torch(name, strict):
    model, x = made(name)
    program = torch.export.export(copy.deepcopy(model), (x,), strict=strict)
    decomposed = program.run_decompositions()
    targets = [str(node.target) for node in decomposed.graph.nodes if node.op == "call_function"]
    assert targets and not any("onepass" in target for target in targets)
    torch.testing.assert_close(decomposed.module()(x), copy.deepcopy(model)(x))


def test_norms_of_torch_nn_are_found_in_the_decomposed_program():
    for model, op in ((onepass.nn.LayerNorm(6), "native_layer_norm"), (onepass.nn.GroupNorm(4, 8, activation="silu"), "native_group_norm")):
        program = torch.export.export(model, (X,)).run_decompositions()
        assert any(op in str(node.target) for node in program.graph.nodes)


def test_the_program_itself_has_our_op():
    program = torch.export.export(onepass.nn.GroupNorm(4, 8), (X,))
    assert any("onepass.norm" in str(node.target) for node in program.graph.nodes)
    kept = program.run_decompositions({})
    assert any("onepass.norm" in str(node.target) for node in kept.graph.nodes)


@pytest.mark.parametrize("name", ["GroupNorm", "LayerNorm2d", "a patched model"])
def test_dynamic_shapes(name):
    model, x = made(name)
    program = torch.export.export(model, (x,), dynamic_shapes=({0: Dim.DYNAMIC, 2: Dim.DYNAMIC, 3: Dim.DYNAMIC},)).run_decompositions()
    other = torch.randn(3, 8, 10, 4)
    torch.testing.assert_close(program.module()(other), model(other))


# The first process exports. The second cannot import onepass.
EXPORTS = """
import sys, torch, onepass
model = torch.nn.Sequential(torch.nn.Conv2d(8, 8, 3), torch.nn.GroupNorm(4, 8), torch.nn.SiLU())
onepass.patch(model)
x = torch.randn(2, 8, 6, 6)
torch.save((x, model(x).detach()), sys.argv[1] + "/tensors.pt")
torch.export.save(torch.export.export(model, (x,)).run_decompositions(), sys.argv[1] + "/model.pt2")
"""
LOADS = """
import sys
sys.modules["onepass"] = None
import torch
x, y = torch.load(sys.argv[1] + "/tensors.pt")
torch.testing.assert_close(torch.export.load(sys.argv[1] + "/model.pt2").module()(x), y)
print("same")
"""


def test_a_decomposed_program_runs_without_onepass(tmp_path):
    for code in (EXPORTS, LOADS):
        done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
    assert "same" in done.stdout


@pytest.mark.skipif(find_spec("onnxscript") is None or find_spec("onnxruntime") is None, reason="needs onnxscript and onnxruntime")
@pytest.mark.parametrize("name", ["LayerNorm", "GroupNorm, half", "BatchNorm", "a sum", "a patched model"])
def test_onnx(name, tmp_path):
    import onnxruntime

    model, x = made(name)
    expected = copy.deepcopy(model)(x)
    torch.onnx.export(model, (x,), str(tmp_path / "model.onnx"), dynamo=True, verbose=False)
    session = onnxruntime.InferenceSession(str(tmp_path / "model.onnx"))
    found = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    tolerance = 2e-3 if x.dtype == torch.half else 1e-5
    for ours, reference in zip(found, expected if isinstance(expected, tuple) else (expected,)):
        torch.testing.assert_close(torch.from_numpy(ours), reference.detach(), rtol=tolerance, atol=tolerance)
