"""The front door gives the same results as Python, and behaves like torch's own nodes in autograd."""

import pytest
import torch
import torch.nn.functional as F
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

import onepass.functional as O
from onepass.backends.front_door import At, ByNeeds, Descriptor, Layout, New, launcher
from onepass.dispatch import front_door, launchers, packed, recent
from onepass.verify import calls, tensors
from onepass.verify.cases import Case

pytestmark = pytest.mark.usefixtures("opened")
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
C = 16
CASES = [
    Case("layer_norm", (6, 40)),
    Case("layer_norm", (6, 40), affine="none"),
    Case("layer_norm", (6, 40), affine="weight"),
    Case("layer_norm", (6, 40), affine="bias", wide=True),
    Case("layer_norm", (4, 6, 8), rank=2),
    Case("layer_norm", (4, 6, 8), "transposed"),
    Case("layer_norm", (4, 6, 8), modulate=True),
    Case("layer_norm", (6, 40), residual=True),
    Case("rms_norm", (6, 40)),
    Case("rms_norm", (6, 40), affine="none"),
    Case("rms_norm", (6, 40), residual=True),
    Case("layer_norm", (4, 6, 8), residual=True, modulate=True, activation="silu"),
    Case("group_norm", (2, 8, 5, 5), "channels_last", groups=4, residual=True),
    Case("group_norm", (2, 8, 5, 5), groups=4, activation="silu"),
    Case("group_norm", (2, 8, 5, 5), "channels_last", groups=4, activation="silu"),
    Case("instance_norm", (3, 4, 7)),
    Case("instance_norm", (3, 4, 7), running=True),
    Case("batch_norm", (4, 6, 5), running=True),
    Case("batch_norm", (4, 6, 5, 3), "channels_last", running=True),
    Case("batch_norm", (4, 6, 5)),
    Case("batch_norm", (4, 6, 5), evaluate=True),
    Case("layer_norm2d", (2, 6, 4, 4), "channels_last"),
    Case("layer_norm", (0, 40)),
]


def operands() -> tuple[torch.Tensor, torch.nn.Parameter, torch.nn.Parameter]:
    return torch.randn(6, C, requires_grad=True), torch.nn.Parameter(torch.randn(C)), torch.nn.Parameter(torch.randn(C))


def steps(case: Case, dtype: torch.dtype, device: str, number: int = 3) -> list[torch.Tensor | None]:
    """The outputs, gradients and running statistics of several training steps with different values."""
    found: list[torch.Tensor | None] = []
    for seed in range(number):
        made = tensors.make(case, dtype, device, seed=seed)
        inputs = [t.requires_grad_() for name, t in made._asdict().items() if t is not None and not name.startswith("running")]
        outputs = calls.by_onepass(case, made)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        gradients = [torch.randn(y.shape, generator=torch.Generator().manual_seed(seed)).to(y) for y in outputs]
        found += [*outputs, *torch.autograd.grad(outputs, inputs, gradients), *(made.running_mean, made.running_var)]
    return found


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_open_and_closed_give_the_same_bits(case, dtype, device):
    by_cpp = steps(case, dtype, device)
    front_door.close()
    by_python = steps(case, dtype, device)
    assert len(by_cpp) == len(by_python)
    for ours, expected in zip(by_cpp, by_python):
        assert (ours is None) == (expected is None)
        if ours is not None and expected is not None:
            assert torch.equal(ours.detach(), expected.detach()) and ours.stride() == expected.stride()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_open_and_closed_give_the_same_bits_in_new_memory_that_torch_does_not_fill(case, device):
    """All other tests run in torch's deterministic mode, in which C++ does not allocate itself."""
    torch.use_deterministic_algorithms(False)
    test_open_and_closed_give_the_same_bits(case, torch.float32, device)


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_backward_like_an_earlier_one_runs_without_python(deterministic, monkeypatch, anew):
    calls, original, seen = [], ByNeeds.launcher, []
    monkeypatch.setattr(ByNeeds, "launcher", lambda self, *arguments: calls.append(self) or original(self, *arguments))
    torch.use_deterministic_algorithms(deterministic)
    x, weight, bias = operands()
    for _ in range(4):
        O.layer_norm(x, (C,), weight, bias).square().sum().backward()
        seen.append(len(calls))
    assert seen[0] and len(set(seen)) == 1


def test_the_node_is_one_that_torch_knows():
    x, weight, bias = operands()
    y = O.layer_norm(x, (C,), weight, bias)
    assert y.grad_fn.name() == type(y.grad_fn).__name__ == "OnepassNormBackward"
    assert isinstance(y.grad_fn, torch.autograd.graph.Node) and "grad_fn=<OnepassNormBackward>" in repr(y)
    assert [node.variable is t for (node, _), t in zip(y.grad_fn.next_functions, (x, weight, bias))] == [True] * 3
    seen = []
    y.grad_fn.register_hook(lambda gradients, dy: seen.append(len(gradients)))
    y.grad_fn.register_prehook(lambda dy: seen.append(len(dy)))
    y.sum().backward()
    assert seen == [1, 3]


def test_a_repeated_backward_does_not_run_python(monkeypatch):
    x, weight, bias = operands()
    calls_of_python = []
    original = packed._plain_backward
    monkeypatch.setattr(packed, "_plain_backward", lambda *given: calls_of_python.append(1) or original(*given))
    for _ in range(5):
        O.layer_norm(x, (C,), weight, bias).square().sum().backward()
    assert len(calls_of_python) == 1
    torch.autograd.grad(O.layer_norm(x, (C,), weight, bias).square().sum(), weight)  # other gradients are needed
    assert len(calls_of_python) == 2


@pytest.mark.parametrize("needed", [(0,), (1,), (2,), (0, 2), (1, 2), (0, 1, 2)], ids=str)
def test_only_some_gradients(needed, door):
    given = operands()
    for frozen in (False, True):
        for i, t in enumerate(given):
            t.requires_grad_(i in needed or not frozen)
        wanted = [given[i] for i in needed]
        for _ in range(3):
            ours = torch.autograd.grad(O.layer_norm(given[0], (C,), *given[1:]).square().sum(), wanted)
            expected = torch.autograd.grad(F.layer_norm(given[0], (C,), *given[1:]).square().sum(), wanted)
            torch.testing.assert_close(ours, expected)


GRADIENTS = {
    "expanded": lambda y: y.sum(),
    "transposed": lambda y: (y.t() * torch.randn(C, 6)).sum(),
    "from part of y": lambda y: y[:, ::2].square().sum(),
    "negative bit": lambda y: (torch.view_as_complex(y.view(6, C // 2, 2)).conj().imag * torch.arange(C // 2)).sum(),
}


@pytest.mark.parametrize("kind", GRADIENTS)
def test_unusual_gradients(kind, door):
    x, weight, bias = operands()
    for _ in range(3):
        found = []
        for m in (O, F):
            torch.manual_seed(1)
            found.append(torch.autograd.grad(GRADIENTS[kind](m.layer_norm(x, (C,), weight, bias)), (x, weight, bias)))
        torch.testing.assert_close(*found)


def test_inputs_at_odd_addresses(door):
    base, weight, bias = torch.randn(6 * C + 1), torch.randn(C + 1), torch.randn(C + 1)
    given = [base[1:].view(6, C), weight[1:], bias[1:]]
    for t in given:
        t.requires_grad_()
    for _ in range(3):
        ours, expected = (torch.autograd.grad(m.layer_norm(given[0], (C,), *given[1:]).square().sum(), given) for m in (O, F))
        torch.testing.assert_close(ours, expected)


def test_second_derivatives(door):
    x, weight, bias = operands()
    for _ in range(2):
        found = []
        for m in (O, F):
            (dx,) = torch.autograd.grad(m.layer_norm(x, (C,), weight, bias).sin().sum(), x, create_graph=True)
            found.append(torch.autograd.grad(dx.square().sum(), (x, weight, bias)))
        torch.testing.assert_close(*found, rtol=1e-4, atol=1e-4)


def test_backward_twice(door):
    x, weight, bias = operands()
    y = O.layer_norm(x, (C,), weight, bias)
    y.sum().backward(retain_graph=True)
    y.sum().backward()
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        y.sum().backward()


def test_a_changed_input_is_noticed(door):
    x, weight, bias = operands()
    for change in (weight, x):
        y = O.layer_norm(x * 1 if change is weight else x, (C,), weight, bias)
        with torch.no_grad():
            change.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()
    y = O.layer_norm(x, (C,), weight, bias)
    with torch.no_grad():
        bias.add_(1)  # it is not saved
    y.sum().backward()


def test_autograd_notices_that_running_statistics_change(door):
    x, scale = torch.randn(4, 6, 5), torch.randn(6, requires_grad=True)
    mean, var = torch.zeros(6), torch.ones(6)
    for _ in range(3):
        version, product = mean._version, mean * scale
        O.batch_norm(x, mean, var, scale, None, training=True).sum().backward()
        assert mean._version == version + 1
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            product.sum().backward()


def test_hooks_on_saved_tensors(door):
    x, weight, bias = operands()
    O.layer_norm(x, (C,), weight, bias).sum().backward()
    expected, x.grad = x.grad, None
    shapes = []
    with saved_tensors_hooks(lambda t: (shapes.append(t.shape), t.numpy(force=True))[1], torch.from_numpy):
        y = O.layer_norm(x, (C,), weight, bias)
    y.sum().backward()
    assert shapes[:2] == [x.shape, weight.shape] and len(shapes) == 3
    torch.testing.assert_close(x.grad, expected, rtol=0, atol=0)
    with saved_tensors_hooks(lambda t: t, lambda t: t.t().contiguous().t() if t.dim() == 2 else t):
        y = O.layer_norm(x, (C,), weight, bias)
    torch.testing.assert_close(torch.autograd.grad(y.sum(), x)[0], expected)
    with saved_tensors_hooks(lambda t: t, lambda t: t.double()):
        y = O.layer_norm(x, (C,), weight, bias)
    with pytest.raises(RuntimeError, match="hooks on saved tensors must keep dtype"):
        y.sum().backward()


def test_a_hook_that_raises(door):
    def refuse(t):
        raise ValueError("no")

    x, weight, bias = operands()
    with saved_tensors_hooks(refuse, refuse), pytest.raises(ValueError, match="no"):
        O.layer_norm(x, (C,), weight, bias)
    with saved_tensors_hooks(lambda t: t, refuse):
        y = O.layer_norm(x, (C,), weight, bias)
    with pytest.raises(ValueError, match="no"):
        y.sum().backward()


@pytest.mark.parametrize("context", ["reentrant", "not reentrant", "save_on_cpu"])
def test_checkpointing(context, door):
    x, weight, bias = operands()

    def run(x):
        return O.layer_norm(O.layer_norm(x, (C,), weight, bias), (C,), weight, bias)

    expected = torch.autograd.grad(run(x).square().sum(), (x, weight))
    if context == "save_on_cpu":
        with save_on_cpu():
            y = run(x)
    else:
        y = checkpoint(run, x, use_reentrant=context == "reentrant")
    y.square().sum().backward()
    assert torch.equal(x.grad, expected[0]) and torch.equal(weight.grad, expected[1])


def test_anomaly_mode_names_the_node():
    x, weight, bias = operands()
    with pytest.warns(UserWarning, match="OnepassNormBackward"), torch.autograd.detect_anomaly():
        y = O.layer_norm(x, (C,), weight, bias)
        with pytest.raises(RuntimeError, match="'OnepassNormBackward' returned nan values"):
            y.backward(torch.full_like(y, torch.inf))


def test_no_graph_without_gradients(door):
    x, weight, bias = operands()
    for context in (torch.no_grad(), torch.inference_mode()):
        with context:
            assert not O.layer_norm(x, (C,), weight, bias).requires_grad
    assert not O.layer_norm(x.detach(), (C,), weight.detach(), bias.detach()).requires_grad


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("needed", [("weight",), ("x",), ("residual",), ("x", "residual", "weight")], ids=str)
@pytest.mark.parametrize("used", ["y", "sum", "both"])
def test_a_residual(used, needed, device, door):
    x, residual, weight = (torch.randn(shape, device=device) for shape in ((6, C), (6, C), (C,)))
    inputs = {"x": x, "residual": residual, "weight": weight}
    wanted = [inputs[name].requires_grad_() for name in needed]
    if used == "sum" and needed == ("weight",):
        return  # there is no gradient
    for _ in range(3):
        found = []
        for y, total in (O.add_rms_norm(x, residual, (C,), weight), (F.rms_norm(x + residual, (C,), weight), x + residual)):
            assert total.requires_grad == (needed != ("weight",))
            parts = {"y": [y], "sum": [total], "both": [y, total]}[used]
            found.append(torch.autograd.grad(torch.stack([part.square().sum() for part in parts]).sum(), wanted, allow_unused=True))
        torch.testing.assert_close(*found)


def _recent_launchers():
    return [launch for variants in recent._recent.values() for _, launch in variants]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("norm", ["plain", "residual", "modulate"])
def test_later_training_calls_run_in_cpp(norm, device):
    """The first calls run in Python. Those that follow give the same outputs, gradients and graphs without it."""
    x, residual, scale, shift = (torch.randn(2, 5, C, device=device, requires_grad=True) for _ in range(4))
    scale, shift = (t.detach()[:, 0].clone().requires_grad_() for t in (scale, shift))
    weight, bias = (torch.nn.Parameter(torch.randn(C, device=device)) for _ in range(2))
    call, inputs = {
        "plain": (lambda: O.layer_norm(x, (C,), weight, bias), [x, weight, bias]),
        "residual": (lambda: O.add_layer_norm(x, residual, (C,), weight, bias), [x, residual, weight, bias]),
        "modulate": (lambda: O.layer_norm(x, (C,), weight, bias, modulate=(scale, shift)), [x, weight, bias, scale, shift]),
    }[norm]
    recent.forget_recent()
    found = []
    for number in range(4):
        outputs = call()
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        assert number == 0 or all(type(y.grad_fn).__name__ == "OnepassNormBackward" for y in outputs)
        found.append([*outputs, *torch.autograd.grad(outputs, inputs, [torch.ones_like(y) for y in outputs])])
    assert any(getattr(launch, "__name__", "") == "trained" for launch in _recent_launchers())
    for again in found[1:]:
        assert all(map(torch.equal, again, found[0]))


def test_a_sum_of_constants_needs_no_gradient():
    x, residual, weight = torch.randn(6, C), torch.randn(6, C), torch.nn.Parameter(torch.ones(C))
    for _ in range(3):
        y, total = O.add_layer_norm(x, residual, (C,), weight)
        assert y.requires_grad and not total.requires_grad
        y.sum().backward()
    assert weight.grad is not None


@pytest.mark.parametrize("device", DEVICES)
def test_a_checkpoint_recomputes_a_first_call(device):
    """The recomputation is like the first call, so it takes a shorter way. It must save as many tensors: a checkpoint counts them."""
    x, residual = (torch.randn(6, C, device=device, requires_grad=True) for _ in range(2))
    launchers.forget_all()
    y, total = checkpoint(lambda *given: O.add_layer_norm(*given, (C,)), x, residual, use_reentrant=False)
    found = torch.autograd.grad((y * total).sum(), (x, residual))
    added = x + residual
    expected = torch.autograd.grad((F.layer_norm(added, (C,)) * added).sum(), (x, residual))
    torch.testing.assert_close(found, expected)


def test_a_launcher_describes_the_inputs_that_a_kernel_copies():
    """The C++ code passes each descriptor function the input that it is for, also inside a tuple of arguments."""
    x, dy, passed = torch.randn(3), torch.randn(3), []
    of_x, of_dy = (lambda t: ("x", t)), (lambda t: ("dy", t))
    run = launcher(
        careful=lambda *_: pytest.fail("this call is a usual one"),
        device=-1,
        arguments=("dy", "x"),
        inputs={"x": Layout(), "dy": Layout()},
        outputs={"dx": New((3,), (1,), torch.float32)},
        allocate=lambda shape, stride, dtype: torch.empty_strided(shape, stride, dtype=dtype),
        returned="dx",
        steps=[(lambda *arguments: passed.append(arguments), [Descriptor("dy", of_dy), (Descriptor("x", of_x), At("x")), At("dx", 4)])],
    )
    assert run is not None
    dx = run(dy, x)
    (described, (nested, address), last), *_ = passed
    assert described[0] == "dy" and described[1] is dy and nested[0] == "x" and nested[1] is x
    assert address == x.data_ptr() and last == dx.data_ptr() + 4
