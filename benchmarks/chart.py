"""Draws docs/models.svg from results/models-h200.jsonl: how much faster whole models are after `onepass.patch`.

A bar starts at 1, the speed of the unpatched model. It goes to the right for a gain, and to the left for a loss. A thin line
is the 95 % interval. The colors change with the color scheme of the viewer.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from html import escape
from pathlib import Path

from onepass.bench import record
from onepass.bench.record import Record

from .model_variant import COMPILE, EAGER, PROVIDERS, REDUCE_OVERHEAD
from .model_zoo import ENTRIES
from .report_suite import all_of

TITLES = {EAGER: "eager", COMPILE: "torch.compile", REDUCE_OVERHEAD: "torch.compile, reduce-overhead (CUDA graphs)"}
WIDTH, LEFT, RIGHT, TOP, BOTTOM = 880, 350, 60, 78, 44  # pixels
BAR, GAP, LEAST = 13, 12, 0.75  # a bar's height, the space between models, and the speed-up at the left end
STYLE = """
  text { font: 12px system-ui, sans-serif; fill: #1f2328 } .title { font-size: 15px; font-weight: 600 } .small { font-size: 11px }
  .card { fill: #ffffff; stroke: #d0d7de } .grid { stroke: #d8dee4 } .one { stroke: #1f2328; stroke-width: 1.5 }
  .interval { stroke: #57606a }
  .eager { fill: #2f6fdf } .compile { fill: #e08a00 } .reduce-overhead { fill: #1a9e77 } .loss { fill: #c4232b; font-weight: 600 }
  @media (prefers-color-scheme: dark) {
    text { fill: #e6edf3 } .card { fill: #0d1117; stroke: #30363d } .grid { stroke: #30363d } .one { stroke: #e6edf3 }
    .interval { stroke: #9da7b3 } .eager { fill: #5b95f5 } .compile { fill: #f0a830 } .reduce-overhead { fill: #3fc79a }
    .loss { fill: #ff7b72 }
  }
"""


def picture(records: Sequence[Record]) -> str:
    """Return the chart as SVG. A model or mode without a measured speed-up has no bar."""
    ratios = {(r["row"], r["provider"]): r for r in records if "ratio" in r}
    drawn = [entry for entry in ENTRIES if any(row == entry.name for row, _ in ratios)]
    if not drawn:
        raise ValueError("there is no speed-up to draw: no record has the field 'ratio'; run `python -m benchmarks.models` first")
    highest = max(max(r["ratio"], r["ratio_high"]) for r in ratios.values())
    scale = (WIDTH - LEFT - RIGHT) / (highest - LEAST)
    height = TOP + BOTTOM + len(drawn) * (len(PROVIDERS) * BAR + GAP)

    def at(speed: float) -> float:
        return LEFT + (max(speed, LEAST) - LEAST) * scale

    parts = [*_axis(at, highest, height), *_legend(list(ratios.values()))]
    for i, entry in enumerate(drawn):
        y = TOP + i * (len(PROVIDERS) * BAR + GAP)
        parts.append(f'<text x="{LEFT - 10}" y="{y + 1.5 * BAR + 4:.1f}" text-anchor="end">{escape(entry.title)}</text>')
        for j, (mode, (_, after)) in enumerate(PROVIDERS.items()):
            if (entry.name, after) in ratios:
                parts += _bar(at, y + j * BAR, mode, ratios[entry.name, after])
    title = "How much faster one step is after onepass.patch(model)"
    one = f'<path class="one" d="M{at(1):.1f} {TOP - 6}V{height - 34}"/>'
    body = "\n".join([f'<text class="title" x="16" y="26">{title}</text>', *parts, one])
    size = f'width="{WIDTH}" height="{height}" viewBox="0 0 {WIDTH} {height}"'
    card = f'<rect class="card" x="0.5" y="0.5" width="{WIDTH - 1}" height="{height - 1}" rx="8"/>'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">\n<title>{title}</title>\n<style>{STYLE}</style>'
    return f"{head}\n{card}\n{body}\n</svg>\n"


def _axis(at: Callable[[float], float], highest: float, height: int) -> Iterator[str]:
    for half in range(2, int(2 * highest) + 1):
        x = at(half / 2)
        yield f'<path class="grid" d="M{x:.1f} {TOP - 6}V{height - 34}"/>'
        yield f'<text class="small" x="{x:.1f}" y="{height - 18}" text-anchor="middle">{half / 2:g}×</text>'


def _legend(ratios: Sequence[Record]) -> Iterator[str]:
    x = 16.0
    for mode, title in TITLES.items():
        yield f'<rect class="{mode}" x="{x}" y="41" width="12" height="12" rx="2"/><text x="{x + 18}" y="51">{title}</text>'
        x += 46 + 6.4 * len(title)
    about = f"{all_of(ratios, 'name')}, bfloat16. Thin line: 95 % interval."
    yield f'<text class="small" x="{WIDTH - 16}" y="51" text-anchor="end">{escape(about)}</text>'


def _bar(at: Callable[[float], float], y: float, mode: str, found: Record) -> Iterator[str]:
    start, end = sorted((at(1), at(found["ratio"])))
    low, high = at(found["ratio_low"]), at(found["ratio_high"])
    middle, kind = y + BAR / 2, " loss" if found["ratio_high"] < 1 else ""
    yield f'<rect class="{mode}" x="{start:.1f}" y="{y + 1:.1f}" width="{max(end - start, 1):.1f}" height="{BAR - 2}"/>'
    yield f'<path class="interval" d="M{low:.1f} {middle:.1f}H{high:.1f}"/>'
    yield f'<text class="small{kind}" x="{max(at(1), end, high) + 5:.1f}" y="{middle + 4:.1f}">{found["ratio"]:.2f}×</text>'


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.chart", description=__doc__)
    parser.add_argument("--results", type=Path, default=Path("results/models-h200.jsonl"), help="read these results (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=Path("docs/models.svg"), help="write the chart to this file (default: %(default)s)")
    parser.add_argument("--check", action="store_true", help="only check that the chart agrees with the results")
    args = parser.parse_args(argv)
    try:
        new = picture(record.read(args.results))
        if args.check and args.out.read_text() != new:
            print(f"{args.out} is not up to date with {args.results}; run `python -m benchmarks.chart`")
            return 1
        if args.check:
            print(f"{args.out} is up to date with {args.results}")
            return 0
        args.out.write_text(new)
    except (OSError, ValueError) as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 2
    print(f"{args.out} written from {args.results}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
