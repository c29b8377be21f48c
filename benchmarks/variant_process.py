"""Runs a Variant of model_variant.py in a process of its own, and asks it for results."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from contextlib import suppress
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, ClassVar

from .model_variant import Variant
from .model_zoo import ENTRIES, Entry
from .shared_memory import SharedMemory

PATIENCE = 60  # seconds that one measurement may take
_processes = get_context("spawn")  # a fork of a process that has used CUDA may hang


class Failed(Exception):
    """Raised if a variant has no answer: its process raised, was too late or ended. The message is the reason."""


class VariantProcess:
    """A Variant of model_variant.py in a process of its own. The output of the process goes to a file."""

    def __init__(self, args: argparse.Namespace, entry: Entry, patched: bool, folder: Path, memory: SharedMemory) -> None:
        self._answers, theirs = _processes.Pipe()
        log = folder / f"{entry.name}-{'after' if patched else 'before'}.log"
        about = entry.name, patched, args.small, args.device, args.backend, memory
        self._process = _processes.Process(target=_serve, args=(theirs, log, *about))
        self._process.start()
        theirs.close()
        self._dead = ""

    def ask(self, method: str, *args: Any) -> None:
        if not self._dead:
            with suppress(OSError):  # `answer` then reports that the process has ended
                self._answers.send((method, args))

    def answer(self, end: float) -> Any:
        """Return the answer to `ask`, and wait for it until `end`.

        If the process is late or has ended, end it and raise Failed, also in all later calls.
        """
        if self._dead:
            raise Failed(self._dead)
        try:
            if not self._answers.poll(max(0.1, end - time.monotonic())):
                self.end("timed out")
                raise Failed(self._dead)
            error, value = self._answers.recv()
        except (EOFError, OSError):
            self._process.join(5)
            self.end(f"its process ended with exit code {self._process.exitcode}")
            raise Failed(self._dead) from None
        if error:
            raise Failed(error)
        return value

    def call(self, method: str, *args: Any) -> Any:
        self.ask(method, *args)
        return self.answer(time.monotonic() + PATIENCE)

    def end(self, why: str = "ended") -> None:
        """End the process and its children, the workers that inductor starts."""
        self._dead = self._dead or why
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid or 0, signal.SIGKILL)
        self._process.kill()
        self._process.join()


class BeforeInOneProcess:
    """The model before `patch`. Its steps are timed and profiled in the process of the patched model.

    Two processes differ by some percent if the host limits a step, because their memory and threads lie elsewhere. So the ratio of SDXL,
    compiled, was 0.88 with a 95 % interval from 0.75 to 0.97 in two processes, and 1.015 from 1.005 to 1.029 in one (H200, 2026-11-17).
    """

    _METHODS: ClassVar = {"seconds": "plain_seconds", "gpu": "plain_gpu"}

    def __init__(self, before: VariantProcess, after: VariantProcess) -> None:
        self._before, self._after = before, after

    def call(self, method: str, *args: Any) -> Any:
        return self._after.call(self._METHODS[method], *args) if method in self._METHODS else self._before.call(method, *args)


def _serve(asked: Connection, log: Path, name: str, patched: bool, *args: Any) -> None:
    os.setsid()
    with log.open("w") as out:
        os.dup2(out.fileno(), 1)
        os.dup2(out.fileno(), 2)
    entry = next(entry for entry in ENTRIES if entry.name == name)
    variant: Variant | None = None
    while True:
        try:
            method, arguments = asked.recv()
        except EOFError:
            return
        try:
            variant = variant or Variant(entry, patched, *args)
            asked.send(("", getattr(variant, method)(*arguments)))
        except Exception as error:
            sys.excepthook(type(error), error, error.__traceback__)
            asked.send((f"{type(error).__name__}: {next(iter(str(error).strip().splitlines()), '')[:300]}", None))
