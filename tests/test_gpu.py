"""On a GPU: the case list within the error budget, torch's autocast, and parameters left on another device."""

import pytest
import torch
import torch.nn.functional as F

import onepass.functional as O
from onepass.bench import cases, verify

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("case", cases.CASES, ids=lambda case: case.name)
def test_every_case(case):
    assert [cell for cell in verify.verify([case], device="cuda") if not cell.ok] == []


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_autocast_as_torch_does_it(dtype):
    x = torch.randn(4, 8, 5, 6, device="cuda").to(dtype)
    weight, bias = torch.randn(2, 8, device="cuda", dtype=torch.promote_types(dtype, torch.float32))
    with torch.autocast("cuda", dtype=torch.bfloat16):
        calls = {
            "group_norm": (2, weight, bias),
            "layer_norm": ((6,),),
            "rms_norm": ((6,),),
            "instance_norm": (None, None, weight, bias),
            "batch_norm": (None, None, weight, bias, True),
        }
        for name, args in calls.items():
            ours, torchs = getattr(O, name)(x, *args), getattr(F, name)(x, *args)
            assert ours.dtype == torchs.dtype, name
            torch.testing.assert_close(ours, torchs)


def test_a_weight_on_the_cpu():
    x = torch.randn(4, 8, device="cuda")
    for _ in range(2):
        with pytest.raises(RuntimeError, match="weight is on cpu"):
            O.layer_norm(x, (8,), torch.ones(8))


def test_autocast_of_a_sum():
    """The sum keeps its dtype, the norm of it is taken in float32, as torch does it unfused."""
    x, residual = torch.randn(2, 4, 8, device="cuda").half()
    with torch.autocast("cuda", dtype=torch.float16):
        y, total = O.add_layer_norm(x, residual, (8,), activation="silu")
        torch.testing.assert_close(y, F.silu(F.layer_norm(x + residual, (8,))))
        assert total.dtype == torch.float16 and y.dtype == torch.float32
        y, total = O.add_group_norm(x, residual, 2, modulate=(x, residual))
        assert total.dtype == torch.float16 and y.dtype == torch.float32


def test_out_and_statistics():
    x = torch.randn(4, 8, 5, 6, device="cuda").to(memory_format=torch.channels_last)
    expected = O.group_norm(x, 2, activation="silu", return_stats=True)
    assert expected.mean.is_cuda and expected.mean.shape == (4, 2)
    assert O.group_norm(x, 2, activation="silu", out=x) is x and torch.equal(x, expected.output)
    rows, out = torch.randn(6, 8, device="cuda"), torch.empty(6, 8, device="cuda")
    torch.ops.onepass.layer_norm_out(out, rows, None, None, 6, 8, 1e-5)
    torch.testing.assert_close(out, F.layer_norm(rows, (8,)))


@pytest.mark.parametrize("extra", ["scale", "residual", "mean_weight"])
def test_an_extra_on_the_cpu(extra):
    x = torch.randn(4, 8, 5, device="cuda")
    calls = {
        "scale": lambda: O.group_norm(x, 2, modulate=(torch.ones(4, 8), None)),
        "residual": lambda: O.add_group_norm(x, x.cpu(), 2),
        "mean_weight": lambda: O.switchable_norm(x, torch.ones(3), torch.ones(3, device="cuda"), training=True),
    }
    for _ in range(2):
        with pytest.raises(RuntimeError, match=f"{extra} is on cpu"):
            calls[extra]()
