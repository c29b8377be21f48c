"""The C kernels as a library: compiled on first use for the machine it runs on, and kept for the next process.

A cached library is named after all it depends on (source, compiler, flags, CPU), and loaded only if its bytes are those that were written.
Several processes may start at once: one compiles, the others wait for its lock. What goes wrong is an `Unavailable`, with the reason.
"""

from __future__ import annotations

import ctypes
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from hashlib import sha256
from pathlib import Path
from time import perf_counter

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

SOURCES = Path(__file__).parent / "c"
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
FOR_THIS_MACHINE = ("-march=native", "-mcpu=native", "")  # the first that the compiler knows
LIMIT = 120  # seconds


class Unavailable(Exception):
    """The kernels cannot be used here, and why."""


@cache
def library() -> ctypes.CDLL:
    """The kernels, loaded. The first call on a machine compiles them.

    Example: `library().onepass_forward`
    """
    compiler = _compiler()
    folder = _folder()
    sources = sorted(path for path in SOURCES.iterdir() if path.suffix in (".c", ".h"))
    if not sources:
        raise Unavailable(f"the C sources are missing from {SOURCES}: install onepass again")
    path = folder / f"cpu-{_key(compiler, sources)}.so"
    if not _whole(path):
        with _lock(path.with_suffix(".lock")):
            if not _whole(path):
                _compile(compiler, path)
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise Unavailable(f"the cached library {path} cannot be loaded ({error}): delete it") from None


def _compiler() -> list[str]:
    """The command that $CC names, or cc, gcc or clang."""
    named = shlex.split(os.environ.get("CC", ""))
    for words in [named] if named else [["cc"], ["gcc"], ["clang"]]:
        found = shutil.which(words[0])
        if found:
            return [found, *words[1:]]
    raise Unavailable(f"there is no C compiler ({named[0] if named else 'cc, gcc or clang'})")


def _folder() -> Path:
    """Where libraries are kept: of this user, and writable by nobody else, since they are code that will run."""
    root = os.environ.get("ONEPASS_CACHE") or os.path.join(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "onepass")
    folder = Path(os.path.expanduser(root))
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        state = folder.stat()
    except OSError as error:
        raise Unavailable(f"no place for the compiled kernels: {error}; ONEPASS_CACHE names another") from None
    if hasattr(os, "getuid") and (state.st_uid != os.getuid() or state.st_mode & 0o022):
        raise Unavailable(
            f"{folder} belongs to, or can be written by, other users: code from there is not run; ONEPASS_CACHE names another place"
        )
    return folder


def _key(compiler: list[str], sources: list[Path]) -> str:
    state = os.stat(compiler[0])
    parts = [*map(str, compiler), str(state.st_size), str(state.st_mtime_ns), *FLAGS, *FOR_THIS_MACHINE, _cpu()]
    digest = sha256("\n".join(parts).encode())
    for path in sources:
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()[:24]


def _cpu() -> str:
    """What -march=native depends on: the first processor's model and features, as the system tells."""
    words = [platform.system(), platform.machine()]
    try:
        with open("/proc/cpuinfo") as file:
            for line in file:
                if not line.strip():
                    break
                if line.startswith(("model name", "flags", "Features", "CPU implementer", "CPU part", "CPU variant")):
                    words.append(line.strip())
    except OSError:
        words += [platform.processor(), platform.release()]
    return "\n".join(words)


def _whole(path: Path) -> bool:
    """Whether a library is there as it was written: half a file, once mapped, would end the process."""
    try:
        return path.with_suffix(".sha256").read_text() == sha256(path.read_bytes()).hexdigest()
    except OSError:
        return False


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    """One process at a time; a lock ends with the process that holds it."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as error:
        raise Unavailable(f"the compiled kernels cannot be kept: {error}; ONEPASS_CACHE names another place") from None
    try:
        with suppress(OSError):  # a file system without locks: at worst several compile, each in a place of its own
            if fcntl:
                fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _compile(compiler: list[str], path: Path) -> None:
    shown = sys.stderr is not None and sys.stderr.isatty()
    started = perf_counter()
    if shown:
        print(f"onepass: compiling the CPU kernels with {compiler[0]}, once …", end="", file=sys.stderr, flush=True)
    said = ""
    try:
        with tempfile.TemporaryDirectory(dir=path.parent, prefix="build-") as folder:
            built = Path(folder) / path.name
            for machine in FOR_THIS_MACHINE:
                command = [*compiler, *FLAGS, *([machine] if machine else []), str(SOURCES / "onepass.c"), "-o", str(built), "-lm"]
                done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=LIMIT, stdin=subprocess.DEVNULL)
                if done.returncode == 0 and built.exists():
                    break
                said = said or (done.stderr or done.stdout).strip()
            else:
                raise Unavailable(f"{shlex.join(compiler)} failed: {said[-300:] or 'it said nothing'}")
            digest = built.with_suffix(".sha256")
            digest.write_text(sha256(built.read_bytes()).hexdigest())
            os.replace(digest, path.with_suffix(".sha256"))
            os.replace(built, path)
    except subprocess.TimeoutExpired:
        raise Unavailable(f"{shlex.join(compiler)} did not end within {LIMIT} s") from None
    except OSError as error:
        raise Unavailable(f"the kernels could not be compiled with {shlex.join(compiler)}: {error}") from None
    finally:
        if shown:
            print(f" {perf_counter() - started:.1f} s", file=sys.stderr)
