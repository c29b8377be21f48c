"""What torch's functions do not have: every legal combination of extras, statistics, `out`, and the plain operator.

Results are compared with torch's operations, one after the other, in fp64 and within the error budget.
"""

import itertools
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch.testing import assert_close

import onepass
import onepass.functional as O
from onepass.core.spec import ACTIVATIONS, GRANULARITIES
from onepass.verify import matrix, oracle
from onepass.verify.cases import Case
from onepass.verify.tensors import lay_out
from tests.conftest import CPU_FAMILIES

BASE = {
    "layer_norm": {"shape": (3, 4, 2, 5)},
    "rms_norm": {"shape": (3, 4, 5), "eps": 1e-3},
    "group_norm": {"shape": (3, 4, 4, 4), "groups": 2},
    "instance_norm": {"shape": (3, 4, 4, 4)},
    "batch_norm": {"shape": (3, 4, 4, 4)},
    "layer_norm2d": {"shape": (3, 4, 4, 4)},
    "switchable_norm": {"shape": (3, 4, 4, 4)},
}
CHOICES = {
    "activation": ("", *ACTIVATIONS),
    "modulate": (False, True),
    "residual": (False, True),
    "offset": (0.0, 1.0),
    "granularity": GRANULARITIES,
    "last": (False, True),
    "using_bn": (True, False),
    "evaluate": (False, True),
}
TAKES = {
    "layer_norm": ("residual", "offset", "granularity"),
    "rms_norm": ("residual", "offset"),
    "group_norm": ("residual", "last"),
    "instance_norm": ("last", "evaluate"),
    "batch_norm": ("last", "evaluate"),
    "layer_norm2d": (),
    "switchable_norm": ("last", "using_bn", "evaluate"),
}


def _combinations(op):
    """Every legal combination of extras of a norm."""
    names = ("activation", "modulate", *TAKES[op])
    for values in itertools.product(*(CHOICES[name] for name in names)):
        chosen = dict(zip(names, values))
        rank = 3 if op == "layer_norm" and chosen["granularity"] != "element" else 1
        if chosen.get("using_bn", True) or not chosen["evaluate"]:  # without BatchNorm there are no running statistics to evaluate with
            yield Case(op, **BASE[op], rank=rank, **chosen)


def test_the_combinations_are_many():
    assert sum(len(list(_combinations(op))) for op in BASE) > 250


@pytest.mark.parametrize("op", BASE)
def test_every_legal_combination(op):
    """Values and gradients are within the budget of both oracles on every family. Dtypes and layouts take turns."""
    for i, case in enumerate(_combinations(op)):
        dtype, layout = matrix.DTYPES[i % 4], ("contiguous", "channels_last", "sliced")[i % 3]
        assert [cell for cell in matrix.verify([replace(case, layout=layout)], [dtype]) if not cell.ok] == []


@pytest.mark.parametrize("dtype", matrix.DTYPES, ids=str)
@pytest.mark.parametrize("layout", ["contiguous", "channels_last", "strided"])
def test_add_is_add_then_norm_bit_for_bit(dtype, layout):
    x, residual = (lay_out(torch.randn(3, 8, 5, 6).to(dtype), layout) for _ in range(2))
    weight, bias = torch.randn(2, 8).to(dtype)
    scale, shift = torch.randn(2, 3, 8).to(dtype)
    calls = [
        (O.add_group_norm, O.group_norm, (4, weight, bias), {"activation": "silu", "modulate": (scale, shift)}),
        (O.add_group_norm, O.group_norm, (4, weight, bias), {}),
        (O.add_layer_norm, O.layer_norm, ((8, 5, 6), weight, bias), {"granularity": "channel", "activation": "gelu"}),
        (O.add_layer_norm, O.layer_norm, ((5, 6),), {}),
        (O.add_rms_norm, O.rms_norm, ((6,), torch.randn(6).to(dtype), 1e-6), {"weight_offset": 1.0}),
    ]
    for fused, norm, args, keywords in calls:
        y, total = fused(x, residual, *args, **keywords)
        assert torch.equal(total, x + residual) and torch.equal(y, norm(x + residual, *args, **keywords))
        assert y.dtype == total.dtype == dtype and y.stride() == total.stride()


@pytest.mark.parametrize("family", CPU_FAMILIES)
def test_a_promoted_sum(family):
    x, residual, weight = torch.randn(4, 8).bfloat16().requires_grad_(), torch.randn(4, 8, requires_grad=True), torch.randn(8)
    with onepass.force(family):
        y, total = O.add_layer_norm(x, residual, (8,), weight)
        assert y.dtype == total.dtype == torch.float32
        assert_close(y, F.layer_norm(x + residual, (8,), weight))
        dx, dresidual = torch.autograd.grad((y * total).sum(), (x, residual))
    assert dx.dtype == torch.bfloat16 and dresidual.dtype == torch.float32
    assert_close(dx, dresidual.bfloat16())


@pytest.mark.parametrize("dtype", matrix.DTYPES, ids=str)
def test_add_of_unlike_memory(dtype):
    """Expanded, permuted and sliced addends in every combination. The sum has the strides of x."""
    shape = (4, 3, 2, 6)
    layouts = [
        torch.randn(shape),
        torch.randn(4, 3, 1, 6).expand(shape),
        torch.randn(6, 3, 4, 2).permute(2, 1, 3, 0),
        torch.randn(4, 3, 2, 12)[..., ::2],
        torch.randn(shape).to(memory_format=torch.channels_last),
    ]
    weight = torch.randn(6).to(dtype)
    for x, residual in itertools.product(layouts, layouts):
        x, residual = (t.detach().to(dtype).requires_grad_() if 0 not in t.stride() else t.to(dtype) for t in (x, residual))
        y, total = O.add_group_norm(x, residual, 2, weight, channel_dim=-1, activation="gelu")
        assert y.stride() == total.stride() == torch.empty_like(x).stride()
        torch.testing.assert_close(total, x + residual, rtol=0, atol=0)
        unfused = O.group_norm(total.detach().requires_grad_(), 2, weight, channel_dim=-1, activation="gelu")
        assert torch.equal(y, unfused)
        if x.requires_grad or residual.requires_grad:
            dy = torch.linspace(-1, 1, y.numel(), dtype=dtype).view(shape)
            total = total.detach().double().requires_grad_()
            reference = O.group_norm(total, 2, weight.double(), channel_dim=-1, activation="gelu")
            (expected,) = torch.autograd.grad(reference, total, dy.double())
            (grad,) = torch.autograd.grad(y, x if x.requires_grad else residual, dy)
            assert_close(grad, expected.to(dtype))


def test_a_sum_is_in_the_graph_only_if_a_term_is():
    x, weight = torch.randn(4, 8), torch.randn(8, requires_grad=True)
    torch._dynamo.reset()
    compiled = torch.compile(O.add_layer_norm, fullgraph=True, backend="aot_eager")
    for add in (O.add_layer_norm, compiled):
        y, total = add(x, x, (8,), weight)
        assert y.requires_grad and not total.requires_grad
        y, total = add(x, x.clone().requires_grad_(), (8,), weight)
        assert y.requires_grad and total.requires_grad


def test_the_dtype_of_a_sum_is_what_is_checked():
    x, residual = torch.full((2, 8), 1e-4).bfloat16(), torch.zeros(2, 8, dtype=torch.float64)
    y, total = O.add_rms_norm(x, residual, (8,), torch.ones(8, dtype=torch.float64), modulate=(torch.zeros(2, 8).double(), None))
    assert_close(y, O.rms_norm(total, (8,)))
    with pytest.raises(RuntimeError, match=r"weight has dtype torch\.bfloat16 and input torch\.float32"):
        O.add_layer_norm(x, residual.float(), (8,), torch.ones(8).bfloat16())


def test_one_channel_with_global_parameters():
    """Grey images have one channel."""
    module, x = onepass.nn.LayerNorm((1, 4, 4), granularity="global"), torch.randn(2, 1, 4, 4)
    with torch.no_grad():
        assert_close(module(x), F.layer_norm(x, (1, 4, 4)))
    assert_close(O.layer_norm(x, (1, 4, 4), None, torch.ones(()), granularity="global"), F.layer_norm(x, (1, 4, 4)) + 1)


def test_either_output_of_an_add_may_be_unused():
    x, residual = (torch.randn(4, 8, requires_grad=True) for _ in range(2))
    y, total = O.add_layer_norm(x, residual, (8,))
    assert_close(torch.autograd.grad(total.square().sum(), (x, residual), retain_graph=True), (2 * total, 2 * total))
    expected = torch.autograd.grad(F.layer_norm(x + residual, (8,)).square().sum(), x)
    assert_close(torch.autograd.grad(y.square().sum(), x), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("activation", [*ACTIVATIONS, "swish"])
@pytest.mark.parametrize("dtype", matrix.DTYPES, ids=str)
def test_activation_is_norm_then_activation_within_one_rounding(dtype, activation):
    functions = {"swish": F.silu, "gelu_tanh": lambda z: F.gelu(z, approximate="tanh")}
    function = functions.get(activation) or getattr(F, activation)
    x, weight, bias = torch.randn(4, 16, 7, 7).to(dtype), *torch.randn(2, 16).to(dtype)
    for layout in ("contiguous", "channels_last"):
        x = lay_out(x.contiguous(), layout)
        for call in (
            lambda **k: O.group_norm(x, 4, weight, bias, **k),  # noqa: B023
            lambda **k: O.layer_norm(x, (7,), **k),  # noqa: B023
            lambda **k: O.batch_norm(x, None, None, weight, bias, True, **k),  # noqa: B023
            lambda **k: O.layer_norm2d(x, weight, bias, **k),  # noqa: B023
        ):
            z = call().to(torch.promote_types(dtype, torch.float32))
            unfused, y = function(z).double(), call(activation=activation).double()
            # Without fusion, z is rounded once more. After that both are rounded in the same way.
            once = 1.13 * oracle.half_ulp(z.double(), dtype) + oracle.half_ulp(unfused, dtype)
            slack = 2 * torch.finfo(z.dtype).eps * z.abs()  # torch's erf differs between vectorized elements and the remainder
            assert ((y - unfused).abs() <= 1.01 * once + slack).all()


def test_half_types_with_float32_parameters():
    x = torch.randn(3, 8, 5, 5).half().to(memory_format=torch.channels_last).requires_grad_()
    weight, bias = (torch.randn(8, requires_grad=True) for _ in range(2))
    scale, shift = torch.randn(3, 8).half().requires_grad_(), torch.randn(3, 8, requires_grad=True)
    y = O.group_norm(x, 2, weight, bias, modulate=(scale, shift), activation="silu")
    z = F.group_norm(x.float(), 2, weight, bias) * (1 + scale.float())[:, :, None, None] + shift[:, :, None, None]
    assert_close(y.float(), F.silu(z), rtol=2e-3, atol=2e-3)
    grads = torch.autograd.grad(y.sum(), (x, weight, bias, scale, shift))
    assert [g.dtype for g in grads] == [t.dtype for t in (x, weight, bias, scale, shift)]


def test_scale_or_shift_alone():
    x, t = torch.randn(3, 7, 8), torch.randn(3, 8, requires_grad=True)
    assert_close(O.layer_norm(x, (8,), modulate=(t, None)), F.layer_norm(x, (8,)) * (1 + t)[:, None])
    assert_close(O.layer_norm(x, (8,), modulate=(None, t)), F.layer_norm(x, (8,)) + t[:, None])
    assert_close(O.layer_norm(x, (8,), modulate=(None, None)), F.layer_norm(x, (8,)))


# Statistics.

X = torch.randn(3, 8, 5, 6)
STATS = {
    "layer_norm": (lambda x, **k: O.layer_norm(x, (6,), **k), (3, 8, 5), (3,)),
    "layer_norm of all": (lambda x, **k: O.layer_norm(x, x.shape, **k), (), (0, 1, 2, 3)),
    "rms_norm": (lambda x, **k: O.rms_norm(x, (5, 6), eps=1e-5, **k), (3, 8), None),
    "group_norm": (lambda x, **k: O.group_norm(x, 8, **k), (3, 8), (2, 3)),
    "instance_norm": (lambda x, **k: O.instance_norm(x, **k), (3, 8), (2, 3)),
    "batch_norm": (lambda x, **k: O.batch_norm(x, None, None, training=True, **k), (8,), (0, 2, 3)),
    "layer_norm2d": (lambda x, **k: O.layer_norm2d(x, eps=1e-5, **k), (3, 5, 6), (1,)),
}


@pytest.mark.parametrize("dtype", matrix.DTYPES, ids=str)
@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
@pytest.mark.parametrize("name", STATS)
def test_return_stats(name, layout, dtype):
    call, shape, dims = STATS[name]
    x = lay_out(X.to(dtype, copy=True), layout).requires_grad_()
    stats = call(x, return_stats=True, activation="silu")
    assert stats._fields == ("output", "mean", "rstd") and torch.equal(stats.output, call(x, activation="silu"))
    wide = x.detach().double()
    acc = torch.promote_types(dtype, torch.float32)
    assert stats.rstd.dtype == acc and stats.rstd.shape == shape and not stats.rstd.requires_grad
    if dims is None:
        assert stats.mean is None
        assert_close(stats.rstd, torch.rsqrt(wide.square().mean((2, 3)) + 1e-5).to(acc))
    else:
        var, mean = torch.var_mean(wide, dims, correction=0)
        assert stats.mean.dtype == acc and stats.mean.shape == shape and not stats.mean.requires_grad
        assert_close(stats.mean, mean.to(acc), rtol=1e-5, atol=1e-6)
        assert_close(stats.rstd, torch.rsqrt(var + 1e-5).to(acc))
    (dx,) = torch.autograd.grad(stats.output.sum(), x)
    assert dx.shape == x.shape


def test_return_stats_in_evaluation_are_the_running_ones():
    mean, var = torch.randn(8), torch.rand(8) + 1
    for call in (O.batch_norm, lambda *a, **k: O.instance_norm(*a, use_input_stats=False, **k)):
        stats = call(X, mean, var, return_stats=True)
        assert torch.equal(stats.mean, mean) and stats.mean.data_ptr() != mean.data_ptr()
        assert_close(stats.rstd, torch.rsqrt(var + 1e-5))


def test_return_stats_of_training_batch_norm_updates_as_usual():
    ours, torchs = ((torch.zeros(8), torch.ones(8)) for _ in range(2))
    stats = O.batch_norm(X, *ours, training=True, return_stats=True)
    assert_close(stats.output, F.batch_norm(X, *torchs, training=True))
    assert_close(ours, torchs)


# out=

OUT = {name: call for name, (call, _, _) in STATS.items()} | {
    "evaluation": lambda x, **k: O.batch_norm(x, torch.linspace(-1, 1, 8), torch.linspace(1, 2, 8), **k),
    "switchable_norm": lambda x, **k: O.switchable_norm(x, torch.ones(3), torch.zeros(3), training=True, **k),
    "modulated": lambda x, **k: O.group_norm(x, 4, modulate=(torch.ones(3, 8), torch.ones(3, 8)), **k),
}


@pytest.mark.parametrize("layout", ["contiguous", "channels_last", "strided"])
@pytest.mark.parametrize("name", OUT)
def test_out(name, layout):
    call, x = OUT[name], lay_out(X, layout)
    expected = call(x)
    for out in (torch.empty_like(x), torch.empty(x.shape), torch.empty(3, 5, 6, 8).permute(0, 3, 1, 2)):
        assert call(x, out=out) is out and torch.equal(out, expected)
    stats = call(x, out=out, return_stats=True)
    assert stats.output is out
    x = x.clone()
    expected = call(x)
    assert call(x, out=x) is x and torch.equal(x, expected)


@pytest.mark.parametrize(
    "out, message",
    [
        (lambda x: torch.empty(3, 8, 5, 5), "Expected out tensor of shape"),
        (lambda x: torch.empty(x.shape).half(), "dtype torch.float16"),
        (lambda x: torch.empty(x.shape, device="meta"), "on meta"),
        (lambda x: torch.empty(1).expand(x.shape), "single memory location"),
        (lambda x: x.as_strided(x.shape, (1, 3, 24, 120)), "shares memory with input but is not input"),
        (lambda x: torch.ones_like(x).requires_grad_(), "don't support automatic differentiation"),
        (lambda x: [1.0], "argument 'out' must be Tensor, not list"),
    ],
)
def test_out_is_refused(out, message):
    x = X.clone()
    out = out(x)
    with pytest.raises((RuntimeError, TypeError), match=message):
        O.group_norm(x, 2, out=out)
    assert torch.equal(x, X)


def test_out_is_refused_where_memory_is_shared():
    memory = torch.randn(2, 8, 6)
    flat = memory.view(-1)
    x, ahead = flat[:48].view(8, 6), flat[12:60].view(8, 6)
    before = flat.clone()
    with pytest.raises(RuntimeError, match="shares memory with input but is not input"):
        O.layer_norm(x, (6,), out=ahead)
    with pytest.raises(RuntimeError, match="shares memory with another argument"):
        O.layer_norm(x, (6,), flat[60:66], out=flat[48:].view(8, 6))
    with pytest.raises(RuntimeError, match="shares memory with another argument"):
        O.batch_norm(x, memory[1, 0], torch.ones(6), training=True, out=memory[1])
    assert torch.equal(flat, before)


def test_out_may_share_a_buffer():
    """Slices of one buffer that do not overlap."""
    memory = torch.randn(4, 24)
    x = memory[:, :8]
    expected = O.layer_norm(x, (8,))
    assert torch.equal(O.layer_norm(x, (8,), out=memory[:, 8:16]), expected)
    rows = torch.randn(8, 6)
    assert torch.equal(O.layer_norm(rows[::2], (6,), out=rows[1::2]), O.layer_norm(rows[::2], (6,)))
    for bad in (memory[:, 7:15], memory[:, 1:9], memory.view(-1)[24:56].view(4, 8), torch.zeros(100).as_strided((4, 8), (4, 1))):
        with pytest.raises(RuntimeError, match="single memory location"):
            O.layer_norm(x, (8,), out=bad)
    square = torch.randn(6, 6)
    with pytest.raises(RuntimeError, match="shares memory with input but is not input"):
        O.layer_norm(square, (6,), out=square.t())
    one = torch.randn(2, 1, 8)
    assert O.layer_norm(one, (8,), out=one.as_strided((2, 1, 8), (8, 3, 1))).data_ptr() == one.data_ptr()


def test_out_is_refused_when_a_gradient_is_needed():
    x, weight = torch.randn(4, 8), torch.randn(8, requires_grad=True)
    for bad in ((x.clone().requires_grad_(), None), (x, weight)):
        with pytest.raises(RuntimeError, match=r"call it under torch\.no_grad"):
            O.layer_norm(bad[0], (8,), bad[1], out=torch.empty(4, 8))
    with torch.no_grad():
        O.layer_norm(x, (8,), weight, out=x)


# The plain operator.


@pytest.mark.parametrize("dtype", matrix.DTYPES, ids=str)
def test_layer_norm_out(dtype):
    x, gamma, beta = torch.randn(12, 40).to(dtype), *torch.randn(2, 40)
    gamma, beta = (t.double() if dtype == torch.float64 else t for t in (gamma, beta))
    out = torch.empty_like(x)
    expected = O.layer_norm(x, (40,), gamma, beta, 1e-3)
    assert O.layer_norm_out(out, x, gamma, beta, 12, 40, 1e-3) is out and torch.equal(out, expected)
    out.zero_()
    assert torch.ops.onepass.layer_norm_out(out, x, gamma, beta, 12, 40, 1e-3) is None and torch.equal(out, expected)
    images, out = x.view(3, 4, 5, 8), torch.empty(3, 4, 5, 8, dtype=dtype)
    O.layer_norm_out(out, images, gamma.view(5, 8), beta, 12, 40, 1e-3)
    assert torch.equal(out.view(12, 40), expected)
    O.layer_norm_out(x, x, gamma, beta, 12, 40, 1e-3)
    assert torch.equal(x, expected)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"num_tokens": 11}, "input to hold num_tokens·hidden_size = 11·40 = 440"),
        ({"hidden_size": 41}, "12·41"),
        ({"num_tokens": -12, "hidden_size": -40}, "num_tokens=-12"),
        ({"hidden_size": 0}, "hidden_size=0"),
        ({"out": torch.empty(12, 41)}, "out to hold"),
        ({"out": torch.empty(40, 12).t()}, "out to be contiguous"),
        ({"input": torch.empty(40, 12).t()}, "input to be contiguous"),
        ({"out": torch.empty(12, 40).half()}, "out of dtype torch.float32"),
        ({"gamma": torch.ones(39)}, "gamma to hold hidden_size=40"),
        ({"beta": torch.ones(12)}, "beta to hold hidden_size=40"),
        ({"gamma": torch.ones(40).double()}, "gamma has dtype"),
    ],
)
@pytest.mark.parametrize("function", [O.layer_norm_out, torch.ops.onepass.layer_norm_out], ids=["functional", "op"])
def test_layer_norm_out_checks_every_size(function, change, message):
    arguments = {"out": torch.empty(12, 40), "input": torch.randn(12, 40), "gamma": torch.ones(40), "beta": None}
    with pytest.raises(RuntimeError, match=message):
        function(**{**arguments, "num_tokens": 12, "hidden_size": 40, "epsilon": 1e-5, **change})


def test_layer_norm_out_has_no_gradient():
    with pytest.raises(RuntimeError, match="don't support automatic differentiation"):
        O.layer_norm_out(torch.empty(2, 4), torch.randn(2, 4, requires_grad=True), None, None, 2, 4)


def test_a_well_known_case():
    """fp16 1151×8192 with mean -2.3 and deviation 0.5 is within 1e-2 of torch, and within our budget."""
    x = (-2.3 + 0.5 * torch.randn(1151, 8192)).half()
    weight, bias = torch.rand(8192).half(), torch.rand(8192).half()
    y = O.layer_norm(x, (8192,), weight, bias, 1e-5)
    assert_close(y, F.layer_norm(x, (8192,), weight, bias, 1e-5), rtol=1e-2, atol=1e-2)
    x, weight, bias = x.double(), weight.double(), bias.double()
    var, mean = torch.var_mean(x, 1, correction=0, keepdim=True)
    x_hat = (x - mean) / torch.sqrt(var + 1e-5)
    exact = x_hat * weight + bias
    scale = weight.abs() * (1 + x_hat.abs()) + bias.abs()
    budget = oracle.half_ulp(exact, torch.float16) + 8 * torch.finfo(torch.float32).eps * (1 + mean.abs() / var.sqrt()) * scale
    assert ((y.double() - exact).abs() <= budget).all()
