"""Timing on the CPU: variants interleaved, medians with their spread."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple


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
            taken.append(_once(run, n))
    return [Timing(statistics.median(s), *(statistics.quantiles(s, n=4)[i] for i in (0, 2))) for s in samples]


def _once(run: Callable[[], Any], n: int) -> float:
    start = time.perf_counter()
    for _ in range(n):
        run()
    return (time.perf_counter() - start) / n


def _repeats(run: Callable[[], Any]) -> int:
    """How many calls make a sample of about a millisecond, after a warm-up."""
    run()
    return max(1, min(1000, int(1e-3 / max(_once(run, 3), 1e-7))))
