"""Launchers in C++, which need little host time. They exist only while the front door is open.

The front door is a Python module in C++. backends/c/front_door.py compiles and loads it. dispatch/front_door.py decides when, and
opens it: it sets the attributes of `FrontDoor`. While the front door is closed, Python does the same work.

`launcher` in this file describes a launch to the C++ code (backends/c/src/front_door/launcher.h). In each call a launcher checks its
inputs, allocates its outputs, and runs its steps. It handles only the usual case. It hands all other calls to `careful`, a Python
function that computes the same. A call is unusual if

- a tensor is on another device, has another layout, or has no memory,
- an address is not aligned, or
- a C kernel cannot allocate memory. Then `careful` tries again, and raises MemoryError if that fails, too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from onepass.core.memory import LOWEST

Launcher = Callable[..., Any]


class FrontDoor:
    """The functions of the module in C++. They are None while the front door is closed."""

    launcher: Callable[[dict[str, Any]], Launcher] | None = None
    memory: Any = None  # a function that returns a new, empty list of backwards (c/src/front_door/remembered.h)
    remember: Callable[..., None] | None = None  # adds a backward to such a list
    trained: Callable[[dict[str, Any]], Callable[..., Any]] | None = None  # returns a norm with gradients (c/src/front_door/trained.h)


class New(NamedTuple):
    """An output. Each call allocates it anew."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


class Layout(NamedTuple):
    """The strides, shape and dtype that an input must have. None allows any. With `contiguous`, it must be contiguous."""

    stride: tuple[int, ...] | None = None
    shape: tuple[int, ...] | None = None
    dtype: torch.dtype | None = None
    contiguous: bool = False


@dataclass(frozen=True)
class At:
    """The address of a tensor, plus an offset in bytes."""

    tensor: str
    offset: int = 0


class Stream:
    """Stands for the current stream in the arguments of a step."""


@dataclass(frozen=True)
class Descriptor:
    """Stands for `function(input)` in the arguments of a step."""

    input: str
    function: Callable[..., Any]


class CStep(NamedTuple):
    """A call of a C kernel. The struct CStep in c_step.h has the same fields."""

    kind: int  # 0: onepass_forward, 1: onepass_track, 2: onepass_backward
    function: int  # its address
    problem: bytes  # a packed struct Problem (c/src/problem.h)
    tensors: Sequence[At | None]  # one for each field of struct Tensors; None: a null pointer
    threads: Callable[[], int] | None  # returns the number of threads; None: one thread
    copies: Sequence[tuple[At | None, At]] = ()  # (source, target), copied before the call; if source is None, zeros are written
    copied_bytes: int = 0  # the size of each copy
    running: tuple[At | None, At | None] = (None, None)  # running_mean and running_var, only for onepass_track
    momentum: int = -1  # the index of the momentum among the arguments, only for onepass_track


class ByNeeds:
    """A backward, called with tensors and `needs`, which says which gradients are needed. It prepares a launcher for each `needs`.

    `prepare(*tensors, needs)` returns a launcher that takes the tensors. The last tensor may be None in some calls only.
    """

    def __init__(self, prepare: Callable[..., Launcher]) -> None:
        self._prepare, self._made = prepare, dict[tuple[Any, bool], Launcher]()

    def __call__(self, *arguments: Any) -> Any:
        return self.launcher(*arguments)(*arguments[:-1])

    def launcher(self, *arguments: Any) -> Launcher:
        """Return the launcher for these arguments."""
        key = arguments[-1], arguments[-2] is None
        found = self._made.get(key)
        if found is None:
            found = self._made[key] = self._prepare(*arguments)
        return found


def launcher(
    careful: Launcher,
    device: int,
    arguments: Sequence[str],
    inputs: Mapping[str, Layout],
    outputs: Mapping[str, New],
    allocate: Callable[..., Any],
    returned: str | Sequence[str | None],
    *,
    steps: Sequence[tuple[Callable[..., Any], Sequence[Any]]] = (),
    c_step: CStep | None = None,
    alignment: int = 1,
    stream_of: Callable[[int], int] | None = None,
    counters_of: Callable[[int, int], Any] | None = None,
    changed: Sequence[str] = (),
) -> Launcher | None:
    """Return a function that takes the `arguments` and returns the outputs in `returned`, or None if the front door is closed.

    `device` is the number of a GPU, or -1 for the CPU. `allocate` returns a new tensor. The C++ code takes new tensors from the same
    allocator, and calls `allocate` itself in torch's deterministic mode, in which new memory is filled. `changed` names the arguments
    that the kernels change in place.

    Each of the `steps` is a Python function that launches a GPU kernel, and its arguments. At, Stream and Descriptor among the
    arguments, also inside tuples, stand for values that differ in each call. `At("counters")` is the address of the tensor that
    `counters_of(device, stream)` returns.
    """
    if FrontDoor.launcher is None:
        return None
    numbers = {name: number for number, name in enumerate((*inputs, *outputs, "counters"))}
    made = list(outputs)
    description: dict[str, Any] = {
        "careful": careful,
        "device": device,
        "number": len(arguments),
        "lowest": LOWEST,
        "alignment": alignment,
        "inputs": tuple((arguments.index(name), like.contiguous, *like[:3]) for name, like in inputs.items()),
        "allocate": allocate,
        "outputs": tuple(tuple(new) for new in outputs.values()),
        "stream_of": stream_of,
        "counters_of": counters_of,
        "steps": tuple((function, tuple(_argument(value, numbers) for value in values)) for function, values in steps),
        "c": None if c_step is None else _c_step(c_step, numbers),
        "changed": [arguments.index(name) for name in changed],
        "returned": made.index(returned) if isinstance(returned, str) else tuple(-1 if n is None else made.index(n) for n in returned),
    }
    return FrontDoor.launcher(description)


def _argument(value: Any, numbers: Mapping[str, int]) -> tuple[int, Any]:
    """Return (kind, value) of an argument. The kinds are those of `Argument::Kind` in launcher.h."""
    if isinstance(value, At):
        return 1, _at(value, numbers)
    if value is Stream:
        return 2, None
    if isinstance(value, Descriptor):
        return 3, (numbers[value.input], value.function)
    if type(value) is tuple and any(isinstance(part, (At, Descriptor, tuple)) or part is Stream for part in value):
        return 4, tuple(_argument(part, numbers) for part in value)
    return 0, value


def _c_step(step: CStep, numbers: Mapping[str, int]) -> dict[str, Any]:
    return step._asdict() | {
        "tensors": tuple(_at(at, numbers) for at in step.tensors),
        "copies": tuple((_at(source, numbers), _at(target, numbers)) for source, target in step.copies),
        "running": tuple(_at(at, numbers) for at in step.running),
    }


def _at(at: At | None, numbers: Mapping[str, int]) -> tuple[int, int]:
    return (-1, 0) if at is None else (numbers[at.tensor], at.offset)
