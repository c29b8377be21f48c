"""The cache, a folder of compiled libraries: its permissions, its lock, and loading a library from it.

A library contains code that will run. So it is loaded only if its hash is right and nobody but this user and root can change it.
"""

from __future__ import annotations

import ctypes
import os
import platform
import shutil
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from hashlib import sha256
from pathlib import Path
from time import monotonic, sleep, time
from typing import IO

from onepass.backends.compilation import print_to_terminal

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None


DAY = 86400  # seconds


CACHE_HINT = "set ONEPASS_CACHE to use another folder"


class Unavailable(Exception):
    """Raised if the C kernels cannot be used. The message is the reason."""

    def __init__(self, reason: str, first: bool = False) -> None:
        super().__init__(reason)
        self.first = first  # True if this process raises the reason for the first time


class Unusable(Unavailable):
    """Raised if there is no cached library, or if it cannot be trusted. Compiling it again may help."""


def open_folder(directory: Path) -> int:
    """Open the cache folder, or create it, and return its descriptor. Raise if anyone but this user and root can write to it."""
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise Unavailable(f"no place for the compiled kernels: {error}; {CACHE_HINT}") from None
    if _others_can_write(os.fstat(folder)):
        os.close(folder)
        raise Unavailable(f"{directory} belongs to, or can be written by, other users, so onepass runs no code from it; {CACHE_HINT}")
    return folder


def _others_can_write(state: os.stat_result) -> bool:
    return state.st_uid not in (os.geteuid(), 0) or bool(state.st_mode & (stat.S_IWGRP | stat.S_IWOTH))


def load(folder: int, path: Path, functions: Sequence[str]) -> ctypes.CDLL:
    """Load a library from the cache and return it. Raise `Unusable` if it is missing, or if its hash is wrong.

    `functions` are the names of the functions that it must have.

    The file is opened once, and this open file is both checked and loaded. So nobody can replace it in between, except on macOS,
    where it is loaded by its name.
    """
    try:
        with _open(folder, path) as file, _open(folder, path.with_suffix(".sha256")) as digest:
            if digest.read(65) != sha256(file.read()).hexdigest().encode():
                raise Unusable(f"{path} is damaged")
            return _load_open(file.fileno(), path, functions)
    except FileNotFoundError:
        raise Unusable("") from None
    except OSError as error:
        raise Unusable(f"{path} cannot be read: {error}") from None


def _open(folder: int, path: Path) -> IO[bytes]:
    """Open a regular file of the cache for reading. Raise `Unusable` if anyone but this user and root can write it."""
    # NOFOLLOW: a link could point out of the folder. NONBLOCK: opening a named pipe would wait for a writer.
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


def _load_open(descriptor: int, path: Path, functions: Sequence[str]) -> ctypes.CDLL:
    name, duplicate = str(path), -1
    if os.path.exists(f"/proc/self/fd/{descriptor}"):  # not on macOS
        duplicate = os.dup(descriptor)
        name = f"/proc/self/fd/{duplicate}"
    try:
        loaded = ctypes.CDLL(name)
    except OSError as error:
        if duplicate >= 0:
            os.close(duplicate)
        reason = str(error).replace(name, path.name)
        raise Unavailable(f"the cached library {path} cannot be loaded ({reason}): delete it; {CACHE_HINT}") from None
    # `duplicate` stays open, so that /proc/self/fd/... never names another file: the loader identifies libraries by name.
    missing = [function for function in functions if not hasattr(loaded, function)]
    if missing:
        raise Unavailable(f"the cached library {path} lacks {missing[0]}: delete it, and check the compiler in CC")
    loaded._name = str(path)  # messages print this name
    return loaded


_held: set[int] = set()  # file descriptors of the locks that this process holds


def _close_inherited_locks() -> None:
    """Close the locks that a forked child has inherited. Otherwise the child would hold them until it exits."""
    for descriptor in _held:
        with suppress(OSError):
            os.close(descriptor)
    _held.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_inherited_locks)


@contextmanager
def lock(folder: int, path: Path, deadline: float, what: str) -> Iterator[bool]:
    """Hold the lock file that lets one process at a time compile. The system releases it if the process ends.

    `what` names the library in messages. Yield True, or False if the file system has no locks. Without locks, several processes may
    compile, each in its own folder.
    """
    assert fcntl is not None
    try:
        descriptor = os.open(path.name, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600, dir_fd=folder)
    except OSError as error:
        raise Unavailable(f"the compiled kernels cannot be kept in {path.parent}: {error}; {CACHE_HINT}") from None
    _held.add(descriptor)
    try:
        yield _acquire(descriptor, path, deadline, what)
    finally:
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_UN)  # closing does not unlock if a forked process has a copy of the descriptor
        _held.discard(descriptor)
        os.close(descriptor)


def _acquire(descriptor: int, path: Path, deadline: float, what: str) -> bool:
    """Wait for the lock and return True. Return False if the file system has no locks. Raise `Unavailable` after the deadline."""
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
            raise Unavailable(f"{holder} is compiling {what} and was not done after {waited:.0f} s (it holds {path})")
        if not shown:
            left = deadline - monotonic()
            print_to_terminal(f"onepass: waiting for {holder}, which is compiling {what} and holds {path}, up to {left:.0f} s …\n")
        shown = True
        sleep(0.05)
    with suppress(OSError):  # this text is for the messages of waiting processes; it may be lost on a full disk
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"process {os.getpid()} on {platform.node()}".encode(), 0)
    return True


def scratch_prefix(library: str) -> str:
    """Return the prefix of the scratch folders in which this machine compiles a library.

    `remove_leftovers` must spare those of other machines, which may not see this machine's lock on a network file system.
    """
    return f"build-{sha256(os.fsencode(platform.node())).hexdigest()[:8]}-{library}-"


def check_replaceable(path: Path) -> None:
    """Remove an empty directory where the library or its checksum must go. Raise if it is not empty."""
    for old in (path, path.with_suffix(".sha256")):
        try:
            os.rmdir(old)
        except (FileNotFoundError, NotADirectoryError):
            pass
        except OSError as error:
            raise Unavailable(f"{old} is a directory, and in the way: {error.strerror}") from None


def remove_leftovers(directory: Path, library: str, locked: bool) -> None:
    """Remove the scratch folders that killed processes have left.

    If `locked`, no other process of this machine compiles the library, so all of its scratch folders are leftovers. Other scratch
    folders are removed after a day. Libraries are not removed, since another machine may use them over a network file system.
    """
    with suppress(OSError):
        for entry in list(os.scandir(directory)):
            ours = locked and entry.name.startswith(scratch_prefix(library))
            if entry.name.startswith("build-") and (ours or entry.stat(follow_symlinks=False).st_mtime < time() - DAY):
                shutil.rmtree(entry.path, ignore_errors=True)
