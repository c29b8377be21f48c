"""Repeats and times launches of the backward of `ring`, which the planner does not use yet: some of them hang (docs/notes/backward.md).

Each launch runs many times. All its runs must give the same bits, gradients close to those of the planner's launches, and counters that are
0 again. If a launch hangs, the process names it, prints the counters that are not 0, and ends with status 3. On a Hopper GPU, run
`python -m benchmarks.ring_backward --kind blocks --repeats 300`. `--list` prints the launches and `--compile` compiles them, without a GPU.
"""

from __future__ import annotations

import argparse
import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from triton.backends.compiler import GPUTarget

from onepass.backends.family import BACKWARD, Launches
from onepass.backends.gpu.ring import schedule_backward
from onepass.backends.gpu.ring.launch_backward import BLOCKS, COLUMNS, ELEMENTS, KINDS, SET, RingBackwardLaunch
from onepass.backends.gpu.walk import walk
from onepass.bench import timing
from onepass.bench.suite import Row, problem_of
from onepass.bench.terminal import progress, table
from onepass.core.device import KNOWN_DEVICES, Device, describe
from onepass.core.operands import NO_OPTIONAL, Gradients, Needs, SavedTensors
from onepass.core.problem import NormProblem
from onepass.planning.choose import plan
from onepass.verify import tensors
from onepass.verify.cases import Case

from .background import bits
from .launch_times import CLOSE
from .sweep import KNOWN_GPUS
from .watchdog import Watchdog

HALF, BFLOAT, FULL = torch.float16, torch.bfloat16, torch.float32
LAST = "channels_last"
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
    SET: [Row(Case("batch_norm", (256, 512, 28, 28), wide=True), HALF)],
    ELEMENTS: [Row(Case(op, shape), BFLOAT) for op in ("layer_norm", "rms_norm") for shape in ((4096, 32768), (1024, 131072))],
}


def launches_of(problem: NormProblem, device: Device, each: int) -> Iterator[tuple[RingBackwardLaunch, Launches]]:
    """Yield the first `each` launches, by modelled time, for each shape of a block and number of tiles, with all that follows them."""
    found = schedule_backward.candidates(problem, walk(problem), device)
    taken: dict[tuple[int, ...], int] = {}
    for launch in sorted(found, key=lambda launch: schedule_backward.modelled_time(problem, launch, device)):
        kind = launch.block_i, launch.block_j, launch.tiles
        taken[kind] = taken.get(kind, 0) + 1
        if taken[kind] <= each:
            yield launch, schedule_backward.with_sums(problem, launch, device)


def compile_all(rows: Sequence[Row], each: int) -> int:
    """Compile all launches of these rows for an H200. Return how many kernels there are."""
    from onepass.backends.gpu import backward

    sources = dict[str, Any]()
    for row in rows:
        problem = problem_of(row)
        needs = needs_of(problem)
        for _, launches in launches_of(problem, KNOWN_DEVICES["h200"], each):
            sources |= {repr(source): source for _, kernel in backward.kernels(problem, launches, needs) for source in (kernel.source(),)}
    for source in progress(list(sources.values()), len(sources), lambda source: source.function.__name__, log=True):
        source.compile(GPUTarget("cuda", KNOWN_GPUS["h200"], 32))
    return len(sources)


def needs_of(problem: NormProblem) -> Needs:
    return Needs(True, problem.weight is not None, problem.bias is not None)


def name_of(launch: RingBackwardLaunch) -> str:
    blocks = f"{launch.block_i}x{launch.block_j}"
    return f"{launch.kind}, teams of {launch.members}, blocks of {blocks}, {launch.tiles} in a unit, {launch.slots} slots"


def measure(row: Row, device: Device, repeats: int, each: int, watchdog: Watchdog) -> list[list[str]]:
    """Run the planner's backward and all launches of a row. Return a line for each, with its time and its faults."""
    from onepass.backends.gpu import backward, forward
    from onepass.backends.gpu.ring.launch import RESET

    problem, case = problem_of(row), row.case
    watchdog.begin(row.name)
    with torch.no_grad(), timing.capturable_stream("cuda"):
        operands = tensors.make(case, row.dtype, "cuda", on_device=True)
        dy = tensors.make_dy(operands, on_device=True)
        run = forward.forward(problem, plan(problem, device).launches)
        result = run(operands.x, operands.weight, operands.bias, None, None, NO_OPTIONAL)
        saved = SavedTensors(operands.x, operands.weight, operands.bias, result.mean, result.rstd)
        needs = needs_of(problem)
        planned = plan(problem, device, BACKWARD)
        choices = {f"planned: {planned.family}": planned.launches}
        choices |= {name_of(launch): all_of for launch, all_of in launches_of(problem, device, each)}
        runs = {name: partial(backward.backward(problem, launches), dy, None, saved, needs) for name, launches in choices.items()}
        expected = next(iter(runs.values()))()
        faults = {}
        for name, run in runs.items():
            watchdog.begin(f"{row.name} by {name}")
            faults[name] = _faults(run, expected, repeats, forward.COUNTERS[RESET].eager)
        target = torch.empty_like(operands.x)
        watchdog.begin(f"{row.name}: replays of graphs")
        copy, *times = timing.device_times([partial(target.copy_, operands.x), *(timing.capture(run)[0] for run in runs.values())])
    least = copy.median * row.copies
    lines = [[name, f"{time.median * 1e6:.1f}", f"{least / time.median:.2f}", faults[name]] for name, time in zip(runs, times)]
    return [[row.name, f"{least * 1e6:.1f}", "1", ""], *lines]


class Counters:
    """Copies the counters of `ring` while a launch hangs: on a stream of its own, to memory that was allocated before."""

    def __init__(self) -> None:
        self.stream, self.host = torch.cuda.Stream(), torch.empty(4096, dtype=torch.int32, pin_memory=True)

    def report(self) -> str:
        """Return the counters that are not 0. A unit has one, which counts the members that stored their sums, and then those that left."""
        from onepass.backends.gpu import forward
        from onepass.backends.gpu.ring.launch import RESET

        lines = []
        for of_stream in forward.COUNTERS[RESET].eager:
            with torch.cuda.stream(self.stream):
                found = self.host[: len(of_stream)].copy_(of_stream[: len(self.host)], non_blocking=True)
                self.stream.synchronize()
            lines += [f"unit {unit}: {count}" for unit, count in enumerate(found.tolist()) if count]
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
            dirty += int(counter.any())
            counter.zero_()
    off = max(_distance(a, b) for a, b in zip(first, expected) if a is not None and b is not None)
    words = [f"{other} of {repeats} runs with other bits"] * (other > 0) + [f"{dirty} with counters that are not 0"] * (dirty > 0)
    return "; ".join(words + [f"off by {off:.3g}"] * (not off < CLOSE))


def _distance(a: Tensor, b: Tensor) -> float:
    return ((a.float() - b.float()).abs().max() / b.float().abs().max()).item()


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.ring_backward", description=__doc__)
    parser.add_argument("--kind", choices=KINDS, action="append", help="only launches of this kind; may be given twice")
    parser.add_argument("--repeats", type=int, default=100, help="runs of each launch (100)")
    parser.add_argument("--each", type=int, default=2, help="launches for each shape of a block (2)")
    parser.add_argument("--compile", action="store_true", help="only compile the kernels for an H200, into the cache of Triton")
    parser.add_argument("--list", action="store_true", help="print the launches for an H200, and run nothing")
    args = parser.parse_args(argv)
    rows = [row for kind in args.kind or KINDS for row in ROWS[kind]]
    if args.list:
        for row in rows:
            found = launches_of(problem_of(row), KNOWN_DEVICES["h200"], args.each)
            print("\n  ".join([row.name, *(name_of(launch) for launch, _ in found)]))
        return 0
    if args.compile:
        print(f"{compile_all(rows, args.each)} kernels are in the cache of Triton")
        return 0
    lines, watchdog = [["launch", "µs", "of copy speed", "faults"]], Watchdog(print, leave=_leave(Counters()))
    device = describe(torch.device("cuda"))
    for row in progress(rows, len(rows), lambda row: row.name, log=True):
        lines += measure(row, device, args.repeats, args.each, watchdog)
    watchdog.end()
    print(table(lines))
    return 1 if any(line[3] for line in lines[1:]) else 0


if __name__ == "__main__":
    sys.exit(main())
