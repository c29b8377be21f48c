"""Timing, with a clock instead of a GPU."""

import pytest
import torch

from onepass.bench import timing


def test_cuda_times(monkeypatch):
    """Slow variants get fewer samples, and the L2 cache is flushed before every sample."""
    clock, flushed = [0.0], []

    class Event:
        def __init__(self, enable_timing):
            self.at = 0.0

        def record(self):
            self.at = clock[0]

        def elapsed_time(self, other):
            return other.at - self.at

    def takes(milliseconds, calls):
        def run():
            assert len(flushed) == sum(map(len, every)) + 1
            clock[0] += milliseconds
            calls.append(milliseconds)

        return run

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(timing, "_flush", lambda: lambda: flushed.append(1))
    every = [], [], []
    times = timing.device_times([takes(ms, calls) for ms, calls in zip((0.1, 4, 100), every)])
    assert [t.median for t in times] == pytest.approx([1e-4, 4e-3, 0.1]) and list(map(len, every)) == [21, 11, 6]
    assert all(0 < t.low <= t.median for t in timing.host_times([lambda: sum(range(100)), lambda: None]))
