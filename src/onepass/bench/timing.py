"""Timing: variants interleaved, medians with their spread. On CUDA the device's time and the host's time of a call apart."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any, NamedTuple

import torch


class Timing(NamedTuple):
    median: float  # seconds per call
    low: float  # quartiles
    high: float


def interleaved(variants: Sequence[Callable[[], Any]], seconds: float = 0.3) -> list[Timing]:
    """Time several callables in turn, so that what disturbs one disturbs all.

    Example: `ours, torchs = interleaved([lambda: f(x), lambda: g(x)])`
    """
    repeats = [_repeats(run) for run in variants]
    samples: list[list[float]] = [[] for _ in variants]
    end = time.perf_counter() + seconds * len(variants)
    while len(samples[0]) < 5 or (time.perf_counter() < end and len(samples[0]) < 200):
        for run, n, taken in zip(variants, repeats, samples):
            taken.append(once(run, n))
    return [summary(taken) for taken in samples]


def summary(samples: Sequence[float]) -> Timing:
    low, median, high = statistics.quantiles(samples, n=4)
    return Timing(median, low, high)


def once(run: Callable[[], Any], n: int) -> float:
    """Seconds of a call, of n."""
    start = time.perf_counter()
    for _ in range(n):
        run()
    return (time.perf_counter() - start) / n


def _repeats(run: Callable[[], Any]) -> int:
    """How many calls make a sample of about a millisecond, after a warm-up."""
    run()
    return max(1, min(1000, int(1e-3 / max(once(run, 3), 1e-7))))


@contextmanager
def aside(device: str) -> Iterator[None]:
    """On CUDA, a stream that can be captured, which the default one cannot.

    A backward runs on the stream of its forward, so the forward belongs inside, too. It is always the same stream, since the allocator
    keeps freed memory for the stream that had it.
    """
    if not device.startswith("cuda"):
        yield
        return
    stream = _stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        yield
    torch.cuda.current_stream().wait_stream(stream)


@cache
def _stream() -> torch.cuda.Stream:
    return torch.cuda.Stream()


def captured(run: Callable[[], Any]) -> tuple[Callable[[], Any], str]:
    """The replay of a CUDA graph of the call, "graph"; or the call itself, "events", where it cannot be captured. Inside `aside`."""
    stream = torch.cuda.current_stream()
    if stream == torch.cuda.default_stream():
        raise RuntimeError("the default stream cannot be captured; call this inside `with aside(device)`")
    for _ in range(3):
        run()
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph, stream=stream):
            run()
    except Exception:
        torch.cuda.synchronize()  # raises where more is broken than the capture
        return run, "events"
    return graph.replay, "graph"


def device_times(variants: Sequence[Callable[[], Any]], samples: int = 20) -> list[Timing]:
    """What each call takes on the current CUDA device, between events, from a flushed L2; past 2 ms with fewer samples, at least 5.

    A copy belongs here as it is, not captured: in a graph it becomes a memcpy node, at two thirds of its speed (H200, 2026-11-15).

    Example: `copy, ours = device_times([lambda: y.copy_(x), captured(run)[0]])`
    """
    return [summary(taken) for taken in device_samples(variants, samples)]


def device_samples(variants: Sequence[Callable[[], Any]], samples: int = 20) -> list[list[float]]:
    """As `device_times`, every sample of each call."""
    flush = _flush()

    def sample(run: Callable[[], Any]) -> Callable[[], float]:
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        flush()  # its 80 µs also let the host run ahead, so that its own time is not in the sample
        start.record()
        run()
        stop.record()
        return lambda: start.elapsed_time(stop) / 1e3

    first = [sample(run) for run in variants]
    torch.cuda.synchronize()
    counts = [max(5, min(samples, int(samples * 2e-3 / max(seconds(), 1e-6)))) for seconds in first]
    taken: list[list[Callable[[], float]]] = [[] for _ in variants]
    for i in range(max(counts, default=0)):
        for run, count, times in zip(variants, counts, taken):
            if i < count:
                times.append(sample(run))
    torch.cuda.synchronize()
    return [[seconds() for seconds in times] for times in taken]


def _flush() -> Callable[[], Any]:
    """Writes four times the L2, at least 256 MB."""
    size = max(2**28, 4 * torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size)
    return torch.empty(size // 4, dtype=torch.int32, device="cuda").zero_


def host_times(variants: Sequence[Callable[[], Any]], batches: int = 15) -> list[Timing]:
    """What each call takes of the host, not waiting for the device, which is idle before every batch.

    A batch has 20 calls, so that 40 launches each stay below the 1024 at which the host has to wait; fewer where the device is slow.
    """
    return [summary(taken) for taken in host_samples(variants, batches)]


def host_samples(variants: Sequence[Callable[[], Any]], batches: int = 15, most: int = 20) -> list[list[float]]:
    """As `host_times`, every batch of each call, with at most so many calls."""
    calls = [max(min(5, most), min(most, int(0.02 / _finished(run)))) for run in variants]
    samples: list[list[float]] = [[] for _ in variants]
    for _ in range(batches):
        for run, n, taken in zip(variants, calls, samples):
            torch.cuda.synchronize()
            taken.append(once(run, n))
    torch.cuda.synchronize()
    return samples


def _finished(run: Callable[[], Any]) -> float:
    """Seconds of a call with the device's part in it."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    run()
    torch.cuda.synchronize()
    return time.perf_counter() - start
