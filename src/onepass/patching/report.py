"""What `patch` did, or would do: one row for each norm, counts, and a table."""

from __future__ import annotations

import re
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
        actions = [row.action for row in self.rows]
        replaced = actions.count(REPLACED) + actions.count(FUSED)
        return {"found": len(actions), "replaced": replaced, "fused": actions.count(FUSED), "left": actions.count(LEFT), "already": actions.count(ALREADY)}

    def __enter__(self) -> Report:
        return self

    def __exit__(self, *_: object) -> None:
        self._undo()

    def __str__(self) -> str:
        """A line for all norms of which the same is to be said, the numbers in their paths as a range or list."""
        lines: dict[tuple[str, ...], list[str]] = {}
        for row in self.rows:
            lines.setdefault((re.sub(r"\d+", "#", row.name), row.cls, row.action, row.became, row.why), []).append(row.name)
        table = [("norm", "", "class", "", "")]
        for (_, cls, action, became, why), names in lines.items():
            said = {REPLACED: f"replaced by {became}", FUSED: f"{became}, fused with {why}", LEFT: f"left alone: {why}", ALREADY: "patched before"}[action]
            table.append((_together(names), f"×{len(names)}" if len(names) > 1 else "", cls, "→" if action in (REPLACED, FUSED) else "", said + _aside(action, why)))
        widths = [max(len(row[i]) for row in table) for i in range(3)]
        text = [f"{row[0]:{widths[0]}}  {row[1]:{widths[1]}}  {row[2]:{widths[2]}}  {row[4]}".rstrip() for row in table]
        counts = self.counts
        would = "would be " if self.dry_run else ""
        summary = f"{counts['found']} norms: {counts['replaced']} {would}replaced, {counts['fused']} of them fused; {counts['left']} left alone"
        if counts[ALREADY]:
            summary += f", {counts[ALREADY]} patched before"
        return "\n".join([*text, *self.notes, summary])


def _aside(action: str, why: str) -> str:
    return f" (not fused: {why})" if action == REPLACED and why else ""


def _together(names: list[str]) -> str:
    """One path for several: "down.{0-3}.norm"."""
    parts = zip(*(re.split(r"(\d+)", name) for name in names))
    return "".join(part[0] if len(set(part)) == 1 else _numbers(sorted({int(number) for number in part})) for part in parts)


def _numbers(numbers: list[int]) -> str:
    whole = numbers == list(range(numbers[0], numbers[-1] + 1))
    return f"{{{numbers[0]}-{numbers[-1]}}}" if whole else "{" + ",".join(map(str, numbers)) + "}"
