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
