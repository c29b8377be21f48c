"""`onepass run`: explain, verify and time one problem."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch

from onepass.bench import timing
from onepass.bench.terminal import print_table
from onepass.planning.explain import explain
from onepass.planning.options import force
from onepass.verify import calls, oracle, tensors
from onepass.verify.cases import Case

from .arguments import LAYOUTS
from .formatting import milliseconds


def run(args: argparse.Namespace) -> int:
    _check_dimensions(args)
    _check_options(args)
    fields = {name: getattr(args, name) for name in Case.__dataclass_fields__}
    case = Case(**{**fields, "layout": LAYOUTS.get(args.layout, args.layout)})
    operands = tensors.make(case, getattr(torch, args.dtype), args.device, args.seed)
    dy = tensors.make_dy(operands, args.seed)
    with force(args.family):
        print(f"{case.name}\n\n{explain(calls.by_onepass, case, operands)}")
        y = oracle.evaluate(case, operands, None).y
        print(f"\ny: mean {y.double().mean():.4g}, standard deviation {y.double().std():.4g}, strides {y.stride()}")
        ok = _report_errors(case, operands, dy) if args.verify else True
        if args.time:
            _report_times(case, operands, dy)
    return 0 if ok else 1


def _check_dimensions(args: argparse.Namespace) -> None:
    """Raise a ValueError if the input has too few dimensions for the norm."""
    rows = args.op in ("layer_norm", "rms_norm")
    if rows and not 1 <= args.rank <= len(args.shape):
        raise ValueError(f"--rank {args.rank}: expected 1 to {len(args.shape)}, as --shape has {len(args.shape)} dimensions")
    if not rows and len(args.shape) < 2:
        raise ValueError(f"--shape {args.shape[0]}: {args.op} needs at least two dimensions, samples and channels, for example 8,64")


# Options that only some norms take.
ONLY_FOR = {
    "residual": ("layer_norm", "rms_norm", "group_norm"),
    "offset": ("layer_norm", "rms_norm"),
    "granularity": ("layer_norm",),
    "last": ("group_norm", "instance_norm", "batch_norm", "switchable_norm"),
}


def _check_options(args: argparse.Namespace) -> None:
    """Raise a ValueError if the norm does not take an option."""
    for name, ops in ONLY_FOR.items():
        if getattr(args, name) != Case.__dataclass_fields__[name].default and args.op not in ops:
            raise ValueError(f"--{name} is not for {args.op}; expected {', '.join(ops)}, or no --{name}")


def _report_errors(case: Case, operands: tensors.Operands, dy: torch.Tensor) -> bool:
    exact = oracle.exact(case, operands, dy)
    rows = [["", "largest error", "fraction of the budget", "torch's fraction"]]
    ours, torchs = (oracle.evaluate(case, operands, dy, run) for run in (calls.by_onepass, calls.by_torch))
    worst, torch_worst = (oracle.worst(outcome, exact.value, exact.allowed) for outcome in (ours, torchs))
    for name, outcome, value, error, other in zip(ours._fields, ours, exact.value, worst.parts, torch_worst.parts):
        if outcome is not None and value is not None and error is not None:
            largest = (outcome.double() - value).abs().nan_to_num().max().item() if outcome.numel() else 0.0
            rows.append([name, f"{largest:.3g}", f"{error:.3f}", f"{other:.3f}"])
    print()
    print_table(rows)
    print(f"the two oracles differ by {exact.disagreement:.2g} times the allowed difference")
    return exact.disagreement <= 1 and max(worst.forward, worst.backward or 0) <= 1


def _report_times(case: Case, operands: tensors.Operands, dy: torch.Tensor) -> None:
    rows = [["milliseconds", "onepass", "torch", "copy of x"]]
    for name, gradient in (("forward", None), ("with backward", dy)):
        runs: list[Callable[[], Any]] = [
            lambda f=run, g=gradient: oracle.evaluate(case, operands, g, f) for run in (calls.by_onepass, calls.by_torch)
        ]
        times = timing.interleaved([*runs, operands.x.clone])
        rows.append([name, *(f"{milliseconds(t.median)} ({milliseconds(t.low)}-{milliseconds(t.high)})" for t in times)])
    print()
    print_table(rows)
