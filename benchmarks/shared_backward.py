"""Repeats and times launches of the backwards of `ring` and `whole_set`, whose programs wait for each other: see docs/notes/backward.md.

Each launch runs many times. All its runs must give the same bits, gradients close to those of the planner's launches, and counters that are
0 again, but for the sign. If a launch hangs, the process names it, prints the counters that are not 0, and ends with status 3. On a Hopper
GPU, run `python -m benchmarks.shared_backward --kind blocks --repeats 300`. `--list` prints the launches and `--compile` compiles them,
without a GPU.
"""

from __future__ import annotations

import argparse
import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from triton.backends.compiler import GPUTarget

from onepass.backends.family import BACKWARD, Launches
from onepass.backends.gpu.launches import FLIP
from onepass.backends.gpu.ring import schedule_backward as ring
from onepass.backends.gpu.ring.launch import RESET
from onepass.backends.gpu.ring.launch_backward import BLOCKS, COLUMNS, ELEMENTS, SET, RingBackwardLaunch
from onepass.backends.gpu.walk import walk
from onepass.backends.gpu.whole_set import schedule_backward as whole_set
from onepass.backends.gpu.whole_set.launch_backward import WholeSetBackwardLaunch
from onepass.bench import timing
from onepass.bench.suite import Row, problem_of
from onepass.bench.terminal import progress, table
from onepass.core.device import KNOWN_DEVICES, Device, describe
from onepass.core.operands import Gradients
from onepass.core.problem import NormProblem
from onepass.planning.choose import plan
from onepass.verify.cases import Case

from .background import bits
from .launch_times import CLOSE, backward_runs, distance, needs_of, times_of
from .sweep import KNOWN_GPUS
from .watchdog import Watchdog

HALF, BFLOAT, FULL = torch.float16, torch.bfloat16, torch.float32
LAST = "channels_last"
WHOLE_SET = "whole_set"
SIGN = 2**31 - 1  # the bits of a counter without its sign
ROWS = {
    COLUMNS: [
        Row(Case("group_norm", (8, 512, 256, 256), LAST, groups=32, activation="silu"), HALF),
        Row(Case("group_norm", (8, 256, 128, 128), LAST, groups=32, activation="silu"), HALF),
        Row(Case("group_norm", (16, 320, 64, 64), LAST, groups=32, activation="silu"), HALF),
        Row(Case("instance_norm", (256, 512, 28, 28), LAST), HALF),
        Row(Case("group_norm", (8, 256, 128, 128), LAST, groups=32, activation="silu"), FULL),
    ],
    BLOCKS: [
        Row(Case("group_norm", (8, 512, 256, 256), groups=32, activation="silu"), HALF),
        Row(Case("group_norm", (8, 256, 128, 128), groups=32, activation="silu"), HALF),
        Row(Case("group_norm", (16, 320, 64, 64), groups=32, activation="silu"), HALF),
    ],
    SET: [
        Row(Case("batch_norm", (256, 512, 28, 28), wide=True), HALF),
        Row(Case("batch_norm", (128, 64, 32, 32), wide=True), HALF),
        Row(Case("batch_norm", (64, 64, 112, 112), wide=True), HALF),
        Row(Case("batch_norm", (32, 128, 56, 56), wide=True), BFLOAT),
        Row(Case("batch_norm", (64, 256, 56, 56), wide=True), FULL),
        Row(Case("batch_norm", (16, 64, 112, 112), wide=True), HALF),
        Row(Case("batch_norm", (8, 256, 56, 56), wide=True), HALF),
    ],
    ELEMENTS: [Row(Case(op, shape), BFLOAT) for op in ("layer_norm", "rms_norm") for shape in ((4096, 32768), (1024, 131072))],
    WHOLE_SET: [
        Row(Case("group_norm", (2, 320, 64, 64), groups=32, activation="silu"), HALF),
        Row(Case("group_norm", (8, 1280, 16, 16), groups=32, activation="silu"), HALF),
        Row(Case("group_norm", (16, 320, 64, 64), groups=32, activation="silu"), HALF),
        Row(Case("group_norm", (2, 640, 40, 40), groups=32, activation="silu"), FULL),
        Row(Case("instance_norm", (8, 64, 56, 56)), HALF),
    ],
}

Launch = RingBackwardLaunch | WholeSetBackwardLaunch


def launches_of(problem: NormProblem, kind: str, device: Device, each: int) -> Iterator[tuple[Launch, Launches]]:
    """Yield the first `each` launches, by modelled time, for each shape of a block, with all that follows them."""
    w, taken = walk(problem), dict[tuple[Any, ...], int]()
    if kind == WHOLE_SET:
        by_time = sorted(whole_set.candidates(problem, w, device), key=partial(whole_set.modelled_time, problem, device=device))
        found = ((launch, whole_set.with_sums(problem, launch, device)) for launch in by_time)
    else:
        by_time = sorted(ring.candidates(problem, w, device), key=partial(ring.modelled_time, problem, device=device))
        found = ((launch, ring.with_sums(problem, launch, device)) for launch in by_time)
    for launch, launches in found:
        shape = launch.warps, launch.block_i, launch.block_j, getattr(launch, "tiles", 0)
        taken[shape] = taken.get(shape, 0) + 1
        if taken[shape] <= each:
            yield launch, launches


def compile_all(rows: Sequence[tuple[str, Row]], each: int) -> int:
    """Compile all launches of these rows for an H200. Return how many kernels there are."""
    from onepass.backends.gpu import backward

    sources = dict[str, Any]()
    for kind, row in rows:
        problem = problem_of(row)
        needs = needs_of(problem)
        for _, launches in launches_of(problem, kind, KNOWN_DEVICES["h200"], each):
            sources |= {repr(source): source for _, kernel in backward.kernels(problem, launches, needs) for source in (kernel.source(),)}
    for source in progress(list(sources.values()), len(sources), lambda source: source.function.__name__, log=True):
        source.compile(GPUTarget("cuda", KNOWN_GPUS["h200"], 32))
    return len(sources)


def name_of(launch: Launch) -> str:
    if not isinstance(launch, RingBackwardLaunch):
        return f"{launch.name}, {launch.shape}, {launch.warps} warps, {launch.programs} programs"
    blocks = f"{launch.block_i}x{launch.block_j}"
    return f"{launch.kind}, teams of {launch.members}, blocks of {blocks}, {launch.tiles * launch.across} in a unit, {launch.slots} slots"


def measure(kind: str, row: Row, device: Device, repeats: int, each: int, watchdog: Watchdog) -> list[list[str]]:
    """Run the planner's backward and all launches of a row. Return a line for each, with its time and its faults."""
    from onepass.backends.gpu import forward

    problem = problem_of(row)
    watchdog.begin(row.name)
    planned = plan(problem, device, BACKWARD)
    choices = {f"planned: {planned.family}": planned.launches}
    choices |= {name_of(launch): all_of for launch, all_of in launches_of(problem, kind, device, each)}
    with torch.no_grad(), timing.capturable_stream("cuda"):
        x, runs = backward_runs(row, list(choices.values()), device)
        expected, faults = runs[0](), dict[str, str]()
        for name, run in zip(choices, runs):
            watchdog.begin(f"{row.name} by {name}")
            faults[name] = _faults(run, expected, repeats, forward.COUNTERS[FLIP if kind == WHOLE_SET else RESET].eager)
        watchdog.begin(f"{row.name}: replays of graphs")
        copy, times = times_of(x, runs, 20)
    least = copy * replace(row, direction=BACKWARD).copies
    lines = [[name, f"{time:.1f}", f"{least / time:.2f}", faults[name]] for name, time in zip(choices, times)]
    return [[row.name, f"{least:.1f}", "1", ""], *lines]


class Counters:
    """Copies the counters while a launch hangs: on a stream of its own, to memory that was allocated before."""

    def __init__(self) -> None:
        self.stream, self.host = torch.cuda.Stream(), torch.empty(4096, dtype=torch.int32, pin_memory=True)

    def report(self) -> str:
        """Return the counters that are not 0.

        In `ring`, each unit has one, which counts the members that stored their sums, and then those that left. In `whole_set`, each team
        has one: members add to it, and together they flip its sign.
        """
        from onepass.backends.gpu import forward

        lines = []
        for protocol, counters in forward.COUNTERS.items():
            for of_stream in counters.eager:
                with torch.cuda.stream(self.stream):
                    found = self.host[: len(of_stream)].copy_(of_stream[: len(self.host)], non_blocking=True)
                    self.stream.synchronize()
                lines += [f"{protocol} {number}: {count}" for number, count in enumerate(found.tolist()) if count]
        return "; ".join(lines) or "all counters are 0"


def _leave(counters: Counters) -> Callable[[int], None]:
    """Return a function that prints the counters and ends the process."""

    def leave(status: int) -> None:
        threading.Timer(10.0, os._exit, [status]).start()  # if the copy hangs, too
        print(counters.report(), flush=True)
        os._exit(status)

    return leave


def _faults(run: partial[Gradients], expected: Gradients, repeats: int, counters: list[Tensor]) -> str:
    """Run a launch many times. Return what is wrong with the results, in words; "" if nothing is."""
    first, other, dirty = run(), 0, 0
    for _ in range(repeats):
        again = run()
        torch.cuda.synchronize()
        other += any(a is not None and b is not None and not torch.equal(bits(a), bits(b)) for a, b in zip(first, again))
        for counter in counters:
            dirty += int((counter & SIGN).any())
            counter.zero_()
    off = distance(first, expected)
    words = [f"{other} of {repeats} runs with other bits"] * (other > 0) + [f"{dirty} with counters that are not 0"] * (dirty > 0)
    return "; ".join(words + [f"off by {off:.3g}"] * (not off < CLOSE))


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.shared_backward", description=__doc__)
    parser.add_argument("--kind", choices=list(ROWS), action="append", help="only launches of this kind; may be given twice")
    parser.add_argument("--repeats", type=int, default=100, help="runs of each launch (100)")
    parser.add_argument("--each", type=int, default=2, help="launches for each shape of a block (2)")
    parser.add_argument("--compile", action="store_true", help="only compile the kernels for an H200, into the cache of Triton")
    parser.add_argument("--list", action="store_true", help="print the launches for an H200, and run nothing")
    args = parser.parse_args(argv)
    rows = [(kind, row) for kind in args.kind or ROWS for row in ROWS[kind]]
    if args.list:
        for kind, row in rows:
            found = launches_of(problem_of(row), kind, KNOWN_DEVICES["h200"], args.each)
            print("\n  ".join([row.name, *(name_of(launch) for launch, _ in found)]))
        return 0
    if args.compile:
        print(f"{compile_all(rows, args.each)} kernels are in the cache of Triton")
        return 0
    lines, watchdog = [["launch", "µs", "of copy speed", "faults"]], Watchdog(print, leave=_leave(Counters()))
    device = describe(torch.device("cuda"))
    for kind, row in progress(rows, len(rows), lambda one: one[1].name, log=True):
        lines += measure(kind, row, device, args.repeats, args.each, watchdog)
    watchdog.end()
    print(table(lines))
    return 1 if any(line[3] for line in lines[1:]) else 0


if __name__ == "__main__":
    sys.exit(main())
