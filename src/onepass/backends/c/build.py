"""Compile a library on first use, for this machine, and load it.

`library` loads the C kernels. front_door.py uses the same functions for the front door.

The functions of cache.py keep a compiled library for later processes. Its name has two hashes. For the C kernels the first (`_key`)
is of the sources, the flags and the CPU. The second (`_variant`) is of the names of the compiler and the C library. No path is part
of them, so a copied cache works.

Every failure raises `Unavailable` with a reason. A process remembers the reason and does not try again.
"""

from __future__ import annotations

import ctypes
import os
import platform
import shlex
import shutil
import tempfile
import threading
from collections.abc import Callable, Sequence
from functools import partial
from hashlib import sha256
from pathlib import Path
from time import monotonic
from typing import NamedTuple

from onepass.backends.compilation import LOGGER, Compilation

from .cache import (
    CACHE_HINT,
    Unavailable,
    Unusable,
    check_replaceable,
    fcntl,
    load,
    lock,
    open_folder,
    remove_leftovers,
    scratch_prefix,
)
from .compiler import FLAGS, C, Language, find_compiler, named_compiler, run_compiler
from .machine import NATIVE_FLAGS, check_level, level

SOURCES = Path(__file__).parent / "src"


LIMIT = 120  # seconds that a process may wait, in total: for another process that compiles, and for its own compiler


class Recipe(NamedTuple):
    """How to compile a library, and what it is called in the cache."""

    prefix: str  # of the name of its file
    lock: str  # the name of its lock file
    what: str  # it, in messages
    seconds: int  # that compiling takes, about
    language: Language
    functions: Sequence[str]  # that it must have
    key: Callable[[], str]  # returns a hash of all that decides whether a compiled library fits this process
    attempts: Callable[[], list[list[str]]]  # arguments for the compiler; the first that succeed are used


class LoadOnce:
    """Calls a function once per process, and remembers the library that it returned or why it failed. Thread-safe."""

    def __init__(self, load_or_compile: Callable[[], ctypes.CDLL]) -> None:
        self._load_or_compile = load_or_compile
        self.cache_clear()
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._renew_lock)

    def cache_clear(self) -> None:
        self._outcome: ctypes.CDLL | str | None = None
        self._lock = threading.RLock()

    def _renew_lock(self) -> None:
        self._lock = threading.RLock()  # the thread that held the old lock may not exist in a forked child

    def __call__(self) -> ctypes.CDLL:
        """Return the loaded library, or raise `Unavailable`. The first call on a machine compiles it.

        Example: `build.library().onepass_forward`
        """
        with self._lock:
            first = self._outcome is None
            if self._outcome is None:
                try:
                    self._outcome = self._load_or_compile()
                except Unavailable as reason:
                    self._outcome = str(reason)
                except Exception as error:  # counts as Unavailable: calls can still run with torch's operations
                    self._outcome = f"the kernels cannot be compiled or loaded: {type(error).__name__}: {error}"
            if isinstance(self._outcome, str):
                raise Unavailable(self._outcome, first)
            return self._outcome


def load_or_compile(recipe: Recipe, may_compile: bool = True) -> ctypes.CDLL:
    """Return the library of a recipe from the cache, or compile it if this is allowed."""
    if fcntl is None:
        raise Unavailable("C kernels are for Linux and macOS: on this system onepass cannot check who may change a compiled library")
    directory, key = _cache_directory(), recipe.key()
    path = directory / f"{recipe.prefix}-{key}-{_variant(recipe.language)}.so"
    folder = open_folder(directory)
    try:
        try:
            return load(folder, path, recipe.functions)
        except Unusable as error:
            unusable = error
        try:
            if not may_compile:
                raise Unavailable("it is not compiled yet")
            return _compile_locked(recipe, find_compiler(recipe.language), folder, path)
        except Unavailable as error:
            return _load_variant(recipe, folder, directory, key, "; ".join(filter(None, map(str, (error, unusable)))))
    finally:
        os.close(folder)


def _load_variant(recipe: Recipe, folder: int, directory: Path, key: str, reason: str) -> ctypes.CDLL:
    """Return a library that another compiler made from the same sources for the same CPU. Raise the reason if there is none.

    A container image may have such a library, but no compiler and no folder to write to.
    """
    for name in sorted(os.listdir(folder)):
        if name.startswith(f"{recipe.prefix}-{key}-") and name.endswith(".so"):
            try:
                found = load(folder, directory / name, recipe.functions)
            except Unavailable as error:
                reason += f"; {error}" if str(error) not in reason else ""
            else:
                LOGGER.info("using %s, since %s", found._name, reason)
                return found
    raise Unavailable(reason)


def _compile_locked(recipe: Recipe, compiler: list[str], folder: int, path: Path) -> ctypes.CDLL:
    """Return the library. Compile it while this process holds the lock, unless another process has just compiled it."""
    deadline = monotonic() + LIMIT
    with lock(folder, path.parent / recipe.lock, deadline, recipe.what) as locked:
        try:
            return load(folder, path, recipe.functions)  # another process compiled it while this one waited
        except Unusable:
            check_replaceable(path)
            remove_leftovers(path.parent, recipe.prefix, locked)
            _compile(recipe, compiler, path, deadline)
            remove_leftovers(path.parent, recipe.prefix, locked)  # the compiler of a killed process may have gone on writing
            return load(folder, path, recipe.functions)


def _cache_directory() -> Path:
    root = os.environ.get("ONEPASS_CACHE") or os.path.join(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "onepass")
    expanded = os.path.expanduser(root)
    if expanded.startswith("~"):
        raise Unavailable(f"no place for the compiled kernels: {root} cannot be expanded, since HOME is not set; {CACHE_HINT}")
    return Path(expanded)


def _key() -> str:
    """Return a hash of everything that decides whether a library is right for this version of onepass and this CPU."""
    options = named_compiler()[1:]  # such as -fsanitize=address: most programs cannot load such a library
    digest = sha256("\n".join([*FLAGS, *_machine_flags(), *options, level() or _cpu()]).encode(errors="surrogateescape"))
    try:
        sources = sorted(path for path in SOURCES.iterdir() if path.suffix in (".c", ".h"))
        for path in sources:
            digest.update(path.name.encode() + path.read_bytes())
    except OSError as error:
        raise Unavailable(f"the C sources cannot be read: {error}") from None
    if not sources:
        raise Unavailable(f"the C sources are missing from {SOURCES}: install onepass again")
    return digest.hexdigest()[:24]


def _variant(language: Language = C) -> str:
    """Return a hash of what else makes libraries differ: the name of the compiler that the user chose, and the C library."""
    parts = [os.path.basename((named_compiler(language) or [""])[0]), *platform.libc_ver()]
    return sha256("\n".join(parts).encode(errors="surrogateescape")).hexdigest()[:8]


def _machine_flags() -> tuple[str, ...]:
    """Return the flags that say which instructions the compiler may use. They are tried in this order."""
    portable = level()
    if not portable:
        return NATIVE_FLAGS
    check_level(portable, _cpu())
    return (f"-march={portable}",)


def _cpu() -> str:
    """Return what -march=native depends on: the model and features of the first processor, as the system reports them."""
    words = [platform.system(), platform.machine()]
    try:
        with open("/proc/cpuinfo", errors="replace") as file:
            for line in file:
                if not line.strip():
                    break
                if line.startswith(("model name", "flags", "Features", "CPU implementer", "CPU part", "CPU variant")):
                    words.append(line.strip())
    except OSError:
        words += [platform.processor(), platform.release()]
    return "\n".join(words)


def _attempts() -> list[list[str]]:
    return [[*FLAGS, *([machine] if machine else []), str(SOURCES / "onepass.c"), "-lm"] for machine in _machine_flags()]


def _compile(recipe: Recipe, compiler: list[str], path: Path, deadline: float) -> None:
    line = f"compiling {recipe.what}, once per machine (about {recipe.seconds} s)"
    with Compilation(f"{recipe.what} with {compiler[0]}, into {path}", line) as compilation:
        compilation.begin()
        scratch = None
        try:
            # Not a TemporaryDirectory: a child process forked meanwhile would remove the folder when it exits.
            scratch = tempfile.mkdtemp(dir=path.parent, prefix=scratch_prefix(recipe.prefix))
            built = Path(scratch) / path.name
            run_compiler(compiler, recipe.attempts(), built, deadline)
            digest = built.with_suffix(".sha256")
            digest.write_text(sha256(built.read_bytes()).hexdigest())
            for new, final in ((digest, path.with_suffix(".sha256")), (built, path)):
                new.chmod(new.stat().st_mode & ~0o022)  # otherwise, with a umask of 002, the group could write the file
                os.replace(new, final)
        except OSError as error:
            raise Unavailable(f"{recipe.what} could not be compiled with {shlex.join(compiler)}: {error}; {CACHE_HINT}") from None
        finally:
            if scratch:
                shutil.rmtree(scratch, ignore_errors=True)


FUNCTIONS = ("onepass_forward", "onepass_track", "onepass_backward", "onepass_threads")
KERNELS = Recipe("cpu", "lock", "the CPU kernels", 10, C, FUNCTIONS, _key, _attempts)
library = LoadOnce(partial(load_or_compile, KERNELS))
