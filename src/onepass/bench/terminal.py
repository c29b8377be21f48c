"""A progress bar and tables for the terminal, as plain text."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")


def progress(items: Iterable[T], total: int, label: Callable[[T], str], log: bool = False) -> Iterator[T]:
    """Yield the items and show a progress bar. If stderr is no terminal, print a line per item with `log`, else nothing."""
    live = sys.stderr.isatty()
    for done, item in enumerate(items, 1):
        if live:
            bar = "█" * (20 * done // total)
            print(f"\r\033[K{bar:░<20} {done}/{total} {label(item)}", end="", file=sys.stderr, flush=True)
        elif log:
            print(f"{done}/{total} {label(item)}", file=sys.stderr, flush=True)
        yield item
    if live:
        print("\r\033[K", end="", file=sys.stderr, flush=True)


def table(rows: list[list[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows]
    return "\n".join([lines[0], "─" * len(lines[0]), *lines[1:]])
