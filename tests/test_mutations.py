"""The suite can fail: planted faults turn it red."""

import pytest

from tests.mutations import MUTATIONS, survives


@pytest.mark.parametrize("mutation", [m if m.quick else pytest.param(m, marks=pytest.mark.slow) for m in MUTATIONS], ids=lambda m: m.name)
def test_fault_is_found(mutation):
    assert survives(mutation) == ""
