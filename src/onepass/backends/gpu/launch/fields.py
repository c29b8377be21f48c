"""How each field of a kernel's arguments is compiled.

A kernel takes NamedTuples, here called groups. The annotation of a field says what the compiler learns about the value of
that field. The less it learns, the more shapes can use the same compiled kernel. A field with a plain type (int, bool,
str, float) is a constant.
"""

from __future__ import annotations

from functools import cache
from typing import Annotated, Any, NamedTuple, get_type_hints


class Kind(NamedTuple):
    """What the compiler learns about the value of a field."""

    pointer: bool = False
    real: bool = False  # a 32-bit floating-point number
    constant: bool = False  # compiled in by value
    zero_or_one: bool = False  # compiled in by value if it is 0 or 1
    divisor: bool = False  # the largest power of two, up to 16, that divides the value is compiled in


CONSTANT = Kind(constant=True)
POINTER = Kind(pointer=True)
REAL = Kind(real=True)
COUNT = Kind()

Pointer = Annotated[Any, POINTER]  # a missing operand is None, which is compiled in
Real = Annotated[Any, REAL]  # a missing number is None, which is compiled in
Count = Annotated[int, COUNT]
Length = Annotated[int, Kind(divisor=True)]  # the divisor decides how wide loads are
Index = Annotated[int, Kind(zero_or_one=True)]  # if it is 0 or 1, most arithmetic with it is compiled away
Stride = Annotated[int, Kind(zero_or_one=True, divisor=True)]


class Wide(int):
    """An int that a kernel takes in 64 bits, because products with it need more than 32."""


@cache
def kinds(group: Any) -> tuple[Kind | type, ...]:
    """Return the Kind of each field of a group. For a field that is itself a group, return its class instead."""
    hints = get_type_hints(group, include_extras=True)
    found = tuple(_kind(hints[name]) for name in group._fields)
    if len({isinstance(kind, Kind) for kind in found}) > 1:
        raise TypeError(f"{group.__name__} mixes values and groups: in a loop, Triton 3.6 loses the constants of such a tuple")
    return found


def _kind(hint: Any) -> Kind | type:
    if hasattr(hint, "_fields"):
        return hint
    return hint.__metadata__[0] if hasattr(hint, "__metadata__") else CONSTANT
