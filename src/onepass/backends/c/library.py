"""Load the compiled C kernels, and find out how many threads they may use."""

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
    threads: Callable[[], int]  # returns the number of threads that a call may use
    one_thread: str  # why calls use one thread only, or ""
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
    """Return the address of GOMP_parallel in torch's OpenMP runtime, and "". If there is none, return NULL and the reason.

    GOMP_parallel runs a function on several threads. By calling torch's, the C kernels use the same threads as torch.
    """
    linked = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"  # finds symbols of the OpenMP runtime it links, too
    for name in (str(linked), None):  # None searches all global symbols of this process
        with suppress(AttributeError, OSError, TypeError):
            return c_void_p.from_buffer(CDLL(name).GOMP_parallel), ""
    return c_void_p(None), "torch's threads cannot be shared: it has no OpenMP runtime with GOMP_parallel"


def threads() -> int:
    # In a forked child, the OpenMP runtime would wait for threads that do not exist there.
    return 1 if Process.forked else torch.get_num_threads()


def state() -> str:
    """Return the path of the library and the number of threads, or why the kernels cannot be used. `onepass doctor` prints it."""
    try:
        library = load()
    except Unavailable as reason:
        return f"cannot be used: {reason}"
    shared = "one thread, since this process was forked" if Process.forked else f"{threads()} threads, torch's own"
    return f"{library.path}; {library.one_thread or shared}"
