"""A call like a recent one skips the checks, and so does its backward. Whatever differs from the recent one is still found."""

import weakref
from contextlib import nullcontext

import pytest
import torch
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.autograd import forward_ad
from torch.autograd.graph import saved_tensors_hooks
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode

import onepass
import onepass.functional as O
from onepass.dispatch import call, launchers, packed, recent, tracking

CALLS = {
    "layer_norm": lambda x, w, b: O.layer_norm(x, (8,), w, b),
    "rms_norm": lambda x, w, b: O.rms_norm(x, (8,), w, 1e-6),
    "group_norm": lambda x, w, b: O.group_norm(x, 2, w, b, activation="silu"),
    "batch_norm": lambda x, w, b: O.batch_norm(x, torch.zeros(8), torch.ones(8), w, b),
    "training": lambda x, w, b: O.batch_norm(x, torch.zeros(8), torch.ones(8), w, b, True),
}
every_call = pytest.mark.parametrize("name", CALLS)


def _tensors():
    torch.manual_seed(0)
    return [torch.randn(4, 8), torch.randn(8), torch.randn(8)]


@pytest.fixture(autouse=True)
def checked(monkeypatch):
    """Counts the calls and backwards that were checked, and forgets all kinds of calls before the test."""
    count = {"calls": 0, "backwards": 0}

    def counting(module, function, name):
        original = getattr(module, function)

        def counted(*args):
            count[name] += 1
            return original(*args)

        monkeypatch.setattr(module, function, counted)

    counting(call, "_normalize_checked", "calls")
    counting(tracking, "_tracking", "calls")
    counting(packed, "packed_backward", "backwards")
    launchers.forget_all()
    return count


class Mode(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


class Subclass(torch.Tensor):
    pass


def _dead(t):
    """A wrapper of functorch's that outlived its transform."""
    kept = []
    torch.func.grad(lambda inside: (kept.append(inside), inside.sum())[1])(t)
    return kept[0]


def _freed(t):
    t = t.clone()
    t.untyped_storage().resize_(0)
    return t


OTHER = {
    "another shape": lambda t: t.repeat(2, *[1] * (t.dim() - 1)),
    "another dtype": lambda t: t.double(),
    "other strides": lambda t: t.repeat_interleave(2, -1)[..., ::2],
    "a negative bit": lambda t: torch._neg_view(t.neg()),
    "a zero tensor": lambda t: torch._efficientzerotensor(t.shape),
    "no memory": _freed,
    "a device without memory": lambda t: t.to("meta"),
    "a subclass": lambda t: t.as_subclass(Subclass),
    "a parameter": lambda t: torch.nn.Parameter(t),
    "a dead wrapper": _dead,
    "an inference tensor": torch.inference_mode()(lambda t: t.clone()),
    "None": lambda t: None,
    "no tensor": lambda t: t.tolist(),
}


def _outcome(name, tensors):
    """What the call returns, or the error that it raises."""
    try:
        return CALLS[name](*tensors)
    except (RuntimeError, TypeError, ValueError) as raised:
        return type(raised), str(raised)


@every_call
def test_the_second_call_is_not_checked(name, checked):
    first = CALLS[name](*_tensors())
    assert checked["calls"] == 1
    assert_close(CALLS[name](*_tensors()), first, rtol=0, atol=0)
    assert checked["calls"] == 1


@every_call
@pytest.mark.parametrize("other", OTHER)
@pytest.mark.parametrize("at", range(3))
def test_another_tensor_is_found(name, other, at):
    if other == "None" and at == 0:
        pytest.skip("x is a tensor")
    different = [OTHER[other](t) if at == i else t for i, t in enumerate(_tensors())]
    expected = _outcome(name, different)
    launchers.forget_all()
    CALLS[name](*_tensors())
    CALLS[name](*_tensors())
    found = _outcome(name, different)
    assert type(found) is type(expected)
    if isinstance(expected, torch.Tensor) and not expected.is_meta:
        assert_close(found.detach(), expected.detach())
    elif not isinstance(expected, torch.Tensor):
        assert found == expected


CONTEXTS = {
    "a dispatch mode": Mode,
    "inference mode": torch.inference_mode,
    "forward-mode differentiation": forward_ad.dual_level,
    "gradients": torch.enable_grad,
    "batch_invariant": onepass.batch_invariant,
    "force": lambda: onepass.force("blockwise"),
}


@every_call
@pytest.mark.parametrize("context", CONTEXTS)
def test_another_context_is_found(name, context, checked, monkeypatch):
    recalled = []
    monkeypatch.setattr(tracking, "recall", lambda *args: recalled.append(recent.recall(*args)) or recalled[-1])
    with torch.no_grad():
        expected = CALLS[name](*_tensors())
        seen = checked["calls"]
        with CONTEXTS[context]():
            found = CALLS[name](*_tensors())
    assert recalled[-1] is None if name == "training" else checked["calls"] > seen
    assert_close(found.clone(), expected)


@pytest.mark.parametrize("name", [name for name in CALLS if name != "training"])  # vmap refuses to update running statistics
def test_transforms_of_functorch(name):
    x, w, b = _tensors()
    CALLS[name](x, w, b)
    expected = torch.stack([CALLS[name](part, w, b) for part in (x, 2 * x)])
    assert_close(torch.vmap(lambda part: CALLS[name](part, w, b))(torch.stack((x, 2 * x))), expected)


@every_call
def test_tangents_are_not_lost(name):
    x, w, b = _tensors()
    CALLS[name](x, w, b)
    with forward_ad.dual_level():
        y = CALLS[name](forward_ad.make_dual(x, torch.ones_like(x)), w, b)
        assert forward_ad.unpack_dual(y).tangent is not None


def test_variants_of_a_call_are_remembered_together(checked):
    x, w, b = _tensors()
    strided = x.t().contiguous().t()
    for _ in range(3):
        CALLS["layer_norm"](x, w, b)
        CALLS["layer_norm"](strided, w, b)
        CALLS["layer_norm"](x.requires_grad_(), w, b)
        x = x.detach()
    assert checked["calls"] == 3


@pytest.mark.parametrize("size", [0, 3])
def test_the_caches_do_not_grow_without_end(size, monkeypatch):
    monkeypatch.setattr(recent, "MAX_KEYS", size)
    for rows in range(1, 9):
        O.layer_norm(torch.randn(rows, 8), (8,))
    assert len(recent._recent) <= max(size, 1)


def test_without_guards(monkeypatch, checked):
    """Versions of torch without TensorGuards check every call."""
    monkeypatch.setattr(recent, "_guards", None)
    assert_close(CALLS["layer_norm"](*_tensors()), CALLS["layer_norm"](*_tensors()), rtol=0, atol=0)
    assert checked["calls"] == 2


def _step(name, dy=lambda t: t, hooks=nullcontext, change=lambda *tensors: None):
    """The gradients of one training step. `change` may change the leaves before the backward."""
    leaves = [t.requires_grad_() for t in _tensors()]
    with hooks():
        y = CALLS[name](*leaves)
    change(*leaves)
    torch.manual_seed(1)
    return torch.autograd.grad(y, leaves, dy(torch.randn(4, 8)), allow_unused=True)


TRAINED = [name for name in CALLS if name not in ("batch_norm", "training")]
trained = pytest.mark.parametrize("name", TRAINED)


@trained
def test_the_second_backward_is_not_checked(name, checked):
    first = _step(name)
    assert checked["backwards"] == 1
    assert_close(_step(name), first, rtol=0, atol=0)
    assert checked["backwards"] == 1


@trained
@pytest.mark.parametrize("other", ["other strides", "a negative bit", "a zero tensor", "a subclass"])
def test_another_gradient_is_found(name, other):
    expected = _step(name, dy=lambda t: OTHER[other](t).clone().as_subclass(torch.Tensor) if other != "a zero tensor" else t * 0)
    _step(name)
    assert_close(_step(name, dy=OTHER[other]), expected)


HOOKS = {
    "other strides": lambda t: t.repeat_interleave(2, -1)[..., ::2],
    "a negative bit": lambda t: torch._neg_view(t.detach().neg()),
    "a copy": lambda t: t.detach().clone(),
}


@trained
@pytest.mark.parametrize("hook", HOOKS)
def test_hooks_on_saved_tensors(name, hook):
    expected = _step(name)
    for _ in range(2):
        assert_close(_step(name, hooks=lambda: saved_tensors_hooks(lambda t: t, HOOKS[hook])), expected)


@trained
@pytest.mark.parametrize("hook", ["another dtype", "another shape"])
def test_hooks_that_replace_saved_tensors(name, hook):
    _step(name)
    if name == "rms_norm" and hook == "another dtype":
        pytest.skip("on a CPU, norms without a mean convert it back")
    with pytest.raises(RuntimeError, match="in the forward and is"):
        _step(name, hooks=lambda: saved_tensors_hooks(lambda t: t, lambda t: OTHER[hook](t.detach())))


@trained
def test_replaced_data_is_found(name):
    def replace(x, weight, bias):
        weight.data = torch.randn(3)

    _step(name)
    with pytest.raises(RuntimeError, match="weight was"):
        _step(name, change=replace)


@trained
def test_freed_memory_is_found(name):
    _step(name)
    with pytest.raises(RuntimeError, match="has no memory"):
        _step(name, change=lambda x, weight, bias: weight.untyped_storage().resize_(0))


@trained
def test_a_backward_that_is_differentiated(name):
    def gradient_of_gradient():
        leaves = [t.requires_grad_() for t in _tensors()]
        grads = torch.autograd.grad(CALLS[name](*leaves), leaves[:2], torch.ones(4, 8), create_graph=True)
        return torch.autograd.grad(sum(g.square().sum() for g in grads), leaves[:2])

    expected = gradient_of_gradient()
    _step(name)
    _step(name)
    assert_close(gradient_of_gradient(), expected)


@trained
def test_batches_of_gradients(name):
    x, w, b = _tensors()
    _step(name)
    _step(name)
    y = CALLS[name](x.requires_grad_(), w, b)
    dy = torch.randn(3, 4, 8)
    (found,) = torch.autograd.grad(y, x, dy, is_grads_batched=True, retain_graph=True)
    assert_close(found, torch.stack([torch.autograd.grad(y, x, part, retain_graph=True)[0] for part in dy]))


def test_a_negative_gradient_of_the_sum():
    x, r = (torch.randn(4, 8, requires_grad=True) for _ in range(2))
    for _ in range(3):
        y, total = O.add_rms_norm(x, r, (8,), eps=1e-6)
        dsum = torch.randn(4, 8)
        expected = torch.autograd.grad((y, total), (x, r), (torch.ones(4, 8), dsum.neg()), retain_graph=True)
        assert_close(torch.autograd.grad((y, total), (x, r), (torch.ones(4, 8), torch._neg_view(dsum))), expected)


@every_call
@pytest.mark.parametrize("mode", ["real", "fake", "symbolic"])
def test_tracing(name, mode):
    tensors = _tensors()
    expected = CALLS[name](*tensors)
    traced = make_fx(CALLS[name], tracing_mode=mode)(*tensors)
    assert "onepass.norm" in traced.code
    assert_close(traced(*tensors), expected)


@every_call
def test_fake_tensors(name):
    CALLS[name](*_tensors())
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert isinstance(CALLS[name](*_tensors()), FakeTensor)


def test_tensors_are_not_kept_alive():
    x, w, b = _tensors()
    CALLS["layer_norm"](x, w, b)
    alive = [weakref.ref(t) for t in (x, w, b)]
    del x, w, b
    assert [ref() for ref in alive] == [None, None, None]
