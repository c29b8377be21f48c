"""How each field of a kernel's arguments is compiled.

A kernel takes NamedTuples. The annotation of a field says what the compiler learns about its value. Every value that is
compiled in is one more reason to compile again for another shape. A field with a plain type (int, bool, str, float) is
a constant.
"""

from __future__ import annotations

from functools import cache
from typing import Annotated, Any, NamedTuple, get_type_hints


class Kind(NamedTuple):
    """What the compiler learns about a field."""

    pointer: bool = False
    real: bool = False  # a 32-bit floating-point number
    constant: bool = False  # compiled in by value
    zero_or_one: bool = False  # compiled in by value if it is 0 or 1
    divisor: bool = False  # compiled in: the largest power of two, up to 16, that divides it


CONSTANT = Kind(constant=True)
POINTER = Kind(pointer=True)
REAL = Kind(real=True)
COUNT = Kind()

Pointer = Annotated[Any, POINTER]  # None for a missing operand, which is compiled in
Real = Annotated[float, REAL]
Count = Annotated[int, COUNT]
Length = Annotated[int, Kind(divisor=True)]  # the divisor decides how wide loads are
Index = Annotated[int, Kind(zero_or_one=True)]  # most index arithmetic disappears for 0 and 1
Stride = Annotated[int, Kind(zero_or_one=True, divisor=True)]


class Wide(int):
    """A number that the kernel takes in 64 bits, because its products need them."""


@cache
def kinds(group: Any) -> tuple[Kind | type, ...]:
    """The kind of each field, or the NamedTuple class of a nested group."""
    hints = get_type_hints(group, include_extras=True)
    found = tuple(_kind(hints[name]) for name in group._fields)
    if len({isinstance(kind, Kind) for kind in found}) > 1:
        raise TypeError(f"{group.__name__} mixes values and groups: in a loop, Triton 3.6 loses the constants of such a tuple")
    return found


def _kind(hint: Any) -> Kind | type:
    if hasattr(hint, "_fields"):
        return hint
    return hint.__metadata__[0] if hasattr(hint, "__metadata__") else CONSTANT
