"""The options of the planner, and the functions that set them: `force` and `batch_invariant`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NamedTuple

from .registry import FAMILIES


class Options(NamedTuple):
    """The options of the planner. They are part of the key under which the launchers of a call are cached."""

    family: str | None = None
    explain: bool = False
    invariant: bool = False  # see `batch_invariant`


class CannotForce(RuntimeError):
    """Raised if the family that `force` has set cannot run a problem."""


DEFAULT = Options()


options_in_context: ContextVar[Options] = ContextVar("onepass_options", default=DEFAULT)


@contextmanager
def force(family: str | None) -> Iterator[None]:
    """Run every call in this context with one family, or with the planner's choice if `family` is None.

    A call that the family cannot run raises `CannotForce`.

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

    `batch_invariant(True)` holds for the whole process, and `with batch_invariant():` until the end of the block. GPU kernels
    then divide their work according to the size of one sample, whether or not that fills the GPU. Only the forward of the GPU
    families has this property, and only if all samples have equal strides and alignment. Norms with statistics over the whole
    batch, such as BatchNorm in training, cannot have it.

    Example: `onepass.batch_invariant(True)`
    """

    on = False

    def __init__(self, on: bool = True) -> None:
        if not isinstance(on, bool):
            raise TypeError(f"batch_invariant(): argument 'on' must be bool, not {type(on).__name__}; got on={on!r}: pass True or False")
        self._before, batch_invariant.on = batch_invariant.on, on

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        batch_invariant.on = self._before


def current_options() -> Options:
    """Return the options in effect now."""
    return options_in_context.get()._replace(invariant=batch_invariant.on)
