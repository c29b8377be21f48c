"""Compile the C kernels on first use, for this machine, and load them.

The functions of cache.py keep the compiled library for later processes. The name of the library is a hash of the sources, the
compiler, the flags and the CPU. Every failure raises `Unavailable` with a reason. A process remembers the reason and does not
try again.
"""

from __future__ import annotations

import ctypes
import os
import platform
import shlex
import shutil
import signal
import struct
import subprocess
import tempfile
import threading
from collections.abc import Callable
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from time import monotonic
from typing import IO

from .cache import (
    CACHE_HINT,
    Unavailable,
    Unusable,
    check_replaceable,
    fcntl,
    load,
    lock,
    open_folder,
    print_to_terminal,
    remove_leftovers,
    scratch_prefix,
)

SOURCES = Path(__file__).parent / "src"


# -ffast-math is absent: it would change the order of sums, and ignore infinities and NaN.
# -ffp-contract=fast rounds a·b + c once instead of twice.
FLAGS = (
    "-std=gnu11",
    "-O3",
    "-fPIC",
    "-shared",
    "-fvisibility=hidden",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-ffp-contract=fast",
    "-w",
)


MACHINE_FLAGS = ("-march=native", "-mcpu=native", "")  # tried in this order until the compiler succeeds


LIMIT = 120  # seconds that a process may spend on waiting for another one's compiler and on its own, in total


class _LoadOnce:
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


def _load_or_compile() -> ctypes.CDLL:
    if fcntl is None:
        raise Unavailable("C kernels are for Linux and macOS: on this system onepass cannot check who may change a compiled library")
    compiler = _compiler()
    directory = _cache_directory()
    path = directory / f"cpu-{_key(compiler)}.so"
    folder = open_folder(directory)
    try:
        try:
            return load(folder, path)
        except Unusable as error:
            unusable = error
        try:
            return _compile_locked(compiler, folder, path)
        except Unavailable as error:
            raise Unavailable(f"{error}; {unusable}" if str(unusable) else str(error)) from None
    finally:
        os.close(folder)


def _compile_locked(compiler: list[str], folder: int, path: Path) -> ctypes.CDLL:
    """Return the library. Compile it while this process holds the lock, unless another process has just compiled it."""
    deadline = monotonic() + LIMIT
    with lock(folder, path.parent, deadline) as locked:
        try:
            return load(folder, path)  # another process compiled it while this one waited
        except Unusable:
            check_replaceable(path)
            remove_leftovers(path.parent, locked)
            _compile(compiler, path, deadline)
            remove_leftovers(path.parent, locked)  # the compiler of a killed process may have gone on writing
            return load(folder, path)


library = _LoadOnce(_load_or_compile)


def _compiler() -> list[str]:
    """Return the command in $CC, or else the first of cc, gcc and clang that exists, as a list of words."""
    value = os.environ.get("CC", "")
    try:
        named = shlex.split(value)
    except ValueError as error:
        raise Unavailable(f"CC={value!r} cannot be read as a command: {error}") from None
    for words in [named] if named else [["cc"], ["gcc"], ["clang"]]:
        found = shutil.which(words[0])
        if found:
            return [found, *words[1:]]
    raise Unavailable(f"there is no C compiler ({named[0] if named else 'cc, gcc or clang'})")


def _cache_directory() -> Path:
    root = os.environ.get("ONEPASS_CACHE") or os.path.join(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "onepass")
    expanded = os.path.expanduser(root)
    if expanded.startswith("~"):
        raise Unavailable(f"no place for the compiled kernels: {root} cannot be expanded, since HOME is not set; {CACHE_HINT}")
    return Path(expanded)


def _key(compiler: list[str]) -> str:
    """Return a hash of everything that the compiled library depends on."""
    try:
        state = os.stat(compiler[0])
        parts = [*map(str, compiler), str(state.st_size), str(state.st_mtime_ns), *FLAGS, *MACHINE_FLAGS, _cpu()]
        digest = sha256("\n".join(parts).encode(errors="surrogateescape"))
        sources = sorted(path for path in SOURCES.iterdir() if path.suffix in (".c", ".h"))
        for path in sources:
            digest.update(path.name.encode() + path.read_bytes())
    except OSError as error:
        raise Unavailable(f"the compiler or the C sources cannot be read: {error}") from None
    if not sources:
        raise Unavailable(f"the C sources are missing from {SOURCES}: install onepass again")
    return digest.hexdigest()[:24]


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


def _compile(compiler: list[str], path: Path, deadline: float) -> None:
    started = monotonic()
    print_to_terminal(f"onepass: compiling the CPU kernels with {compiler[0]}, once …")
    scratch = None
    try:
        # Not a TemporaryDirectory: a child process forked meanwhile would remove the folder when it exits.
        scratch = tempfile.mkdtemp(dir=path.parent, prefix=scratch_prefix())
        built = Path(scratch) / path.name
        _run_compiler(compiler, built, deadline)
        digest = built.with_suffix(".sha256")
        digest.write_text(sha256(built.read_bytes()).hexdigest())
        for new, final in ((digest, path.with_suffix(".sha256")), (built, path)):
            new.chmod(new.stat().st_mode & ~0o022)  # otherwise, with a umask of 002, the group could write the file
            os.replace(new, final)
    except OSError as error:
        raise Unavailable(f"the kernels could not be compiled with {shlex.join(compiler)}: {error}; {CACHE_HINT}") from None
    finally:
        if scratch:
            shutil.rmtree(scratch, ignore_errors=True)
        print_to_terminal(f" {monotonic() - started:.1f} s\n")


def _run_compiler(compiler: list[str], built: Path, deadline: float) -> None:
    """Compile for this CPU or, if that fails, for any CPU of its architecture. All attempts share one deadline."""
    failure = ""
    for machine in MACHINE_FLAGS:
        left = max(deadline - monotonic(), 0.0)
        command = [*compiler, *FLAGS, *([machine] if machine else []), str(SOURCES / "onepass.c"), "-o", str(built), "-lm"]
        try:
            code, output = _run(command, built.parent, left)
        except subprocess.TimeoutExpired:
            failure = failure or f"it did not end within {left:.0f} s"
            break
        if code == 0 and built.is_file():
            if _is_complete(built.read_bytes()):
                return
            output = output or "it wrote half a library"
        failure = failure or output or (f"it was killed by signal {-code}" if code < 0 else "it said nothing")
        if "No space left on device" in output:
            break
    raise Unavailable(f"{shlex.join(compiler)} failed: {' '.join(failure.split())[-300:]}")


def _is_complete(library: bytes) -> bool:
    """Return whether a library in 64-bit ELF, the format of Linux, is as long as its header says.

    Loading an incomplete library would crash the process. Files in other formats count as complete.
    """
    if len(library) < 64 or library[:5] != b"\x7fELF\x02":
        return True
    # The section headers are at the end of the file. Bytes 40 and 58 of the ELF header hold their offset, size and number.
    offset, entry, count = (*struct.unpack_from("=Q", library, 40), *struct.unpack_from("=2H", library, 58))
    return offset + entry * count <= len(library)


def _run(command: list[str], scratch: Path, seconds: float) -> tuple[int, str]:
    """Run a compiler and return its exit status and output. After `seconds`, kill the compiler and the programs it started."""
    # The output goes to a file. A pipe would stay open until every program that the compiler started has ended.
    with _temporary_file() as output:
        # TMPDIR puts the compiler's temporary files into `scratch`, which the caller removes.
        env = {**os.environ, "LC_ALL": "C", "TMPDIR": str(scratch)}
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True, env=env)
        try:
            code = process.wait(seconds)
        except BaseException:  # the timeout, or Ctrl-C
            with suppress(OSError):
                os.killpg(process.pid, signal.SIGKILL)
            with suppress(subprocess.TimeoutExpired):
                process.wait(1)
            raise
        output.seek(0)
        return code, output.read().decode(errors="replace").strip()


def _temporary_file() -> IO[bytes]:
    """Return a new temporary file. On Linux it is in memory, so that a compiler can report a full disk."""
    if hasattr(os, "memfd_create"):
        with suppress(OSError):
            return os.fdopen(os.memfd_create("compiler"), "w+b")
    return tempfile.TemporaryFile()
