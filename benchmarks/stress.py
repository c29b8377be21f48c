"""Runs random problems by the kernel families whose programs wait for each other, while other work runs on the same GPU.

`python -m benchmarks.stress --count 10000 --out results/stress-h200.log` runs each problem by each of these families that
supports it, and by the family that the planner chooses. Each runs twice. Both runs must give the same bits, with errors
within the budget of verify/oracle.py. `--only INDEX` repeats one problem. If a problem takes longer than a minute, the
program prints it and ends with status 3.

`--direction backward` runs forwards and backwards, with the gradients of x and of all parameters, and compares all results.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import deterministic as _deterministic

from onepass.backends.family import BACKWARD, FORWARD, Direction
from onepass.bench import accuracy, record
from onepass.bench.terminal import table
from onepass.core import reference
from onepass.core.device import describe
from onepass.planning.options import CannotForce, force
from onepass.planning.registry import FAMILIES
from onepass.verify import calls, oracle, tensors
from onepass.verify.calls import Output
from onepass.verify.cases import Case
from onepass.verify.oracle import Outcome
from onepass.verify.tensors import Operands

from . import stress_problems
from .background import BackgroundWork, bits
from .precompile import Families, prepare
from .stress_problems import Problem
from .watchdog import Watchdog

# Kernel families whose GPU programs wait for each other. Not `team` for backwards: the planner never chooses it, and its many kernels
# would take the place of problems.
SHARING: dict[Direction, tuple[str, ...]] = {FORWARD: ("team", "ring", "whole_set"), BACKWARD: ("ring", "whole_set")}
deterministic: Any = _deterministic  # Any, because the type checker does not know the attributes of this module
PLANNER = "planner"
EVERY = 500  # print progress after so many problems


class Verdict(NamedTuple):
    """The result of one problem, run by one family."""

    error: float | None = None  # the largest error as a fraction of the budget; None if the problem did not run
    fault: str = ""  # what is wrong, apart from the error
    skipped: bool = False

    @property
    def ok(self) -> bool:
        return self.skipped or (not self.fault and self.error is not None and self.error <= 1)

    def __str__(self) -> str:
        return self.fault or f"the largest error is {self.error:.3g} of the budget"


class Returned(NamedTuple):
    """What a call returned: its outcome, and mean and rstd if the problem asks for statistics."""

    outcome: Outcome
    mean: Tensor | None = None
    rstd: Tensor | None = None


def verdicts(
    problem: Problem, device: str, families: Families, seed: int = 0, before: Callable[[], Any] = lambda: None
) -> dict[str, Verdict]:
    """Run a problem by every family, and return a Verdict for each. `before` is called before each run.

    A backward runs by the family that was forced when its forward ran. So a family must be able to run both.

    Example: `verdicts(stress_problems.draw(0, 17), "cpu", ["blockwise", None])["blockwise"].ok`
    """
    operands = stress_problems.make(problem, device, seed)
    dy = tensors.make_dy(operands, seed + problem.index, on_device=True) if problem.direction == BACKWARD else None
    found: dict[str, Verdict] = {}
    results: dict[str, Returned] = {}
    for family in families:
        name = family or PLANNER
        try:
            with force(family):
                first, second = (_run_once(problem, operands, dy, before) for _ in range(2))
        except CannotForce:
            found[name] = Verdict(skipped=True)
        except Exception as error:
            found[name] = Verdict(fault=f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}")
        else:
            results[name] = first
            found[name] = Verdict(fault="" if _same(first, second) else "two runs gave different bits")
    outcomes = {name: returned.outcome for name, returned in results.items()}
    errors = accuracy.largest_errors(problem.case, operands, outcomes, dy, all_results=True)
    for name, returned in results.items():
        error = errors[name] if returned.rstd is None else max(errors[name], _statistics(problem.case, operands, returned))
        found[name] = found[name]._replace(error=error)
    return found


def _run_once(problem: Problem, operands: Operands, dy: Tensor | None, before: Callable[[], Any]) -> Returned:
    statistics: list[Tensor | None] = []

    def run(case: Case, t: Operands) -> Output:
        call: Any = calls.onepass_call(case, t)
        if not problem.stats:
            return call()
        result = call(return_stats=True)
        statistics.extend((result.mean, result.rstd))
        return result.output

    before()
    return Returned(oracle.evaluate(problem.case, operands, dy, run), *statistics)


def _same(first: Returned, second: Returned) -> bool:
    pairs = zip((*first.outcome, first.mean, first.rstd), (*second.outcome, second.mean, second.rstd))
    return all(torch.equal(bits(a), bits(b)) for a, b in pairs if a is not None and b is not None)


def _statistics(case: Case, operands: Operands, returned: Returned) -> float:
    """Return the largest error of mean and rstd, as a fraction of the error budget.

    The budget of the mean is 8·ε·mean(|x|), and that of rstd is 8·ε·κ·rstd, each plus half a unit in the last place. ε is the
    machine epsilon, and κ = 1 + |mean|·rstd.
    """
    assert returned.mean is not None and returned.rstd is not None
    x, spec = oracle.in_float64(operands).x, replace(calls.spec_of(case), activation="")
    exact, size = reference.forward(spec, x, None, None), reference.forward(spec, x.abs(), None, None)
    assert exact.mean is not None and size.mean is not None
    plain = 8 * torch.finfo(returned.rstd.dtype).eps
    kappa = 1 + exact.mean.abs() * exact.rstd
    allowed = (plain * size.mean, returned.mean, exact.mean), (plain * kappa * exact.rstd, returned.rstd, exact.rstd)
    return max(oracle.error_ratio(actual, value, off + oracle.half_ulp(value, actual.dtype)) for off, actual, value in allowed)


@dataclass
class Tally:
    """The results of one family on all problems."""

    ran: int = 0
    skipped: int = 0
    failed: int = 0
    worst: float = 0.0
    where: str = "–"  # the index of the problem with the largest error

    def add(self, problem: Problem, verdict: Verdict) -> None:
        self.ran += not verdict.skipped
        self.skipped += verdict.skipped
        self.failed += not verdict.ok
        if verdict.error is not None and verdict.error > self.worst:
            self.worst, self.where = verdict.error, f"{problem.index}"


@dataclass
class Run:
    """One run of the stress test: all problems, one after the other. It reports with `say`."""

    families: Families
    device: str
    seed: int
    say: Callable[[str], None]
    tallies: dict[str, Tally] = field(default_factory=dict)
    faults: int = 0

    def __call__(self, problems: Sequence[Problem], minutes: float = math.inf) -> int:
        """Run the problems for at most so many minutes, and return the number of failures."""
        watchdog, start = Watchdog(self.say), time.monotonic()
        watchdog.begin("the norms in the background")
        busy = BackgroundWork(self.families) if self.device.startswith("cuda") else None
        before = busy.refill if busy else lambda: None
        self.tallies = {family or PLANNER: Tally() for family in self.families}
        for done, problem in enumerate(problems, 1):
            words = f"{problem.index}: {problem.name}"
            watchdog.begin(words)
            # For every other problem, let torch fill new memory with NaN, to find reads of memory that was never written. The
            # other problems run without the kernels that fill.
            deterministic.fill_uninitialized_memory = problem.index % 2 == 0
            try:
                found = verdicts(problem, self.device, self.families, self.seed, before)
                late = time.monotonic() - start > 60 * minutes
                report = done % EVERY == 0 or done == len(problems) or late
                wrong = busy.check() if busy and report else ""
            except RuntimeError as error:  # a kernel failed, or the GPU is in an error state
                self._fail(f"{words}: {error}\nnothing can run after it; CUDA_LAUNCH_BLOCKING=1 and --only may tell which family failed")
                break
            for family, verdict in found.items():
                self.tallies[family].add(problem, verdict)
                if not verdict.ok:
                    self._fail(f"{words} by {family}: {verdict}; repeat it with {_repeat(problem, self.seed)}")
            if wrong:
                self._fail(f"in the background, up to problem {problem.index}: {wrong}")
            if report:
                self.say(f"{done}/{len(problems)} problems, {time.monotonic() - start:.0f} s, {self.faults} failures")
            if late:
                self.say(f"stopped after {minutes:g} minutes")
                break
        watchdog.end()
        return self.faults

    def _fail(self, words: str) -> None:
        self.faults += 1
        self.say(f"FAILED {words}")

    def summary(self) -> str:
        head = ["family", "ran", "skipped", "failed", "worst error / budget", "of problem"]
        rows = [[name, str(t.ran), str(t.skipped), str(t.failed), f"{t.worst:.3f}", t.where] for name, t in self.tallies.items()]
        return table([head, *rows])


def _repeat(problem: Problem, seed: int) -> str:
    return f"--direction {BACKWARD} " * (problem.direction == BACKWARD) + f"--seed {seed} --only {problem.index}"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.stress", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--count", type=int, default=10000, help="problems (10000)")
    parser.add_argument("--direction", choices=[FORWARD, BACKWARD], default=FORWARD)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, metavar="INDEX", help="run this problem only")
    parser.add_argument("--minutes", type=float, default=math.inf, help="stop after so many minutes, compilation not counted")
    parser.add_argument("--kernels", type=int, default=150, help="the most kernels to compile; problems that need more are skipped (150)")
    parser.add_argument("--device", default="cuda", help="cuda, or cpu to run the blockwise family")
    parser.add_argument("--out", type=Path, help="also write the output to this file")
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
    draw = stress_problems.draw_backward if args.direction == BACKWARD else stress_problems.draw
    families: Families = [*(name for name in (SHARING[args.direction] if on_cuda else ("blockwise",)) if name in known), None]
    origin = record.origin(args.device)
    say(", ".join(f"{key} {value}" for key, value in origin.items()))
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # CUDA's deterministic mode needs this setting
    torch.use_deterministic_algorithms(True)  # torch fills new memory only in deterministic mode
    if args.only is not None:
        problems = [draw(args.seed, args.only)]
    elif on_cuda:
        from triton.runtime import driver

        device, target = describe(torch.device(args.device)), driver.active.get_current_target()
        problems, words = prepare(draw, args.seed, args.count, device, families, args.kernels, target)
        say(words)
    else:
        problems = [draw(args.seed, index) for index in range(args.count)]
    run = Run(families, args.device, args.seed, say)
    failures = run(problems, args.minutes)
    say(f"{run.summary()}\n{failures} failures")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
