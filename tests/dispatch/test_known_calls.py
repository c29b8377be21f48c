"""Calls with a residual or a modulation take a shorter path from the second call of a kind on. Nothing else may differ."""

import pytest
import torch
from torch.testing import assert_close

import onepass.functional as O
from onepass.dispatch import call, launchers


def _tensors(**options):
    torch.manual_seed(0)
    return [torch.randn(shape, **options) for shape in ((2, 6, 8), (2, 6, 8), (8,), (8,), (2, 8), (2, 8))]


CALLS = {
    "add_layer_norm": lambda x, r, w, b, s, t: O.add_layer_norm(x, r, (8,), w, b),
    "add_rms_norm": lambda x, r, w, b, s, t: O.add_rms_norm(x, r, (8,), w, 1e-6),
    "add_group_norm": lambda x, r, w, b, s, t: O.add_group_norm(x, r, 2, w[:6], b[:6], activation="silu"),
    "layer_norm": lambda x, r, w, b, s, t: (O.layer_norm(x, (8,), w, b, modulate=(s, t)),),
    "rms_norm": lambda x, r, w, b, s, t: (O.rms_norm(x, (8,), w, 1e-6, modulate=(s, t)),),
}
every_call = pytest.mark.parametrize("name", CALLS)


@pytest.fixture(autouse=True)
def short(monkeypatch):
    """Counts the calls that took the short path, and forgets all kinds of calls before the test."""
    taken = []
    known = call.normalize_known

    def counted(*args):
        found = known(*args)
        taken.append(found is not None)
        return found

    monkeypatch.setattr(call, "normalize_known", counted)
    launchers.forget_all()
    return taken


def _gradients(name, tensors):
    leaves = [t.clone().requires_grad_() for t in tensors]
    outputs = CALLS[name](*leaves)
    grads = torch.autograd.grad([out.square().sum() for out in outputs], leaves, allow_unused=True)
    return [*outputs, *[g for g in grads if g is not None]]


@every_call
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_second_call_equals_the_first(name, dtype, short):
    tensors = _tensors(dtype=dtype)
    first, second = CALLS[name](*tensors), CALLS[name](*tensors)
    assert short == [False, True]
    assert_close(second, first, rtol=0, atol=0)


@every_call
def test_gradients_of_the_second_call_equal_those_of_the_first(name, short):
    tensors = _tensors()
    first, second = _gradients(name, tensors), _gradients(name, tensors)
    assert short == [False, True]
    assert_close(second, first, rtol=0, atol=0)


BAD = {
    "another shape": lambda t: t[..., :1],
    "another dtype": lambda t: t.to(torch.int32),
    "no tensor": lambda t: t.tolist(),
    "a device without memory": lambda t: t.to("meta"),
    "a freed storage": lambda t: (t := t.clone(), t.untyped_storage().resize_(0))[0],
}


@every_call
@pytest.mark.parametrize("bad", BAD)
def test_errors_are_the_same_after_a_good_call(name, bad):
    def error(tensors):
        with pytest.raises((RuntimeError, TypeError, ValueError)) as raised:
            CALLS[name](*tensors)
        return type(raised.value), str(raised.value)

    good = _tensors()
    which = range(2) if name.startswith("add") else (0, 4, 5)
    wrong = [[BAD[bad](t) if i == at else t for i, t in enumerate(good)] for at in which]
    before = []
    for tensors in wrong:
        launchers.forget_all()
        before.append(error(tensors))
    CALLS[name](*good)
    assert [error(tensors) for tensors in wrong] == before


@every_call
def test_a_negative_view(name):
    tensors = _tensors()
    CALLS[name](*tensors)
    negative = [torch._neg_view(t) for t in tensors]
    assert_close(CALLS[name](*negative), CALLS[name](*[-t for t in tensors]))


@every_call
def test_other_strides_of_the_residual(name):
    tensors = _tensors()
    CALLS[name](*tensors)
    strided = [t.repeat_interleave(2, -1)[..., ::2] for t in tensors]
    assert_close(CALLS[name](*strided), CALLS[name](*tensors))


def _batch_norm(tensors, module=O, grad=False):
    x, weight, bias, mean, var = (t.clone() for t in tensors)
    leaves = [t.requires_grad_(grad) for t in (x, weight, bias)]
    y = module.batch_norm(x, mean, var, weight, bias, True, 0.1)
    return [y.detach(), mean, var, *(torch.autograd.grad(y.square().sum(), leaves) if grad else ())]


@pytest.mark.parametrize("grad", [False, True])
def test_training_steps_of_batch_norm(grad):
    torch.manual_seed(0)
    tensors = [torch.randn(4, 6, 5, 5), torch.randn(6), torch.randn(6), torch.zeros(6), torch.ones(6)]
    first, second = _batch_norm(tensors, grad=grad), _batch_norm(tensors, grad=grad)
    assert_close(second, first, rtol=0, atol=0)
    assert_close(second, _batch_norm(tensors, torch.nn.functional, grad), rtol=1e-4, atol=1e-4)


BAD_RUNNING = {
    "another shape": lambda t: t[:3],
    "a freed storage": BAD["a freed storage"],
    "a leaf that needs a gradient": lambda t: t.clone().requires_grad_(),
    "memory that overlaps": lambda t: t[:1].expand(6),
}


@pytest.mark.parametrize("bad", BAD_RUNNING)
@pytest.mark.parametrize("at", [0, 1])
@pytest.mark.parametrize("grad", [False, True])
def test_errors_of_batch_norm_are_the_same_after_a_good_call(bad, at, grad):
    def error():
        x = torch.randn(4, 6, 5, 5, requires_grad=grad)
        running = [torch.zeros(6), torch.ones(6)]
        running[at] = BAD_RUNNING[bad](running[at])
        try:
            O.batch_norm(x, *running, training=True)
        except RuntimeError as raised:
            return str(raised)
        return "no error"

    before = error()
    _batch_norm([torch.randn(4, 6, 5, 5), torch.randn(6), torch.randn(6), torch.zeros(6), torch.ones(6)], grad=grad)
    O.batch_norm(torch.randn(4, 6, 5, 5, requires_grad=grad), torch.zeros(6), torch.ones(6), training=True)
    assert error() == before


def test_a_hook_that_raises_does_not_update_twice():
    def pack(t):
        raise RuntimeError("the hook")

    x, mean, var = torch.randn(4, 6, 5, 5, requires_grad=True), torch.zeros(6), torch.ones(6)
    O.batch_norm(x, mean.clone(), var.clone(), training=True)
    once = mean.clone(), var.clone()
    O.batch_norm(x, *once, training=True)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t), pytest.raises(RuntimeError, match="the hook"):
        O.batch_norm(x, mean, var, training=True)
    assert_close((mean, var), once, rtol=0, atol=0)
