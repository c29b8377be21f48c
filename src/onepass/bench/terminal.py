"""Tables and progress: by rich, if it is installed and a terminal shows them, and otherwise as plain text."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from typing import TextIO, TypeVar

T = TypeVar("T")
AddRow = Callable[[Sequence[str]], None]


def progress(items: Iterable[T], total: int, label: Callable[[T], str], log: bool = False) -> Iterator[T]:
    """Yield the items and show a progress bar. As plain text, print ten lines in all, or with `log` a line per item.

    Example: `for row in progress(rows, len(rows), lambda row: row.name): measure(row)`
    """
    if _rich(sys.stderr):
        yield from _bar(items, total, label)
        return
    step = 1 if log else max(1, total // 10)
    for done, item in enumerate(items, 1):
        if done % step == 0:
            print(f"{done}/{total} {label(item)}", file=sys.stderr, flush=True)
        yield item


def print_table(rows: Sequence[Sequence[str]]) -> None:
    """Print a table. Its first row is the head."""
    with growing_table(rows[0], _widths(rows)) as add:
        for row in rows[1:]:
            add(row)


@contextmanager
def growing_table(head: Sequence[str], widths: Sequence[int]) -> Iterator[AddRow]:
    """Print a table row by row, as its rows are measured. Plain text uses the widths of the columns.

    Example: `with growing_table(["norm", "ms"], [12, 6]) as add: add(["layer_norm", "0.31"])`
    """
    if not _rich(sys.stdout):
        lines = table([head], widths).split("\n")
        print("\n".join(lines), flush=True)
        yield lambda row: print(_line(row, widths), flush=True)
        return
    from rich import box
    from rich.live import Live
    from rich.table import Table
    from rich.text import Text

    drawn = Table(*head, box=box.SIMPLE_HEAD, pad_edge=False)
    with Live(drawn):
        yield lambda row: drawn.add_row(*map(Text, row))


def table(rows: Sequence[Sequence[str]], widths: Sequence[int] = ()) -> str:
    """Return a table as plain text. Its first row is the head."""
    widths = widths or _widths(rows)
    head, *lines = (_line(row, widths) for row in rows)
    return "\n".join([head, "─" * len(head), *lines])


def _line(row: Sequence[str], widths: Sequence[int]) -> str:
    return "  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip()


def _widths(rows: Sequence[Sequence[str]]) -> list[int]:
    return [max(map(len, column)) for column in zip(*rows)]


def _rich(stream: TextIO) -> bool:
    return stream.isatty() and find_spec("rich") is not None


def _bar(items: Iterable[T], total: int, label: Callable[[T], str]) -> Iterator[T]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    columns = BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}", markup=False)
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=total)
        for item in items:
            bar.update(task, advance=1, description=label(item))
            yield item
