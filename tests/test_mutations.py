"""The tests can fail: they find every planted fault."""

import pytest

from tests.mutations import MUTATIONS, ROOT, SOURCE, survives


@pytest.mark.parametrize("mutation", [m if m.quick else pytest.param(m, marks=pytest.mark.slow) for m in MUTATIONS], ids=lambda m: m.name)
def test_fault_is_found(mutation):
    assert survives(mutation) == ""


def test_every_fault_can_be_planted():
    """Each text occurs once in its file, and the tests exist. So no fault gets lost when a file moves."""
    for mutation in MUTATIONS:
        file = SOURCE / mutation.file
        assert file.exists() and file.read_text().count(mutation.before) == 1, mutation.name
        assert (ROOT / mutation.tests.partition(" -k ")[0]).exists(), mutation.name
