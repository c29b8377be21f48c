"""Mean and rstd in one tensor."""

import pytest
import torch

from onepass.core import norms
from onepass.core.problem import bind
from onepass.core.statistics import packed_shape, packed_stride, repack, unpack


@pytest.mark.parametrize("spec", [norms.layer_norm(1), norms.rms_norm(1, 1e-6)])
def test_what_was_unpacked_is_packed_again(spec):
    problem = bind(spec, torch.empty(5, 6, 8))
    whole = torch.empty(7 + 64)[7:].as_strided(packed_shape(problem), packed_stride(problem), 7)
    mean, rstd = unpack(problem, whole)
    again = repack(problem, mean, rstd)
    assert again is not None
    assert (again.data_ptr(), again.shape, again.stride()) == (whole.data_ptr(), whole.shape, whole.stride())


def test_statistics_from_elsewhere_are_not_packed():
    problem = bind(norms.layer_norm(1), torch.empty(5, 6, 8))
    mean, rstd = unpack(problem, torch.empty_strided(packed_shape(problem), packed_stride(problem)))
    assert repack(problem, mean.clone(), rstd) is None
    assert repack(problem, mean, rstd.clone()) is None
    assert repack(problem, None, rstd) is None
    assert repack(problem, mean, rstd.double()) is None
    assert repack(problem, mean, rstd.t().contiguous().t()) is None
    assert repack(bind(norms.rms_norm(1, 1e-6), torch.empty(5, 6, 8)), None, rstd.clone()) is None
