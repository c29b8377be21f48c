"""Loads the compiled C kernels, and finds the threads that they may use."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from ctypes import CDLL, c_char_p, c_double, c_int64, c_void_p
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch

from onepass.core.device import Process

from . import build
from .cache import Unavailable


class Library(NamedTuple):
    forward: Callable[..., int]
    track: Callable[..., int]
    backward: Callable[..., int]
    threads: Callable[[], int]  # how many may work
    one_thread: str  # why no more than one may, or ""
    path: str


@cache
def load() -> Library:
    library = build.library()
    forward, track, backward = library.onepass_forward, library.onepass_track, library.onepass_backward
    forward.argtypes, backward.argtypes = [c_char_p, c_char_p, c_int64], [c_char_p, c_char_p, c_int64, c_int64]
    track.argtypes = [c_char_p, c_char_p, c_int64, c_void_p, c_void_p, c_double]
    parallel, reason = _openmp()
    library.onepass_threads(parallel)
    if reason:
        return Library(forward, track, backward, lambda: 1, reason, library._name)
    return Library(forward, track, backward, threads, "", library._name)


def _openmp() -> tuple[c_void_p, str]:
    """GOMP_parallel of the OpenMP runtime that torch works with: its threads are ours, and there are never more than torch has."""
    linked = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"  # a look-up here finds the runtime that this library is linked with
    for name in (str(linked), None):  # None: what the process shows to all, where torch lies elsewhere
        with suppress(AttributeError, OSError, TypeError):
            return c_void_p.from_buffer(CDLL(name).GOMP_parallel), ""
    return c_void_p(None), "torch's threads cannot be shared: it has no OpenMP runtime with GOMP_parallel"


def threads() -> int:
    # The OpenMP runtime's threads do not come along in a fork, and it would wait for them.
    return 1 if Process.forked else torch.get_num_threads()


def state() -> str:
    """In words: whether the kernels can be used, from where and with how many threads; or why not."""
    try:
        library = load()
    except Unavailable as reason:
        return f"cannot be used: {reason}"
    shared = "one thread, since this process was forked" if Process.forked else f"{threads()} threads, torch's own"
    return f"{library.path}; {library.one_thread or shared}"
