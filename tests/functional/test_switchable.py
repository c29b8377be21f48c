"""SwitchableNorm agrees with a direct implementation of the paper, and with each norm that it mixes."""

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch.testing import assert_close

import onepass
import onepass.functional as O

C = 6


class Paper(torch.nn.Module):
    """Luo et al. 2018, Differentiable Learning-to-Normalize via Switchable Normalization, for (N, C, H, W)."""

    def __init__(self, eps=1e-5, momentum=0.1):
        super().__init__()
        self.weight, self.bias = torch.nn.Parameter(torch.randn(C)), torch.nn.Parameter(torch.randn(C))
        self.mean_weight, self.var_weight = torch.nn.Parameter(torch.randn(3)), torch.nn.Parameter(torch.randn(3))
        self.register_buffer("running_mean", torch.zeros(C))
        self.register_buffer("running_var", torch.ones(C))
        self.eps, self.momentum = eps, momentum

    def forward(self, x):
        n, c, h, w = x.shape
        flat = x.view(n, c, -1)
        mean_in, var_in = flat.mean(-1, keepdim=True), flat.var(-1, keepdim=True, correction=0)
        mean_ln, var_ln = x.view(n, -1).mean(1).view(n, 1, 1), x.view(n, -1).var(1, correction=0).view(n, 1, 1)
        if self.training:
            channels = flat.transpose(0, 1).reshape(c, -1)
            mean_bn, var_bn = channels.mean(1), channels.var(1, correction=0)
            with torch.no_grad():
                self.running_mean.lerp_(mean_bn, self.momentum)
                self.running_var.lerp_(channels.var(1), self.momentum)
        else:
            mean_bn, var_bn = self.running_mean, self.running_var
        a, b = self.mean_weight.softmax(0), self.var_weight.softmax(0)
        mean = a[0] * mean_in + a[1] * mean_ln + a[2] * mean_bn.view(1, c, 1)
        var = b[0] * var_in + b[1] * var_ln + b[2] * var_bn.view(1, c, 1)
        x_hat = (flat - mean) / torch.sqrt(var + self.eps)
        return (x_hat * self.weight.view(1, c, 1) + self.bias.view(1, c, 1)).view(n, c, h, w)


@pytest.mark.parametrize("family", [None, "blockwise", "reference"])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_equals_the_paper(layout, family):
    paper = Paper().double()
    ours = onepass.nn.SwitchableNorm2d(C, dtype=torch.float64)
    ours.load_state_dict(paper.state_dict())
    for step in range(4):
        if step == 3:
            paper.eval(), ours.eval()
        x = (torch.randn(4, C, 5, 7, dtype=torch.float64) * 3 + 2).requires_grad_()
        with onepass.force(family):
            y, expected = ours(x.to(memory_format=layout)), paper(x)
            assert_close(y, expected)
            dy = torch.randn_like(expected)
            grads = [torch.autograd.grad(out, (x, *m.parameters()), dy) for out, m in ((y, ours), (expected, paper))]
        assert_close(*grads)
        assert_close(dict(ours.state_dict()), dict(paper.state_dict()))


ONE = torch.eye(3) * 1e4  # logits that select one norm


@pytest.mark.parametrize("family", ["blockwise", "reference"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_pushed_to_one_norm_equals_it(dtype, family):
    x = (torch.randn(4, C, 5, 7, dtype=dtype) + 1).requires_grad_()
    weight, bias = (torch.randn(C, dtype=dtype, requires_grad=True) for _ in range(2))
    norms = (
        lambda: F.instance_norm(x, None, None, weight, bias),
        lambda: F.group_norm(x, 1, weight, bias),
        lambda: F.batch_norm(x, None, None, weight, bias, True),
    )
    dy = torch.randn_like(x)
    with onepass.force(family):
        for logits, norm in zip(ONE, norms):
            y, expected = O.switchable_norm(x, logits, logits, None, None, weight, bias, training=True), norm()
            assert_close(y, expected)
            assert_close(*(torch.autograd.grad(out, (x, weight, bias), dy) for out in (y, expected)), rtol=1e-4, atol=1e-5)
        same = O.switchable_norm(x, ONE[0], ONE[0], None, None, weight, bias, training=True)
        assert torch.equal(same, O.instance_norm(x, None, None, weight, bias))  # the same sets and kernel give the same bits


def test_far_from_zero():
    """Mean 10⁴·std in float32, where E[x²] - E[x]² has no digits left."""
    x = torch.randn(4, C, 16, 16) + 1e4
    logits = torch.randn(3)
    y = O.switchable_norm(x, logits, logits, training=True)
    expected = O.switchable_norm(x.double(), logits.double(), logits.double(), training=True)
    assert_close(y.double(), expected, rtol=0, atol=5e-2)


def test_without_batch_norm():
    x, logits = torch.randn(1, C, 5), torch.randn(2, requires_grad=True)
    y = O.switchable_norm(x, logits, logits, using_bn=False)
    mean, var = x.mean(2, keepdim=True), x.var(2, keepdim=True, correction=0)
    share = logits.softmax(0)
    mean = share[0] * mean + share[1] * x.mean((1, 2), keepdim=True)
    var = share[0] * var + share[1] * x.var((1, 2), keepdim=True, correction=0)
    assert_close(y, (x - mean) / torch.sqrt(var + 1e-5))
    module = onepass.nn.SwitchableNorm1d(C, using_bn=False)
    assert list(module.state_dict()) == ["weight", "bias", "mean_weight", "var_weight"] and module.mean_weight.shape == (2,)
    assert torch.equal(module(x), module.eval()(x))


def test_on_samples_without_positions():
    """On (N, C) it mixes LayerNorm and BatchNorm only, by the last two of three logits."""
    x, logits = torch.randn(5, C), torch.tensor([9.0, 0.3, -0.4])
    share = logits[1:].softmax(0)
    mean = share[0] * x.mean(1, keepdim=True) + share[1] * x.mean(0)
    var = share[0] * x.var(1, keepdim=True, correction=0) + share[1] * x.var(0, correction=0)
    expected = (x - mean) / torch.sqrt(var + 1e-5)
    assert_close(O.switchable_norm(x, logits, logits, training=True), expected)
    assert_close(O.switchable_norm(x, logits[1:], logits[1:], training=True), expected)
    assert_close(O.switchable_norm(x[:1], torch.zeros(2), torch.zeros(2), using_bn=False), F.layer_norm(x[:1], (C,)))


@pytest.mark.parametrize("name, shape", [("1d", (4, C)), ("1d", (4, C, 5)), ("2d", (4, C, 5, 3)), ("3d", (4, C, 2, 5, 3))])
def test_modules(name, shape):
    module = getattr(onepass.nn, f"SwitchableNorm{name}")(C, activation="relu")
    assert list(module.state_dict()) == ["weight", "bias", "mean_weight", "var_weight", "running_mean", "running_var"]
    x = torch.randn(shape)
    batch = torch.nn.BatchNorm1d(C)
    for _ in range(3):
        module(x), batch(x.movedim(1, 0).flatten(1).t())
    assert_close(module.running_mean, batch.running_mean)
    assert_close(module.running_var, batch.running_var)
    module.eval()
    last = getattr(onepass.nn, f"SwitchableNorm{name}")(C, activation="relu", channel_dim=-1).eval()
    last.load_state_dict(module.state_dict())
    assert_close(last(x.movedim(1, -1)).movedim(-1, 1), module(x))
    for twin in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert torch.equal(twin(x), module(x))
    with pytest.raises(ValueError, match="expected"):
        module(torch.randn(4, C, 1, 1, 1, 1))


def test_no_positions_at_all():
    logits = torch.randn(2, 2, requires_grad=True)
    y = O.switchable_norm(torch.randn(3, C, 0), *logits, using_bn=False)
    (grad,) = torch.autograd.grad(y.sum(), logits)
    assert not grad.any()


def test_statistics():
    x, logits = torch.randn(4, C, 5), torch.randn(2, 3)
    stats = O.switchable_norm(x, *logits, training=True, return_stats=True)
    assert stats.mean.shape == stats.rstd.shape == (4, C)
    assert_close((x - stats.mean[:, :, None]) * stats.rstd[:, :, None], stats.output)
    running = torch.randn(C), torch.rand(C) + 1
    stats = O.switchable_norm(x, *logits, *running, return_stats=True)
    assert_close((x - stats.mean[:, :, None]) * stats.rstd[:, :, None], stats.output)


def test_one_reduce_and_one_apply(monkeypatch):
    """The moments of x are computed once, for all norms of the mix."""
    from onepass.backends.torch_ops import blockwise
    from onepass.dispatch import launchers

    seen = []
    monkeypatch.setattr(blockwise, "moments", lambda x, *args, original=blockwise.moments: (seen.append(x.numel()), original(x, *args))[1])
    launchers.forget_all()
    x = torch.randn(4, C, 5)
    with onepass.force("blockwise"):
        O.switchable_norm(x, torch.zeros(3), torch.zeros(3), training=True)
    assert seen == [x.numel()]


def test_explain_says_what_is_mixed():
    text = str(onepass.explain(O.switchable_norm, torch.randn(4, C, 5), torch.zeros(3), torch.zeros(3), training=True))
    assert "blockwise" in text and "mixes the statistics" in text and "(given)" not in text
    evaluated = str(onepass.explain(onepass.nn.SwitchableNorm1d(C).eval(), torch.randn(4, C, 5)))
    assert "of the set alone, of all sets along c, of all sets along n (given)" in evaluated
