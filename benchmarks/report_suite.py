"""Makes the tables of docs/measured.md from the records of `onepass bench`.

A row of a table is one forward or backward of the suite. It needs a record of each provider: onepass and its peers, torch
and torch.compile.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from onepass.bench.providers import OURS, PROVIDERS
from onepass.bench.record import Record, extra_mb
from onepass.bench.suite import BACKWARD_SUITE, SUITE, Row

BEGIN, END = "<!-- bench:begin -->", "<!-- bench:end -->"
BACKWARD_BEGIN, BACKWARD_END = "<!-- bench-backward:begin -->", "<!-- bench-backward:end -->"
PEERS = [name for name in PROVIDERS if name != OURS]


def updated(text: str, records: Sequence[Record], suite: Sequence[Row] = SUITE, backward: Sequence[Row] = BACKWARD_SUITE) -> str:
    """Return `text` with a new table between each pair of marks. The marks of the backward table may be missing."""
    text = between(text, BEGIN, END, table(records, suite))
    if BACKWARD_BEGIN in text or BACKWARD_END in text:
        text = between(text, BACKWARD_BEGIN, BACKWARD_END, table(records, backward))
    return text


def between(text: str, begin: str, end: str, table: str) -> str:
    """Return `text` with the table in the place of what is between the marks `begin` and `end`."""
    before, begun, rest = text.partition(begin)
    _, ended, after = rest.partition(end)
    if not (begun and ended):
        raise ValueError(f"the text has no {begin} ... {end}")
    return f"{before}{begin}\n{table}\n{end}{after}"


def table(records: Iterable[Record], suite: Sequence[Row] = SUITE) -> str:
    """Return a summary (machine, versions, targets met), the table in Markdown, and the list of failures."""
    by_key = {(record["row"], record["provider"]): record for record in records}
    missing = [f"{row.name} by {provider}" for row in suite for provider in PROVIDERS if (row.name, provider) not in by_key]
    if missing:
        raise ValueError(f"{len(missing)} results are missing: {'; '.join(missing)}")
    used = [[by_key[row.name, provider] for provider in PROVIDERS] for row in suite]
    flat = [record for group in used for record in group]
    if len({record["name"] for record in flat}) > 1:
        raise ValueError(f"the results are of several machines: {all_of(flat, 'name')}")
    head = ["case", "copy", "onepass (of copy speed; target)", *PEERS, "host, onepass / torch", "plan"]
    head += ["MB beside the gradients, onepass / " + " / ".join(PEERS)] if _backward(suite[0]) else []
    lines = [head, ["---"] * len(head), *(_line(row, *group) for row, group in zip(suite, used))]
    failed = [f"- {record['row']} by {record['provider']}: {record['error']}" for record in flat if "error" in record]
    return "\n".join([_summary(used), "", *(f"| {' | '.join(line)} |" for line in lines), *([""] if failed else []), *failed])


def _summary(used: list[list[Record]]) -> str:
    flat = [record for group in used for record in group]
    versions = ", ".join(f"{field} {all_of(flat, field)}" for field in ("torch", "triton", "onepass", "commit"))
    wanted = [ours for ours, *_ in used if ours["target"] is not None]
    met = sum(bool(ours.get("met")) for ours in wanted)
    lost = sum(any(_faster(peer, ours) for peer in peers) for ours, *peers in used)
    return (
        f"{all_of(flat, 'name')}, {versions}, {all_of(flat, 'date')}. Microseconds. Of {len(wanted)} targets {met} are met; on {lost} of "
        f"{len(used)} rows a peer is faster, in bold."
    )


def all_of(records: Iterable[Record], field: str) -> str:
    return " and ".join(sorted({str(record[field]) for record in records}))


def _line(row: Row, ours: Record, *peers: Record) -> list[str]:
    hosts = " / ".join(_us(record.get("host_us")) for record in (ours, peers[0]))
    cells = [f"**{_time(peer)}**" if _faster(peer, ours) else _time(peer) for peer in peers]
    memory = [" / ".join(extra_mb(record) for record in (ours, *peers))] if _backward(row) else []
    return [row.name, _us(ours["copy_us"]), _ours(row, ours), *cells, hosts, ours["plan"] or "–", *memory]


def _backward(row: Row) -> bool:
    return row.direction == "backward"


def _ours(row: Row, record: Record) -> str:
    if "error" in record:
        return _time(record)
    excess = row.missed_by(record["us"], record["fraction"])
    verdict = "" if excess is None else f"; {row.goal} ✓" if excess <= 0 else f"; {row.goal}, misses it by {excess:.2g}"
    return f"{_time(record)} ({record['fraction']:.2f}{verdict})"


def _faster(peer: Record, ours: Record) -> bool:
    """Return whether a peer is faster than onepass. A missing time counts as slower than any time."""
    return "us" in peer and peer["us"] < ours.get("us", float("inf"))


def _time(record: Record) -> str:
    if "error" in record:
        return "failed"
    return _us(record["us"]) + (" with host" if record["mode"] == "events" else "")


def _us(us: float | None) -> str:
    return "–" if us is None else f"{us:.0f}" if us >= 100 else f"{us:.1f}"
