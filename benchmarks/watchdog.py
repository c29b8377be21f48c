"""Ends the process if it hangs."""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable
from typing import Any

LONGEST = 60.0  # seconds that one problem may take


class Watchdog:
    """A thread that ends the process with status 3 if a problem takes too long, so that a hang does not hold the GPU.

    `begin` starts the time of a problem. `end` stops the thread. `say` prints a message, and `leave` ends the process.
    """

    def __init__(self, say: Callable[[str], None], longest: float = LONGEST, leave: Callable[[int], Any] = os._exit) -> None:
        self.say, self.longest, self.leave = say, longest, leave
        self.name, self.deadline = "", math.inf
        threading.Thread(target=self._watch, daemon=True).start()

    def begin(self, name: str) -> None:
        self.name, self.deadline = name, time.monotonic() + self.longest

    def end(self) -> None:
        self.deadline = None

    def _watch(self) -> None:
        while (deadline := self.deadline) is not None:
            if time.monotonic() > deadline:
                self.say(f"HANGS: not finished after {self.longest:g} s: {self.name}")
                return self.leave(3)
            time.sleep(min(1.0, self.longest / 10))
