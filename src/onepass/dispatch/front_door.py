"""Opens the front door: the autograd function and the launchers in C++ (backends/front_door.py).

The first norm of a process looks for the compiled module in the cache. If it is not there, another process compiles it, once for
each version of torch and Python. That process continues if this one ends. Until the module is loaded, Python does the same work. Both
give the same results.
"""

from __future__ import annotations

import atexit
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from typing import ClassVar

from onepass.backends.c.cache import Unavailable
from onepass.backends.compilation import LOGGER
from onepass.backends.front_door import FrontDoor

from .node import Node

VARIABLE = "ONEPASS_FRONT_DOOR"
# With `-c`, Python searches the current folder for modules first. Remove it: a file there could have the name of a module.
_COMPILE = "import sys; sys.path = list(filter(None, sys.path)); from onepass.backends.c import front_door; front_door.compile_only()"


class State:
    started = False
    reason = "no norm was computed yet"  # why Python does the work; "" once the front door is open
    # Held while a module is loaded in the background, and for good once Python ends: a thread that is inside a C++ module then aborts.
    opening: ClassVar[threading.Lock] = threading.Lock()
    listeners: ClassVar[list[Callable[[], None]]] = []  # called if the front door opens or closes later than in `start`


def start() -> None:
    """Open the front door if it is compiled. Otherwise, compile it in the background. Only the first call has an effect."""
    if State.started:
        return
    State.started = True
    if not _open(may_compile=False) and _can_compile():
        atexit.register(State.opening.acquire, timeout=10)  # a fork may inherit a lock that nobody releases
        threading.Thread(target=_compile_apart, name="onepass-front-door", daemon=True).start()


def open_now() -> str:
    """Open the front door, and compile it first if necessary. Return "", or the reason why it stays closed."""
    State.started = True
    if State.reason and _open(may_compile=True):
        _tell()
    return State.reason


def close() -> None:
    """Close the front door: Python does the work from now on. For tests and comparisons."""
    State.started, State.reason = True, "it was closed"
    Node.apply, FrontDoor.launcher, FrontDoor.trained, FrontDoor.remember, FrontDoor.memory = Node.in_python, None, None, None, None
    _tell()


def _tell() -> None:
    for listener in State.listeners:
        listener()


def _forbidden() -> bool:
    return os.environ.get(VARIABLE) == "off"


def _can_compile() -> bool:
    """Return whether another process should try to compile. Starting one takes seconds, so look for a compiler first."""
    if _forbidden():
        return False
    from onepass.backends.c import front_door  # imported here, so that `import onepass` does not load the code that compiles

    try:
        front_door.check_compilable()
    except Unavailable as reason:
        State.reason = str(reason)
        return False
    return True


def _open(may_compile: bool) -> bool:
    """Try to open the front door. Return whether it is open now. If not, `State.reason` says why."""
    if _forbidden():
        State.reason = f"{VARIABLE}=off"
        return False
    from onepass.backends.c import front_door

    try:
        module = front_door.load(may_compile)
        FrontDoor.launcher, FrontDoor.remember, FrontDoor.memory = module.launcher, module.remember, module.memory
        FrontDoor.trained, Node.apply = module.trained, module.apply
        State.reason = ""
    except Exception as error:  # such as a library that does not fit this torch: Python can still do the work
        State.reason = str(error) if isinstance(error, Unavailable) else f"{type(error).__name__}: {error}"
    return not State.reason


def _compile_apart() -> None:
    """Compile in another process, and then open the front door."""
    if not os.path.basename(sys.executable or "").startswith("python"):
        State.reason = f"{sys.executable!r} is not Python, so no process was started to compile it: call onepass.precompile"
        return
    LOGGER.info("compiling the C++ front door in the background; until then small norms take more host time")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}
    nothing, command = subprocess.DEVNULL, [sys.executable, "-c", _COMPILE]
    try:
        with tempfile.TemporaryFile() as told:  # not a pipe: it would break if this process ended first
            subprocess.run(command, stdin=nothing, stdout=nothing, stderr=told, env=environment, start_new_session=True, check=False)
            told.seek(0)
            lines = told.read().decode(errors="replace").split("\n")
    except OSError as error:
        State.reason = str(error)
        return
    with State.opening:
        if State.reason and _open(may_compile=False):
            _tell()
            LOGGER.info("compiled the C++ front door")
        elif State.reason:
            State.reason = next(filter(None, reversed(lines)), State.reason)
            LOGGER.info("the C++ front door could not be compiled: %s", State.reason)
