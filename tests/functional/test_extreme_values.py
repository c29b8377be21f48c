"""Extreme values: infinities, values near the largest float, constants without an eps, sets of one value, large means.

Where torch's result is finite, so is ours. It is torch's number, or closer to fp64.
"""

from __future__ import annotations

import re
from math import prod
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import onepass
import onepass.functional as O
from benchmarks import random_problems
from onepass.backends.c import launch, walk
from tests.conftest import CPU_FAMILIES

INF, NAN = torch.inf, torch.nan
HALF = [torch.float32, torch.bfloat16, torch.float16]
every_family = pytest.mark.parametrize("family", CPU_FAMILIES)
every_dtype = pytest.mark.parametrize("dtype", HALF, ids=str)


def gradients(module, norm, x, weight, bias, dy):
    """y and the gradients of x, weight and bias, or None."""
    inputs = [None if t is None else t.detach().clone().requires_grad_() for t in (x, weight, bias)]
    y = norm(module, *inputs)
    wanted = [t for t in inputs if t is not None]
    grads = iter(torch.autograd.grad(y, wanted, dy))
    return [y.detach(), *(None if t is None else next(grads) for t in inputs)]


def by(family, norm, *operands):
    """As `gradients`, by one family. Skips the test if the family cannot run it."""
    try:
        with onepass.force(family):
            return gradients(O, norm, *operands)
    except onepass.CannotForce as error:
        pytest.skip(str(error))


def no_number_lost(ours, torchs):
    for name, mine, other in zip(("y", "dx", "dweight", "dbias"), ours, torchs):
        if mine is not None:
            assert mine[other.isfinite()].isfinite().all(), f"{name} is no number where torch has one"


@pytest.mark.parametrize("shape", [(1, 1, 1025), (2, 1, 600), (3, 1, 1000), (1, 1, 4096), (4096, 1), (2, 1, 30, 40)], ids=str)
@every_dtype
@every_family
def test_dweight_from_y_by_given_statistics(family, dtype, shape):
    """A row is read in several blocks, each with its own x_hat. A bug in C once cleared those of later blocks."""
    x, dy = torch.randn(shape).to(dtype), torch.randn(shape).to(dtype)
    weight, bias, mean, var = torch.tensor([1.2]), torch.tensor([0.3]), torch.tensor([0.1]), torch.tensor([1.5])
    norm = lambda module, x, w, b, **save: module.batch_norm(x, mean.to(w.dtype), var.to(w.dtype), w, b, **save)  # noqa: E731
    ours = by(family, lambda module, *t: norm(module, *t, save="y"), x, weight, bias, dy)
    exact = gradients(F, norm, x.double(), weight.double(), bias.double(), dy.double())
    rounded = 2 * torch.finfo(dtype).eps * (x.abs() * dy.abs()).double().sum().item()  # because y is rounded
    torch.testing.assert_close(ours[2].double(), exact[2], rtol=1e-4, atol=rounded)


LAYOUTS = {
    "rows": lambda x: x,
    "tile": lambda x: x.to(memory_format=torch.channels_last),
    "one channel": lambda x: x.reshape(1, 1, -1, 5).contiguous(),
    "long": lambda x: x.repeat(1, 1, 1, 300).reshape(1, 1, -1, 5).contiguous(),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("value", [INF, -INF, NAN])
@every_dtype
@every_family
def test_dx_by_given_statistics_knows_no_x(family, dtype, value, layout):
    x = torch.randn(2, 6, 5, 5)
    x[1, 2, 3, 1] = value
    x = LAYOUTS[layout](x.to(dtype))
    channels = x.shape[1]
    weight, bias, mean, var = torch.rand(channels) + 0.5, torch.randn(channels), torch.randn(channels), torch.rand(channels) + 0.5
    norm = lambda module, x, w, b: module.batch_norm(x, mean.to(x.dtype), var.to(x.dtype), w.to(x.dtype), b.to(x.dtype))  # noqa: E731
    dy = torch.randn_like(x)
    ours, torchs = by(family, norm, x, weight, bias, dy), gradients(F, norm, x, weight, bias, dy)
    assert ours[1].isfinite().all()
    torch.testing.assert_close(ours[1], torchs[1], rtol=2 * torch.finfo(dtype).eps + 1e-5, atol=1e-5)
    no_number_lost(ours, torchs)


def rows(n):
    return (3, n), (n,), lambda x: x


def across(n):
    """A set whose elements are spread out: the kernels walk it by tiles."""
    return (n, 4, 8), (n, 8), lambda x: x.transpose(0, 1)


WALKS = {
    **{"pack": rows(37), "long pack": rows(3000), "row": rows(5000), "shared row": rows(70001)},
    **{"tile": across(30), "long tile": across(700)},
}
every_walk = pytest.mark.parametrize("walk", WALKS)


@every_walk
@pytest.mark.parametrize("value", [INF, -INF])
@every_dtype
@every_family
def test_rms_norm_of_an_infinity(family, dtype, value, walk):
    """mean(x²) is infinite and rstd is 0, so finite elements become 0 and one element NaN.

    A bug in C made the whole row NaN.
    """
    shape, trailing, view = WALKS[walk]
    x = torch.randn(shape)
    x.view(-1)[x.numel() // 2 + 1] = value
    x = x.to(dtype)
    norm = lambda module, x, w, _: module.rms_norm(view(x), trailing, w)  # noqa: E731
    dy = torch.randn_like(view(x))
    weight = torch.rand(trailing).to(dtype)
    ours = by(family, norm, x, weight, None, dy)
    exact = gradients(F, norm, x.double(), weight.double(), None, dy.double())
    assert ours[0].isnan().sum() == 1
    for mine, right in zip(ours, exact):
        if mine is not None:
            assert torch.equal(mine.isnan(), right.isnan())
    torch.testing.assert_close(ours[0].double(), exact[0], rtol=1e-2, atol=1e-2, equal_nan=True)


NORMS = {
    "layer_norm": lambda module, x, w, b, eps=1e-5: module.layer_norm(x, x.shape[1:], None, None, eps),
    "rms_norm": lambda module, x, w, b, eps=1e-5: module.rms_norm(x, x.shape[1:], None, eps),
    "group_norm": lambda module, x, w, b, eps=1e-5: module.group_norm(x, 3, w, b, eps),
    "instance_norm": lambda module, x, w, b, eps=1e-5: module.instance_norm(x, None, None, w, b, True, 0.1, eps),
    "batch_norm": lambda module, x, w, b, eps=1e-5: module.batch_norm(x, None, None, w, b, True, 0.1, eps),
}
LARGEST = torch.finfo(torch.float32).max
LARGE = {
    "the largest": lambda x: torch.full_like(x, LARGEST),
    "near the largest": lambda x: 0.9 * LARGEST * (1 + 1e-4 * x).clamp(0.99, 1.01),
    "0 and the largest": lambda x: torch.where(x > 0, 0.9 * LARGEST, 0.0),
    "both signs": lambda x: torch.where(x > 0, 0.9 * LARGEST, -0.9 * LARGEST),
    "one large": lambda x: torch.where(x == x.max(), LARGEST, x),
    "squares overflow": lambda x: 1e25 * x,
}


@pytest.mark.parametrize("values", LARGE)
@pytest.mark.parametrize("shape", [(2, 6, 5, 5), (2, 6, 40, 50), (2, 6, 300, 150)], ids=str)
@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("name", NORMS)
@every_family
def test_large_numbers(family, name, last, shape, values):
    """Where torch's y and gradients are finite, so are ours, although sums and squares overflow."""
    if (family, name) == ("aten", "instance_norm"):
        pytest.skip("torch's group_norm kernel, which has NaN where its instance_norm has 0")
    norm, x = NORMS[name], LARGE[values](torch.randn(shape))
    x = x.to(memory_format=torch.channels_last) if last else x
    weight, bias = (None, None) if name in ("layer_norm", "rms_norm") else (torch.rand(6) + 0.5, torch.randn(6))
    dy = torch.randn_like(x)
    ours, torchs = by(family, norm, x, weight, bias, dy), gradients(F, norm, x, weight, bias, dy)
    no_number_lost(ours, torchs)
    exact = gradients(F, norm, *(None if t is None else t.double() for t in (x, weight, bias, dy)))[0]
    near = [(ours[0].double() - other).abs() <= 1e-3 * (1 + other.abs()) for other in (torchs[0].double(), exact)]
    assert (near[0] | near[1] | ~torchs[0].isfinite()).all()


@pytest.mark.parametrize("values", [0.1, 3.0, 0.0, LARGEST, 1e-30])
@pytest.mark.parametrize("shape", [(2, 6, 5, 5), (2, 6, 41, 50)], ids=str)
@pytest.mark.parametrize("last", [False, True])
@every_dtype
@every_family
def test_constants_without_eps(family, dtype, last, shape, values):
    """torch uses an rstd of 0: y is the bias, and dx is 0."""
    x = torch.full(shape, values).clamp(max=torch.finfo(dtype).max).to(dtype)
    x = x.to(memory_format=torch.channels_last) if last else x
    weight, bias, dy = (torch.rand(6) + 0.5).to(dtype), torch.randn(6).to(dtype), torch.randn_like(x)
    y, dx, dweight, dbias = by(family, lambda *t: NORMS["instance_norm"](*t, eps=0.0), x, weight, bias, dy)
    assert torch.equal(y, bias[:, None, None].expand_as(y)) and not dx.any() and not dweight.any()
    torch.testing.assert_close(dbias, dy.double().sum((0, 2, 3)).to(dtype), rtol=2e-2, atol=1e-4 * prod(shape))


ONE = {
    "layer_norm": ((5, 1), (1,), lambda module, x, w, b: module.layer_norm(x, (1,), w, b)),
    "a scalar": ((1,), (1,), lambda module, x, w, b: module.layer_norm(x, (1,), w, b)),
    "group_norm": ((7, 6), (6,), lambda module, x, w, b: module.group_norm(x, 6, w, b)),
    "channels last": ((4, 6, 1, 1), (6,), lambda module, x, w, b: module.group_norm(x.to(memory_format=torch.channels_last), 6, w, b)),
}


@pytest.mark.parametrize("name", ONE)
@pytest.mark.parametrize("dtype", [torch.float64, *HALF], ids=str)
@every_family
def test_one_value_has_no_gradient(family, dtype, name):
    """y is the bias for every x, so dx is 0. It was not when the compiler rounded only one of wdy and c1."""
    shape, params, norm = ONE[name]
    x, dy = torch.randn(shape).to(dtype), torch.randn(shape).to(dtype)
    _, dx, dweight, dbias = by(family, norm, x, torch.randn(params).to(dtype), torch.randn(params).to(dtype), dy)
    torch_itself = family == "aten"  # its kernel rounds, too
    assert (dx.abs().max() < 1e-3 if torch_itself else not dx.any()) and dweight.abs().max() < 1e-3
    torch.testing.assert_close(dbias, dy.sum(0).reshape(params) if dy.dim() > 1 else dy, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("value", [INF, NAN])
def test_one_value_that_is_no_number(value):
    x = torch.tensor([[1.0], [value]], requires_grad=True)
    O.layer_norm(x, (1,)).sum().backward()
    assert x.grad is not None and x.grad[0] == 0 and x.grad[1].isnan()


FAR = {
    "channel": lambda module, x, w, b: module.layer_norm(x, x.shape[1:], w, b, granularity="channel"),
    "global": lambda module, x, w, b: module.layer_norm(x, x.shape[1:], w, b, granularity="global"),
    "group_norm": lambda module, x, w, b: module.group_norm(x, 3, w, b),
    "instance_norm": lambda module, x, w, b: module.instance_norm(x, None, None, w, b),
}


@pytest.mark.parametrize("dtype, mean", [(torch.float64, 2.0**27), (torch.float32, 2.0**13), (torch.float16, 2.0**9)], ids=str)
@pytest.mark.parametrize("name", FAR)
def test_dweight_where_the_mean_is_large(by_torch, name, dtype, mean):
    """Without C kernels. torch's kernel for groups computes Σ dy·x - mean·Σ dy, whose terms are as large as the mean.

    dy has a sum of 0 in each channel, so the rounding of the mean does not matter.
    """
    digits = {torch.float64: 20, torch.float32: 8, torch.float16: 1}[dtype]
    base = (torch.randn(4, 6, 500, dtype=torch.float64) * 2**digits).round() / 2**digits
    half = torch.randn(4, 6, 250).to(dtype)
    x, dy = (base + mean).to(dtype), torch.cat((half, -half), -1)
    assert torch.equal(x.double() - mean, base)  # x has all digits of base
    params = () if name == "global" else (6,)
    weight, bias = (torch.rand(params, dtype=torch.float64) + 0.5).float(), torch.zeros(params)
    if dtype == torch.float64:
        weight, bias = weight.double(), bias.double()
    ours = gradients(O, FAR[name], x, weight, bias, dy)
    exact = gradients(O, FAR[name], base, weight.double(), bias.double(), dy.double())  # y does not depend on the mean
    eps = torch.finfo(torch.float64 if dtype == torch.float64 else torch.float32).eps
    assert (ours[2].double() - exact[2]).abs().max() <= 16 * eps * mean  # for sums of hundreds of terms; torch is off by 5 to 50 times that


def test_random_problems_reach_the_edges_of_blocks():
    drawn = [random_problems.draw(0, index).case for index in range(6000)]
    assert {prod(case.shape) == 1 for case in drawn} == {False, True}
    for edge in random_problems.EDGES:
        for length in (edge - 1, edge, edge + 1):
            assert any(length in case.shape for case in drawn) or not 0 < length < random_problems.MAX_ELEMENTS, length
        assert any(abs(length - edge) <= 1 for case in drawn for length in case.shape), edge
    for shape_of in (lambda case: case.shape[0], lambda case: case.shape[case.channel_dim]):
        assert sum(shape_of(case) == 1 for case in drawn) > 600  # one row, one channel
    given = [case for case in drawn if case.evaluate and case.save == "y" and case.affine in ("both", "weight")]
    assert sum(case.shape[case.channel_dim] == 1 and 1024 < prod(case.shape) <= 4096 for case in given) >= 3


def test_the_edges_are_those_of_the_sources():
    """Every constant of the C sources and of walk.py is one of EDGES."""
    text = "".join(path.read_text() for path in (Path(launch.__file__).parent / "src").glob("*.h"))
    defined = re.findall(r"(\w+) = (\d+)(?: << (\d+))?[,\s}]", "".join(re.findall(r"enum \{.*?\}", text)))
    sizes = {name: int(value) << int(shift or 0) for name, value, shift in defined}
    bytes_ = {"CACHE_BYTES", "SPARE_BYTES"}  # sizes of a cache and a buffer, not lengths of a block
    assert {name: size for name, size in sizes.items() if name not in bytes_ and size not in random_problems.EDGES} == {}
    assert len(sizes) > 12 and walk.SHORT in random_problems.EDGES and walk.NARROW in random_problems.EDGES
