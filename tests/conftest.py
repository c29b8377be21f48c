"""What all tests share. In every test torch fills new memory with NaN, so that reading uninitialized memory shows."""

import os
import sys

import pytest
import torch

from onepass.backends.c import build, library
from onepass.backends.gpu.family import GpuFamily
from onepass.core.device import describe
from onepass.dispatch import front_door, launchers
from onepass.planning.registry import FAMILIES

# The other families need a GPU or Triton's interpreter.
CPU_FAMILIES = [family.name for family in FAMILIES if not isinstance(family, GpuFamily)]
if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)  # there is a worker for each core

# Many tests start processes. If Python may not keep what it compiles, each compiles the files of torch again, which takes seconds.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
# On a machine without a GPU, torch.manual_seed notes the stack for the GPUs, which takes longer than many tests
manual_seed = torch.manual_seed if torch.cuda.is_available() else torch.default_generator.manual_seed

front_door.open_now()  # before the workers of xdist start, so that only one process compiles it
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # deterministic mode on CUDA requires it


@pytest.fixture(scope="session", autouse=True)
def only_here():
    """Tests run with the front door open. Processes that they start leave it closed, and compile nothing.

    This is a fixture, because the workers of xdist must not inherit the variable: they run tests.
    """
    os.environ.setdefault(front_door.VARIABLE, "off")


@pytest.fixture
def closed(monkeypatch):
    """Close the front door, and open it again after the test."""
    monkeypatch.delenv(front_door.VARIABLE, raising=False)
    front_door.close()
    yield
    front_door.open_now()


@pytest.fixture(autouse=True)
def poison():
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    assert torch.empty(3).isnan().all()
    manual_seed(0)
    yield
    torch.use_deterministic_algorithms(False)


def compiled() -> bool:
    """Whether there are C kernels on this machine."""
    return not library.state().startswith("cannot be used")


@pytest.fixture
def anew():
    """Forget all plans and settings, before and after the test, as in a new process."""

    def forget() -> None:
        for cache in (build.library, library.load, describe):
            cache.cache_clear()
        launchers.forget_all()

    forget()
    yield
    forget()


@pytest.fixture
def by_torch(monkeypatch, anew):
    """Run the CPU without C kernels."""
    monkeypatch.setenv("ONEPASS_CPU", "off")


def pytest_collection_modifyitems(items):
    for item in items:
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="no GPU"))
