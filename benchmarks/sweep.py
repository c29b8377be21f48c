"""Measures norms on shapes that no kernel was tuned on (sweep_problems.py), by the planner's choice and by every family that can run.

Run it with `python -m benchmarks.sweep --device cuda --out results/sweep-h200.jsonl`. It goes on where it stopped: problems with a
result of this commit and machine in that file are skipped. `--summary` prints the report without measuring. Use a seed of your own to
judge the planner.

`--direction backward` measures backwards instead of forwards.

The fraction of a problem is the time in which a copy moves the same bytes, divided by our time. The bytes of parameters count, too. In a
backward, so do those of their gradients. The regret is our time divided by the time of the fastest family. If the spreads of the two
times overlap, the regret is 1.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import onepass
from onepass.backends.family import BACKWARD, FORWARD, Direction
from onepass.bench import accuracy, record, timing
from onepass.bench.measure import first_runs
from onepass.bench.providers import OURS, PROVIDERS, Provider
from onepass.bench.record import Record
from onepass.bench.terminal import progress, table
from onepass.bench.timing import Timing
from onepass.core.device import KNOWN_DEVICES, Device, describe
from onepass.core.problem import NormProblem
from onepass.planning.choose import plan
from onepass.planning.options import CannotForce, Options
from onepass.planning.registry import FAMILIES
from onepass.verify import calls, tensors
from onepass.verify.cases import Case
from onepass.verify.tensors import Operands

from .sweep_problems import Problem, draw, draw_backward

SIZES = {"above 16 MB": (2**24, math.inf), "1 to 16 MB": (2**20, 2**24), "below 1 MB": (0, 2**20)}  # bytes of x
LEAST_FRACTION, LARGEST_REGRET = 0.30, 1.20  # problems beyond these are listed
PEERS = ("torch", "torch.compile")
KNOWN_GPUS = {"a100": 80, "h200": 90, "b200": 100}  # the compute capabilities of some KNOWN_DEVICES
NOT_KERNELS = ("reference", "blockwise")  # families of torch operations: never close to the fastest
NAME_WIDTH = 60


def measure(problem: Problem, device: str, compiled: bool = False) -> Record:
    """Measure one problem. The record has an `error` and no times if our result is wrong, or if the call raises."""
    common = {
        **{"direction": problem.direction},
        **{"row": f"{problem.seed}.{problem.index} {problem.name}", "provider": "sweep", "seed": problem.seed, "index": problem.index},
        **{"kind": problem.kind, "bytes": problem.row.nbytes, **record.origin(device)},
    }
    with torch.no_grad(), timing.capturable_stream(device):
        try:
            return common | _measured(problem, device, compiled)
        except Exception as error:
            if device != "cpu":
                torch.cuda.synchronize()  # raises if the device itself is broken
            return common | {"error": f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')[:200]}"}


def _measured(problem: Problem, device: str, compiled: bool) -> Record:
    case, bound = problem.case, problem.bound
    operands = tensors.make(case, problem.dtype, device, on_device=True)
    operands = operands._replace(x=shifted(operands.x, problem.shift))
    described = describe(torch.device(device))
    dy = tensors.make_dy(operands, on_device=True) if problem.direction == BACKWARD else None
    chosen = plan(bound, described, problem.direction).family
    providers: dict[str, Provider] = {OURS: PROVIDERS[OURS]} | ({} if _breaks_torch(problem) else {"torch": PROVIDERS["torch"]})
    providers |= {"torch.compile": PROVIDERS["torch.compile"]} if compiled else {}
    providers |= {name: partial(_forced, name) for name in able(bound, problem.direction, described) if name != chosen}
    runs, outcomes, failed = first_runs(problem.row, operands, dy, providers)
    if OURS in failed:
        raise RuntimeError(failed[OURS])
    errors = accuracy.largest_errors(case, operands, outcomes, dy)
    outcomes.clear()  # timing needs their memory
    if errors[OURS] > 1:
        raise RuntimeError(f"wrong: the largest error is {errors[OURS]:.3g} of the budget")
    for name in [name for name, error in errors.items() if error > 1 and name not in PROVIDERS]:
        failed[name] = f"wrong: the largest error is {errors[name]:.3g} of the budget"
        del runs[name]
    copy, times = _times(operands, runs)
    least = copy.median * least_bytes(bound, problem.direction) / (2 * problem.row.nbytes)
    return {
        **{"chosen": chosen, "copy_us": _us(copy.median), "fraction": round(least / times[OURS].median, 4), "regret": regret(times)},
        **{"us": {name: [_us(value) for value in found] for name, found in times.items()}, "failed": failed},
    }


def least_bytes(bound: NormProblem, direction: Direction) -> int:
    """Return the smallest number of bytes that a kernel can move. In a backward, the gradients of parameters count, too."""
    least = bound.min_bytes(direction)
    if direction == FORWARD:
        return least
    parameters = least - prod(bound.shape) * bound.dtype.itemsize * (4 if bound.addends else 3)
    return least + parameters


def able(bound: NormProblem, direction: Direction, device: Device) -> Iterator[str]:
    """Yield the names of the families that can run a problem. To force the family of a backward, its forward must be able to run, too."""
    for family in FAMILIES:
        if family.name in NOT_KERNELS:
            continue
        try:
            for each in dict.fromkeys((FORWARD, direction)):
                plan(bound, device, each, Options(family.name))
        except CannotForce:
            continue
        yield family.name


def _breaks_torch(problem: Problem) -> bool:
    """Return whether torch's kernel would read misaligned memory, after which the process can use the GPU no more (torch 2.11)."""
    return bool(problem.shift) and problem.case.op == "batch_norm"


def _forced(family: str, case: Case, operands: Operands) -> Callable[[], Any]:
    call = calls.onepass_call(case, operands)

    def run() -> Any:
        with onepass.force(family):
            return call()

    return run


def shifted(x: Tensor, shift: int) -> Tensor:
    """Return a copy of x, with the same strides, that starts `shift` elements after an aligned address."""
    if not shift:
        return x
    size = sum((n - 1) * stride for n, stride in zip(x.shape, x.stride())) + 1
    memory = torch.empty(size + shift, dtype=x.dtype, device=x.device)
    return memory.as_strided(x.shape, x.stride(), shift).copy_(x)


def _times(operands: Operands, runs: dict[str, Callable[[], Any]]) -> tuple[Timing, dict[str, Timing]]:
    """Time a copy of x and all calls in turn."""
    target = torch.empty_like(operands.x)
    copy = partial(target.copy_, operands.x)
    if operands.x.is_cuda:
        first, *times = timing.device_times([copy, *(timing.capture(run)[0] for run in runs.values())])
    else:
        first, *times = timing.interleaved([copy, *runs.values()], seconds=0.05)
    return first, dict(zip(runs, times))


def regret(times: dict[str, Timing]) -> float:
    """Return our time divided by the time of the fastest family, or 1 if the spreads of the two times overlap."""
    ours = times[OURS]
    best = min((time for name, time in times.items() if name not in PROVIDERS or name == OURS), key=lambda time: time.median)
    return 1.0 if ours.low <= best.high else round(ours.median / best.median, 4)


def _us(seconds: float) -> float:
    return round(seconds * 1e6, 3)


def summary(records: Sequence[Record]) -> str:
    """Return the report: geometric means and quantiles by size, and the problems beyond the limits."""
    good = [r for r in records if "error" not in r]
    lines = [["", "problems", "fraction", "worst 5 %", "regret ≤ 1.05", "worst regret", "slower than torch", "than torch.compile"]]
    for title, (low, high) in SIZES.items():
        lines += [_line(title, [r for r in good if low <= r["bytes"] < high])]
    for kind in dict.fromkeys(r["kind"] for r in good):
        lines += [_line(kind, [r for r in good if r["kind"] == kind])]
    listed = [(f"fraction {r['fraction']:.2f}", r) for r in good if r["fraction"] < LEAST_FRACTION and r["bytes"] >= 2**20]
    listed += [(f"regret {r['regret']:.2f}", r) for r in good if r["regret"] > LARGEST_REGRET]
    for peer in PEERS:
        listed += [(f"{peer} {r['us'][OURS][0] / r['us'][peer][0]:.2f} times as fast", r) for r in good if _loses(r, peer)]
    listed += [(r["error"], r) for r in records if "error" in r]
    return "\n".join([table(lines), *(f"{r['row'][:NAME_WIDTH]:{NAME_WIDTH}} {r.get('chosen', ''):12} {why}" for why, r in listed)])


def _line(title: str, rows: Sequence[Record]) -> list[str]:
    if not rows:
        return [title, "0", *["–"] * 6]
    fractions = sorted(r["fraction"] for r in rows)
    low = sum(r["regret"] <= 1.05 for r in rows) / len(rows)
    return [
        *(title, str(len(rows)), f"{statistics.geometric_mean(fractions):.2f}", f"{fractions[len(rows) // 20]:.2f}"),
        *(f"{low:.0%}", f"{max(r['regret'] for r in rows):.2f}"),
        *(f"{sum(_loses(r, peer) for r in rows)} of {sum(peer in r['us'] for r in rows)}" for peer in PEERS),
    ]


def _loses(found: Record, peer: str) -> bool:
    """Return whether a peer is faster, by more than the spread of both times."""
    times = found["us"]
    return peer in times and times[OURS][1] > times[peer][2]


def main(argv: Sequence[str] | None = None) -> int:
    start = time.monotonic()
    parser = argparse.ArgumentParser(prog="python -m benchmarks.sweep", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--direction", choices=[FORWARD, BACKWARD], default=FORWARD)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=300, help="problems (300)")
    parser.add_argument("--limit", type=float, default=540, help="seconds after which no new problem begins (540)")
    parser.add_argument(
        "--workers",
        type=int,
        default=0,
        help="processes that compile all kernels first, without the GPU (0; with --compile-for one for each core)",
    )
    parser.add_argument(
        "--compile-for", choices=list(KNOWN_GPUS), help="without a GPU: only compile all kernels for this one, into the cache of Triton"
    )
    parser.add_argument("--compiled", action="store_true", help="measure torch.compile, too, on every third problem")
    parser.add_argument("--out", type=Path, help="add the results to this file, one JSON object per line")
    parser.add_argument("--summary", action="store_true", help="only print the report of that file")
    args = parser.parse_args(argv)
    draws = _draws(args.direction)
    if args.compile_for:
        from triton.backends.compiler import GPUTarget

        target = GPUTarget("cuda", KNOWN_GPUS[args.compile_for], 32)
        print(_compile_kernels(args, range(args.count), KNOWN_DEVICES[args.compile_for], target, None))
        return 0
    known, here = record.read(args.out) if args.out and args.out.exists() else [], record.origin(args.device)
    done = {r["index"] for r in _of_seed(known, args) if all(r[field] == here[field] for field in ("commit", "name"))}
    left = [] if args.summary else [index for index in range(args.count) if index not in done]
    if args.workers and left:
        print(_compile_ahead(args, left), file=sys.stderr, flush=True)
    for index in progress(left, len(left), lambda index: draws(args.seed, index).name, log=True):
        if time.monotonic() - start > args.limit:
            print(f"{args.limit:g} s have passed: run the same command again to go on", file=sys.stderr)
            break
        known = record.merge(known, [measure(draws(args.seed, index), args.device, args.compiled and _with_compiled(index))])
        if args.out:
            record.write(args.out, known)
    of_seed = _of_seed(known, args)
    print(summary(of_seed))
    return 1 if any("error" in r for r in of_seed) else 0


def _draws(direction: Direction) -> Callable[[int, int], Problem]:
    return draw_backward if direction == BACKWARD else draw


def _of_seed(records: Sequence[Record], args: argparse.Namespace) -> list[Record]:
    """Return the records of the seed and the direction that were asked for. Old records of forwards do not name their direction."""
    return [r for r in records if r["seed"] == args.seed and r.get("direction", FORWARD) == args.direction]


def _with_compiled(index: int) -> bool:
    """Return whether torch.compile is measured on this problem: on a third of each kind."""
    return index // 3 % 3 == 0


def _run_compiled(seed: int, index: int, direction: Direction) -> None:
    """In another process: let torch.compile compile a problem's call. Its cache on disk keeps the result."""
    problem = _draws(direction)(seed, index)
    operands = tensors.make(problem.case, problem.dtype, "cuda", on_device=True)
    operands = operands._replace(x=shifted(operands.x, problem.shift))
    dy = tensors.make_dy(operands, on_device=True) if direction == BACKWARD else None
    with torch.no_grad():
        first_runs(problem.row, operands, dy, {"torch.compile": PROVIDERS["torch.compile"]})
    torch.cuda.synchronize()


def _compile_kernels(args: argparse.Namespace, indices: Sequence[int], device: Device, target: Any, seconds: float | None) -> str:
    from .precompile import compile_ahead

    families = [None, *(family.name for family in FAMILIES if family.name not in NOT_KERNELS)]
    return compile_ahead(_draws(args.direction), args.seed, indices, device, families, target, args.workers or os.cpu_count() or 1, seconds)


def _compile_ahead(args: argparse.Namespace, indices: Sequence[int]) -> str:
    from triton import knobs
    from triton.runtime import driver

    from .precompile import finish, new_pool

    os.environ["TRITON_CACHE_DIR"] = knobs.cache.dir  # if it is not set, torch.compile sets it to another folder, which has no kernels
    device, target = describe(torch.device(args.device)), driver.active.get_current_target()
    words = _compile_kernels(args, indices, device, target, args.limit / 2)
    if args.compiled:
        os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"  # otherwise each process would start several more
        pool = new_pool(args.workers)
        done = [pool.submit(_run_compiled, args.seed, index, args.direction) for index in indices if _with_compiled(index)]
        words += f"; torch.compile: {finish(pool, done, args.limit / 4)}"
    return words


if __name__ == "__main__":
    sys.exit(main())
