"""Run a compiler for C or C++: find it, give it a time limit, and check what it wrote."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import struct
import subprocess
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from time import monotonic
from typing import IO, NamedTuple

from .cache import Unavailable

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


class Language(NamedTuple):
    name: str
    variable: str  # the environment variable that names a compiler
    commands: tuple[str, ...]  # that are tried if it is not set


C = Language("C", "CC", ("cc", "gcc", "clang"))
CPP = Language("C++", "CXX", ("c++", "g++", "clang++"))


def named_compiler(language: Language = C) -> list[str]:
    """Return the command in the language's variable as a list of words. The list is empty if it is not set."""
    value = os.environ.get(language.variable, "")
    try:
        return shlex.split(value)
    except ValueError as error:
        raise Unavailable(f"{language.variable}={value!r} cannot be read as a command: {error}") from None


def find_compiler(language: Language = C) -> list[str]:
    """Return the command in the language's variable, or else the first of its commands that exists, as a list of words."""
    named = named_compiler(language)
    for words in [named] if named else [[command] for command in language.commands]:
        found = shutil.which(words[0])
        if found:
            return [found, *words[1:]]
    *others, last = language.commands
    expected = named[0] if named else f"{', '.join(others)} or {last}"
    raise Unavailable(f"there is no {language.name} compiler ({expected})")


def run_compiler(compiler: list[str], attempts: Sequence[Sequence[str]], built: Path, deadline: float) -> None:
    """Compile with each list of arguments until one succeeds. All attempts share one deadline."""
    failure = ""
    for arguments in attempts:
        left = max(deadline - monotonic(), 0.0)
        try:
            code, output = _run([*compiler, *arguments, "-o", str(built)], built.parent, left)
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
