"""The folder in which compiled libraries are kept: who may write it, who may compile now, and how a library is loaded from it.

A library is code that will run. It is loaded only if its bytes are those that were written, and only this user or root can change it.
"""

from __future__ import annotations

import ctypes
import os
import platform
import shutil
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from hashlib import sha256
from pathlib import Path
from time import monotonic, sleep, time
from typing import IO

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None


FUNCTIONS = ("onepass_forward", "onepass_track", "onepass_backward", "onepass_threads")


DAY = 86400  # seconds


ANOTHER_PLACE = "ONEPASS_CACHE names another place"


class Unavailable(Exception):
    """The kernels cannot be used here, and why."""

    def __init__(self, reason: str, first: bool = False) -> None:
        super().__init__(reason)
        self.first = first  # nobody in this process was told before


class Unusable(Unavailable):
    """There is no cached library, or none to be trusted; compiling it again may help."""


def open_folder(place: Path) -> int:
    """The folder, open. Only this user or root may be able to write it, since it holds code that will run."""
    try:
        place.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder = os.open(place, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise Unavailable(f"no place for the compiled kernels: {error}; {ANOTHER_PLACE}") from None
    if _others_can_write(os.fstat(folder)):
        os.close(folder)
        raise Unavailable(f"{place} belongs to, or can be written by, other users: code from there is not run; {ANOTHER_PLACE}")
    return folder


def _others_can_write(state: os.stat_result) -> bool:
    return state.st_uid not in (os.geteuid(), 0) or bool(state.st_mode & (stat.S_IWGRP | stat.S_IWOTH))


def load(folder: int, path: Path) -> ctypes.CDLL:
    """A library of the cache, if it is as it was written: half a file, once mapped, would end the process.

    All questions are put to the open file, and the open file is loaded. So nobody can exchange it in between.
    """
    try:
        with _open(folder, path) as file, _open(folder, path.with_suffix(".sha256")) as written:
            if written.read(65) != sha256(file.read()).hexdigest().encode():
                raise Unusable(f"{path} is damaged")
            return _load_open(file.fileno(), path)
    except FileNotFoundError:
        raise Unusable("") from None
    except OSError as error:
        raise Unusable(f"{path} cannot be read: {error}") from None


def _open(folder: int, path: Path) -> IO[bytes]:
    """A file of the cache that only this user or root can write."""
    # A link could lead out of the folder, and a named pipe would have to be waited for.
    descriptor = os.open(path.name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=folder)
    try:
        state = os.fstat(descriptor)
        if not stat.S_ISREG(state.st_mode):
            raise Unusable(f"{path} is not a file")
        if _others_can_write(state):
            raise Unusable(f"{path} belongs to, or can be written by, other users")
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def _load_open(descriptor: int, path: Path) -> ctypes.CDLL:
    name, kept = str(path), -1
    if os.path.exists(f"/proc/self/fd/{descriptor}"):  # not on macOS
        kept = os.dup(descriptor)
        name = f"/proc/self/fd/{kept}"
    try:
        loaded = ctypes.CDLL(name)
    except OSError as error:
        if kept >= 0:
            os.close(kept)
        said = str(error).replace(name, path.name)
        raise Unavailable(f"the cached library {path} cannot be loaded ({said}): delete it; {ANOTHER_PLACE}") from None
    # From now on `kept` stays open: the loader knows a library by its name, so that name must not come to mean another file.
    missing = [function for function in FUNCTIONS if not hasattr(loaded, function)]
    if missing:
        raise Unavailable(f"the cached library {path} lacks {missing[0]}: delete it, and look at what CC does")
    loaded._name = str(path)  # for people
    return loaded


_held: set[int] = set()  # locks of this process, as open files


def _forked() -> None:
    """A child has a copy of an open lock, and would hold it as long as it lives."""
    for descriptor in _held:
        with suppress(OSError):
            os.close(descriptor)
    _held.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)


@contextmanager
def lock(folder: int, place: Path, deadline: float) -> Iterator[bool]:
    """One process at a time: there is one lock for the folder, and it ends with the process that holds it.

    Gives False where the file system has no locks. Then several may compile, each in a place of its own.
    """
    assert fcntl is not None
    try:
        descriptor = os.open("lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600, dir_fd=folder)
    except OSError as error:
        raise Unavailable(f"the compiled kernels cannot be kept in {place}: {error}; {ANOTHER_PLACE}") from None
    _held.add(descriptor)
    try:
        yield _locked(descriptor, place / "lock", deadline)
    finally:
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_UN)  # closing is not enough where another process has a copy
        _held.discard(descriptor)
        os.close(descriptor)


def _locked(descriptor: int, path: Path, deadline: float) -> bool:
    assert fcntl is not None
    started, shown = monotonic(), False
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            holder = os.pread(descriptor, 200, 0).decode(errors="replace") or "another process"
        except OSError:
            return False
        if monotonic() > deadline:
            waited = monotonic() - started
            raise Unavailable(f"{holder} compiles the kernels, and was not done after {waited:.0f} s (it holds {path})")
        if not shown:
            left = deadline - monotonic()
            say(f"onepass: waiting for {holder}, which compiles the CPU kernels (it holds {path}), up to {left:.0f} s …\n")
        shown = True
        sleep(0.05)
    with suppress(OSError):  # for those who wait; a full disk is no reason to stop here
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"process {os.getpid()} on {platform.node()}".encode(), 0)
    return True


def say(text: str) -> None:
    """To a person at a terminal, and to no log."""
    with suppress(AttributeError, OSError, ValueError):  # there may be no stderr, or a closed one
        if sys.stderr.isatty():
            print(text, end="", file=sys.stderr, flush=True)


def scratch_prefix() -> str:
    """Of the folders in which this machine compiles. On a network's file system other machines may not see our lock."""
    return f"build-{sha256(os.fsencode(platform.node())).hexdigest()[:8]}-"


def make_way(path: Path) -> None:
    """Say so before anything is compiled if a library could not be put in its place. Anything but a directory is replaced."""
    for old in (path, path.with_suffix(".sha256")):
        try:
            os.rmdir(old)
        except (FileNotFoundError, NotADirectoryError):
            pass
        except OSError as error:
            raise Unavailable(f"{old} is a directory, and in the way: {error.strerror}") from None


def sweep(place: Path, alone: bool) -> None:
    """Remove what killed processes left: all of this machine's, since whoever holds the lock is the only one to compile.

    Other libraries stay: on a network's file system another machine may be running them.
    """
    with suppress(OSError):
        for entry in list(os.scandir(place)):
            ours = alone and entry.name.startswith(scratch_prefix())
            if entry.name.startswith("build-") and (ours or entry.stat(follow_symlinks=False).st_mtime < time() - DAY):
                shutil.rmtree(entry.path, ignore_errors=True)
