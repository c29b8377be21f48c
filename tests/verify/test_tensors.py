"""The tensors of a case."""

import torch

from onepass.verify import tensors
from onepass.verify.cases import Case


def test_big_operands_are_drawn_in_their_dtype():
    x = tensors.make(Case("group_norm", (4, 8, 16, 16), "channels_last", groups=2), torch.float16, on_device=True).x
    dy = tensors.make_dy(tensors.Operands(x), on_device=True)
    for t in (x, dy):
        assert t.dtype == torch.float16 and t.stride() == (2048, 1, 128, 8) and 0.9 < t.float().std() < 1.1
    assert not torch.equal(x, dy)
