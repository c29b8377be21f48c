"""A budget of GPU memory for processes that run at the same time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import get_context


class SharedMemory:
    """GPU memory that processes share: `with memory(gigabytes)` waits until so much is free, and takes it for the block.

    A request for more than there is takes all.
    """

    def __init__(self, gigabytes: int) -> None:
        processes = get_context("spawn")
        self._turn, self._free, self._all = processes.Lock(), processes.Semaphore(gigabytes), gigabytes

    @contextmanager
    def __call__(self, gigabytes: int) -> Iterator[None]:
        gigabytes = min(gigabytes, self._all)
        with self._turn:
            for _ in range(gigabytes):
                self._free.acquire()
        try:
            yield
        finally:
            for _ in range(gigabytes):
                self._free.release()
