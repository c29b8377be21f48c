"""Makes the table of whole models in docs/benchmarks.md from the records of `benchmarks.models`.

A variant of a model is before or after `onepass.patch`, in one of three modes. The table has the modes of the records. A model
that was measured at all needs a record of every variant of these modes. Models that were not measured are named below.
"""

from __future__ import annotations

from collections.abc import Sequence

from onepass.bench.record import Record

from .model_variant import COMPILE, EAGER, PROVIDERS, REDUCE_OVERHEAD
from .model_zoo import ENTRIES, Entry
from .report_suite import all_of, between
from .step_ratio import GAIN_MISSED, LEAST_GAIN, NOT_SETTLED, SLOWER

BEGIN, END = "<!-- models:begin -->", "<!-- models:end -->"
TITLES = {EAGER: "eager", COMPILE: "torch.compile", REDUCE_OVERHEAD: "reduce-overhead"}
MEMORY = EAGER, COMPILE  # CUDA graphs keep their memory, so a peak says nothing


def updated(text: str, records: Sequence[Record], entries: Sequence[Entry] = ENTRIES) -> str:
    """Return `text` with a new table between its marks."""
    return between(text, BEGIN, END, table(records, entries))


def table(records: Sequence[Record], entries: Sequence[Entry] = ENTRIES) -> str:
    """Return the table in Markdown, followed by a summary and the list of failures."""
    by_key = {(record["row"], record["provider"]): record for record in records}
    modes = [mode for mode, names in PROVIDERS.items() if any(record["provider"] in names for record in records)]
    variants = [name for mode in modes for name in PROVIDERS[mode]]
    measured = [entry for entry in entries if any(record["row"] == entry.name for record in records)]
    missing = [f"{entry.name} {variant}" for entry in measured for variant in variants if (entry.name, variant) not in by_key]
    if missing:
        raise ValueError(f"{len(missing)} results are missing: {'; '.join(missing)}")
    used = {entry: {variant: by_key[entry.name, variant] for variant in variants} for entry in measured}
    flat = [record for found in used.values() for record in found.values()]
    if len({record["name"] for record in flat}) > 1:
        raise ValueError(f"the results are of several machines: {all_of(flat, 'name')}")
    if any(record.get("small") for record in flat):
        raise ValueError("these are results of the small models, which only tests use")
    head = _head(modes)
    lines = [head, ["---"] * len(head), *(_line(entry, found, modes) for entry, found in used.items())]
    left = [entry.name for entry in entries if entry not in measured]
    notes = [_summary(flat, used) + _verdicts(flat) + (f" Not measured: {', '.join(left)}." if left else "")]
    failed = [f"- {record['row']}, {record['provider']}: {record['error']}" for record in flat if "error" in record]
    return "\n".join([*(f"| {' | '.join(line)} |" for line in lines), "", *notes, *([""] if failed else []), *failed])


def _head(modes: Sequence[str]) -> list[str]:
    times = [cell for mode in modes for cell in (f"{TITLES[mode]}: before", "after", "ratio")]
    return ["one step, bfloat16", *times, "peak GB: before, after; compiled"]


def _verdicts(flat: Sequence[Record]) -> str:
    """Name the steps that miss their targets, in a sentence for each verdict, or return "" if there are no verdicts."""
    if not any("verdict" in record for record in flat):
        return ""
    found = {
        kind: [f"{r['row']} ({r['provider']})" for r in flat if r.get("verdict") == kind] for kind in (SLOWER, NOT_SETTLED, GAIN_MISSED)
    }
    missed = f"Steps that the GPU limits, with less than {LEAST_GAIN} of the GPU's gain"
    titles = {SLOWER: "Slower", NOT_SETTLED: "Not settled", GAIN_MISSED: missed}
    return "".join(f" {titles[kind]}: {', '.join(rows) or 'none'}." for kind, rows in found.items())


def _summary(flat: Sequence[Record], used: dict[Entry, dict[str, Record]]) -> str:
    versions = ", ".join(f"{field} {all_of(flat, field)}" for field in ("torch", "triton", "onepass", "commit"))
    libraries = all_of([record for record in flat if "library" in record], "library")
    added = {entry.name: _added(*(found.get(name, {}) for name in PROVIDERS[COMPILE])) for entry, found in used.items()}
    more = [name for name, breaks in added.items() if breaks]
    breaks = f"none in {list(added.values()).count(0)} of {len(added)} models" + (f", some in {', '.join(more)}" if more else "")
    about = f"{all_of(flat, 'name')}, {versions}, {libraries}, {all_of(flat, 'date')}"
    return f"{about}. Median milliseconds, GPU time in brackets. Graph breaks added: {breaks}."


def _added(before: Record, after: Record) -> int | None:
    """Return how many graph breaks patching adds, or None if `before` or `after` was not compiled."""
    was, now = (record.get("graph_breaks") for record in (before, after))
    return None if was is None or now is None else max(0, now - was)


def _line(entry: Entry, found: dict[str, Record], modes: Sequence[str]) -> list[str]:
    times = [cell for mode in modes for cell in _pair(*(found[name] for name in PROVIDERS[mode]))]
    memory = "; ".join(", ".join(_gigabytes(found[name]) for name in PROVIDERS[mode]) for mode in MEMORY if mode in modes)
    return [entry.title, *times, memory]


def _pair(before: Record, after: Record) -> list[str]:
    """Return the cells before, after and ratio. The ratio of steps is the median of the pairs, if there were pairs."""
    ratios = [before[field] / after[field] for field in ("ms", "gpu_ms") if before.get(field) and after.get(field)]
    ratios[:1] = [after["ratio"]] if "ratio" in after else ratios[:1]
    return [_time(before), _time(after), _bracketed([f"{ratio:.2f}×" for ratio in ratios]) if ratios else "–"]


def _time(record: Record) -> str:
    times = [record[field] for field in ("ms", "gpu_ms") if record.get(field)]
    return "failed" if "error" in record else _bracketed([f"{ms:.1f}" if ms >= 10 else f"{ms:.2f}" for ms in times])


def _bracketed(texts: Sequence[str]) -> str:
    return f"{texts[0]} ({texts[1]})" if len(texts) > 1 else texts[0]


def _gigabytes(record: Record) -> str:
    return f"{record['peak_bytes'] / 1e9:.2f}" if record.get("peak_bytes") else "–"
