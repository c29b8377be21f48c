"""Turns the arguments of a kernel into the types, constants and divisors that Triton's compiler takes.

Arguments may be groups (NamedTuples) of values or of groups. A leaf is a single value among them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from .descriptor import Descriptor
from .fields import CONSTANT, COUNT, POINTER, REAL, Kind, Wide, kinds

ALIGNMENT = 16  # the largest divisor of a number or address that the compiler uses. A vector load is 16 bytes wide

TYPE_NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", torch.int32: "i32"}

Path = tuple[int, ...]  # where a leaf (a single value) is: (7, 1) is field 1 of argument 7, counted from 0


class PointerLeaf(NamedTuple):
    path: Path
    name: str  # the operand: the name of the field without "_ptr"
    dtype: torch.dtype


class Signature(NamedTuple):
    """The leaves (single values) of a kernel's arguments. `numbers` are those that every launch passes after the pointers."""

    types: tuple[tuple[str, Any], ...]  # for each argument, its type or a NamedTuple of types
    constants: tuple[tuple[Path, Any], ...]
    divisors: tuple[tuple[Path, int], ...]
    pointers: tuple[PointerLeaf, ...]
    numbers: tuple[int | float, ...]


def signature_of(names: Sequence[str], arguments: Sequence[Any]) -> Signature:
    """Return the Signature of a kernel whose parameters have these names.

    An argument is a NamedTuple, a dtype (which stands for a pointer), None (no such pointer), a float, an int, or a
    Descriptor.
    """
    leaves = _Leaves()
    types = tuple((name, leaves.argument(name, value, (at,))) for at, (name, value) in enumerate(zip(names, arguments, strict=True)))
    return Signature(types, tuple(leaves.constants), tuple(leaves.divisors), tuple(leaves.pointers), tuple(leaves.numbers))


class _Leaves:
    def __init__(self) -> None:
        self.constants: list[tuple[Path, Any]] = []
        self.divisors: list[tuple[Path, int]] = []
        self.pointers: list[PointerLeaf] = []
        self.numbers: list[int | float] = []

    def argument(self, name: str, value: Any, path: Path) -> Any:
        if isinstance(value, Descriptor):
            return value.type_name
        if isinstance(value, tuple):
            return self.group(value, path)
        return self.leaf(name, REAL if isinstance(value, float) else COUNT if isinstance(value, int) else POINTER, value, path)

    def group(self, value: Any, path: Path) -> Any:
        fields = zip(value._fields, kinds(type(value)), value)
        return type(value)(*(self.field(name, kind, leaf, (*path, at)) for at, (name, kind, leaf) in enumerate(fields)))

    def field(self, name: str, kind: Any, value: Any, path: Path) -> Any:
        return self.leaf(name, kind, value, path) if isinstance(kind, Kind) else self.group(value, path)

    def leaf(self, name: str, kind: Kind, value: Any, path: Path) -> str:
        if kind == CONSTANT or value is None or (kind.zero_or_one and value in (0, 1)):
            self.constants.append((path, value))
            return "constexpr"
        if kind.pointer:
            self.pointers.append(PointerLeaf(path, name.removesuffix("_ptr"), value))
            return f"*{TYPE_NAMES[value]}"
        self.numbers.append(value)
        if kind.real:
            return "fp32"
        divisor = min(value & -value, ALIGNMENT) if kind.divisor else 1
        self.divisors += [(path, divisor)] if divisor > 1 else []
        return "i64" if isinstance(value, Wide) or value >= 2**31 else "i32"


def runtime_types(types: Any) -> list[str]:
    """Return the types of the values that a launch passes, in order: all leaves but the constants."""
    if isinstance(types, str):
        return [] if types == "constexpr" else [types]
    return [leaf for inner in types for leaf in runtime_types(inner)]


def filled(arguments: Sequence[Any], operands: Mapping[str, Any], names: Sequence[str]) -> list[Any]:
    """Return the arguments with a tensor of `operands` in place of each dtype, as Triton's interpreter takes them."""
    return [_filled(name, value, operands) for name, value in zip(names, arguments)]


def _filled(name: str, value: Any, operands: Mapping[str, Any]) -> Any:
    if isinstance(value, torch.dtype):
        return operands[name.removesuffix("_ptr")]
    if isinstance(value, tuple):
        return type(value)(*filled(value, operands, value._fields))  # pyright: ignore[reportAttributeAccessIssue]
    return value
