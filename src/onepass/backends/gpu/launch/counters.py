"""Counters that the programs of a team use to wait for each other.

Counters are int32. Before and after a launch, all bits of a counter but the sign are 0.

Launches that use the same counters must not overlap. Launches on one stream do not overlap, so each stream has its own
counters. A launch that is captured in a CUDA graph may be replayed on any stream, but not twice at once. So each captured
launch has its own counters. Memory does not grow with the number of calls.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

_POOL = 2**16  # counters on each device for all captured launches


# `torch.cuda.is_current_stream_capturing` without its Python wrapper
_capturing = getattr(torch._C, "_cuda_isCurrentStreamCapturing", torch.cuda.is_current_stream_capturing)


class Counters:
    """The counters of all kernels that follow one protocol: FLIP of gpu/launches.py, or RESET of ring/launch.py.

    A kernel leaves its counters ready for the next launch.
    """

    def __init__(self) -> None:
        self._eager: dict[tuple[int, int], Tensor] = {}  # the counters of each stream
        self._kept: list[Tensor] = []  # all counters that were ever in `_eager`: a launch may still use replaced ones
        self._pools: dict[int, list[Tensor]] = {}  # the unused rest of each device's pool: one Tensor, which one thread pops

    @property
    def eager(self) -> list[Tensor]:
        """The counters of all streams, for tests. They are 0 while no launch runs."""
        return list(self._eager.values())

    def take(self, stream: tuple[int, int], n: int) -> Tensor:
        """Return at least n counters for a launch on `stream`, which is (device, raw stream) and must be current."""
        if _capturing():
            return self._captured(stream[0], n)
        found = self._eager.get(stream)
        if found is None or len(found) < n:
            found = _apart(stream[0], 1 << max(n - 1, 1023).bit_length())
            self._kept.append(found)
            self._eager[stream] = found
            self._make_pool(stream[0])
        return found

    def _make_pool(self, device: int) -> None:
        """Make the device's pool of counters, all 0, if it has none: outside any capture, so no graph repeats the memset."""
        if device not in self._pools:
            self._pools.setdefault(device, [_apart(device, _POOL)])

    def _captured(self, device: int, n: int) -> Tensor:
        try:
            left = self._pools[device].pop()
        except (KeyError, IndexError):  # no pool yet, or another thread has popped it
            return _zeros(device, n)
        n += -n % 4  # 4 counters are 16 bytes, and kernels are compiled for addresses at multiples of 16
        enough = len(left) >= n
        self._pools[device].append(left[n:] if enough else left)
        return left[:n] if enough else _zeros(device, n)


def _apart(device: int, n: int) -> Tensor:
    """Return n counters that every stream sees as 0, in memory that belongs to no CUDA graph.

    While torch.compile warms up a CUDA graph, all memory that its thread allocates comes from the graph's memory pool,
    which later reuses it even if the counters still need it. So another thread allocates the counters.
    """

    def make() -> Tensor:
        found = _zeros(device, n)
        torch.cuda.current_stream(device).synchronize()
        return found

    with ThreadPoolExecutor(1) as other:
        return other.submit(make).result()


def _zeros(device: int, n: int) -> Tensor:
    """Return n new counters that are 0. If this call is captured, each replay repeats the memset, which is a little slower."""
    return torch.zeros(n, dtype=torch.int32, device=torch.device("cuda", device))
