"""Compares the norms on this CPU with torch eager and torch.compile: every op, dtype, layout and size, forward and backward.

`python -m benchmarks.cpu --out results/cpu-x86.jsonl` measures calls as users write them. `--compile` adds torch.compile.
onepass, torch and torch.compile take turns, so that a slow minute of the machine affects all of them. A time is the median
of the turns. Before the timing, results for inputs of 1 MB are checked against the error budget of verify/oracle.py.
"""

from __future__ import annotations

import argparse
import platform
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from math import exp, log
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from onepass.bench import accuracy, record
from onepass.bench.record import Record
from onepass.bench.terminal import progress, table
from onepass.dispatch import front_door
from onepass.verify import calls, tensors
from onepass.verify.cases import Case
from onepass.verify.tensors import Operands

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SIZES = (4, 16, 64, 256, 1024, 8192, 32768, 65536)  # sizes of x in KB
LIMIT = 0.95  # a fraction of torch's speed; no case should be slower than this


def rows(kb: int, dtype: torch.dtype) -> list[Case]:
    """Return the cases with an x of `kb` KB: matrices with rows of at most 1024 elements, and images with 320 or 32 channels."""
    n = kb * 1024 // dtype.itemsize
    width = min(1024, max(n // 4, 1))
    flat = (n // width, width)
    channels = 320 if kb >= 2048 else 32
    side = 32 if channels == 320 else max(4, int((n / channels) ** 0.5) // 4 * 4)
    image = (max(1, n // (channels * side * side)), channels, side, side)
    wide = dtype != torch.float32
    found = [
        Case("layer_norm", flat),
        Case("rms_norm", flat, eps=1e-6),
        Case("layer_norm", flat, activation="gelu"),
        Case("rms_norm", flat, eps=1e-6, residual=True),
    ]
    for layout in ("contiguous", "channels_last"):
        found += [
            Case("group_norm", image, layout, groups=32),
            Case("group_norm", image, layout, groups=32, activation="silu"),
            Case("instance_norm", image, layout),
            Case("batch_norm", image, layout, wide=wide),
            Case("batch_norm", image, layout, wide=wide, evaluate=True),
            Case("layer_norm2d", image, layout, eps=1e-6),
        ]
    return found


def fused(case: Case) -> bool:
    return bool(case.activation) or case.residual


def title(case: Case) -> str:
    words = [f"add_{case.op}" if case.residual else case.op, *([case.activation] if case.activation else [])]
    words += ["evaluation"] if case.evaluate else []
    return " ".join(words) + ("" if len(case.shape) < 4 else " NHWC" if case.layout == "channels_last" else " NCHW")


def by_torch(case: Case, t: Operands) -> Callable[[], calls.Output]:
    """Return a call of torch's functions as a user would write it."""
    op = calls.OPS[case.op]
    norm: Callable[..., Tensor] = F.group_norm if case.op == "group_norm" else op.torch
    arguments = op.arguments(case, t)
    if t.residual is not None:
        return partial(_added, norm, t.x, t.residual, *arguments)
    act = {"silu": F.silu, "gelu": F.gelu}.get(case.activation)
    return (lambda: act(norm(t.x, *arguments))) if act else partial(norm, t.x, *arguments)


def _added(norm: Callable[..., Tensor], x: Tensor, residual: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
    total = x + residual
    return norm(total, *arguments), total


def _times(variants: dict[str, Callable[[], Any]], seconds: float) -> dict[str, float]:
    """Time the variants in turn for `seconds` in all. Return the median microseconds of a call of each."""
    for call in variants.values():
        call()
        call()
    started = time.perf_counter()
    for call in variants.values():
        call()
    # The number of calls in a turn, so that a turn lasts about a millisecond.
    repeat = max(1, int(1e-3 * len(variants) / max(time.perf_counter() - started, 1e-6)))
    found: dict[str, list[float]] = {name: [] for name in variants}
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(found[next(iter(found))]) < 5:
        for name, call in variants.items():
            started = time.perf_counter()
            for _ in range(repeat):
                call()
            found[name].append((time.perf_counter() - started) / repeat * 1e6)
    return {name: median(times) for name, times in found.items()}


def _y(output: calls.Output) -> Tensor:
    return output[0] if isinstance(output, tuple) else output


def measure(case: Case, dtype: torch.dtype, kb: int, compiled: bool, backward: bool, seconds: float) -> Iterator[Record]:
    operands = tensors.make(case, dtype, on_device=True)
    variants: dict[str, Callable[[], Any]] = {"torch": by_torch(case, operands), "onepass": calls.onepass_call(case, operands)}
    if compiled:
        torch._dynamo.reset()
        variants["compile"] = torch.compile(by_torch(case, operands))
    shared = {"case": title(case), "dtype": record.dtype_name(dtype), "kb": kb, "threads": torch.get_num_threads(), "fused": fused(case)}
    with torch.no_grad():
        copy = torch.empty_like(operands.x)
        times = _times({**variants, "copy": lambda: copy.copy_(operands.x)}, seconds)
    yield {**shared, "direction": "forward", **{f"{name}_us": round(us, 2) for name, us in times.items()}}
    if not backward:
        return
    inputs = [t.requires_grad_() for t in operands if t is not None and t is not operands.running_mean and t is not operands.running_var]
    dy = tensors.make_dy(operands, on_device=True)
    graphs = {name: _y(call()) for name, call in variants.items() if name != "compile"}
    times = _times({n: partial(torch.autograd.grad, y, inputs, dy, retain_graph=True) for n, y in graphs.items()}, seconds)
    yield {**shared, "direction": "backward", **{f"{name}_us": round(us, 2) for name, us in times.items()}}


def errors() -> Iterator[tuple[str, float]]:
    """Yield (name, error) for each case with an x of 1 MB: the largest error as a fraction of the error budget."""
    for dtype in DTYPES:
        for case in rows(1024, dtype):
            operands = tensors.make(case, dtype)
            with torch.no_grad():
                outcome = accuracy.outcome(calls.by_onepass(case, operands), operands)
            yield f"{title(case)} {record.dtype_name(dtype)}", accuracy.largest_errors(case, operands, {"onepass": outcome})["onepass"]


def mean(ratios: Sequence[float]) -> float:
    """Return the geometric mean, or NaN if there are no ratios."""
    return exp(sum(map(log, ratios)) / len(ratios)) if ratios else float("nan")


def summary(records: list[Record]) -> str:
    """Return a table of speed relative to torch: the mean from 32 MB on, the slowest case, and how many cases are below LIMIT."""
    lines = [["", "threads", "plain ≥ 32 MB", "fused ≥ 32 MB", "slowest ≥ 1 MB", "cases below 0.95", "slowest case"]]
    for direction in ("forward", "backward"):
        for threads in sorted({r["threads"] for r in records}):
            some = [r for r in records if r["direction"] == direction and r["threads"] == threads]
            if not some:
                continue
            ratios = [(r["torch_us"] / r["onepass_us"], r) for r in some]
            large = [[q for q, r in ratios if r["kb"] >= 32768 and r["fused"] == f] for f in (False, True)]
            middle, (low, which) = (
                min([q for q, r in ratios if r["kb"] >= 1024], default=float("nan")),
                min(ratios, key=lambda pair: pair[0]),
            )
            below = sum(q < LIMIT for q, _ in ratios)
            least = f"{low:.2f} {which['case']} {which['dtype']} {which['kb']} KB"
            means = [f"{mean(q):.2f}" for q in large]
            lines.append([direction, str(threads), *means, f"{middle:.2f}", f"{below} of {len(ratios)}", least])
    return table(lines)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cpu", description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--threads", default="1,2")
    parser.add_argument("--kb", default=",".join(map(str, SIZES)))
    parser.add_argument("--dtypes", default=",".join(map(record.dtype_name, DTYPES)))
    parser.add_argument("--seconds", type=float, default=0.2, help="for each measurement")
    parser.add_argument("--compile", action="store_true", help="measure torch.compile too; each case compiles for about ten seconds")
    parser.add_argument("--no-backward", action="store_true")
    options = parser.parse_args(arguments)
    front_door.open_now()
    wrong = [(name, error) for name, error in errors() if not error <= 1]
    if wrong:
        print("\n".join(f"{name}: {error:.3g} of the error budget" for name, error in wrong))
        return 1
    origin = {**record.origin("cpu"), "name": f"{_model()}, {platform.machine()}"}
    work = [
        (threads, case, getattr(torch, dtype), kb)
        for threads in map(int, options.threads.split(","))
        for dtype in options.dtypes.split(",")
        for kb in map(int, options.kb.split(","))
        for case in rows(kb, getattr(torch, dtype))
    ]
    records: list[Record] = []
    for threads, case, dtype, kb in progress(work, len(work), lambda w: f"{title(w[1])} {w[2]} {w[3]} KB"):
        torch.set_num_threads(threads)
        records += [{**r, **origin} for r in measure(case, dtype, kb, options.compile, not options.no_backward, options.seconds)]
    if options.out:
        record.write(options.out, records)
    print(summary(records))
    return 0


def _model() -> str:
    """Return the number of cores and the name of the CPU."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith(("model name", "CPU part"))]
    return f"{len(names)} of {names[0]}" if names else platform.processor()


if __name__ == "__main__":
    sys.exit(main())
