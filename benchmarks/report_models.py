"""Makes the table of whole models in README.md from the records of `benchmarks.models`.

A variant of a model is before or after `onepass.patch`, eager or compiled. Every model needs a record of every variant.
"""

from __future__ import annotations

from collections.abc import Sequence

from onepass.bench.record import Record

from .model_variant import COMPILE, EAGER
from .model_zoo import ENTRIES, Entry
from .models import PROVIDERS
from .report_suite import all_of, between

BEGIN, END = "<!-- models:begin -->", "<!-- models:end -->"
VARIANTS = [name for names in PROVIDERS.values() for name in names]
HEAD = ["one step, bfloat16", "eager: before", "after", "", "torch.compile: before", "after", "", "peak GB: before, after; compiled"]


def updated(text: str, records: Sequence[Record], entries: Sequence[Entry] = ENTRIES) -> str:
    """Return `text` with a new table between its marks."""
    return between(text, BEGIN, END, table(records, entries))


def table(records: Sequence[Record], entries: Sequence[Entry] = ENTRIES) -> str:
    """Return the table in Markdown, followed by a summary and the list of failures."""
    by_key = {(record["row"], record["provider"]): record for record in records}
    missing = [f"{entry.name} {variant}" for entry in entries for variant in VARIANTS if (entry.name, variant) not in by_key]
    if missing:
        raise ValueError(f"{len(missing)} results are missing: {'; '.join(missing)}")
    used = {entry: {variant: by_key[entry.name, variant] for variant in VARIANTS} for entry in entries}
    flat = [record for found in used.values() for record in found.values()]
    if len({record["name"] for record in flat}) > 1:
        raise ValueError(f"the results are of several machines: {all_of(flat, 'name')}")
    if any(record.get("small") for record in flat):
        raise ValueError("these are results of the small models, which only tests use")
    lines = [HEAD, ["---"] * len(HEAD), *(_line(entry, found) for entry, found in used.items())]
    failed = [f"- {record['row']}, {record['provider']}: {record['error']}" for record in flat if "error" in record]
    return "\n".join([*(f"| {' | '.join(line)} |" for line in lines), "", _summary(flat, used), *([""] if failed else []), *failed])


def _summary(flat: Sequence[Record], used: dict[Entry, dict[str, Record]]) -> str:
    versions = ", ".join(f"{field} {all_of(flat, field)}" for field in ("torch", "triton", "onepass", "commit"))
    libraries = all_of([record for record in flat if "library" in record], "library")
    added = {entry.name: _added(*(found[name] for name in PROVIDERS[COMPILE])) for entry, found in used.items()}
    more = [name for name, breaks in added.items() if breaks]
    breaks = f"none in {list(added.values()).count(0)} of {len(added)} models" + (f", some in {', '.join(more)}" if more else "")
    about = f"{all_of(flat, 'name')}, {versions}, {libraries}, {all_of(flat, 'date')}"
    return f"{about}. Median milliseconds, GPU time in brackets. Graph breaks added: {breaks}."


def _added(before: Record, after: Record) -> int | None:
    """Return how many graph breaks patching adds, or None if `before` or `after` was not compiled."""
    was, now = (record.get("graph_breaks") for record in (before, after))
    return None if was is None or now is None else max(0, now - was)


def _line(entry: Entry, found: dict[str, Record]) -> list[str]:
    times = [cell for mode in (EAGER, COMPILE) for cell in _pair(*(found[name] for name in PROVIDERS[mode]))]
    memory = "; ".join(", ".join(_gigabytes(found[name]) for name in PROVIDERS[mode]) for mode in (EAGER, COMPILE))
    return [entry.title, *times, memory]


def _pair(before: Record, after: Record) -> list[str]:
    ratios = [f"{before[field] / after[field]:.2f}×" for field in ("ms", "gpu_ms") if before.get(field) and after.get(field)]
    return [_time(before), _time(after), _bracketed(ratios) if ratios else "–"]


def _time(record: Record) -> str:
    times = [record[field] for field in ("ms", "gpu_ms") if record.get(field)]
    return "failed" if "error" in record else _bracketed([f"{ms:.1f}" if ms >= 10 else f"{ms:.2f}" for ms in times])


def _bracketed(texts: Sequence[str]) -> str:
    return f"{texts[0]} ({texts[1]})" if len(texts) > 1 else texts[0]


def _gigabytes(record: Record) -> str:
    return f"{record['peak_bytes'] / 1e9:.2f}" if record.get("peak_bytes") else "–"
