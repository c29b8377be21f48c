"""Counters that the programs of a team use to wait for each other.

They are int32. Before and after a launch, all their bits but the sign are 0.

Launches that use the same counters must not overlap. Launches on one stream do not overlap. A captured launch may be
replayed on any stream at any time, but not twice at once, so each keeps counters of its own. Memory does not grow with
the number of calls.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from .stream import Stream

_POOL = 2**16  # counters on each device for captured launches: enough for some thousand launches


_capturing = torch.cuda.is_current_stream_capturing


class Counters:
    """The counters of kernels with one protocol. Each kernel resets its counters before it exits."""

    def __init__(self) -> None:
        self._eager: dict[Stream, Tensor] = {}  # one for each stream: its launches do not overlap
        self._kept: list[Tensor] = []  # all that were made: a launch may still use an old one
        self._pools: dict[int, list[Tensor]] = {}  # the rest of each device's pool, in a list of one; only one thread can pop it

    def take(self, stream: Stream, n: int) -> Tensor:
        """At least n counters for a launch on this stream, which must be the current one."""
        if _capturing():
            return self._captured(stream.device, n)
        found = self._eager.get(stream)
        if found is None or len(found) < n:
            found = _apart(stream.device, 1 << max(n - 1, 1023).bit_length())
            self._kept.append(found)
            self._eager[stream] = found
            self._make_pool(stream.device)
        return found

    def _make_pool(self, device: int) -> None:
        """Make a pool of zeros outside any capture, so that a captured launch needs no memset."""
        if device not in self._pools:
            self._pools.setdefault(device, [_apart(device, _POOL)])

    def _captured(self, device: int, n: int) -> Tensor:
        try:
            left = self._pools[device].pop()
        except (KeyError, IndexError):  # no pool yet, or another thread is taking
            return _zeros(device, n)
        n += -n % 4  # kernels are compiled for pointers at multiples of 16 bytes
        enough = len(left) >= n
        self._pools[device].append(left[n:] if enough else left)
        return left[:n] if enough else _zeros(device, n)


def _apart(device: int, n: int) -> Tensor:
    """Counters that every stream sees as 0, in memory that belongs to no CUDA graph.

    While torch.compile warms up a CUDA graph, all memory that its thread allocates comes from the graph's pool, and is
    reused later even if it is still in use. So another thread allocates.
    """

    def make() -> Tensor:
        found = _zeros(device, n)
        torch.cuda.current_stream(device).synchronize()
        return found

    with ThreadPoolExecutor(1) as other:
        return other.submit(make).result()


def _zeros(device: int, n: int) -> Tensor:
    """If this is captured, each replay runs the memset: correct, but a little slower."""
    return torch.zeros(n, dtype=torch.int32, device=torch.device("cuda", device))
