"""Fits the constants of the cost models to measured times: how fast are the launches between which a family chooses?

A family such as `ring` can run a problem by many launches: with blocks and teams of several sizes. Its cost model (schedule.py of the
family) gives the time of each launch from a few constants (src/onepass/backends/gpu/constants.py). This script measures some launches
of some problems, and then changes the constants until the modelled times agree with the measured ones.

Run it on a GPU with `python -m benchmarks.fit --out results/launches-h200.jsonl`. Without a GPU, `python -m benchmarks.fit
results/launches-h200.jsonl` fits the constants to that file again. Both print the constants, the error of the model, and how much
time its choices lose. Constants are not changed in the source: copy those that you want.

With `--direction backward`, it does the same for the backwards of these families, whose models are in schedule_backward.py. The file is
results/launches-backward-h200.jsonl. Times of a backward include the launches that add up cells, the partial sums of parameters.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from functools import lru_cache, partial
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch

from onepass.backends.family import BACKWARD, FORWARD
from onepass.backends.gpu import constants
from onepass.backends.gpu.ring import schedule as ring
from onepass.backends.gpu.ring import schedule_backward as ring_backward
from onepass.backends.gpu.ring.launch_backward import RingBackwardLaunch
from onepass.backends.gpu.walk import walk
from onepass.backends.gpu.whole_set import schedule as whole_set
from onepass.backends.gpu.whole_set import schedule_backward as whole_set_backward
from onepass.backends.gpu.whole_set.launch_backward import WholeSetBackwardLaunch
from onepass.bench import record
from onepass.bench.record import Record
from onepass.bench.suite import Row, problem_of
from onepass.bench.terminal import progress, table
from onepass.core.device import KNOWN_DEVICES, Device, describe
from onepass.core.problem import NormProblem
from onepass.verify.cases import Case

from . import named_constants, shared_backward
from .launch_times import backward_launch_times, launch_times, needs_of
from .precompile import build, finish, new_pool, sources

HALF, BFLOAT, FULL = torch.float16, torch.bfloat16, torch.float32
NEAR, FAR = 5, 8  # launches of each problem: those that the model takes for the fastest, and some others
SLOWEST = 2.0  # the others are modelled to take up to this many times as long


@dataclass(frozen=True)
class Model:
    """The cost model of a family: its schedule.py, and the names of those constants of gpu/constants.py that are fitted."""

    schedule: ModuleType
    constants: tuple[str, ...]  # "BACK_FIRST.columns" is BACK_FIRST["columns"]
    direction: str = FORWARD

    def launches(self, problem: NormProblem, device: Device) -> list[Any]:
        """Return all launches of a problem, in the order of their modelled times."""
        found = dict.fromkeys(self.schedule.candidates(problem, walk(problem), device))  # some occur twice
        return sorted(found, key=partial(self.time, problem, device))

    def values(self) -> dict[str, float]:
        return {name: named_constants.get(name) for name in self.constants}

    def time(self, problem: NormProblem, device: Device, launch: Any) -> float:
        return self.schedule.modelled_time(problem, launch, device)

    def sources(self, row: Row, launches: Sequence[Any], device: Device) -> list[Any]:
        """Return the kernels that `measure` runs."""
        from onepass.backends.gpu import forward

        return [kernel.source() for launch in launches for kernel in forward.kernels(problem_of(row), (launch,), False)]

    def measure(self, row: Row, launches: Sequence[Any], device: Device) -> tuple[float, list[float]]:
        """Return the microseconds of a copy of x, and of each launch."""
        return launch_times(row, [(launch,) for launch in launches], [name_of(launch) for launch in launches])


@dataclass(frozen=True)
class BackwardModel(Model):
    """The cost model of a family's backward: its schedule_backward.py. Each launch runs with those that add up its cells."""

    direction: str = BACKWARD

    def time(self, problem: NormProblem, device: Device, launch: Any) -> float:
        time = super().time(problem, device, launch)
        if self.schedule is whole_set_backward:  # its model leaves the sums to the cost
            time += constants.LAUNCH * _sums(problem, launch, device)
        return time

    def sources(self, row: Row, launches: Sequence[Any], device: Device) -> list[Any]:
        from onepass.backends.gpu import backward

        problem = problem_of(row)
        chains = [self.schedule.with_sums(problem, launch, device) for launch in launches]
        found = [kernel.source() for chain in chains for _, kernel in backward.kernels(problem, chain, needs_of(problem))]
        found += sources(row, device, None)  # those of the planner
        return list({repr(source): source for source in found}.values())  # chains have sums in common

    def measure(self, row: Row, launches: Sequence[Any], device: Device) -> tuple[float, list[float]]:
        chains = [self.schedule.with_sums(problem_of(row), launch, device) for launch in launches]
        return backward_launch_times(row, chains, [name_of(launch) for launch in launches], device)


@lru_cache(4096)  # a fit asks for it again with all constants
def _sums(problem: NormProblem, launch: Any, device: Device) -> int:
    """Return how many launches add up the cells of a launch of `whole_set`."""
    _, *sums = whole_set_backward.with_sums(problem, launch, device)
    return sum(step.needed for step in sums)


def _by_kind(names: str, *kinds: str) -> tuple[str, ...]:
    return tuple(f"BACK_{name}.{kind}" for kind in kinds for name in names.split())


MODELS = {
    "ring": Model(
        ring,
        (
            *("RUN_UNIT", "RUN_BLOCK", "RUN_CROWDED", "RUN_AGAIN", "RUN_APPLY", "RUN_ANY_BLOCK", "RUN_COMPUTE", "RUN_ACTIVATION"),
            *("RUN_UNALIGNED", "RUN_ONE_BY_ONE", "RUN_COMBINE", "RUN_COMBINE_MEMBER", "RUN_EXCHANGE", "RUN_FIRST", "RUN_FIRST_DIRECT"),
        ),
    ),
    "ring, columns": Model(
        ring,
        (
            *("RING_EXCHANGE", "RING_BLOCK", "RING_CROWDED", "RING_UNEVEN", "RING_UNPAIRED", "RING_MERGE", "RING_UNIT", "RING_TILE"),
            *("RING_SET", "RING_COLUMNS", "RING_NARROW", "RING_TALL", "RING_FLAT", "RING_AGAIN"),
        ),
    ),
    "whole_set": Model(
        whole_set,
        (
            *("WHOLE_LAUNCH", "WHOLE_BANDWIDTH", "WHOLE_ELEMENT", "WHOLE_OWN", "WHOLE_ACTIVATION", "WHOLE_CENTERED", "WHOLE_MASKED"),
            *("WHOLE_EXCHANGE", "WHOLE_MEMBER", "WHOLE_MEMBER_APART", "WHOLE_STALL", "WHOLE_REFILL"),
        ),
    ),
    "ring, backward": BackwardModel(  # one model, because kinds of launches have some constants in common
        ring_backward,
        (
            *_by_kind("FIRST BYTES BLOCK CROWDED UNIT", "columns", "blocks", "set", "elements"),
            *_by_kind("SILU GELU", "columns", "blocks", "elements"),  # a BatchNorm has no activation
            *("BACK_ALONE", "BACK_WIDE", "BACK_RUN", "BACK_TILE", "BACK_SET", "BACK_MEMBER", "BACK_MANY_SETS", "BACK_COLUMNS"),
            *("BACK_MANY_SUMS", "BACK_EXCHANGE", "BACK_CELLS"),
        ),
    ),
    "whole_set, backward": BackwardModel(
        whole_set_backward,
        (
            *("WHOLE_BACK_FIRST", "WHOLE_BACK_BANDWIDTH", "WHOLE_BACK_SILU", "WHOLE_BACK_GELU", "WHOLE_BACK_EXCHANGE"),
            *("WHOLE_BACK_STALL", "WHOLE_BACK_ALONE", "WHOLE_BACK_MEMBER", "WHOLE_BACK_REFILL"),
        ),
    ),
}


def _rows(*shape: int, function: str = "layer_norm", dtype: torch.dtype = BFLOAT) -> Row:
    return Row(Case(function, shape, affine="weight" if function == "rms_norm" else "both"), dtype)


def _images(*shape: int, groups: int = 32, dtype: torch.dtype = HALF, layout: str = "contiguous") -> Row:
    return Row(Case("group_norm", shape, layout, groups=groups, activation="silu"), dtype)


def _channels_last(*shape: int, function: str = "group_norm", groups: int = 32) -> Row:
    if function == "group_norm":
        return _images(*shape, groups=groups, layout="channels_last")
    return Row(Case(function, shape, "channels_last"), HALF)


def _groups(*shape: int, layout: str = "contiguous", dtype: torch.dtype = HALF, activation: str = "silu", groups: int = 32) -> Row:
    return Row(Case("group_norm", shape, layout, groups=groups, activation=activation), dtype)


def _wide_batch(*shape: int, layout: str = "contiguous", dtype: torch.dtype = HALF) -> Row:
    return Row(Case("batch_norm", shape, layout, wide=True), dtype)


def _backwards(*rows: Row) -> tuple[Row, ...]:
    return tuple(replace(row, direction=BACKWARD) for row in rows)


LAST = "channels_last"

PROBLEMS = {
    "ring": (  # sets that are one long run each
        *(
            _rows(4096, 40960),
            _rows(4096, 32768),
            _rows(3000, 20480),
            _rows(2500, 25000),
            _rows(3000, 32768, function="rms_norm"),
            _rows(128, 1048576),
            _rows(128, 1048576, function="rms_norm"),
            _rows(512, 262144),
            _rows(3, 1000000),
            _rows(1, 2000000),
            _rows(2, 4000000),
            _rows(20, 100000),
            _rows(9, 40001),
            _rows(250, 30000),
            _rows(1, 8388608, function="rms_norm"),
            _images(8, 320, 64, 64),
            _images(8, 1920, 32, 32),
            _images(2, 640, 64, 64),
            _rows(2048, 65536),
            _rows(1024, 131072),
            _rows(100, 700000),
            _rows(1, 16777216),
            _rows(300, 49152, dtype=FULL),
        ),
        *(_rows(1024, 131072, function="rms_norm"), _rows(60, 1000000, function="rms_norm"), _rows(777, 50257), _rows(33, 1000003)),
        *(_rows(65, 50257), _images(8, 512, 256, 256), _images(64, 512, 64, 64), _images(12, 1920, 40, 40), _images(7, 96, 200, 200)),
        *(_images(2, 640, 128, 128), _images(16, 320, 64, 64), _images(5, 640, 96, 96, dtype=BFLOAT), _images(3, 256, 300, 300)),
    ),
    "ring, columns": (  # other sets
        *(_channels_last(8, 512, 256, 256), _channels_last(2, 512, 256, 256), _channels_last(64, 512, 64, 64)),
        *(
            _channels_last(16, 320, 64, 64),
            _channels_last(4, 960, 64, 64),
            _channels_last(2, 1920, 32, 32),
            _channels_last(1, 256, 256, 256),
        ),
        *(_channels_last(16, 256, 64, 64, groups=1), _channels_last(3, 2560, 40, 40)),
        *(_channels_last(256, 512, 28, 28, function=function) for function in ("instance_norm", "batch_norm")),
        *(_channels_last(20, 200, 60, 60, function="instance_norm"), _channels_last(32, 1024, 14, 14, function="batch_norm")),
        *(Row(Case("batch_norm", shape), HALF) for shape in ((256, 512, 28, 28), (64, 256, 56, 56))),
        Row(Case("layer_norm", (16, 256, 64, 64), "channels_last", rank=3, granularity="channel"), HALF),
        *(Row(Case("layer_norm2d", shape), HALF) for shape in ((16, 384, 56, 56), (5, 96, 200, 200))),
    ),
    "whole_set": (
        *(_rows(37, 50240), _rows(64, 20000), _rows(300, 24576), _rows(20, 100000), _rows(7, 32768, function="rms_norm")),
        *(_images(1, 2560, 24, 24), _images(2, 1920, 32, 32), _images(16, 1920, 16, 16), _images(3, 960, 48, 48), _images(4, 640, 32, 32)),
        *(_images(8, 320, 64, 64), _images(1, 1280, 32, 32), _images(2, 960, 64, 64, dtype=BFLOAT)),
        *(_rows(3000, 5120), _rows(9000, 6144), _rows(500, 7168, dtype=FULL), _rows(20000, 8192), _rows(3000, 9216), _rows(1500, 12288)),
        *(_rows(3000, 5120, function="rms_norm"), _rows(6000, 10240, function="rms_norm"), _rows(400, 6144), _rows(700, 12288)),
        *(_rows(2000, 16000), _rows(8000, 4608, dtype=HALF)),
        *(_channels_last(2, channels, 32, 32) for channels in (640, 1280, 1920)),
        *(_channels_last(8, 1280, 16, 16), _channels_last(16, 1280, 16, 16), _channels_last(4, 2560, 8, 8), _channels_last(2, 640, 64, 64)),
        *(_channels_last(12, 60, 18, 18, groups=3), _channels_last(1, 1920, 32, 32), _channels_last(12, 1920, 17, 17)),
        *(Row(Case("batch_norm", (64, 1024, 14, 14)), FULL), Row(Case("batch_norm", (32, 280, 21, 20)), FULL)),
        *(_rows(126, 32000, dtype=FULL), _rows(512, 8192, function="rms_norm"), _images(8, 640, 16, 16)),
    ),
    "ring, backward": _backwards(
        # columns
        *(_groups(*shape, layout=LAST) for shape in ((8, 512, 256, 256), (8, 256, 128, 128), (2, 256, 128, 128), (16, 320, 64, 64))),
        *(_groups(*shape, layout=LAST) for shape in ((4, 320, 128, 128), (2, 320, 64, 64), (8, 640, 64, 64), (4, 960, 64, 64))),
        *(_groups(*shape, layout=LAST) for shape in ((16, 1280, 32, 32), (2, 1280, 64, 64), (8, 1280, 16, 16), (8, 1920, 32, 32))),
        *(_groups(*shape, layout=LAST, activation="") for shape in ((2, 512, 256, 256), (4, 960, 64, 64))),
        *(_groups(*shape, layout=LAST, dtype=BFLOAT) for shape in ((8, 256, 128, 128), (4, 320, 128, 128))),
        _groups(4, 512, 64, 64, layout=LAST, dtype=FULL, activation=""),
        _groups(2, 96, 200, 200, layout=LAST, dtype=BFLOAT, activation="gelu", groups=8),
        _groups(6, 64, 150, 150, layout=LAST, groups=2),
        Row(Case("instance_norm", (64, 256, 56, 56), LAST), HALF),
        Row(Case("instance_norm", (16, 128, 112, 112), LAST), BFLOAT),
        Row(Case("instance_norm", (8, 64, 100, 100), LAST), FULL),
        *(_wide_batch(*shape, layout=LAST) for shape in ((16, 64, 56, 56), (32, 64, 56, 56), (64, 256, 28, 28))),
        _wide_batch(32, 256, 28, 28, layout=LAST, dtype=BFLOAT),
        # blocks
        *(
            _groups(*shape)
            for shape in ((8, 512, 256, 256), (1, 128, 1024, 1024), (2, 256, 128, 128), (16, 320, 64, 64), (64, 512, 64, 64))
        ),
        *(_groups(2, 512, 256, 256, activation=""), _groups(4, 512, 128, 128, dtype=FULL, activation="")),
        *(_groups(8, 256, 128, 128, dtype=BFLOAT), _groups(4, 640, 64, 64, dtype=BFLOAT), _groups(8, 960, 64, 64, activation="gelu")),
        *(Row(Case("instance_norm", (4, 32, 256, 256)), HALF), Row(Case("instance_norm", (16, 64, 320, 320)), BFLOAT)),
        # set
        *(_wide_batch(256, 512, 28, 28), _wide_batch(64, 64, 112, 112), _wide_batch(32, 128, 56, 56), _wide_batch(16, 64, 112, 112)),
        *(_wide_batch(128, 64, 32, 32), _wide_batch(8, 256, 56, 56), _wide_batch(32, 128, 56, 56, dtype=BFLOAT)),
        Row(Case("batch_norm", (64, 256, 56, 56)), FULL),
        # elements
        *(_rows(4096, 32768), _rows(8192, 16384, dtype=HALF), _rows(128, 262144), _rows(1000, 32768, dtype=FULL), _rows(20, 1000000)),
        *(Row(Case("rms_norm", shape), BFLOAT) for shape in ((1024, 131072), (4096, 16384), (64, 50176))),
        Row(Case("rms_norm", (3000, 20480)), FULL),
        Row(Case("layer_norm", (300, 65536), activation="silu"), BFLOAT),
        Row(Case("layer_norm", (2000, 24576), activation="gelu"), BFLOAT),
    ),
    "whole_set, backward": _backwards(
        *(_groups(*shape) for shape in ((2, 320, 64, 64), (8, 1280, 16, 16), (16, 320, 64, 64), (8, 512, 256, 256), (2, 256, 128, 128))),
        *(_groups(2, 640, 40, 40, dtype=FULL), _groups(4, 640, 64, 64, dtype=BFLOAT), _groups(8, 256, 128, 128, dtype=BFLOAT)),
        *(_groups(64, 512, 64, 64), _groups(2, 512, 256, 256, activation=""), _groups(8, 960, 64, 64, activation="gelu")),
        *(_groups(4, 512, 128, 128, dtype=FULL, activation=""), _groups(2, 64, 160, 160, activation="", groups=1)),
        *(Row(Case("instance_norm", shape), HALF) for shape in ((8, 64, 56, 56), (4, 32, 256, 256))),
        Row(Case("instance_norm", (16, 64, 320, 320)), BFLOAT),
    ),
}


def name_of(launch: Any) -> str:
    """Return the numbers of a launch that tell it from the others of its problem."""
    if isinstance(launch, RingBackwardLaunch | WholeSetBackwardLaunch):
        return shared_backward.name_of(launch)
    values = {field.name: getattr(launch, field.name) for field in fields(launch) if field.name not in ("walk", "programs")}
    return " ".join(f"{name}={value}" for name, value in values.items())


def chosen(launches: Sequence[Any], times: Sequence[float]) -> list[Any]:
    """Return the launches to measure: the NEAR fastest, and FAR others at equal distances."""
    others = [launch for launch, time in zip(launches[NEAR:], times[NEAR:]) if time <= SLOWEST * times[0]]
    step = max(len(others) // FAR, 1)
    return [*launches[:NEAR], *others[step - 1 :: step][:FAR]]


def picked_launches(family: str, row: Row, device: Device) -> list[Any]:
    model, problem = MODELS[family], problem_of(row)
    launches = model.launches(problem, device)
    return chosen(launches, [model.time(problem, device, launch) for launch in launches])


def _build(family: str, row: Row, number: int, device: Device, target: Any) -> None:
    """In another process: compile one kernel."""
    build(_sources(family, row, device)[number], target)


def _sources(family: str, row: Row, device: Device) -> list[Any]:
    return MODELS[family].sources(row, picked_launches(family, row, device), device)


def compile_ahead(rows: Sequence[tuple[str, Row]], device: Device, workers: int) -> str:
    """Compile the kernels of all launches in other processes. Return a sentence about it."""
    import triton

    driver: Any = triton.runtime.driver.active
    pool, target = new_pool(workers), driver.get_current_target()
    jobs = [(family, row, number) for family, row in rows for number in range(len(_sources(family, row, device)))]
    return finish(pool, [pool.submit(_build, *job, device, target) for job in jobs], 300)


def measure(family: str, row: Row, device: Device) -> list[Record]:
    """Measure launches of one problem."""
    picked = picked_launches(family, row, device)
    copy, times = MODELS[family].measure(row, picked, device)
    common = {"row": f"{family} {row.name}", "family": family, "copy_us": round(copy, 2), **record.origin("cuda")}
    return [common | {"provider": name_of(launch), "us": round(time, 2)} for launch, time in zip(picked, times)]


class Point(NamedTuple):
    row: str
    problem: NormProblem
    launch: Any
    us: float
    weight: float  # 1 for the fastest launch of a problem


def points_of(family: str, records: Iterable[Record], device: Device) -> Iterator[Point]:
    """Yield the measured launches that the family still has."""
    rows = {f"{family} {row.name}": row for row in PROBLEMS[family]}
    known: dict[str, dict[str, Any]] = {}
    best: dict[str, float] = {}
    records = list(records)
    for found in records:
        best[found["row"]] = min(found["us"], best.get(found["row"], math.inf))
    for found in records:
        if found["row"] not in rows:
            continue
        problem = problem_of(rows[found["row"]])
        launches = known.setdefault(found["row"], {name_of(launch): launch for launch in MODELS[family].launches(problem, device)})
        if found["provider"] in launches:
            weight = (best[found["row"]] / found["us"]) ** 6
            yield Point(found["row"], problem, launches[found["provider"]], found["us"], weight)


def error_of(model: Model, points: Sequence[Point], device: Device) -> float:
    """Return the error of the model: the root mean square of the logarithms of modelled / measured. Slow launches count less."""
    squares = sum(point.weight * math.log(model.time(point.problem, device, point.launch) / point.us) ** 2 for point in points)
    return math.sqrt(squares / sum(point.weight for point in points))


@contextmanager
def using(model: Model, values: dict[str, float]) -> Iterator[None]:
    """Give a model these constants in a block."""
    before = model.values()
    try:
        _put(values)
        yield
    finally:
        _put(before)


def _put(values: dict[str, float]) -> None:
    for name, value in values.items():
        named_constants.put(name, value)


def fit(model: Model, points: Sequence[Point], device: Device) -> dict[str, float]:
    """Return the constants with which the model agrees best with the measurements."""

    def error(values: dict[str, float]) -> float:
        with using(model, values):
            return error_of(model, points, device)

    found, step = model.values(), 0.2
    best = error(found)
    while step > 0.003:  # change the constant that helps most, as far as it helps; take smaller steps if none does
        moves = [(name, factor) for name in model.constants for factor in (1 + step, 1 / (1 + step))]
        errors = [error(found | {name: found[name] * factor}) for name, factor in moves]
        now = min(errors)
        name, factor = moves[errors.index(now)]
        if now >= best - 1e-4 * best:
            step /= 2
        while now < best - 1e-7:
            found, best = found | {name: found[name] * factor}, now
            now = error(found | {name: found[name] * factor})
    return found


def report(family: str, points: Sequence[Point], device: Device) -> str:
    """Return the constants before and after the fit, the errors, and what the choices lose."""
    model = MODELS[family]
    before, after = model.values(), fit(model, points, device)
    errors, losses = [], []
    for values in (before, after):
        with using(model, values):
            errors.append(error_of(model, points, device))
            losses.append(_losses(model, points, device))
    lines = [["", "now", "fitted"], *([name, f"{before[name]:.4g}", f"{after[name]:.4g}"] for name in model.constants)]
    lines += [["error of the model", *(f"{error:.1%}" for error in errors)]]
    lines += [[row, *(f"{loss[row]:.3f}" for loss in losses)] for row in losses[0]]
    title = f"{family}: {len(points)} launches. For each problem: the time of the chosen launch, divided by the time of the fastest."
    return f"{title}\n{table(lines)}"


def _losses(model: Model, points: Sequence[Point], device: Device) -> dict[str, float]:
    """Return for each problem the time of the launch that the model prefers, divided by the time of the fastest."""
    rows: dict[str, list[Point]] = {}
    for point in points:
        rows.setdefault(point.row, []).append(point)
    return {
        row: min(found, key=lambda point: model.time(point.problem, device, point.launch)).us / min(point.us for point in found)
        for row, found in rows.items()
    }


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fit", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("results", nargs="?", type=Path, help="fit the constants to this file, and measure nothing")
    parser.add_argument("--out", type=Path, help="merge what is measured into this file, one JSON object per line")
    parser.add_argument("--workers", type=int, default=0, help="processes that compile all kernels first, without the GPU (0)")
    parser.add_argument("--gpu", choices=KNOWN_DEVICES, default="h200", help="the GPU of the file that is fitted (h200)")
    parser.add_argument("--direction", choices=(FORWARD, BACKWARD), default=FORWARD, help="which models to fit (forward)")
    parser.add_argument("--family", choices=MODELS, action="append", help="only this family; may be given twice")
    args = parser.parse_args(argv)
    families = args.family or [family for family, model in MODELS.items() if model.direction == args.direction]
    failed = 0
    if args.results:
        device, known = KNOWN_DEVICES[args.gpu], record.read(args.results)
    elif torch.cuda.is_available():
        device, known = describe(torch.device("cuda")), []
        rows = [(family, row) for family in families for row in PROBLEMS[family]]
        if args.workers:
            print(compile_ahead(rows, device, args.workers), file=sys.stderr, flush=True)
        for family, row in progress(rows, len(rows), lambda job: f"{job[0]} {job[1].name}", log=True):
            try:
                known = record.merge(known, measure(family, row, device))
            except RuntimeError as error:  # a launch that is wrong or does not run leaves the other problems alone
                failed += 1
                print(error, file=sys.stderr, flush=True)
            if args.out:
                record.write(args.out, record.merge(record.read(args.out) if args.out.exists() else [], known))
    else:
        parser.error("there is no GPU to measure on; expected the name of a file with results")
    for family in families:
        points = list(points_of(family, known, device))
        print(report(family, points, device) if points else f"{family}: no measured launch is one of its launches now")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
