"""Thousands of random problems by the families that synchronise programs, beside other work on the same GPU, against fp64.

`python -m benchmarks.stress --count 10000 --out results/stress-h200.log`. Each problem runs by each family that can and by the planner's
choice, twice; both times the bits must be the same, and errors within the budget. `--only INDEX` repeats one. A problem that does not end
within a minute is printed, and ends the process with 3: a hang must not hold the GPU.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import deterministic as _deterministic

from onepass import functional
from onepass.bench import accuracy, record
from onepass.bench.terminal import table
from onepass.core import reference
from onepass.core.device import describe
from onepass.planning.options import CannotForce, force
from onepass.planning.registry import FAMILIES
from onepass.verify import calls, oracle
from onepass.verify.calls import Output
from onepass.verify.cases import Case
from onepass.verify.oracle import Outcome
from onepass.verify.tensors import Operands

from . import stress_problems
from .precompile import Families, prepare
from .stress_problems import Problem

SHARING = ("team", "ring", "whole_set")  # programs of these wait for one another
deterministic: Any = _deterministic  # a module whose attributes a type checker does not see
OWN = "planner"
LONGEST = 60.0  # seconds a problem may take
EVERY = 500  # problems between lines of progress


class Verdict(NamedTuple):
    """One problem by one family."""

    error: float | None = None  # the largest, as a fraction of the budget; None where it did not run
    fault: str = ""  # what is wrong beside it
    skipped: bool = False

    @property
    def ok(self) -> bool:
        return self.skipped or (not self.fault and self.error is not None and self.error <= 1)

    def __str__(self) -> str:
        return self.fault or f"the largest error is {self.error:.3g} of the budget"


class Given(NamedTuple):
    """What a call gave: the parts that a Case knows of, and the statistics if they were asked for."""

    outcome: Outcome
    mean: Tensor | None = None
    rstd: Tensor | None = None


def verdicts(
    problem: Problem, device: str, families: Families, seed: int = 0, before: Callable[[], Any] = lambda: None
) -> dict[str, Verdict]:
    """A problem by every family; `before` is called before each run.

    Example: `verdicts(stress_problems.draw(0, 17), "cpu", ["blockwise", None])["blockwise"].ok`
    """
    operands = stress_problems.make(problem, device, seed)
    found: dict[str, Verdict] = {}
    results: dict[str, Given] = {}
    for family in families:
        name = family or OWN
        try:
            with force(family):
                first, second = (_given(problem, operands, before) for _ in range(2))
        except CannotForce:
            found[name] = Verdict(skipped=True)
        except Exception as error:
            found[name] = Verdict(fault=f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}")
        else:
            results[name] = first
            found[name] = Verdict(fault="" if _same(first, second) else "two runs gave different bits")
    errors = accuracy.largest_errors(problem.case, operands, {name: given.outcome for name, given in results.items()})
    for name, given in results.items():
        error = errors[name] if given.rstd is None else max(errors[name], _statistics(problem.case, operands, given))
        found[name] = found[name]._replace(error=error)
    return found


def _given(problem: Problem, operands: Operands, before: Callable[[], Any]) -> Given:
    statistics: list[Tensor | None] = []

    def run(case: Case, t: Operands) -> Output:
        call: Any = calls.onepass_call(case, t)
        if not problem.stats:
            return call()
        result = call(return_stats=True)
        statistics.extend((result.mean, result.rstd))
        return result.output

    before()
    return Given(oracle.evaluate(problem.case, operands, None, run), *statistics)


def _same(first: Given, second: Given) -> bool:
    pairs = zip((*first.outcome, first.mean, first.rstd), (*second.outcome, second.mean, second.rstd))
    return all(torch.equal(bits(a), bits(b)) for a, b in pairs if a is not None and b is not None)


def bits(t: Tensor) -> Tensor:
    """As integers, of which NaN equals itself and -0 is not 0."""
    return t.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[t.element_size()])


def _statistics(case: Case, operands: Operands, given: Given) -> float:
    """The largest error of mean and rstd. The mean may be off by 8·ε times the mean of |x|, rstd by 8·ε·κ of itself, and half an ulp."""
    assert given.mean is not None and given.rstd is not None
    x, spec = oracle.in_float64(operands).x, replace(calls.spec_of(case), activation="")
    exact, size = reference.forward(spec, x, None, None), reference.forward(spec, x.abs(), None, None)
    assert exact.mean is not None and size.mean is not None
    plain = 8 * torch.finfo(given.rstd.dtype).eps
    kappa = 1 + exact.mean.abs() * exact.rstd
    allowed = (plain * size.mean, given.mean, exact.mean), (plain * kappa * exact.rstd, given.rstd, exact.rstd)
    return max(accuracy._ratio(actual, value, off + oracle.half_ulp(value, actual.dtype)) for off, actual, value in allowed)


class Busy:
    """Two more streams of the GPU, each with work queued whenever `keep` returns.

    One has matrix products and copies, the other norms by the families that synchronise programs, eager and in a graph, whose bits must be
    those of their first run.
    """

    def __init__(self, families: Families) -> None:
        self.wrong = torch.zeros((), dtype=torch.int64, device="cuda")
        self.queues = [
            (torch.cuda.Stream(), work, deque([torch.cuda.Event(), torch.cuda.Event()], 2)) for work in (self._others(), self._norms)
        ]
        inputs = [torch.randn(shape, device="cuda").half().to(memory_format=torch.channels_last) for shape in BACKGROUND]
        norms = [partial(_background, family, x) for family in families if family for x in inputs]
        self.norms = [norm for norm in norms if _can(norm)] or [partial(_background, None, x) for x in inputs]
        self.firsts = [norm() for norm in self.norms]
        stream = self.queues[1][0]
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            self._eager()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, stream=stream):
            for _ in range(4):
                self._eager()
        torch.cuda.synchronize()

    def keep(self) -> None:
        for stream, work, events in self.queues:
            if events[0].query():  # the last batch but one has ended
                with torch.cuda.stream(stream):
                    work()
                    event = torch.cuda.Event()
                    event.record()
                events.append(event)

    def check(self) -> str:
        """What is wrong, or "". Waits for all streams."""
        torch.cuda.synchronize()
        wrong = int(self.wrong.item())
        self.wrong.zero_()
        return f"{wrong} elements differ from their first run" if wrong else ""

    def _others(self) -> Callable[[], None]:
        a, big = torch.randn(2048, 2048, device="cuda").half(), torch.zeros(2**24, device="cuda")
        product, copy = torch.empty_like(a), torch.empty_like(big)

        def work() -> None:
            for _ in range(12):
                torch.mm(a, a, out=product)
                copy.copy_(big)

        return work

    def _norms(self) -> None:
        self._eager()
        self.graph.replay()

    def _eager(self) -> None:
        for norm, first in zip(self.norms, self.firsts):
            self.wrong.add_((bits(norm()) != bits(first)).sum())


BACKGROUND = (2, 320, 64, 64), (1, 96, 61, 67), (4, 1280, 16, 16)


def _background(family: str | None, x: Tensor) -> Tensor:
    with torch.no_grad(), force(family):
        return functional.group_norm(x, 32, activation="silu")


def _can(norm: Callable[[], Tensor]) -> bool:
    try:
        norm()
    except CannotForce:
        return False
    return True


class Watch:
    """Ends the process where a problem does not end."""

    def __init__(self, say: Callable[[str], None], longest: float = LONGEST, leave: Callable[[int], Any] = os._exit) -> None:
        self.say, self.longest, self.leave = say, longest, leave
        self.name, self.deadline = "", math.inf
        threading.Thread(target=self._look, daemon=True).start()

    def begin(self, name: str) -> None:
        self.name, self.deadline = name, time.monotonic() + self.longest

    def end(self) -> None:
        self.deadline = None

    def _look(self) -> None:
        while (deadline := self.deadline) is not None:
            if time.monotonic() > deadline:
                self.say(f"HANGS: not ended after {self.longest:g} s: {self.name}")
                return self.leave(3)
            time.sleep(min(1.0, self.longest / 10))


@dataclass
class Tally:
    """Of one family."""

    ran: int = 0
    skipped: int = 0
    failed: int = 0
    worst: float = 0.0
    where: str = "–"  # the problem with the largest error

    def add(self, problem: Problem, verdict: Verdict) -> None:
        self.ran += not verdict.skipped
        self.skipped += verdict.skipped
        self.failed += not verdict.ok
        if verdict.error is not None and verdict.error > self.worst:
            self.worst, self.where = verdict.error, f"{problem.index}"


@dataclass
class Run:
    """All problems, one after the other; what is said of them goes to `say`."""

    families: Families
    device: str
    seed: int
    say: Callable[[str], None]
    tallies: dict[str, Tally] = field(default_factory=dict)
    faults: int = 0

    def __call__(self, problems: Sequence[Problem], minutes: float = math.inf) -> int:
        """How much failed."""
        watch, start = Watch(self.say), time.monotonic()
        watch.begin("the norms in the background")
        busy = Busy(self.families) if self.device.startswith("cuda") else None
        before = busy.keep if busy else lambda: None
        self.tallies = {family or OWN: Tally() for family in self.families}
        for done, problem in enumerate(problems, 1):
            words = f"{problem.index}: {problem.name}"
            watch.begin(words)
            # Of every other problem, what nobody has written is NaN; the others follow each other without the kernels that fill memory.
            deterministic.fill_uninitialized_memory = problem.index % 2 == 0
            try:
                found = verdicts(problem, self.device, self.families, self.seed, before)
                late = time.monotonic() - start > 60 * minutes
                report = done % EVERY == 0 or done == len(problems) or late
                wrong = busy.check() if busy and report else ""
            except RuntimeError as error:  # of a kernel that has ended, or of the GPU
                self._fail(f"{words}: {error}\nnothing can run after it; CUDA_LAUNCH_BLOCKING=1 and --only may tell by which family")
                break
            for family, verdict in found.items():
                self.tallies[family].add(problem, verdict)
                if not verdict.ok:
                    self._fail(f"{words} by {family}: {verdict}; repeat it with --seed {self.seed} --only {problem.index}")
            if wrong:
                self._fail(f"in the background, up to problem {problem.index}: {wrong}")
            if report:
                self.say(f"{done}/{len(problems)} problems, {time.monotonic() - start:.0f} s, {self.faults} failures")
            if late:
                self.say(f"stopped after {minutes:g} minutes")
                break
        watch.end()
        return self.faults

    def _fail(self, words: str) -> None:
        self.faults += 1
        self.say(f"FAILED {words}")

    def summary(self) -> str:
        head = ["family", "ran", "skipped", "failed", "worst error / budget", "of problem"]
        rows = [[name, str(t.ran), str(t.skipped), str(t.failed), f"{t.worst:.3f}", t.where] for name, t in self.tallies.items()]
        return table([head, *rows])


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.stress", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--count", type=int, default=10000, help="problems (10000)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, metavar="INDEX", help="this problem, and no other")
    parser.add_argument("--minutes", type=float, default=math.inf, help="stop after so many, compilation aside")
    parser.add_argument("--kernels", type=int, default=150, help="draw no problem that would need more of them in all (150)")
    parser.add_argument("--device", default="cuda", help="cuda; on the cpu, the formula family instead")
    parser.add_argument("--out", type=Path, help="write what is printed here, too")
    args = parser.parse_args(arguments)
    log = None
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        log = args.out.open("w")

    def say(words: str) -> None:
        for file in (sys.stdout, log):
            if file is not None:
                print(words, file=file, flush=True)

    on_cuda, known = args.device.startswith("cuda"), {family.name for family in FAMILIES}
    families: Families = [*(name for name in (SHARING if on_cuda else ("blockwise",)) if name in known), None]
    origin = record.origin(args.device)
    say(", ".join(f"{key} {value}" for key, value in origin.items()))
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # what deterministic mode asks of CUDA
    torch.use_deterministic_algorithms(True)  # else memory is not filled
    if args.only is not None:
        problems = [stress_problems.draw(args.seed, args.only)]
    elif on_cuda:
        from triton.runtime import driver

        device, target = describe(torch.device(args.device)), driver.active.get_current_target()
        problems, words = prepare(args.seed, args.count, device, families, args.kernels, target)
        say(words)
    else:
        problems = [stress_problems.draw(args.seed, index) for index in range(args.count)]
    run = Run(families, args.device, args.seed, say)
    failures = run(problems, args.minutes)
    say(f"{run.summary()}\n{failures} failures")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
