"""On a GPU: `ring` where each column or each unit is a set, where parameters differ from row to row, and in teams of one program."""

import pytest
import torch
import torch.nn.functional as F

import onepass
import onepass.functional as O

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="`ring` runs on Hopper GPUs only"
    ),
]

HALF, BFLOAT, FULL = torch.float16, torch.bfloat16, torch.float32
ROUNDING = {HALF: 2**-9, BFLOAT: 2**-6, FULL: 2**-15}

# Some have columns that are no multiple of a block, rows that are no multiple of a block, or sets that do not fit the ring.
SHAPES = [
    (20, 64, 28, 28, HALF), (7, 72, 13, 13, BFLOAT), (3, 200, 40, 40, FULL), (2, 40, 300, 300, HALF), (1, 128, 9, 9, BFLOAT),
    (300, 32, 8, 8, HALF), (1, 8, 700, 700, BFLOAT), (64, 1024, 7, 7, HALF),
]  # fmt: skip


def _images(n, channels, height, width, dtype, channels_last):
    """Images whose channels have different means and deviations, with weight and bias."""
    deviation, mean = 0.5 + torch.rand(channels, 1, 1, device="cuda"), torch.randn(channels, 1, 1, device="cuda")
    x = torch.randn(n, channels, height, width, device="cuda") * deviation + mean
    x = x.to(dtype)
    weight, bias = torch.randn(2, channels, device="cuda").to(dtype)
    return x.to(memory_format=torch.channels_last) if channels_last else x, weight, bias


def _assert_close(y, exact, dtype):
    torch.testing.assert_close(y.double(), exact, rtol=ROUNDING[dtype], atol=ROUNDING[dtype])


@pytest.mark.parametrize("n, channels, height, width, dtype", SHAPES)
def test_instance_norm(n, channels, height, width, dtype):
    x, weight, bias = _images(n, channels, height, width, dtype, True)
    with onepass.force("ring"):
        found = O.instance_norm(x, weight=weight, bias=bias, return_stats=True)
    wide = x.double()
    exact = F.instance_norm(wide.contiguous(), weight=weight.double(), bias=bias.double())
    _assert_close(found.output, exact, dtype)
    torch.testing.assert_close(found.mean.flatten().double(), wide.mean((2, 3)).flatten(), rtol=1e-5, atol=1e-5)
    var = wide.var((2, 3), correction=0).flatten()
    torch.testing.assert_close(found.rstd.flatten().double(), (var + 1e-5).rsqrt(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("n, channels, height, width, dtype", SHAPES)
def test_batch_norm(n, channels, height, width, dtype):
    x, weight, bias = _images(n, channels, height, width, dtype, True)
    weight, bias = weight.float(), bias.float()  # like the running statistics
    running = [torch.zeros(channels, device="cuda"), torch.ones(channels, device="cuda")]
    exact_running = [t.double() for t in running]
    with onepass.force("ring"):
        y = O.batch_norm(x, *running, weight, bias, training=True)
    exact = F.batch_norm(x.double(), *exact_running, weight.double(), bias.double(), training=True)
    _assert_close(y, exact, dtype)
    for found, expected in zip(running, exact_running):
        torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)


# The number of pixels is a multiple of 8, so that rows begin at multiples of 16 bytes.
PIXELS = [(16, 384, 56, 56, HALF), (3, 200, 40, 40, FULL), (5, 96, 20, 22, BFLOAT), (2, 1000, 8, 9, HALF), (1, 3000, 40, 40, BFLOAT)]


@pytest.mark.parametrize("activation", [None, "silu"])
@pytest.mark.parametrize("n, channels, height, width, dtype", PIXELS)
def test_layer_norm2d(n, channels, height, width, dtype, activation):
    x, weight, bias = _images(n, channels, height, width, dtype, False)
    with onepass.force("ring"):
        y = O.layer_norm2d(x, weight, bias, activation=activation)
    exact = F.layer_norm(x.double().permute(0, 2, 3, 1), (channels,), weight.double(), bias.double(), 1e-6).permute(0, 3, 1, 2)
    _assert_close(y, F.silu(exact) if activation else exact, dtype)


@pytest.mark.parametrize("n, channels, height, width, dtype", PIXELS[:3])
def test_modulated_layer_norm2d(n, channels, height, width, dtype):
    x, _, _ = _images(n, channels, height, width, dtype, False)
    scale, shift = torch.randn(2, n, channels, device="cuda").to(dtype)
    with onepass.force("ring"):
        y = O.layer_norm2d(x, None, None, modulate=(scale, shift))
    exact = F.layer_norm(x.double().permute(0, 2, 3, 1), (channels,), eps=1e-6).permute(0, 3, 1, 2)
    _assert_close(y, exact * (1 + scale.double()[:, :, None, None]) + shift.double()[:, :, None, None], dtype)


# The last tile of a unit has columns of the next set, or not. Rows fill blocks, or not.
ONE_SET = [(100, 24, 28, 28, HALF), (70, 5, 20, 22, BFLOAT), (256, 16, 56, 56, HALF), (300, 3, 36, 40, FULL), (1000, 7, 8, 9, BFLOAT)]


@pytest.mark.parametrize("n, channels, height, width, dtype", ONE_SET)
def test_batch_norm_of_contiguous_images(n, channels, height, width, dtype):
    x, weight, bias = _images(n, channels, height, width, dtype, False)
    with onepass.force("ring"):
        found = O.batch_norm(x, None, None, weight, bias, training=True, return_stats=True)
    wide = x.double()
    _assert_close(found.output, F.batch_norm(wide, None, None, weight.double(), bias.double(), training=True), dtype)
    torch.testing.assert_close(found.mean.flatten().double(), wide.mean((0, 2, 3)), rtol=1e-5, atol=1e-5)
    var = wide.var((0, 2, 3), correction=0)
    torch.testing.assert_close(found.rstd.flatten().double(), (var + 1e-5).rsqrt(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [HALF, FULL])
@pytest.mark.parametrize(
    "n, channels, height, groups", [(16, 256, 64, 1), (5, 320, 33, 4), (40, 200, 17, 1), (3, 1024, 50, 16), (2, 96, 90, 1)]
)
def test_wide_groups(n, channels, height, groups, dtype):
    """A group fills a tile of columns or more."""
    x, weight, bias = _images(n, channels, height, height, dtype, True)
    with onepass.force("ring"):
        y = O.group_norm(x, groups, weight, bias, activation="silu")
    _assert_close(y, F.silu(F.group_norm(x.double(), groups, weight.double(), bias.double())), dtype)


@pytest.mark.parametrize(
    "n, channels, height, groups, channels_last", [(64, 512, 64, 32, False), (300, 128, 24, 8, True), (400, 320, 8, 32, True)]
)
def test_a_team_of_one(n, channels, height, groups, channels_last):
    """Many small sets: each belongs to one program, which exchanges no moments."""
    x, weight, bias = _images(n, channels, height, height, HALF, channels_last)
    with onepass.force("ring"):
        y = O.group_norm(x, groups, weight, bias, activation="silu")
    for first in range(0, n, 32):  # float64 takes four times as much memory
        part = x[first : first + 32].double()
        exact = F.silu(F.group_norm(part, groups, weight.double(), bias.double()))
        _assert_close(y[first : first + 32], exact, HALF)
