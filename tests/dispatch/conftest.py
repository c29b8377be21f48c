"""Fixtures of the tests of the front door."""

import pytest

from onepass.dispatch import front_door
from tests.conftest import compiled


@pytest.fixture
def opened(monkeypatch):
    """Open the front door, also after a test that closes it."""
    monkeypatch.delenv(front_door.VARIABLE, raising=False)
    if reason := front_door.open_now():
        pytest.skip(reason)
    if not compiled():
        pytest.skip("there are no C kernels")
    yield
    front_door.open_now()


@pytest.fixture(params=["open", "closed"])
def door(request, opened):
    """Run a test twice: with the front door open, and with Python doing the work."""
    if request.param == "closed":
        front_door.close()
    return request.param
