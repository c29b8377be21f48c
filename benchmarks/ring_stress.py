"""A stress test of the GPU kernel family `ring`: delays one hand-over at a time, and counts wrong elements.

In `ring`, groups of warps pass blocks of x to each other through the slots of a ring in shared memory. A hand-over is a
place where one group waits for another. A fence orders the loads from a slot before the copy that refills it. The test
runs each hand-over with the fence and without it, on one stream and on four. Of four streams, two replay graphs and two
run eagerly. The ring has few slots and refills them at once, so that a missing synchronization shows. One cell of the
test has a planted fault, "early". The test must find it, which shows that it can find others.

A cell is one hand-over, one fence and one number of streams. If a cell takes longer than a minute on one shape, the
process ends with status 3. On a Hopper GPU, run
`python -m benchmarks.ring_stress --seconds 240 --out results/ring-stress-h200.jsonl`.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from onepass.backends.gpu import forward
from onepass.backends.gpu.launch.counters import Counters
from onepass.backends.gpu.ring.launch import RESET
from onepass.bench import record
from onepass.bench.terminal import table
from onepass.core.device import Device, describe
from onepass.core.operands import NO_OPTIONAL
from onepass.verify.tensors import lay_out

from .background import bits
from .precompile import build, finish, new_pool
from .ring_stress_shapes import SHAPES, planned
from .watchdog import LONGEST, Watchdog

HANDOVERS = {  # "group name", where group is a group of warps: what this group does late
    "": "nothing",
    "load copy": "copying into an empty slot",
    "reduce block": "loading a full block",
    "reduce crowd": "the same loads, already issued, behind others in the shared-memory pipe",
    "reduce release": "releasing a block that is read again later",
    "reduce moments": "storing the moments of columns",
    "publish moments": "loading the moments of columns",
    "publish parts": "storing a member's moments",
    "publish count": "counting a member after its moments are stored",
    "combine lines": "storing gain and term in free lines",
    "combine count": "reading the counter",
    "combine parts": "loading the moments of all members after the last is counted",
    "combine known": "storing mean and rstd",
    "combine leave": "counting a member after it has read the moments",
    "combine reset": "resetting the counter",
    "apply lines": "loading mean, rstd, gain and term",
    "apply block": "loading a block",
    "apply crowd": "the same loads, already issued, behind others in the shared-memory pipe",
    "apply release": "releasing a block",
    "apply used": "releasing the lines",
}

# Which group executes the fence: "load", the group that refills slots, as in production; "readers", the groups that read
# them; or none. "early" is a planted fault: a slot is released before it is read.
FENCES = ("load", "readers", "none", "early")
INPUTS = 3  # inputs of each shape. They take turns, so that data left over from one launch is wrong for the next
REPEATS = 4  # a graph runs all inputs this many times
BATCH = 6  # a lane without a graph makes this many launches before the next lane takes its turn
DEVICE = "cuda"
CLOSE = 2.0**-8  # tolerance: the delayed kernel is compiled separately, and may round differently from production's


class Cell(NamedTuple):
    """One cell of the table: the hand-over that is delayed, the place of the fence, and the number of streams."""

    handover: str
    fence: str
    streams: int

    @property
    def stress(self) -> str:
        return f"{self.handover}/{self.fence}"

    def __str__(self) -> str:
        return f"{self.handover or 'nothing'} late, fence {self.fence}, {self.streams} stream{'s' * (self.streams > 1)}"


def cells(handovers: Sequence[str], fences: Sequence[str]) -> list[Cell]:
    """Return the cells in order. Hand-overs of slots come first, with every fence. The others skip the fence "readers"."""
    found = [Cell("apply block", "early", 1)] if "early" in fences else []
    named = [handover for handover in HANDOVERS if handover in handovers]
    for handover in sorted(named, key=lambda handover: not _of_a_slot(handover)):
        for fence in fences:
            if fence != "early" and (fence != "readers" or _of_a_slot(handover)):
                found += [Cell(handover, fence, streams) for streams in (1, 4)]
    return found


def _of_a_slot(handover: str) -> bool:
    return not handover or handover.split()[1] in ("copy", "block", "crowd", "release")


def shapes_of(cell: Cell) -> list[str]:
    """Return the names of the shapes on which a cell runs.

    Only "again" has blocks that are read again. Without such blocks, the reduce group releases no slots.
    """
    return ["again"] if cell.handover in ("reduce crowd", "reduce release") else list(SHAPES)


def source(name: str, stress: str | None, device: Device) -> Any:
    (kernel,) = forward.kernels(*planned(SHAPES[name], device), SHAPES[name].statistics, stress=stress)
    return kernel.source()


def _build(name: str, stress: str | None, device: Device, target: Any) -> None:
    build(source(name, stress, device), target)


def prepare(wanted: Sequence[tuple[str, str | None]], device: Device, target: Any, workers: int, seconds: float) -> str:
    """Compile kernels, given as (shape, stress), in other processes for at most `seconds`. Return a sentence about it."""
    start = time.monotonic()
    pool = new_pool(workers)
    words = finish(pool, [pool.submit(_build, name, stress, device, target) for name, stress in wanted], seconds)
    return f"in {time.monotonic() - start:.0f} s, {words}"


Launch = Callable[[Tensor], list[Tensor]]


class Images:
    """The inputs of a shape, and the outputs of the production kernel when it runs alone on the GPU."""

    def __init__(self, name: str, device: Device) -> None:
        self.name, self.shape, self.device = name, SHAPES[name], device
        generator = torch.Generator(DEVICE).manual_seed(0)
        channels = self.shape.shape[1]
        self.weight, self.bias = torch.randn(2, channels, device=DEVICE, generator=generator).half().unbind()
        made = (torch.randn(self.shape.shape, device=DEVICE, generator=generator).half() for _ in range(INPUTS))
        self.inputs = [lay_out(x, self.shape.case.layout, DEVICE) for x in made]
        self.expected = [self.launch(None)(x) for x in self.inputs]
        torch.cuda.synchronize()
        for x, (y, *_) in zip(self.inputs, self.expected):
            exact = self._normalized(x.double().contiguous(), self.weight.double(), self.bias.double())
            torch.testing.assert_close(y, F.silu(exact).half(), rtol=2**-8, atol=2**-8)

    def _normalized(self, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        if self.shape.groups:
            return F.group_norm(x, self.shape.groups, weight, bias)
        if self.shape.op == "instance_norm":
            return F.instance_norm(x, weight=weight, bias=bias)
        if self.shape.op == "batch_norm":
            return F.batch_norm(x, None, None, weight, bias, training=True)
        return F.layer_norm(x.movedim(1, -1), weight.shape, weight, bias).movedim(-1, 1)  # each row, or each pixel

    def launch(self, stress: str | None) -> Launch:
        run = forward.forward(*planned(self.shape, self.device), self.shape.statistics, stress)

        def launch(x: Tensor) -> list[Tensor]:
            result = run(x, self.weight, self.bias, None, None, NO_OPTIONAL)
            return [t for t in (result.y, result.mean, result.rstd) if t is not None]

        return launch

    def references(self, launch: Launch) -> list[list[Tensor]]:
        """Return the expected outputs for each input: those of this kernel when it runs alone on the GPU.

        If these are not close to the outputs of the production kernel, return the outputs of the production kernel.
        """
        firsts = [launch(x) for x in self.inputs]
        return [
            first if all(torch.allclose(a, b, CLOSE, CLOSE) for a, b in zip(first, right)) else right
            for first, right in zip(firsts, self.expected)
        ]


class Lane:
    """A stream that launches a kernel on the inputs in turn, and counts outputs whose bits differ from the references.

    The counts stay on the GPU: the host does not wait for them until it calls `counts` or `pattern`.
    """

    def __init__(self, launch: Launch, inputs: list[Tensor], references: list[list[Tensor]], captured: bool) -> None:
        self.launch, self.pairs, self.stream = launch, list(zip(inputs, references)), torch.cuda.Stream()
        self.launches, self.graph = 0, None
        self._elements, self._wrong = torch.zeros(2, dtype=torch.int64, device=DEVICE).unbind()
        self._where = torch.zeros_like(inputs[0], dtype=torch.bool)
        torch.cuda.synchronize()
        if captured:
            with torch.cuda.stream(self.stream):  # run once, because the pool of counters must exist before the capture
                self._run(1)
                for count in (self._elements, self._wrong, self._where):
                    count.zero_()  # forget the counts of that launch
            torch.cuda.synchronize()
            self.graph = torch.cuda.CUDAGraph()
            # Do not capture on the stream that replays. Do not use `torch.cuda.graph`, which would collect garbage.
            with torch.cuda.stream(torch.cuda.Stream()):
                self.graph.capture_begin()
                self._run(REPEATS * len(self.pairs))
                self.graph.capture_end()

    def _run(self, times: int) -> None:
        for i in range(times):
            x, reference = self.pairs[i % len(self.pairs)]
            masks = [bits(found) != bits(right) for found, right in zip(self.launch(x), reference)]
            wrong = sum(mask.sum() for mask in masks)
            self._elements += wrong
            self._wrong += wrong > 0
            self._where |= masks[0]

    def step(self) -> None:
        with torch.cuda.stream(self.stream):
            if self.graph is None:
                self._run(BATCH)
                self.launches += BATCH
            else:
                self.graph.replay()
                self.launches += REPEATS * len(self.pairs)

    def counts(self) -> tuple[int, int, int]:
        """Return the number of launches, of wrong launches, and of wrong elements."""
        return self.launches, int(self._wrong.item()), int(self._elements.item())

    def pattern(self) -> str:
        """Describe which elements of y were wrong in any launch; "" if none were. A row is one position with all its channels."""
        rows = self._where.movedim(1, -1).flatten(0, -2).sum(1)
        widths = sorted(set(rows[rows > 0].tolist()))
        return f"{int((rows > 0).sum())} rows, {', '.join(map(str, widths[:8]))} columns of each" if widths else ""


def run(cell: Cell, images: Images, seconds: float) -> dict[str, Any]:
    """Run one cell on one shape for `seconds`, and return its record: the counts, and which elements were wrong."""
    forward.COUNTERS[RESET] = Counters()  # captured launches use up a pool of counters, so start with a new pool
    launch = images.launch(cell.stress)
    references = images.references(launch)
    lanes = [Lane(launch, images.inputs, references, captured=i >= 2) for i in range(cell.streams)]
    torch.cuda.synchronize()
    start = time.monotonic()
    while time.monotonic() - start < seconds:
        for _ in range(4):
            for lane in lanes:
                lane.step()
        torch.cuda.synchronize()
    taken = time.monotonic() - start
    launches, wrong, elements = map(sum, zip(*(lane.counts() for lane in lanes)))
    patterns = "; ".join(filter(None, (lane.pattern() for lane in lanes)))
    found = {"handover": cell.handover, "fence": cell.fence, "streams": cell.streams, "shape": images.name}
    return found | {"launches": launches, "wrong": wrong, "elements": elements, "seconds": round(taken, 2), "pattern": patterns}


@dataclass
class Tally:
    """The sum of the results of one cell on all shapes."""

    launches: int = 0
    wrong: int = 0
    elements: int = 0
    shapes: list[str] = field(default_factory=list)  # the shapes with wrong launches

    def add(self, found: dict[str, Any]) -> None:
        self.launches += found["launches"]
        self.wrong += found["wrong"]
        self.elements += found["elements"]
        self.shapes += [found["shape"]] if found["wrong"] else []

    def __str__(self) -> str:
        return f"{self.launches}" + (f": {self.wrong} WRONG, {self.elements} elements" if self.wrong else "")


def summary(tallies: dict[Cell, Tally]) -> str:
    """Return a table of launches and wrong launches: a line for each hand-over, a column for each fence and number of streams."""
    columns = sorted({(cell.fence, cell.streams) for cell in tallies})
    head = ["late", *(f"{fence}, {streams}" for fence, streams in columns)]
    lines = [
        [handover or "nothing", *(str(tallies.get(Cell(handover, *column), "–")) for column in columns)]
        for handover in dict.fromkeys(cell.handover for cell in tallies)
    ]
    return table([head, *lines])


def verdict(tallies: dict[Cell, Tally]) -> tuple[str, int]:
    """Return the verdict in words, and the number of bad cells.

    A cell is bad if it has wrong launches with the fence of production, or none although a fault was planted.
    """
    planted = [tally for cell, tally in tallies.items() if cell.fence == "early"]
    blind = sum(not tally.wrong for tally in planted)
    production = sum(tally.wrong > 0 for cell, tally in tallies.items() if cell.fence == "load")
    without = sum(tally.wrong for cell, tally in tallies.items() if cell.fence == "none")
    words = [f"with the fence {production} cells are wrong", f"without it {without} launches"]
    words += ["the planted fault was NOT seen" if blind else "the planted fault was seen"] if planted else []
    return "; ".join(words), production + blind


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.ring_stress", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=240, help="for all launches, compilation not counted (240)")
    parser.add_argument("--compile", type=float, default=150, metavar="SECONDS", help="the most seconds for compilation (150)")
    parser.add_argument("--workers", type=int, default=14, help="number of processes that compile (14)")
    parser.add_argument("--only", default=",".join(HANDOVERS), help="hand-overs, separated by commas; an empty name delays nothing")
    parser.add_argument("--fences", default=",".join(FENCES), help=f"some of {','.join(FENCES)}")
    parser.add_argument("--shapes", default=",".join(SHAPES), help=f"some of {','.join(SHAPES)}")
    parser.add_argument("--out", type=Path, help="append one line of JSON for each cell and shape to this file")
    args = parser.parse_args(arguments)
    for option, known in (("only", HANDOVERS), ("fences", FENCES), ("shapes", SHAPES)):
        unknown = set(getattr(args, option).split(",")) - set(known)
        if unknown:
            parser.error(f"--{option} {', '.join(sorted(unknown))}: unknown; expected some of {', '.join(filter(None, known))}")
    from triton.runtime import driver

    device, target, origin = describe(torch.device(DEVICE)), driver.active.get_current_target(), record.origin(DEVICE)
    say = partial(print, flush=True)
    say(", ".join(f"{key} {value}" for key, value in origin.items()))
    wanted = cells(args.only.split(","), args.fences.split(","))
    jobs = [(cell, name) for cell in wanted for name in shapes_of(cell) if name in args.shapes.split(",")]
    kernels = dict.fromkeys((name, cell.stress) for cell, name in jobs)
    production = [(name, None) for name in dict.fromkeys(name for _, name in jobs)]
    say(prepare([*production, *kernels], device, target, args.workers, args.compile))
    watchdog = Watchdog(say, LONGEST)
    tallies: dict[Cell, Tally] = {}
    for found in _all(jobs, device, args.seconds, watchdog, say):
        tallies.setdefault(Cell(found["handover"], found["fence"], found["streams"]), Tally()).add(found)
        if args.out:
            record.append(args.out, origin | found)
    watchdog.end()
    words, failures = verdict(tallies)
    say(f"{summary(tallies)}\n{words}")
    return 1 if failures else 0


def _all(
    jobs: Sequence[tuple[Cell, str]], device: Device, seconds: float, watchdog: Watchdog, say: Callable[[str], None]
) -> Iterator[dict[str, Any]]:
    """Run all jobs, pairs of (cell, shape), and yield their records. Each job gets an equal share of the time that is left."""
    start, made = time.monotonic(), {}
    for done, (cell, name) in enumerate(jobs):
        watchdog.begin(f"{cell}, {name}")
        if name not in made:
            made[name] = Images(name, device)
        left = start + seconds - time.monotonic()
        if left <= 0:
            return say(f"stopped after {done} of {len(jobs)}: {seconds:g} s are over")
        found = run(cell, made[name], left / (len(jobs) - done))
        if found["wrong"]:
            say(f"{cell}, {name}: {found['wrong']} of {found['launches']} launches wrong, {found['elements']} elements; {found['pattern']}")
        if (done + 1) % 20 == 0:
            say(f"{done + 1}/{len(jobs)}, {time.monotonic() - start:.0f} s")
        yield found


if __name__ == "__main__":
    sys.exit(main())
