"""The report that `patch` returns: one row for each norm, counts, and a table to print."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

REPLACED, FUSED, LEFT, ALREADY = "replaced", "fused", "left", "already"
NO_NORMS = (
    "No module of this model is a norm. Calls of functions, such as F.layer_norm(x, shape), are not replaced: use onepass.functional."
)


class Row(NamedTuple):
    """One norm of the model, and what `patch` did with it."""

    name: str  # the path of the norm in the model, such as "down.0.norm"
    cls: str  # the name of its original class
    action: str  # "replaced", "fused", "left" (unchanged), or "already" (patched by an earlier call)
    became: str  # the name of the class of onepass.nn that now computes the norm; "" if it was left unchanged
    why: str  # what the norm was fused with, why it was not fused, or why it was left unchanged


@dataclass
class Report:
    """The result of `patch`: every norm of a model, and what happened to it. At the end of a `with` block, it undoes `patch`.

    Example: `print(onepass.patch(model, dry_run=True))`
    """

    rows: list[Row]
    notes: list[str] = field(default_factory=list)
    dry_run: bool = False
    _undo: Callable[[], None] = field(default=lambda: None, repr=False)

    @property
    def counts(self) -> dict[str, int]:
        """The numbers of norms: "found", "replaced" (fused or not), "fused", "left" (unchanged), "already" (patched before)."""
        times = Counter(row.action for row in self.rows)
        replaced = times[REPLACED] + times[FUSED]
        return {"found": len(self.rows), "replaced": replaced, "fused": times[FUSED], "left": times[LEFT], "already": times[ALREADY]}

    def __enter__(self) -> Report:
        return self

    def __exit__(self, *_: object) -> None:
        self._undo()

    def __str__(self) -> str:
        """Return the report as a table. Norms such as "down.0.norm" and "down.1.norm" share a line if otherwise alike."""
        if not self.rows:
            return "\n".join([NO_NORMS, *self.notes, self._summary()])
        alike: dict[tuple[str, ...], list[Row]] = {}
        for row in self.rows:
            alike.setdefault((re.sub(r"\d+", "#", row.name), *row[1:]), []).append(row)
        lines = [("norm", "", "class", "")]
        for rows in alike.values():
            times = f"×{len(rows)}" if len(rows) > 1 else ""
            lines.append((_merge_paths([row.name for row in rows]), times, rows[0].cls, _describe(rows[0])))
        width = [max(len(line[column]) for line in lines) for column in range(3)]
        table = [f"{name:{width[0]}}  {times:{width[1]}}  {cls:{width[2]}}  {text}".rstrip() for name, times, cls, text in lines]
        return "\n".join([*table, *self.notes, self._summary()])

    def _summary(self) -> str:
        found, replaced, fused, left, already = self.counts.values()
        would_be = " would be" if self.dry_run else ""
        earlier = f", {already} already patched" if already else ""
        return f"{counted(found, 'norm')}: {replaced}{would_be} replaced, {fused} of them fused; {left} left alone{earlier}"


def counted(number: int, noun: str) -> str:
    """Return a number with its noun: "1 norm", "2 norms"."""
    return f"{number} {noun}" + "s" * (number != 1)


def _describe(row: Row) -> str:
    if row.action == REPLACED:
        return f"replaced by {row.became}" + (f", not fused with {row.why}" if row.why else "")
    return {FUSED: f"{row.became}, fused with {row.why}", LEFT: f"left alone: {row.why}", ALREADY: "already patched"}[row.action]


def _merge_paths(names: list[str]) -> str:
    """Merge paths that differ only in numbers into one, such as "down.{0-3}.norm"."""
    parts = zip(*(re.split(r"(\d+)", name) for name in names))
    return "".join(part[0] if len(set(part)) == 1 else _merge_numbers(sorted({int(number) for number in part})) for part in parts)


def _merge_numbers(numbers: list[int]) -> str:
    """Return "{0-3}" for consecutive numbers, and a list such as "{0,2}" for others."""
    is_range = numbers == list(range(numbers[0], numbers[-1] + 1))
    return f"{{{numbers[0]}-{numbers[-1]}}}" if is_range else "{" + ",".join(map(str, numbers)) + "}"
