"""Times several calls in turn, and reports medians and quartiles.

On CUDA, GPU time and host time are measured separately.
"""

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
    low: float  # the first quartile
    high: float  # the third quartile


def interleaved(variants: Sequence[Callable[[], Any]], seconds: float = 0.3) -> list[Timing]:
    """Time several callables in turn, so that a disturbance of the machine affects all. Return one Timing for each.

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
    """Make n calls, and return the average seconds of one."""
    start = time.perf_counter()
    for _ in range(n):
        run()
    return (time.perf_counter() - start) / n


def _repeats(run: Callable[[], Any]) -> int:
    """Return how many calls take about a millisecond, from 1 to 1000. Make one call as a warm-up first."""
    run()
    return max(1, min(1000, int(1e-3 / max(once(run, 3), 1e-7))))


@contextmanager
def capturable_stream(device: str) -> Iterator[None]:
    """On CUDA, run the block on a stream that a CUDA graph can capture. The default stream cannot be captured.

    A backward runs on the stream of its forward, so run the forward inside the block too. All blocks use the same stream,
    because the allocator reuses freed memory only on the stream that used it before.
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


def capture(run: Callable[[], Any]) -> tuple[Callable[[], Any], str]:
    """Capture a call in a CUDA graph. Return (replay, "graph"), or (run, "events") if the call cannot be captured.

    Use this function inside `with capturable_stream(device)`.
    """
    stream = torch.cuda.current_stream()
    if stream == torch.cuda.default_stream():
        raise RuntimeError("the default stream cannot be captured; call this inside `with capturable_stream(device)`")
    for _ in range(3):
        run()
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph, stream=stream):
            run()
    except Exception:
        torch.cuda.synchronize()  # raises if the device itself is broken
        return run, "events"
    return graph.replay, "graph"


def device_times(variants: Sequence[Callable[[], Any]], samples: int = 20) -> list[Timing]:
    """Return the GPU time of each call, measured between CUDA events. The L2 cache is flushed before each sample.

    Calls longer than 2 ms get fewer samples, but at least 5. Do not capture a copy: in a graph, `copy_` becomes a memcpy
    node, which runs at two thirds of its usual speed (H200, 2026-11-15).

    Example: `copy, ours = device_times([lambda: y.copy_(x), capture(run)[0]])`
    """
    return [summary(taken) for taken in device_samples(variants, samples)]


def device_samples(variants: Sequence[Callable[[], Any]], samples: int = 20) -> list[list[float]]:
    """Measure as `device_times` does, and return all samples of each call, in seconds."""
    flush = _flush()

    def sample(run: Callable[[], Any]) -> Callable[[], float]:
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        flush()  # takes the GPU 80 µs, in which the host queues the call: so samples contain no host time
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
    """Return a call that flushes the L2 cache: it writes four times the size of the cache, but at least 256 MB."""
    size = max(2**28, 4 * torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size)
    return torch.empty(size // 4, dtype=torch.int32, device="cuda").zero_


def host_times(variants: Sequence[Callable[[], Any]], batches: int = 15) -> list[Timing]:
    """Return the host time of each call: the time until the call returns, while the GPU may still be working.

    Calls are timed in batches of at most 20, and the GPU is idle before each batch. If a call takes over 1 ms, batches
    have fewer calls, but at least 5. A call should launch at most 40 kernels: CUDA makes the host wait once 1024 are queued.
    """
    return [summary(taken) for taken in host_samples(variants, batches)]


def host_samples(variants: Sequence[Callable[[], Any]], batches: int = 15, max_calls: int = 20) -> list[list[float]]:
    """Measure as `host_times` does, with at most `max_calls` calls in a batch. Return the seconds per call of every batch."""
    calls = [max(min(5, max_calls), min(max_calls, int(0.02 / _seconds_to_finish(run)))) for run in variants]
    samples: list[list[float]] = [[] for _ in variants]
    for _ in range(batches):
        for run, n, taken in zip(variants, calls, samples):
            torch.cuda.synchronize()
            taken.append(once(run, n))
    torch.cuda.synchronize()
    return samples


def _seconds_to_finish(run: Callable[[], Any]) -> float:
    """Make a call, and return the seconds until the GPU has finished it."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    run()
    torch.cuda.synchronize()
    return time.perf_counter() - start
