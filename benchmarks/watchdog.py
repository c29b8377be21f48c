"""Ends a process that hangs."""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable
from typing import Any

LONGEST = 60.0  # seconds that a problem may take


class Watchdog:
    """Ends the process with status 3 if a problem takes too long: a hang must not hold the GPU."""

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
