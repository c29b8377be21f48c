"""On a GPU: sets that are one long run each, which `ring` and `whole_set` read as rows that follow one another."""

import pytest
import torch
import torch.nn.functional as F

import onepass
import onepass.functional as O
from onepass.planning.options import CannotForce

pytestmark = pytest.mark.gpu

HALF, BFLOAT, FULL = torch.float16, torch.bfloat16, torch.float32
ROUNDING = {HALF: 2**-9, BFLOAT: 2**-6, FULL: 2**-15}


def _forced(family, call):
    try:
        with onepass.force(family):
            return call()
    except CannotForce as reason:
        if family == "ring" and torch.cuda.get_device_capability() == (9, 0):
            raise
        pytest.skip(str(reason))


def _assert_close(y, exact, dtype):
    torch.testing.assert_close(y.double(), exact, rtol=ROUNDING[dtype], atol=ROUNDING[dtype])


def _random(*shape, dtype=FULL):
    return torch.randn(shape, device="cuda").to(dtype)


# Lengths are even and odd. Some are no multiple of 64. There are enough rows for units of several.
ROWS = [
    (300, 32769, BFLOAT), (41, 32776, HALF), (9, 40001, FULL), (37, 50256, BFLOAT), (37, 50257, BFLOAT), (64, 50258, HALF),
    (1000, 40960, BFLOAT), (3, 131072, FULL), (5, 1000003, BFLOAT), (2, 1000004, HALF), (1, 3000001, BFLOAT), (17, 65540, FULL),
    (4, 36863, BFLOAT), (1, 36863, FULL), (3, 65535, HALF),  # the last member of a team has no element of some runs
]  # fmt: skip


@pytest.mark.parametrize("family", ["ring", "whole_set"])
@pytest.mark.parametrize("rows, length, dtype", ROWS)
def test_layer_norm(family, rows, length, dtype):
    x, weight, bias = _random(rows, length, dtype=dtype) + 3, _random(length, dtype=dtype), _random(length, dtype=dtype)
    found = _forced(family, lambda: O.layer_norm(x, (length,), weight, bias, return_stats=True))
    wide = x.double()
    _assert_close(found.output, F.layer_norm(wide, (length,), weight.double(), bias.double()), dtype)
    torch.testing.assert_close(found.mean.flatten().double(), wide.mean(1), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found.rstd.flatten().double(), (wide.var(1, correction=0) + 1e-5).rsqrt(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("family", ["ring", "whole_set"])
@pytest.mark.parametrize("length", [32776, 40961])
@pytest.mark.parametrize("affine", ["none", "weight", "bias", "float32"])
def test_parameters(family, length, affine):
    x = _random(70, length, dtype=BFLOAT)
    dtype = FULL if affine == "float32" else BFLOAT
    weight = _random(length, dtype=dtype) if affine in ("weight", "float32") else None
    bias = _random(length, dtype=dtype) if affine in ("bias", "float32") else None
    y = _forced(family, lambda: O.layer_norm(x, (length,), weight, bias, activation="silu"))
    wide = [t if t is None else t.double() for t in (weight, bias)]
    _assert_close(y, F.silu(F.layer_norm(x.double(), (length,), *wide)), BFLOAT)


@pytest.mark.parametrize("family", ["ring", "whole_set"])
@pytest.mark.parametrize("length", [32776, 40001])
def test_rms_norm_and_modulation(family, length):
    x, weight = _random(3, 20, length, dtype=HALF), _random(length, dtype=HALF)
    y = _forced(family, lambda: O.rms_norm(x, (length,), weight, 1e-6, weight_offset=1.0))
    _assert_close(y, F.rms_norm(x.double(), (length,), 1 + weight.double(), 1e-6), HALF)
    scale, shift = _random(3, length, dtype=HALF), _random(3, length, dtype=HALF)
    y = _forced(family, lambda: O.layer_norm(x, (length,), modulate=(scale, shift)))
    _assert_close(y, F.layer_norm(x.double(), (length,)) * (1 + scale[:, None].double()) + shift[:, None].double(), HALF)


# Channels of 4096, 576 and 784 elements: their parameters differ by block, by row of 64, and by row of 16.
IMAGES = [
    ((5, 64, 64, 64), 4, HALF), ((3, 960, 24, 24), 8, BFLOAT), ((2, 512, 28, 28), 4, HALF), ((1, 6, 128, 256), 2, FULL),
    ((7, 96, 40, 40), 4, BFLOAT), ((260, 72, 32, 32), 2, HALF),
]  # fmt: skip


@pytest.mark.parametrize("family", ["ring", "whole_set"])
@pytest.mark.parametrize("shape, groups, dtype", IMAGES)
def test_group_norm(family, shape, groups, dtype):
    x, weight, bias = _random(*shape, dtype=dtype) - 2, _random(shape[1], dtype=dtype), _random(shape[1], dtype=dtype)
    y = _forced(family, lambda: O.group_norm(x, groups, weight, bias, activation="silu"))
    _assert_close(y, F.silu(F.group_norm(x.double(), groups, weight.double(), bias.double())), dtype)


def test_nothing_is_written_beside_y():
    """Rows of odd length share vectors with their neighbours."""
    x = _random(6, 50257, dtype=BFLOAT)
    room = torch.full((8 + x.numel() + 8,), 7.0, device="cuda", dtype=BFLOAT)
    y = room[8:-8].view_as(x)
    _forced("ring", lambda: O.layer_norm(x, (50257,), out=y))
    _assert_close(y, F.layer_norm(x.double(), (50257,)), BFLOAT)
    assert (room[:8] == 7).all() and (room[-8:] == 7).all()


@pytest.mark.parametrize("length", [50257, 131072])
def test_batch_invariance(length):
    x = _random(40, length, dtype=BFLOAT)
    with onepass.batch_invariant(True):
        together = O.layer_norm(x, (length,))
        for n in (1, 3, 17):
            assert torch.equal(O.layer_norm(x[:n].clone(), (length,)), together[:n])
            if length % 8 == 0:  # otherwise the rows begin at different places between multiples of 16 bytes
                assert torch.equal(O.layer_norm(x[n : n + 1].clone(), (length,)), together[n : n + 1])


@pytest.mark.parametrize("family", ["ring", "whole_set"])
@pytest.mark.parametrize("length", [40960, 40961])
def test_a_tensor_that_starts_at_an_odd_element(family, length):
    x = _random(1 + 20 * length, dtype=BFLOAT)[1:].view(20, length)
    y = _forced(family, lambda: O.layer_norm(x, (length,)))
    _assert_close(y, F.layer_norm(x.double(), (length,)), BFLOAT)


def test_a_mean_far_from_zero():
    x = _random(20, 65536) + 3000
    y = _forced("ring", lambda: O.layer_norm(x, (65536,)))
    torch.testing.assert_close(y.double(), F.layer_norm(x.double(), (65536,)), rtol=1e-3, atol=1e-3)
