"""The functions that launch/prepared.py writes pass to kernels what `Chain.launch` passes. Kernels are replaced: no GPU is needed."""

import os
from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

from onepass.backends.family import BACKWARD, FORWARD, PlannedLaunches
from onepass.backends.gpu.launch import chain, kernel, prepared, stream
from onepass.core import norms
from onepass.core.device import KNOWN_DEVICES
from onepass.core.operands import OptionalOperands
from onepass.core.problem import bind
from onepass.planning.choose import plan
from onepass.planning.options import Options
from onepass.planning.registry import family_named

pytestmark = [
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter uses no prepared functions"),
    pytest.mark.usefixtures("closed"),  # while the front door is open, nothing is written
]
H200, STREAM = KNOWN_DEVICES["h200"], 77


class Launched(list):
    """The arguments of all launches."""

    def run(self, *args):
        self.append(args)


@pytest.fixture
def launched(monkeypatch):
    """Records launches. Tensors of the CPU take the place of those of a GPU, whose number is -1."""
    found = Launched()
    monkeypatch.setattr(kernel.Kernel, "load", lambda self, device, odd=(): (found.run, tuple(sorted(odd)), ("metadata",)))
    monkeypatch.setattr(stream, "current_device", lambda: -1)
    for module in (stream, chain):
        monkeypatch.setattr(module, "current_raw_stream", lambda device: STREAM)
    cpu = lambda shape, stride, dtype: torch.empty_strided(shape, stride, dtype=dtype)  # noqa: E731
    monkeypatch.setattr(prepared, "on_current_gpu_unfilled", lambda: cpu)
    monkeypatch.setattr(prepared, "on_current_gpu", cpu)
    from onepass.backends.gpu import forward, short_backward, short_forward

    for module in (forward, short_backward, short_forward):
        monkeypatch.setattr(module, "current_device", lambda: -1)
    for module in (chain, forward, short_backward, short_forward):
        monkeypatch.setattr(module, "allocate", cpu)
    monkeypatch.setattr(forward, "current_raw_stream", lambda device: STREAM)
    monkeypatch.setattr("onepass.backends.gpu.launch.counters._capturing", lambda: False)
    monkeypatch.setattr("onepass.backends.gpu.launch.counters._apart", lambda device, n: torch.zeros(n, dtype=torch.int32))
    return found


def _written(monkeypatch):
    """The functions that were written, each with its careful function."""
    pairs, original = [], prepared.prepared

    def kept(chain, arguments, outputs, returned, careful, *more):
        made = original(chain, arguments, outputs, returned, careful, *more)
        pairs.append((made, careful))
        return made

    for module in ("short_forward", "short_backward"):
        monkeypatch.setattr(f"onepass.backends.gpu.{module}.prepared", kept)
    return pairs


def _same_launches(launched, made, careful, arguments):
    """Both functions launch the same kernels with the same addresses of inputs and the same numbers."""
    results, calls = [], []
    inputs = {t.data_ptr(): f"input {at}" for at, t in enumerate(arguments) if t is not None}
    made.__globals__["careful"] = None  # the usual call does without
    for function in (made, careful):
        launched.clear()
        results.append(function(*arguments))
        calls.append([[_named(arg, inputs) for arg in args] for args in launched])
    assert calls[0] and calls[0] == calls[1]
    for one, other in zip(*[result if isinstance(result, tuple) else (result,) for result in results]):
        assert (one is None) == (other is None)
        if one is not None:
            assert (one.shape, one.stride(), one.dtype) == (other.shape, other.stride(), other.dtype)
    return calls[0]


def _named(arg, inputs):
    """An address by its name. Outputs and the workspace have another address in each call, so all are "new"."""
    if hasattr(arg, "base"):  # a descriptor of x
        return "descriptor", inputs[arg.base.data_ptr()]
    return inputs.get(arg, "new" if type(arg) is int and arg > 2**32 else arg)


X = torch.randn(4, 64, dtype=torch.bfloat16)
W = torch.randn(64, dtype=torch.bfloat16)
NCHW = torch.randn(2, 64, 8, 8, dtype=torch.bfloat16).to(memory_format=torch.channels_last)
LARGE = torch.randn(4, 320, 64, 64, dtype=torch.bfloat16).to(memory_format=torch.channels_last)
P320 = torch.randn(320, dtype=torch.bfloat16)
SCALE = torch.randn(4, 64, dtype=torch.bfloat16)


def _problem(spec, x, weight, bias, track=False, **extras):
    return bind(spec, x, weight, bias, False, track, OptionalOperands(**extras))


def _plan(problem, direction, family=None):
    chosen = plan(problem, H200, direction, Options(family))
    return family_named(chosen.family), chosen.launches


PLAIN = {
    "layer_norm": (norms.layer_norm(1, 1e-5, "element", False), X, W, None),
    "group_norm": (norms.group_norm(8, 1e-5, 1, False), NCHW, W, None),
    "a team": (norms.group_norm(32, 1e-5, 1, False), LARGE, P320, "team"),
    "a ring": (norms.group_norm(32, 1e-5, 1, False), LARGE, P320, "ring"),
    "reread": (norms.group_norm(32, 1e-5, 1, False), LARGE, P320, "tile_reread"),
}


def test_a_backward_of_teams(launched, monkeypatch):
    x = torch.randn(2, 64, 8, 8, dtype=torch.bfloat16)
    problem, pairs = _problem(norms.group_norm(8, 1e-5, 1, False), x, W, None), _written(monkeypatch)
    family, launches = _plan(problem, BACKWARD, "whole_set")
    members = replace(launches[0], members=2, programs=32)
    statistics = torch.randn(2, 2, 8)
    family.train_backward(problem, (members, *launches[1:]))(torch.randn_like(x), x, W, None, statistics, (True, True, False))
    calls = _same_launches(launched, *pairs[-1], (torch.randn_like(x), x, W, None, statistics))
    assert [call[0] for call in calls] == [32, launches[1].programs]


@pytest.mark.parametrize("name", PLAIN)
@pytest.mark.parametrize("affine", [2, 1, 0])
def test_inference_and_training(name, affine, launched, monkeypatch):
    spec, x, param, forced = PLAIN[name]
    weight, bias = param if affine else None, param.clone() if affine > 1 else None
    problem, pairs = _problem(spec, x, weight, bias), _written(monkeypatch)
    family, launches = _plan(problem, FORWARD, forced)
    family.infer(problem, launches)
    _same_launches(launched, *pairs[-1], (x, weight, bias, None, None))
    family.train_forward(problem, launches)
    _same_launches(launched, *pairs[-1], (x, weight, bias))
    y, statistics = pairs[-1][0](x, weight, bias)
    family, launches = _plan(problem, BACKWARD)
    needs = True, weight is not None, bias is not None
    family.train_backward(problem, launches)(torch.randn_like(x), x, weight, bias, statistics, needs)
    calls = _same_launches(launched, *pairs[-1], (torch.randn_like(y), x, weight, bias, statistics))
    assert {"input 0", "input 1", "input 4"} <= {arg for args in calls for arg in args if isinstance(arg, str)}


@pytest.mark.parametrize("forced, layout", [("tile_reread", torch.channels_last), ("whole_set", torch.contiguous_format)])
def test_statistics_at_an_odd_address(forced, layout, launched):
    """Hooks on saved tensors may return them there. A kernel must not take the mean for aligned then, but the workspace still is."""
    x = NCHW.contiguous(memory_format=layout)
    problem = _problem(norms.group_norm(8, 1e-5, 1, False), x, W, None)
    family, launches = _plan(problem, BACKWARD, forced)
    count = 2 * 8 * 2
    statistics = torch.randn(count + 1)[1:].view(2, 2, 8)
    family.train_backward(problem, launches)(torch.randn_like(x), x, W, None, statistics, (True, True, False))
    odd = {name for args in launched for name in args[4]}
    assert {"mean", "rstd"} <= odd and not any("cells" in name for name in odd) and len(launched) == len(launches)


@pytest.mark.parametrize("residual", [X.clone(), None], ids=["residual", ""])
@pytest.mark.parametrize("modulated", [True, False])
def test_extras(residual, modulated, launched, monkeypatch):
    if residual is None and not modulated:
        pytest.skip("no extras")
    scale, shift = (SCALE[0], SCALE[1].clone()) if modulated else (None, None)
    spec, pairs = norms.layer_norm(1, 1e-5, "element", modulated), _written(monkeypatch)
    problem = _problem(spec, X, W, None, residual=residual, scale=scale, shift=shift)
    family, launches = _plan(problem, FORWARD)
    for make in (family.infer_extras, family.train_extras):
        make(problem, launches)
        _same_launches(launched, *pairs[-1], (X, W, None, residual, scale, shift))
    _, statistics, total = pairs[-1][0](X, W, None, residual, scale, shift)
    assert (total is None) == (residual is None)
    family, launches = _plan(problem, BACKWARD)
    needs = True, True, False, modulated, modulated
    for dsum in (None, torch.randn_like(X)) if residual is not None else (None,):
        family.train_extras_backward(problem, launches)(torch.randn_like(X), X, W, None, statistics, scale, shift, dsum, needs)
        _same_launches(launched, *pairs[-1], (torch.randn_like(X), X, W, None, statistics, scale, shift, dsum))


@pytest.mark.parametrize("train", [False, True])
def test_running_statistics(train, launched, monkeypatch):
    spec, pairs = norms.batch_norm(1e-5, 1, False), _written(monkeypatch)
    problem = _problem(spec, NCHW, None, None, track=True)
    family, launches = _plan(problem, FORWARD)
    mean, var = torch.zeros(64), torch.ones(64)
    (family.train_track if train else family.track)(problem, launches)(NCHW, None, None, mean, var, 0.25)
    assert mean._version == var._version == 1
    calls = _same_launches(launched, *pairs[-1], (NCHW, None, None, mean, var))
    (updating,) = [call for call in calls if "input 3" in call]  # one kernel updates running_mean and running_var
    at = updating.index("input 3")
    assert updating[at : at + 2] == ["input 3", "input 4"]
    assert {0.25, 128 / 127} <= {value for value in updating if isinstance(value, float)}


UNUSUAL = {
    "x not aligned": lambda x, w: (torch.randn(x.numel() + 1, dtype=x.dtype)[1:].view_as(x), w),
    "weight not aligned": lambda x, w: (x, torch.randn(65, dtype=w.dtype)[1:]),
    "x and weight not aligned": lambda x, w: (UNUSUAL["x not aligned"](x, w)[0], UNUSUAL["weight not aligned"](x, w)[1]),
    "weight not contiguous": lambda x, w: (x, torch.randn(128, dtype=w.dtype)[::2]),
}


@pytest.mark.parametrize("unusual", UNUSUAL)
def test_unusual_tensors_take_the_careful_path(unusual, launched):
    problem = _problem(PLAIN["layer_norm"][0], X, W, None)
    family, launches = _plan(problem, FORWARD)
    x, weight = UNUSUAL[unusual](X, W)
    family.infer(problem, launches)(x, weight, None, None, None)
    (args,) = launched
    assert x.data_ptr() in args
    assert args[4] == tuple(name for name, t in (("weight", weight), ("x", x)) if t.data_ptr() % 16), "the kernel for these odd addresses"
    assert (weight.data_ptr() in args) == weight.is_contiguous()


@pytest.mark.parametrize("train", [False, True])
def test_an_odd_address_gets_launches_of_its_own(train, launched):
    """They are planned once, when the first x at an odd address comes."""
    problem, planned = _problem(PLAIN["layer_norm"][0], X, W, None), []
    family, launches = _plan(problem, FORWARD)

    def for_odd_address():
        planned.append(replace(problem, aligned=False))
        return planned[-1], (replace(launches[0], programs=launches[0].programs + 1),)

    make, rest = (family.train_forward, [None]) if train else (family.infer, [None] * 3)
    launch = make(problem, PlannedLaunches(launches, for_odd_address))
    odd, weight = UNUSUAL["x not aligned"](X, W)
    for x in (X, odd, X, odd):
        launch(x, weight, *rest)
    usual = launches[0].programs
    assert [args[0] for args in launched] == [usual, usual + 1, usual, usual + 1] and len(planned) == 1


@pytest.mark.parametrize("at", range(3))
def test_freed_memory_raises(at, launched):
    problem, bias = _problem(PLAIN["layer_norm"][0], X, W, W), W.clone()
    family, launches = _plan(problem, FORWARD)
    launch = family.infer(problem, launches)
    launch(X, W, bias, None, None)
    launched.clear()
    tensors = [t.clone() for t in (X, W, bias)]
    tensors[at].untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match="no memory"):
        launch(*tensors, None, None)
    assert not launched


@pytest.mark.parametrize("fills", [False, True])
def test_torch_fills_outputs_in_its_deterministic_mode(fills, launched, monkeypatch):
    """The tests run in that mode, so other tests only see the function that fills."""
    monkeypatch.setattr(prepared, "on_current_gpu_unfilled", lambda: lambda *new: torch.zeros(new[0], dtype=new[2]))
    monkeypatch.setattr(prepared, "fills_memory", lambda: fills)
    problem = _problem(PLAIN["layer_norm"][0], X, W, None)
    family, launches = _plan(problem, FORWARD)
    y = family.infer(problem, launches)(X, W, None, None, None)
    assert y.isnan().all() if fills else y.eq(0).all()


class Triton36:
    """The launcher of Triton 3.6: the compiled function takes all arguments in one row."""

    global_scratch_size = profile_scratch_size = 0
    launch_cooperative_grid, launch_pdl = False, True

    def __init__(self, launch):
        self.launch = launch

    def __call__(self, gridX, gridY, gridZ, stream, function, *args):
        self.launch(gridX, gridY, gridZ, stream, function, self.launch_cooperative_grid, self.launch_pdl, None, None, *args)


class Triton39(Triton36):
    """The launcher of Triton 3.9: the compiled function takes the kernel's arguments in a tuple."""

    def __call__(self, gridX, gridY, gridZ, stream, function, metadata, hook1, hook2, hook3, *args):
        self.launch(gridX, gridY, gridZ, stream, function, False, True, metadata, hook1, hook2, hook3, None, None, ("*bf16",), b"", args)


class Scratch(Triton36):
    global_scratch_size = 128


@pytest.mark.parametrize("launcher", [Triton36, Triton39, Scratch])
def test_the_compiled_function_gets_what_tritons_launcher_passes(launcher, launched, monkeypatch):
    run = launcher(launched.run)
    monkeypatch.setattr(kernel.Kernel, "load", lambda self, device, odd=(): (run, 6, ("metadata",)))
    problem, pairs = _problem(PLAIN["layer_norm"][0], X, W, None), _written(monkeypatch)
    family, launches = _plan(problem, FORWARD)
    family.infer(problem, launches)
    made, careful = pairs[-1]
    made(X, W, None, None, None)
    careful(X, W, None, None, None)
    direct, wrapped = ([arg for part in args for arg in (part if isinstance(part, tuple) else (part,))] for args in launched)
    y = [at for at, (one, other) in enumerate(zip(direct, wrapped)) if one != other]
    assert len(direct) == len(wrapped) and len(y) <= 1, "only the address of y may differ"
    assert STREAM in direct and X.data_ptr() in direct
    assert (prepared.launcher_of(chain_kernel(family, problem, launches), -1, [])[0] is run) == (launcher is Scratch)


def chain_kernel(family, problem, launches):
    from onepass.backends.gpu.forward import kernels

    return kernels(problem, launches)[0]
