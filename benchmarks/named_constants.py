"""Reads and changes constants of the cost models by name: "SPEED.row" is SPEED["row"] of src/onepass/backends/gpu/constants.py."""

from __future__ import annotations

from typing import Any

from onepass.backends.gpu import constants


def holder(name: str) -> tuple[Any, Any]:
    """Return the dictionary that holds a constant, and its key."""
    first, *keys = name.split(".")
    found: Any = vars(constants)
    for key in (first, *keys[:-1]) if keys else ():
        found = found[_key(key)]
    return found, _key(keys[-1] if keys else first)


def _key(text: str) -> Any:
    return int(text) if text.isdigit() else text


def get(name: str) -> float:
    found, key = holder(name)
    return found[key]


def put(name: str, value: float) -> None:
    found, key = holder(name)
    found[key] = value
