"""What callers may ask of the planner: `force` and `batch_invariant`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NamedTuple

from .registry import FAMILIES


class Options(NamedTuple):
    """What a caller may ask of the planner. Part of the cache key of every call."""

    family: str | None = None
    explain: bool = False
    invariant: bool = False  # see `batch_invariant`


class CannotForce(RuntimeError):
    """The family that `force` pins cannot run this problem."""


DEFAULT = Options()


options_in_context: ContextVar[Options] = ContextVar("onepass_options", default=DEFAULT)


@contextmanager
def force(family: str | None) -> Iterator[None]:
    """Run every call in this context with one family. A call raises `CannotForce` if the family cannot run it.

    Example: `with onepass.force(family="blockwise"): y = onepass.functional.layer_norm(x, (64,))`
    """
    names = [f.name for f in FAMILIES]
    if family is not None and family not in names:
        raise ValueError(f"family={family!r} is unknown; expected one of {', '.join(names)}, or None to let the planner choose")
    token = options_in_context.set(options_in_context.get()._replace(family=family))
    try:
        yield
    finally:
        options_in_context.reset(token)


class batch_invariant:
    """Make the result of a sample independent of how many samples are in the batch.

    The setting holds for the whole process; as a context manager, until the end of the block. Kernels then divide the work
    by the size of one sample, not by what fills the GPU. This holds for the forward of the GPU families, if samples have equal
    strides and alignment. It cannot hold for norms whose sets span the batch.

    Example: `onepass.batch_invariant(True)`
    """

    on = False

    def __init__(self, on: bool = True) -> None:
        self._before, batch_invariant.on = batch_invariant.on, on

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        batch_invariant.on = self._before


def current_options() -> Options:
    """The options in effect now."""
    return options_in_context.get()._replace(invariant=batch_invariant.on)
