"""Fits the factors by which the costs of families compare, to the times of a sweep.

`benchmarks.fit` fits the models of `ring` and `whole_set` to launches of these families. The other models are simpler: bytes divided by
a speed. Their factors (src/onepass/backends/gpu/constants.py) are right if the planner chooses the fastest family.

`python -m benchmarks.fit_choices results/sweep-h200.jsonl --seeds 613,701` needs no GPU. It changes one factor after another, as long as
the choices get better, and prints what it changed. Check the new factors on a seed that was not used. Constants are not changed in the
source: copy those that you want.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from onepass.backends.family import FORWARD
from onepass.bench import record
from onepass.bench.providers import OURS
from onepass.bench.record import Record
from onepass.bench.terminal import progress, table
from onepass.core.device import KNOWN_DEVICES, Device
from onepass.core.problem import NormProblem
from onepass.planning.registry import family_named

from .named_constants import get, put
from .sweep import PEERS
from .sweep_problems import draw

ROW, TILE, ROW_REREAD, TILE_REREAD, TEAM, RING, WHOLE = "row", "tile", "row_reread", "tile_reread", "team", "ring", "whole_set"

# Each factor, and the families whose cost it changes. "SPEED.row" is SPEED["row"]. Only factors that change no launches. Better leave
# SPEED["row"] and ROW_START as they are: planning/compiled.py compares the cost of `row` with the time of inductor.
FACTORS = {
    **{f"SPEED.{family}": (family,) for family in (ROW, TILE, ROW_REREAD, TILE_REREAD)},
    **dict.fromkeys(
        (
            "ROW_START",
            "DIVISION.2",
            "DIVISION.4",
            "DIVISION_ODD",
            "UNALIGNED_LONG_ROW",
            "GATHERED_ONE_BY_ONE",
            "ROW_WITHOUT_MEAN",
            "AT_ONCE_WITHOUT_MEAN",
        ),
        (ROW,),
    ),
    **dict.fromkeys(("LONG_ROW", "LONG_ROW_WITHOUT_MEAN", "LONG_ROW_ACTIVATION", "LONG_ROW_IN_TWO", "LONG_ROW_PEELED", "WIDE_ROW"), (ROW,)),
    **dict.fromkeys(
        (
            "REREAD_ACTIVATION",
            "REREAD_CHANNELS",
            "REREAD_ODD_CHANNELS",
            "REREAD_RUNS",
            "REREAD_SHORT_RUNS",
            "REREAD_ODD_RUNS.2",
            "REREAD_ODD_RUNS.4",
            "REREAD_PEELED",
            "REREAD_GELU",
            "REREAD_GELU_RUNS",
        ),
        (ROW_REREAD,),
    ),
    **dict.fromkeys(("REREAD_AT_ONCE.2", "REREAD_AT_ONCE.4", "UNALIGNED_REREAD.2", "UNALIGNED_REREAD.4"), (ROW_REREAD,)),
    **dict.fromkeys(("FROM_L2_AT_ONCE", "ODD_SPEED.row_reread.2", "ODD_SPEED.row_reread.4"), (ROW_REREAD,)),
    "FROM_L2": (ROW_REREAD, TILE_REREAD),
    "TILE_BY_ROW": (TILE_REREAD,),
    **dict.fromkeys(("WIDENED_TILE", "TILE_GELU", "NARROW_TILE", "ODD_SPEED.tile_reread.2", "ODD_SPEED.tile_reread.4"), (TILE_REREAD,)),
    **dict.fromkeys(("NARROW_COLUMNS", "ODD_SPEED.tile.2"), (TILE,)),
    **dict.fromkeys(("RING_START", "RING_SCALE", "RING_SCALE_AGAIN"), (RING,)),
    **dict.fromkeys(("WHOLE_SCALE",), (WHOLE,)),
    **dict.fromkeys(("TEAM_START", "TEAM_SCALE", "MERGE_COLUMNS"), (TEAM,)),
    **dict.fromkeys(("TEAM_REREAD_GELU", "TEAM_REREAD_ODD.2", "TEAM_REREAD_ODD.4"), (TEAM,)),
    **dict.fromkeys(("COPY_RATE.2", "COPY_RATE.4"), (RING, TILE_REREAD)),
}

STEPS = (0.8, 0.9, 0.95, 1.05, 1.1, 1.25)
LEAST_GAIN = 0.03  # of the loss: a smaller one is noise


class Measured(NamedTuple):
    """A problem, and for each family the median of its times, and their first and third quartile."""

    name: str
    problem: NormProblem
    times: dict[str, tuple[float, float, float]]


def read(records: Sequence[Record], seeds: Sequence[int] = ()) -> list[Measured]:
    """Return the problems of these seeds (of all, if there are none) that more than one family can run."""
    found = []
    for r in records:
        if "error" not in r and (not seeds or r["seed"] in seeds) and r.get("direction", FORWARD) == FORWARD:
            times = {r["chosen"] if name == OURS else name: tuple(us) for name, us in r["us"].items() if name not in PEERS}
            found += [Measured(r["row"], draw(r["seed"], r["index"]).bound, times)] if len(times) > 1 else []
    return found


def costs_of(problem: NormProblem, device: Device, families: Iterable[str]) -> dict[str, float]:
    return {name: family_named(name).cost(problem, device, FORWARD, False) for name in families}


def regret(times: dict[str, tuple[float, float, float]], costs: dict[str, float]) -> float:
    """Return the time of the cheapest family divided by the time of the fastest, or 1 if the spreads of the two overlap."""
    chosen, fastest = times[min(costs, key=lambda name: costs[name])], min(times.values())
    return 1.0 if chosen[1] <= fastest[2] else chosen[0] / fastest[0]


def loss(regrets: Sequence[float]) -> float:
    """Return how bad choices are: the time that they lose, and more for each regret above 1.05 and above 1.20."""
    return sum(min(r - 1, 0.6) + 0.08 * (r > 1.05) + 0.25 * (r > 1.2) for r in regrets)


def regrets(measured: Sequence[Measured], device: Device) -> list[float]:
    return [regret(times, costs_of(problem, device, times)) for _, problem, times in measured]


def fit(measured: Sequence[Measured], device: Device, rounds: int = 2) -> dict[str, float]:
    """Return new values of those factors that make the choices better. The constants stay as they are."""
    costs = [costs_of(problem, device, times) for _, problem, times in measured]
    before = {name: get(name) for name in FACTORS}

    def loss_with(name: str, value: float) -> float:
        put(name, value)
        for (_, problem, times), found in zip(measured, costs):
            found.update(costs_of(problem, device, [family for family in FACTORS[name] if family in times]))
        return loss([regret(times, found) for (_, _, times), found in zip(measured, costs)])

    try:
        names = [name for _ in range(rounds) for name in FACTORS]
        for name in progress(names, len(names), str, log=True):
            now = get(name)
            least = loss_with(name, now) - LEAST_GAIN
            tried = {now * step: loss_with(name, now * step) for step in STEPS}
            best = min(tried, key=lambda value: tried[value])
            loss_with(name, best if tried[best] < least else now)
        return {name: get(name) for name in FACTORS if get(name) != before[name]}
    finally:
        for name, value in before.items():
            put(name, value)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.fit_choices", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", type=Path, help="results of benchmarks.sweep")
    parser.add_argument("--seeds", type=lambda text: [int(seed) for seed in text.split(",")], default=[], help="such as 613,701 (all)")
    parser.add_argument("--device", choices=list(KNOWN_DEVICES), default="h200", help="the GPU of the sweep (h200)")
    parser.add_argument("--rounds", type=int, default=2, help="how often each factor is tried; 0 only judges the choices (2)")
    args = parser.parse_args(argv)
    measured, device = read(record.read(args.file), args.seeds), KNOWN_DEVICES[args.device]
    if not measured:
        parser.error(f"{args.file} has no problem of the seeds {args.seeds}")
    found = regrets(measured, device)
    print(f"{len(found)} problems: regret ≤ 1.05 on {sum(r <= 1.05 for r in found)}, > 1.20 on {sum(r > 1.2 for r in found)}")
    changed = fit(measured, device, args.rounds) if args.rounds else {}
    if changed:
        print(table([["factor", "now", "better"], *([name, f"{get(name):.4g}", f"{value:.4g}"] for name, value in changed.items())]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
