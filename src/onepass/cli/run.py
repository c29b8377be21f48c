"""`onepass run`: explain, verify and time one problem."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch

from onepass.bench import timing
from onepass.bench.record import dtype_name
from onepass.bench.terminal import table
from onepass.core.spec import ACTIVATIONS, GRANULARITIES
from onepass.planning.explain import explain
from onepass.planning.options import force
from onepass.planning.registry import FAMILIES
from onepass.verify import calls, cases, matrix, oracle, tensors
from onepass.verify.cases import Case

from .formatting import LAYOUTS, milliseconds


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("op", choices=list(calls.OPS), help="the norm")
    parser.add_argument("--shape", required=True, type=shape, help="shape of the input, for example 32,512,64,64")
    parser.add_argument("--layout", default="contiguous", choices=[*LAYOUTS, *cases.LAYOUTS])
    parser.add_argument("--groups", type=int, default=32, help="group_norm: number of groups (default: 32)")
    parser.add_argument("--rank", type=int, default=1, help="layer_norm, rms_norm: number of normalized dimensions (default: 1)")
    parser.add_argument("--affine", default="both", choices=cases.AFFINES, help="which parameters the norm has")
    parser.add_argument("--wide", action="store_true", help="float32 parameters for a float16 or bfloat16 input")
    parser.add_argument("--init", default="normal", choices=cases.INITS, help="how the input is filled")
    parser.add_argument("--eps", type=float, default=1e-5)
    parser.add_argument("--running", action="store_true", help="batch_norm, instance_norm: update running statistics")
    parser.add_argument("--evaluate", action="store_true", help="batch_norm, instance_norm: use running statistics")
    parser.add_argument("--momentum", type=float, default=0.1)
    parser.add_argument("--activation", default="", choices=ACTIVATIONS, help="activation after the norm")
    parser.add_argument("--modulate", action="store_true", help="modulate with a scale and shift per sample and channel")
    parser.add_argument("--residual", action="store_true", help="layer_norm, rms_norm, group_norm: add a residual first")
    parser.add_argument("--save", choices=("x", "y"), default="x", help="tensor to save for the backward (default: x)")
    parser.add_argument("--offset", type=float, default=0.0, help="layer_norm, rms_norm: weight_offset")
    parser.add_argument("--granularity", default="element", choices=GRANULARITIES, help="layer_norm: shape of weight and bias")
    parser.add_argument("--last", action="store_true", help="group, instance, batch and switchable norm: the input is (N, *, C)")
    parser.add_argument("--no-bn", dest="using_bn", action="store_false", help="switchable_norm: leave out BatchNorm")
    parser.add_argument("--dtype", default="float32", choices=[dtype_name(d) for d in matrix.DTYPES])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--family", choices=[family.name for family in FAMILIES], help="force this kernel family")
    parser.add_argument("--verify", action="store_true", help="check output and gradients against two float64 oracles")
    parser.add_argument("--time", action="store_true", help="compare the time with torch's")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
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


def shape(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(",")))


def _report_errors(case: Case, operands: tensors.Operands, dy: torch.Tensor) -> bool:
    exact = oracle.exact(case, operands, dy)
    rows = [["", "largest error", "fraction of the budget", "torch's fraction"]]
    ours, torchs = (oracle.evaluate(case, operands, dy, run) for run in (calls.by_onepass, calls.by_torch))
    worst, torch_worst = (oracle.worst(outcome, exact.value, exact.allowed) for outcome in (ours, torchs))
    for name, outcome, value, error, other in zip(ours._fields, ours, exact.value, worst.parts, torch_worst.parts):
        if outcome is not None and value is not None and error is not None:
            largest = (outcome.double() - value).abs().nan_to_num().max().item() if outcome.numel() else 0.0
            rows.append([name, f"{largest:.3g}", f"{error:.3f}", f"{other:.3f}"])
    print(f"\n{table(rows)}\nthe two oracles differ by {exact.disagreement:.2g} times the allowed difference")
    return exact.disagreement <= 1 and max(worst.forward, worst.backward or 0) <= 1


def _report_times(case: Case, operands: tensors.Operands, dy: torch.Tensor) -> None:
    rows = [["milliseconds", "onepass", "torch", "copy of x"]]
    for name, gradient in (("forward", None), ("with backward", dy)):
        runs: list[Callable[[], Any]] = [
            lambda f=run, g=gradient: oracle.evaluate(case, operands, g, f) for run in (calls.by_onepass, calls.by_torch)
        ]
        times = timing.interleaved([*runs, operands.x.clone])
        rows.append([name, *(f"{milliseconds(t.median)} ({milliseconds(t.low)}-{milliseconds(t.high)})" for t in times)])
    print(f"\n{table(rows)}")
