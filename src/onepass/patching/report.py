"""What `patch` did, or would do: one row for each norm, counts, and a table."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

REPLACED, FUSED, LEFT, ALREADY = "replaced", "fused", "left", "already"


class Row(NamedTuple):
    """A norm of the model."""

    name: str  # its path
    cls: str  # its class
    action: str  # replaced, fused, left, or already: an earlier patch has it
    became: str  # the class of onepass.nn it computes as; "" where it was left alone
    why: str  # what it was fused with, why it was not, or why it was left alone


@dataclass
class Report:
    """Every norm of a model and what became of it. As a context manager it undoes, at its end, what the call that made it did.

    Example: `print(onepass.patch(model, dry_run=True))`
    """

    rows: list[Row]
    notes: list[str] = field(default_factory=list)
    dry_run: bool = False
    _undo: Callable[[], None] = field(default=lambda: None, repr=False)

    @property
    def counts(self) -> dict[str, int]:
        """How many norms were found, replaced (fused ones among them), fused with a neighbour, left alone, or patched before."""
        times = Counter(row.action for row in self.rows)
        replaced = times[REPLACED] + times[FUSED]
        return {"found": len(self.rows), "replaced": replaced, "fused": times[FUSED], "left": times[LEFT], "already": times[ALREADY]}

    def __enter__(self) -> Report:
        return self

    def __exit__(self, *_: object) -> None:
        self._undo()

    def __str__(self) -> str:
        """A line for all norms of which the same is to be said, the numbers in their paths drawn together."""
        alike: dict[tuple[str, ...], list[Row]] = {}
        for row in self.rows:
            alike.setdefault((re.sub(r"\d+", "#", row.name), *row[1:]), []).append(row)
        lines = [("norm", "", "class", "")]
        for rows in alike.values():
            times = f"×{len(rows)}" if len(rows) > 1 else ""
            lines.append((_together([row.name for row in rows]), times, rows[0].cls, _said(rows[0])))
        width = [max(len(line[column]) for line in lines) for column in range(3)]
        table = [f"{name:{width[0]}}  {times:{width[1]}}  {cls:{width[2]}}  {said}".rstrip() for name, times, cls, said in lines]
        return "\n".join([*table, *self.notes, self._summary()])

    def _summary(self) -> str:
        found, replaced, fused, left, already = self.counts.values()
        would = " would be" if self.dry_run else ""
        before = f", {already} patched before" if already else ""
        return f"{counted(found, 'norm')}:{would} {replaced} replaced, {fused} of them fused; {left} left alone{before}"


def counted(number: int, what: str) -> str:
    return f"{number} {what}" + "s" * (number != 1)


def _said(row: Row) -> str:
    if row.action == REPLACED:
        return f"replaced by {row.became}" + (f", not fused with {row.why}" if row.why else "")
    return {FUSED: f"{row.became}, fused with {row.why}", LEFT: f"left alone: {row.why}", ALREADY: "patched before"}[row.action]


def _together(names: list[str]) -> str:
    """One path for several: "down.{0-3}.norm"."""
    parts = zip(*(re.split(r"(\d+)", name) for name in names))
    return "".join(part[0] if len(set(part)) == 1 else _numbers(sorted({int(number) for number in part})) for part in parts)


def _numbers(numbers: list[int]) -> str:
    whole = numbers == list(range(numbers[0], numbers[-1] + 1))
    return f"{{{numbers[0]}-{numbers[-1]}}}" if whole else "{" + ",".join(map(str, numbers)) + "}"
