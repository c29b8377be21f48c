"""The C kernels as a library: compiled on first use for the machine it runs on, and kept for the next process.

A cached library is named after all it depends on (source, compiler, flags, CPU). `cache` knows how to keep and load it.
Whatever goes wrong is an `Unavailable` with the reason. A process remembers it, and does not try again.
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

from .cache import ANOTHER_PLACE, Unavailable, Unusable, fcntl, load, lock, make_way, open_folder, say, scratch_prefix, sweep

SOURCES = Path(__file__).parent / "src"


# No fast-math: sums keep their order, infinities and NaN their meaning. Contraction makes a·b + c one rounding instead of two.
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


FOR_THIS_MACHINE = ("-march=native", "-mcpu=native", "")  # the first with which the compiler works


LIMIT = 120  # seconds that a process spends at most, waiting for another process and compiling together


class _Once:
    """Calls a function once in a process, whatever comes of it, and from however many threads."""

    def __init__(self, find: Callable[[], ctypes.CDLL]) -> None:
        self._find = find
        self.cache_clear()
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._forked)

    def cache_clear(self) -> None:
        self._found: ctypes.CDLL | str | None = None
        self._lock = threading.RLock()

    def _forked(self) -> None:
        self._lock = threading.RLock()  # its owner may be a thread that the child does not have

    def __call__(self) -> ctypes.CDLL:
        """The kernels, loaded. The first call on a machine compiles them.

        Example: `build.library().onepass_forward`
        """
        with self._lock:
            first = self._found is None
            if self._found is None:
                try:
                    self._found = self._find()
                except Unavailable as reason:
                    self._found = str(reason)
                except Exception as error:  # torch's operations still work, so no error here may reach every call
                    self._found = f"the kernels cannot be compiled or loaded: {type(error).__name__}: {error}"
            if isinstance(self._found, str):
                raise Unavailable(self._found, first)
            return self._found


def _find() -> ctypes.CDLL:
    if fcntl is None:
        raise Unavailable("C kernels are for Linux and macOS: here nobody can tell who may change a compiled library")
    compiler = _compiler()
    place = _place()
    path = place / f"cpu-{_key(compiler)}.so"
    folder = open_folder(place)
    try:
        try:
            return load(folder, path)
        except Unusable as error:
            unusable = error
        try:
            return _load_or_compile(compiler, folder, path)
        except Unavailable as error:
            raise Unavailable(f"{error}; {unusable}" if str(unusable) else str(error)) from None
    finally:
        os.close(folder)


def _load_or_compile(compiler: list[str], folder: int, path: Path) -> ctypes.CDLL:
    deadline = monotonic() + LIMIT
    with lock(folder, path.parent, deadline) as alone:
        try:
            return load(folder, path)  # another process has compiled it in the meantime
        except Unusable:
            make_way(path)
            sweep(path.parent, alone)
            _compile(compiler, path, deadline)
            sweep(path.parent, alone)  # a compiler whose process was killed may have written on
            return load(folder, path)


library = _Once(_find)


def _compiler() -> list[str]:
    """The command that $CC names, or cc, gcc or clang."""
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


def _place() -> Path:
    """The folder where libraries are kept."""
    root = os.environ.get("ONEPASS_CACHE") or os.path.join(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "onepass")
    place = os.path.expanduser(root)
    if place.startswith("~"):
        raise Unavailable(f"no place for the compiled kernels: {root} cannot be expanded, since HOME is not set; {ANOTHER_PLACE}")
    return Path(place)


def _key(compiler: list[str]) -> str:
    """A name for all that a library depends on."""
    try:
        state = os.stat(compiler[0])
        parts = [*map(str, compiler), str(state.st_size), str(state.st_mtime_ns), *FLAGS, *FOR_THIS_MACHINE, _cpu()]
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
    """What -march=native depends on: the first processor's model and features, as the system tells."""
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
    say(f"onepass: compiling the CPU kernels with {compiler[0]}, once …")
    scratch = None
    try:
        # No TemporaryDirectory: a child forked meanwhile would remove it when it ends.
        scratch = tempfile.mkdtemp(dir=path.parent, prefix=scratch_prefix())
        built = Path(scratch) / path.name
        _run_compiler(compiler, built, deadline)
        digest = built.with_suffix(".sha256")
        digest.write_text(sha256(built.read_bytes()).hexdigest())
        for new, kept in ((digest, path.with_suffix(".sha256")), (built, path)):
            new.chmod(new.stat().st_mode & ~0o022)  # a umask of 002 would let the group write
            os.replace(new, kept)
    except OSError as error:
        raise Unavailable(f"the kernels could not be compiled with {shlex.join(compiler)}: {error}; {ANOTHER_PLACE}") from None
    finally:
        if scratch:
            shutil.rmtree(scratch, ignore_errors=True)
        say(f" {monotonic() - started:.1f} s\n")


def _run_compiler(compiler: list[str], built: Path, deadline: float) -> None:
    """Compile for this machine, or, where the compiler fails with that, for any machine of its kind. All tries share one limit."""
    said = ""
    for machine in FOR_THIS_MACHINE:
        left = max(deadline - monotonic(), 0.0)
        command = [*compiler, *FLAGS, *([machine] if machine else []), str(SOURCES / "onepass.c"), "-o", str(built), "-lm"]
        try:
            code, saying = _run(command, built.parent, left)
        except subprocess.TimeoutExpired:
            said = said or f"it did not end within {left:.0f} s"
            break
        if code == 0 and built.is_file():
            if _whole(built.read_bytes()):
                return
            saying = saying or "it wrote half a library"
        said = said or saying or (f"it was killed by signal {-code}" if code < 0 else "it said nothing")
        if "No space left on device" in saying:
            break
    raise Unavailable(f"{shlex.join(compiler)} failed: {' '.join(said.split())[-300:]}")


def _whole(library: bytes) -> bool:
    """Whether an ELF file of 64 bits is as long as it says: loading half of one would end the process. Of others nothing is known."""
    if len(library) < 64 or library[:5] != b"\x7fELF\x02":
        return True
    offset, entry, count = (*struct.unpack_from("=Q", library, 40), *struct.unpack_from("=2H", library, 58))  # of the sections, at the end
    return offset + entry * count <= len(library)


def _run(command: list[str], scratch: Path, seconds: float) -> tuple[int, str]:
    """The exit status of a compiler and what it said. When time is up, the programs that it has started end with it."""
    # What it says goes to a file: the end of a pipe would be waited for as long as any program that it started lives.
    with _memory() as said:
        env = {**os.environ, "LC_ALL": "C", "TMPDIR": str(scratch)}  # its temporary files go with the folder, even if it is killed
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=said, stderr=said, start_new_session=True, env=env)
        try:
            code = process.wait(seconds)
        except BaseException:  # time is up, or someone pressed Ctrl-C
            with suppress(OSError):
                os.killpg(process.pid, signal.SIGKILL)
            with suppress(subprocess.TimeoutExpired):
                process.wait(1)
            raise
        said.seek(0)
        return code, said.read().decode(errors="replace").strip()


def _memory() -> IO[bytes]:
    """A temporary file, on Linux in memory: a full disk is one of the things that a compiler may have to report."""
    if hasattr(os, "memfd_create"):
        with suppress(OSError):
            return os.fdopen(os.memfd_create("compiler"), "w+b")
    return tempfile.TemporaryFile()
