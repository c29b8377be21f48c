"""Fresh memory is poisoned with NaN in every test, so that whatever is read before it was written shows."""

import os

import pytest
import torch

from onepass.families import FAMILIES

CPU_FAMILIES = [family.name for family in FAMILIES if family.module.startswith("cpu")]  # the others need a GPU, or an interpreter
if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)  # there is a worker for each core

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # what deterministic mode asks of CUDA


@pytest.fixture(autouse=True)
def poison():
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    assert torch.empty(3).isnan().all()
    torch.manual_seed(0)
    yield
    torch.use_deterministic_algorithms(False)


def pytest_collection_modifyitems(items):
    for item in items:
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="no GPU"))
