"""No call reads or writes memory outside its tensors. onepass raises before it launches anything, as torch does."""

import gc

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

import onepass
import onepass.functional as O
from onepass.core import norms

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
C = 512

ROWS = {
    "layer_norm": lambda m, x, w, b: m.layer_norm(x, (C,), w, b),
    "rms_norm": lambda m, x, w, b: m.rms_norm(x, (C,), w, 1e-5),
}
CHANNELS = {
    "group_norm": lambda m, x, w, b: m.group_norm(x, 32, w, b),
    "instance_norm": lambda m, x, w, b: m.instance_norm(x, weight=w, bias=b),
    "batch_norm": lambda m, x, w, b: m.batch_norm(x, None, None, w, b, training=True),
}
NORMS = ROWS | CHANNELS
OURS = {  # with extras that torch does not have
    "group_norm, silu": lambda m, x, w, b: m.group_norm(x, 32, w, b, activation="silu"),
    "layer_norm2d": lambda m, x, w, b: m.layer_norm2d(x, w, b),
    "batch_norm, y saved": lambda m, x, w, b: m.batch_norm(x, None, None, w, b, training=True, save="y"),
}


def _input(name: str, device: str) -> Tensor:
    return torch.randn((6, C) if name in ROWS else (4, C, 3, 2), device=device)


def _operands(name: str, device: str) -> tuple[Tensor, Tensor, Tensor]:
    return _input(name, device).requires_grad_(), _param(device), _param(device)


def _param(device: str) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.randn(C, device=device))


def _freed(t: Tensor, offset: int = 0) -> Tensor:
    """A tensor like t whose storage has size 0, as FSDP leaves it."""
    base = torch.zeros(offset + t.numel(), dtype=t.dtype, device=t.device)
    view = base[offset:].view(t.shape)
    view.untyped_storage().resize_(0)
    return view


CHANGES = {
    "weight.half()": lambda x, w, b: setattr(w, "data", w.data.half()),
    "weight.bfloat16()": lambda x, w, b: setattr(w, "data", w.data.bfloat16()),
    "weight.double()": lambda x, w, b: setattr(w, "data", w.data.double()),
    "a shorter weight": lambda x, w, b: setattr(w, "data", w.data[:3].clone()),
    "a longer weight": lambda x, w, b: setattr(w, "data", torch.ones(2 * C, device=w.device)),
    "a weight of another shape": lambda x, w, b: setattr(w, "data", w.data.reshape(2, -1)),
    "a shorter input": lambda x, w, b: setattr(x, "data", x.data[:2].clone()),
    "input.half()": lambda x, w, b: setattr(x, "data", x.data.half()),
    "weight elsewhere": lambda x, w, b: setattr(w, "data", w.data.to("meta")),
    "input freed": lambda x, w, b: x.untyped_storage().resize_(0),
    "weight freed": lambda x, w, b: w.untyped_storage().resize_(0),
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("name", [*NORMS, *OURS])
def test_what_was_saved_changes_before_the_backward(name, change, device):
    operands = _operands(name, device)
    y = (NORMS | OURS)[name](O, *operands)
    if name == "batch_norm, y saved" and change in ("a shorter input", "input.half()", "input freed"):
        return  # the input was not saved
    if change == "weight elsewhere":
        with pytest.raises((RuntimeError, TypeError)):  # torch refuses to assign data of another kind of device
            CHANGES[change](*operands)
            y.sum().backward()
        return
    CHANGES[change](*operands)
    if name == "rms_norm" and device == "cpu" and change in ("weight.half()", "weight.bfloat16()", "weight.double()", "input.half()"):
        y.sum().backward()  # torch promotes here
        return
    with pytest.raises(RuntimeError, match=r"in the forward and is|data is not allocated"):
        y.backward(torch.randn_like(y))
    assert all(t.grad is None for t in operands)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_a_module_is_converted_before_the_backward(dtype, device):
    module = torch.nn.Sequential(torch.nn.Linear(C, C), onepass.nn.LayerNorm(C)).to(device)
    y = module(torch.randn(64, C, device=device)).sum()
    module[1].to(dtype)
    with pytest.raises(RuntimeError, match="expected scalar type Float but found"):
        y.backward()
    gc.collect()  # a corrupted heap shows here at the latest


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_a_norm_without_a_mean_promotes_as_torch_does(dtype):
    """On a CPU. On a GPU torch raises, and so do we."""
    gradients = []
    for module in (F, O):
        torch.manual_seed(3)
        x, weight, _ = _operands("rms_norm", "cpu")
        y = module.rms_norm(x, (C,), weight, 1e-5)
        weight.data = weight.data.to(dtype)
        y.backward(torch.ones_like(y))
        gradients.append((x.grad, weight.grad))
    for ours, torchs in zip(gradients[1], gradients[0]):
        torch.testing.assert_close(ours.double(), torchs.double(), rtol=2e-3, atol=2e-3)


HOOKS = {
    "another dtype": lambda t: t.half(),
    "a wider dtype": lambda t: t.double(),
    "fewer elements": lambda t: t.flatten()[:1],
    "more elements": lambda t: torch.cat([t, t]),
    "elsewhere": lambda t: t.to("meta"),
    "freed": _freed,
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("hook", HOOKS)
@pytest.mark.parametrize("name", [*CHANNELS, *OURS, "layer_norm"])
def test_hooks_on_saved_tensors(name, hook, device):
    operands = _operands(name, device)
    with saved_tensors_hooks(lambda t: t, HOOKS[hook]):
        y = (NORMS | OURS)[name](O, *operands)
    with pytest.raises(RuntimeError):
        y.backward(torch.randn_like(y))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", [*NORMS, *OURS])
def test_hooks_that_change_no_value(name, device):
    """Hooks may return other strides, an offset, or a copy."""
    grads = []
    for unpack in (
        lambda t: t,
        lambda t: t.clone(),
        lambda t: _strided(t),
        lambda t: torch.cat([t.flatten()[:1], t.flatten()])[1:].view(t.shape),
    ):
        torch.manual_seed(1)
        operands = _operands(name, device)
        with saved_tensors_hooks(lambda t: t, unpack):
            y = (NORMS | OURS)[name](O, *operands)
        y.backward(torch.ones_like(y))
        grads.append([t.grad for t in operands if t.grad is not None])
    for other in grads[1:]:
        torch.testing.assert_close(other, grads[0], rtol=1e-4, atol=1e-4)


def _strided(t: Tensor) -> Tensor:
    return torch.stack([t, t], -1)[..., 0]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("offset", [0, 5])
@pytest.mark.parametrize("name", [*NORMS, *OURS])
def test_freed_storage(name, offset, device):
    norm = (NORMS | OURS)[name]
    x, weight, bias = _input(name, device), torch.ones(C, device=device), torch.ones(C, device=device)
    norm(O, x, weight, bias)
    calls = {"input": lambda: norm(O, _freed(x, offset), weight, bias), "weight": lambda: norm(O, x, _freed(weight, offset), bias)}
    if name != "rms_norm":
        calls["bias"] = lambda: norm(O, x, weight, _freed(bias, offset))
    for grad in (False, True):
        weight.requires_grad_(grad)
        for argument, call in calls.items():
            with pytest.raises(RuntimeError, match=f"data is not allocated yet.; {argument} of shape"):
                call()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", [*NORMS, *OURS])
def test_freed_gradient(name, device):
    operands = _operands(name, device)
    y = (NORMS | OURS)[name](O, *operands)
    with pytest.raises(RuntimeError, match="data is not allocated"):
        y.backward(_freed(y.detach()))
    assert all(t.grad is None for t in operands)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("which", [0, 1])
def test_freed_running_statistics(which, training, device):
    x = _input("batch_norm", device)
    good = [torch.zeros(C, device=device), torch.ones(C, device=device)]
    for _ in range(2):  # the second call of a kind takes a shorter path
        O.batch_norm(x, *(t.clone() for t in good), training=training)
        bad = [_freed(t) if i == which else t.clone() for i, t in enumerate(good)]
        with pytest.raises(RuntimeError, match="data is not allocated"):
            O.batch_norm(x, *bad, training=training)
        assert torch.equal(bad[1 - which], good[1 - which]), "the other statistic was updated"


@pytest.mark.parametrize("device", DEVICES)
def test_freed_extras(device):
    x, r, s = torch.randn(4, C, device=device), torch.randn(4, C, device=device), torch.randn(4, C, device=device)
    wide = x.view(4, 1, C)
    O.add_layer_norm(x, r, (C,)), O.layer_norm(wide, (C,), modulate=(s, s))
    for call in (
        lambda: O.add_layer_norm(x, _freed(r), (C,)),
        lambda: O.add_layer_norm(_freed(x), r, (C,)),
        lambda: O.layer_norm(wide, (C,), modulate=(_freed(s), s)),
        lambda: O.layer_norm(wide, (C,), modulate=(s, _freed(s))),
        lambda: O.layer_norm(x, (C,), out=_freed(x)),
    ):
        with pytest.raises(RuntimeError, match="not allocated"):
            call()


@pytest.mark.parametrize("name", NORMS)
def test_zero_tensors(name):
    """torch's zero tensors have no memory, and its norms read them as zeros."""
    x, weight, bias = _input(name, "cpu"), torch.randn(C), torch.randn(C)
    zero = torch._efficientzerotensor
    for operands in ((zero(x.shape), weight, bias), (x, zero(weight.shape), bias), (x, weight, zero(bias.shape))):
        filled = [torch.zeros(t.shape) if t._is_zerotensor() else t for t in operands]
        torch.testing.assert_close(NORMS[name](O, *operands), NORMS[name](F, *filled), rtol=1e-4, atol=1e-4)
    operands = _operands(name, "cpu")
    y = NORMS[name](O, *operands)
    y.backward(torch._efficientzerotensor(y.shape))
    assert operands[0].grad is not None and not operands[0].grad.any()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", NORMS)
def test_negative_bit(name, device):
    def negative(*shape: int) -> Tensor:
        t = torch.randn(*shape, dtype=torch.cfloat, device=device).conj().imag
        assert t.is_neg()
        return t

    shape = _input(name, device).shape
    x, weight, bias, dy = negative(*shape), negative(C), negative(C), negative(*shape)
    plain = [t.resolve_neg().contiguous() for t in (x, weight, bias, dy)]
    for chosen in range(8):  # each of the three with or without its negative bit
        operands = [t if chosen >> i & 1 else p for i, (t, p) in enumerate(zip((x, weight, bias), plain))]
        torch.testing.assert_close(NORMS[name](O, *operands), NORMS[name](F, *plain[:3]), rtol=1e-4, atol=1e-4)
    results = []
    for module, gradient in ((F, plain[3]), (O, dy)):
        leaves = [t.clone().requires_grad_() for t in plain[:3]]
        NORMS[name](module, *leaves).backward(gradient)
        results.append([t.grad for t in leaves if t.grad is not None])
    torch.testing.assert_close(results[1], results[0], rtol=1e-3, atol=1e-3)


def test_negative_bit_of_the_reported_case():
    x = torch.randn(1, 8, dtype=torch.cfloat).conj().imag
    torch.testing.assert_close(O.batch_norm(x, torch.zeros(8), torch.ones(8)), F.batch_norm(x, torch.zeros(8), torch.ones(8)))


def _packed(definition, **changes):
    words, sizes, eps, offset = definition.pack()
    return changes.get("words", words), changes.get("sizes", sizes), eps, offset


NONE7 = (None,) * 7


def _extras(**named):
    names = ("residual", "scale", "shift", "mean_weight", "var_weight", "running_mean", "running_var")
    return [named.get(name) for name in names]


@pytest.mark.parametrize("device", DEVICES)
def test_raw_forward_checks_all_that_it_indexes(device):
    def t(*shape, dtype=torch.float32):
        return torch.randn(*shape, device=device).to(dtype)

    def norm(definition, x, weight=None, bias=None, mean=None, var=None, track=False, packed=None, **extras):
        return torch.ops.onepass.norm(x, weight, bias, mean, var, *(packed or _packed(definition)), track, *_extras(**extras))

    x, g = t(8, 64), norms.group_norm(4)
    rows, modulated = norms.layer_norm(1), norms.layer_norm(1, modulated=True)
    norm(rows, x, t(64), t(64), residual=t(8, 64))
    calls = {
        "a short residual": lambda: norm(rows, x, residual=t(8, 63)),
        "a residual of another shape": lambda: norm(rows, x, residual=t(64, 8)),
        "a short scale": lambda: norm(modulated, x, scale=t(3)),
        "a short shift": lambda: norm(modulated, x, scale=t(8, 64), shift=t(8, 63)),
        "a short weight": lambda: norm(rows, x, t(63)),
        "a long bias": lambda: norm(rows, x, t(64), t(65)),
        "a weight of integers": lambda: norm(rows, x, torch.ones(64, dtype=torch.int64, device=device)),
        "a short var": lambda: norm(norms.batch_norm(), x, mean=t(64), var=t(2)),
        "a short mean": lambda: norm(norms.batch_norm(), x, mean=t(1), var=t(64)),
        "var without mean": lambda: norm(norms.batch_norm(), x, var=t(64)),
        "mean without var": lambda: norm(norms.batch_norm(), x, mean=t(64)),
        "negative groups": lambda: norm(g, t(2, 64, 3), packed=_packed(g, sizes=[-4])),
        "no groups": lambda: norm(g, t(2, 64, 3), packed=_packed(g, sizes=[0])),
        "an axis twice": lambda: norm(rows, x, t(64), packed=_packed(rows, words=rows.pack()[0].replace("| d0 |  |", "| d0 d0 |  |"))),
        "a mix without weights": lambda: norm(norms.switchable_norm(True), t(2, 8, 4)),
        "a mix with few weights": lambda: norm(norms.switchable_norm(True), t(2, 8, 4), mean_weight=t(2), var_weight=t(3)),
        "one running statistic": lambda: norm(
            norms.switchable_norm(True), t(2, 8, 4), mean_weight=t(3), var_weight=t(3), running_mean=t(8)
        ),
        "short running statistics": lambda: norm(
            norms.switchable_norm(True), t(2, 8, 4), mean_weight=t(3), var_weight=t(3), running_mean=t(7), running_var=t(7)
        ),
        "integers": lambda: norm(rows, torch.ones(8, 64, dtype=torch.int32, device=device)),
    }
    for name, call in calls.items():
        for _ in range(2):
            with pytest.raises((ValueError, RuntimeError, ZeroDivisionError)):
                call()
                pytest.fail(name)


@pytest.mark.parametrize("device", DEVICES)
def test_raw_backward_checks_all_that_it_indexes(device):
    def t(*shape):
        return torch.randn(*shape, device=device)

    good = {"dy": t(8, 64), "x": t(8, 64), "weight": t(64), "bias": t(64), "mean": t(8), "rstd": t(8), "var": None}

    def back(needs=(True, True, True, False, False, False, False), definition=None, **changes):
        given = good | changes
        extras = _extras(residual=given.pop("dsum", None), scale=given.pop("scale", None), shift=given.pop("shift", None))
        dy, x, weight, bias, mean, rstd, var = given.values()
        packed = _packed(definition or norms.layer_norm(1))
        return torch.ops.onepass.norm_backward(dy, x, weight, bias, mean, rstd, *packed, False, needs, var, *extras)

    back(), back(dsum=t(8, 64))
    for changes in (
        {"dy": t(4, 64)}, {"dy": t(8, 63)}, {"dy": t(512)}, {"dy": t(8, 64).half()}, {"dsum": t(8, 63)}, {"dsum": t(2)}, {"weight": t(63)},
        {"bias": t(1)}, {"mean": t(7)}, {"mean": None}, {"rstd": t(1)}, {"rstd": t(9)}, {"x": t(8, 65)}, {"x": t(9, 64)},
        {"definition": norms.layer_norm(1, modulated=True), "scale": t(5)},
    ):  # fmt: skip
        for _ in range(2):
            with pytest.raises((ValueError, RuntimeError)):
                back(**changes)
                pytest.fail(str(list(changes)))


MODULATED = {"group_norm, modulated": lambda m, x, w, b: m.group_norm(x, 32, w, b, modulate=(torch.zeros_like(x[:, :, 0, 0]), None))}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", [*NORMS, *OURS, *MODULATED])
def test_a_node_that_is_called_directly(name, device):
    """A user may call a node with any dy. The node checks it, with gradients enabled or not."""
    y = (NORMS | OURS | MODULATED)[name](O, *_operands(name, device))
    node, others = y.grad_fn, [None] * 4 if type(y.grad_fn).__name__ == "NormBackward" else []
    for dy in (torch.ones(3, device=device), torch.ones_like(y)[:1], torch.ones_like(y).half(), torch.ones(y.shape, device="meta")):
        for enabled in (True, False):
            with torch.set_grad_enabled(enabled), pytest.raises(RuntimeError, match=r"^dy is .*, expected .*, like the output"):
                node.apply(dy, *others)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", [*NORMS, *OURS])
def test_default_device(name, device):
    """A call allocates on the device of its input."""
    operands = _operands(name, device)
    y = (NORMS | OURS)[name](O, *operands)
    y.backward(torch.ones_like(y))
    expected = [y.detach(), *(t.grad for t in operands)]
    for t in operands:
        t.grad = None
    torch.set_default_device("meta")
    try:
        y = (NORMS | OURS)[name](O, *operands)
        y.backward(torch.ones_like(y))
        with torch.no_grad():
            again = (NORMS | OURS)[name](O, *operands)
            O.add_layer_norm(torch.ones(4, 8, device=device), torch.ones(4, 8, device=device), (8,))
            O.batch_norm(torch.ones(4, 8, device=device), torch.ones(8, device=device), torch.ones(8, device=device), training=True)
    finally:
        torch.set_default_device(None)
    torch.testing.assert_close(again, expected[0])  # without gradients, another kernel may run
    for found, right in zip((y.detach(), *(t.grad for t in operands)), expected):
        assert found is right is None or torch.equal(found, right)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("add", [O.add_layer_norm, O.add_rms_norm])
def test_the_sum_may_change_where_the_backward_does_not_need_it(add, device):
    x, r, w = torch.randn(4, C, device=device, requires_grad=True), torch.randn(4, C, device=device), _param(device)
    _, total = add(x, r, (C,), w)
    total.mul_(2)
    total.sum().backward()
    assert torch.equal(x.grad, torch.full_like(x, 2.0))
    y, total = add(x, r, (C,), w)
    total.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", CHANNELS)
def test_the_bias_may_change_where_the_backward_does_not_need_it(name, device):
    x, weight, bias = _operands(name, device)
    results = []
    for module in (F, O):
        x.grad = weight.grad = bias.grad = None
        y = CHANNELS[name](module, x, weight, bias)
        with torch.no_grad():
            bias.add_(1)
        y.backward(torch.ones_like(y))
        results.append([t.grad for t in (x, weight, bias)])
    torch.testing.assert_close(results[1], results[0], rtol=1e-3, atol=1e-3)
    y = O.group_norm(_input("group_norm", device), 32, weight, bias, activation="silu")
    with torch.no_grad():
        bias.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):  # the activation needs the bias
        y.sum().backward()
