"""The table that `benchmarks.models` prints: one line for each model and mode, with its verdict."""

from __future__ import annotations

from collections.abc import Sequence

from onepass.bench.record import Record
from onepass.bench.terminal import table

from .model_variant import PROVIDERS

_HEAD = [
    *("model", "mode", "before ms", "after ms", "step", "(95 %)", "verdict"),
    *("GPU ms", "GPU", "busy", "gain", "our kernels", "peak MB", "error", "norms", "breaks", "compile s"),
]
_LEGEND = """\
step, GPU: before / after, of whole steps and of their GPU kernels; busy: share of the step before in which the GPU works
gain: what the step saves of what the GPU saves, where the GPU limits the step; error: fraction of the allowed error
norms: found, fused, left; pairs of numbers are before and after"""


def text(records: Sequence[Record]) -> str:
    """Return the table, a legend and the list of failures."""
    by_key = {(found["row"], found["provider"]): found for found in records}
    rows = list(dict.fromkeys(found["row"] for found in records))
    modes = [mode for mode, (before, _) in PROVIDERS.items() if any((row, before) in by_key for row in rows)]
    lines = [_line(row, mode, *(by_key[row, name] for name in PROVIDERS[mode])) for mode in modes for row in rows]
    failed = [f"FAILED {found['row']} {found['provider']}: {found['error']}" for found in records if "error" in found]
    return "\n".join([table([_HEAD, *lines]), _LEGEND, *failed])


def _line(row: str, mode: str, before: Record, after: Record) -> list[str]:
    interval = f"{after['ratio_low']:.3f}-{after['ratio_high']:.3f}" if "ratio" in after else "–"
    counts = after.get("norms")
    return [
        *(row, mode, *("FAILED" if "error" in found else _number(found, "ms", ".3f") for found in (before, after))),
        *(_number(after, "ratio", ".3f"), interval, after.get("verdict", "–")),
        *(_both(before, after, "gpu_ms", ".3f"), *(_number(after, field) for field in ("gpu_ratio", "gpu_share", "gain"))),
        *(_number(after, "our_kernels", ".0f"), _both(before, after, "peak_bytes", ".0f", 1e6), _number(after, "of_allowed")),
        " ".join(str(counts[key]) for key in ("found", "fused", "left")) if counts else "–",
        *(_both(before, after, field, ".0f") for field in ("graph_breaks", "compile_s")),
    ]


def _both(before: Record, after: Record, field: str, form: str, per: float = 1) -> str:
    return " ".join(_number(found, field, form, per) for found in (before, after))


def _number(found: Record, field: str, form: str = ".2f", per: float = 1) -> str:
    value = found.get(field)
    return "–" if value is None else f"{value / per:{form}}"
