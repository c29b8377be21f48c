"""Says when kernels are compiled, and records which kernels some code needs.

The messages go to `logging.getLogger("onepass")`, at level INFO. If no logging is set up, a terminal shows a short line. A call whose
kernels are loaded runs nothing of this file.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Hashable, Iterator
from contextlib import contextmanager, suppress
from time import monotonic
from types import TracebackType

LOGGER = logging.getLogger("onepass")

_shown: set[str] = set()  # the lines that a terminal has shown


class Record:
    """The kernels that some code needed, and the names and seconds of those that it had to compile."""

    def __init__(self) -> None:
        self.needed: set[Hashable] = set()
        self.compiled: list[tuple[str, float]] = []


_records: list[Record] = []  # global, not in the context: backwards run in threads of autograd


@contextmanager
def recorded() -> Iterator[Record]:
    """Record the kernels that this process needs until the end of the block.

    Example: `with recorded() as record: model(x)`
    """
    record = Record()
    _records.append(record)
    try:
        yield record
    finally:
        _records[:] = [other for other in _records if other is not record]


def need(kernel: Hashable) -> None:
    """Record that a kernel is about to run. It may have to be compiled first."""
    for record in _records:
        record.needed.add(kernel)


class Compilation:
    """The context of code that compiles a kernel, unless a cache has it. The code must call `begin` before it compiles.

    `name` names the kernel in messages. `line` is the short line for a terminal, which a process shows once.
    """

    def __init__(self, name: str, line: str) -> None:
        self.name, self._line = name, line
        self._began: float | None = None

    def begin(self) -> None:
        self._began = monotonic()
        LOGGER.info("compiling %s", self.name)
        if self._line not in _shown and not LOGGER.hasHandlers() and LOGGER.level <= logging.INFO:
            _shown.add(self._line)
            print_to_terminal(f"onepass: {self._line} …\n")

    def __enter__(self) -> Compilation:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._began is None:
            return
        seconds = monotonic() - self._began
        if kind is not None:
            LOGGER.info("compiling %s failed after %.1f s", self.name, seconds)
            return
        LOGGER.info("compiled %s in %.1f s", self.name, seconds)
        for record in _records:
            record.compiled.append((self.name, seconds))


def print_to_terminal(text: str) -> None:
    """Print to stderr, but only if stderr is a terminal, so that logs stay free of progress messages."""
    with suppress(AttributeError, OSError, ValueError):  # stderr may be missing or closed
        if sys.stderr.isatty():
            print(text, end="", file=sys.stderr, flush=True)
