"""Counters by which the programs of a team wait for one another: int32, 0 but for their sign, before a launch and after it.

Launches that use the same counters must not overlap. Those of one stream do not. A captured launch may be replayed on any stream, beside
anything, but never beside itself: each has counters of its own for ever. Memory does not grow with the number of calls.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from .stream import Stream

_POOL = 2**16  # counters of captured launches, on each device: some thousand launches


_capturing = torch.cuda.is_current_stream_capturing


class Counters:
    """Those of one kind of kernel, which leaves them as it wants to find them."""

    def __init__(self) -> None:
        self._eager: dict[Stream, Tensor] = {}  # a handle that comes again is the same stream, whose launches follow one another
        self._kept: list[Tensor] = []  # all that were made: launches may still use those that became too few
        self._pools: dict[int, list[Tensor]] = {}  # a list of one: what of a pool is left; taking it is one step for other threads

    def take(self, stream: Stream, n: int) -> Tensor:
        """At least n counters for a launch on this stream, which is the current one."""
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
        """Zeroed before anything is captured, and outside of it: a captured launch then needs no memset beside it."""
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
    """Counters that are 0 for every stream, in memory of no graph.

    torch.compile warms up its CUDA graphs with all memory of the thread from their pool, which it later hands out again, whoever still has
    it. So another thread allocates.
    """

    def make() -> Tensor:
        found = _zeros(device, n)
        torch.cuda.current_stream(device).synchronize()
        return found

    with ThreadPoolExecutor(1) as other:
        return other.submit(make).result()


def _zeros(device: int, n: int) -> Tensor:
    """Captured, this is a memset at each replay: correct, a little slower."""
    return torch.zeros(n, dtype=torch.int32, device=torch.device("cuda", device))
