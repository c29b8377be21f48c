"""Check arguments that are plain Python values: numbers, flags and shapes."""

from __future__ import annotations

import operator
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor


def require_tensor(input: Any) -> None:
    if isinstance(input, Tensor):
        return
    shape = getattr(input, "shape", None)  # an array shows its shape, not its elements
    got = f"got {input!r:.80}" if shape is None else f"got an array of shape {list(shape)}"
    fix = "pass a tensor: did a function or module before it return nothing?" if input is None else "convert it with torch.as_tensor(input)"
    raise TypeError(f"input must be Tensor, not {type(input).__name__}; {got}: {fix}")


def require_bool(function: str, name: str, position: int, value: Any) -> None:
    if not isinstance(value, (bool, torch.SymBool)):
        raise TypeError(
            f"{function}(): argument '{name}' (position {position}) must be bool, not {type(value).__name__}; got {name}={value!r}"
        )


def as_int(name: str, value: Any, place: str = "") -> int:
    """Return the value as an int. A bool raises TypeError, as in torch. `place` replaces "argument 'name'" in the message."""
    try:
        if type(value) is not bool:
            return operator.index(value)
    except TypeError:
        pass
    raise TypeError(f"{place or f'argument {name!r}'} must be int, not {type(value).__name__}; got {name}={value!r}")


def as_float(function: str, name: str, position: int, value: Any) -> float:
    """Return the value as a float. A Fraction raises TypeError, as in torch."""
    if isinstance(value, (float, int, torch.SymFloat)):
        return value  # pyright: ignore[reportReturnType], a SymFloat stays symbolic
    scalar = isinstance(value, Tensor) and value.numel() == 1 and not value.is_complex()
    if scalar or type(value).__module__ == "numpy":
        with suppress(TypeError, ValueError):
            return float(value)
    raise TypeError(
        f"{function}(): argument '{name}' (position {position}) must be float, not {type(value).__name__}; got {name}={value!r}: pass a "
        f"number, such as {name}={0.1 if name == 'momentum' else 1e-5}"
    )


def as_momentum(function: str, position: int, value: Any) -> Any:
    """Return the momentum as a float. A tensor with one element, which cumulative averages use, is returned as it is."""
    if value is None:
        raise TypeError(
            f"{function}(): argument 'momentum' (position {position}) must be float, not NoneType; momentum=None means a cumulative "
            "average, which needs a count of batches: use the modules onepass.nn.BatchNorm1d, BatchNorm2d or BatchNorm3d"
        )
    return value if isinstance(value, Tensor) and value.numel() == 1 else as_float(function, "momentum", position, value)


def as_shape(function: str, normalized_shape: Any) -> tuple[int, ...]:
    """Return normalized_shape as a tuple of ints."""
    place = f"{function}(): argument 'normalized_shape' (position 2)"
    if isinstance(normalized_shape, (str, Tensor)):
        raise TypeError(f"{place} must be tuple of ints, not {type(normalized_shape).__name__}; got {normalized_shape!r}")
    try:
        sizes = tuple(normalized_shape)
    except TypeError:
        raise TypeError(
            f"{place} must be tuple of ints, not {type(normalized_shape).__name__}; got {normalized_shape!r}, did you mean "
            f"({normalized_shape!r},)?"
        ) from None
    for i, n in enumerate(sizes):
        if isinstance(n, bool) or not (hasattr(n, "__index__") or isinstance(n, torch.SymInt)):
            raise TypeError(f"{place} must be tuple of ints, but found element of type {type(n).__name__} at pos {i}; got {sizes}")
    return tuple([n if isinstance(n, torch.SymInt) else operator.index(n) for n in sizes])  # pyright: ignore[reportReturnType]
