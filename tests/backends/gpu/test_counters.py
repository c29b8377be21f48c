"""Counters of teams, without a GPU: which thread allocates them, and which launch gets which."""

import threading
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")

from onepass.backends.gpu.launch import counters
from onepass.backends.gpu.launch.stream import Stream


@pytest.fixture
def made(monkeypatch):
    """Records the thread and the size of every allocation, and allocates on the CPU."""
    found: list[tuple[int, int]] = []

    def zeros(device: int, n: int) -> torch.Tensor:
        found.append((threading.get_ident(), n))
        return torch.zeros(n, dtype=torch.int32)

    monkeypatch.setattr(counters, "_zeros", zeros)
    monkeypatch.setattr(counters, "_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(synchronize=lambda: None))
    return found


def test_another_thread_allocates(made):
    """Memory of this thread may belong to the pool of a CUDA graph, which torch.compile reuses."""
    counters.Counters().take(Stream(0, 7), 5)
    assert [n for _, n in made] == [1024, counters._POOL]
    assert threading.get_ident() not in {thread for thread, _ in made}


def test_what_became_too_few_stays(made):
    """Old counters stay, since a launch on another stream may still use them."""
    team, stream = counters.Counters(), Stream(0, 7)
    first = team.take(stream, 1024)
    second = team.take(stream, 1025)
    assert len(second) == 2048 and team.take(stream, 2000) is second
    assert any(kept is first for kept in team._kept)
    assert team.take(Stream(0, 8), 1) is not second


def test_captured_launches_share_nothing(made, monkeypatch):
    team = counters.Counters()
    team.take(Stream(0, 7), 1)
    monkeypatch.setattr(counters, "_capturing", lambda: True)
    first, second = team.take(Stream(0, 7), 5), team.take(Stream(0, 7), 3)
    assert second.data_ptr() - first.data_ptr() == 8 * 4  # multiples of 16 bytes
    large = team.take(Stream(0, 7), counters._POOL)
    assert len(large) == counters._POOL and large.untyped_storage().data_ptr() != first.untyped_storage().data_ptr()
    third = team.take(Stream(0, 7), 4)  # the rest is still available
    assert third.data_ptr() - second.data_ptr() == 4 * 4
