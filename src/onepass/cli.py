"""The command line: onepass demo | doctor | run | verify | patch | bench | report."""

from __future__ import annotations

import argparse
import ast
import platform
import sys
from collections import defaultdict
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from . import __version__, device, ops, patch
from .bench import cases, command, oracle, picture, record, timing, verify
from .bench.cases import Case
from .bench.record import dtype_name
from .bench.terminal import progress, table
from .cpu import native
from .families import FAMILIES
from .plan import explain, force, grouped
from .spec import ACTIVATIONS, GRANULARITIES

_LAYOUT = {"nchw": "contiguous", "nhwc": "channels_last"}

DEMO = [
    Case("layer_norm", (2048, 1024)),
    Case("rms_norm", (2048, 1024), eps=1e-6),
    Case("group_norm", (4, 320, 32, 32), groups=32),
    Case("group_norm", (4, 320, 32, 32), "channels_last", groups=32),
    Case("group_norm", (4, 320, 32, 32), "channels_last", groups=32, init="shifted"),
    Case("instance_norm", (8, 64, 56, 56)),
    Case("batch_norm", (16, 64, 28, 28), running=True),
    Case("batch_norm", (16, 64, 28, 28), "channels_last", running=True),
    Case("layer_norm2d", (8, 96, 28, 28), eps=1e-6),
    Case("switchable_norm", (8, 64, 28, 28), running=True),
    Case("group_norm", (4, 320, 32, 32), groups=32, activation="silu"),
    Case("layer_norm", (8, 256, 1024), modulate=True),
    Case("rms_norm", (2048, 1024), residual=True, eps=1e-6),
]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="onepass", description="Normalization layers for PyTorch, as one core in every memory layout.")
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="command", required=True)
    demo = commands.add_parser("demo", help="run every norm here, verified and timed beside torch, and draw what they average over")
    demo.add_argument("--picture", type=Path, default=Path("norms.png"), help="where to save the picture (norms.png)")
    demo.set_defaults(run=_demo)
    commands.add_parser("doctor", help="versions, devices, and what each norm would run on").set_defaults(run=_doctor)
    _add_verify(commands.add_parser("verify", help="the whole case list against both oracles; run this on new hardware"))
    _add_run(commands.add_parser("run", help="one problem of your choice"))
    _add_patch(commands.add_parser("patch", help="what onepass.patch does to a model of yours"))
    command.add_bench(commands.add_parser("bench", help="the speed of every row of the suite, beside torch and the speed of a copy"))
    command.add_report(commands.add_parser("report", help="write the results of bench into docs/measured.md"))
    args = parser.parse_args(argv)
    try:
        return args.run(args)
    except (OSError, RuntimeError, ValueError, TypeError, IndexError, ZeroDivisionError, NotImplementedError) as error:
        print(f"onepass: {error}", file=sys.stderr)
        return 2


def _title(case: Case) -> str:
    """The function, with the extras it is called with."""
    extras = [word for word, there in (("modulate", case.modulate), (case.activation, case.activation)) if there]
    return " + ".join([f"add_{case.op}" if case.residual else case.op, *extras])


def _layout(case: Case) -> str:
    return {name: short for short, name in _LAYOUT.items()}[case.layout] if len(case.shape) == 4 else case.layout


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.3f}"


def _demo(args: argparse.Namespace) -> int:
    if not args.picture.absolute().parent.is_dir():
        raise FileNotFoundError(f"--picture {args.picture}: there is no folder {args.picture.absolute().parent}")
    print(f"onepass {__version__}, torch {torch.__version__}, {torch.get_num_threads()} threads, float32")
    print("error: the largest of y, as a fraction of the error budget against an fp64 oracle (docs/theory.md); times in ms\n")
    rows = [["norm", "shape", "layout", "data", "plan", "error", "torch's", "forward", "torch", "with backward", "torch"]]
    within = True
    for case in progress(DEMO, len(DEMO), lambda case: case.name):
        operands = cases.make(case)
        dy = cases.make_dy(operands)
        exact = oracle.exact(case, operands, dy)
        ours, torchs = (
            oracle.worst(oracle.evaluate(case, operands, dy, run), exact.value, exact.allowed) for run in (cases.by_onepass, cases.by_torch)
        )
        within &= max(ours.forward, ours.backward or 0) <= 1
        plans = explain(cases.by_onepass, case, operands)
        speed = timing.interleaved(
            [
                lambda t=operands, c=case, f=run, g=gradient: oracle.evaluate(c, t, g, f)
                for gradient in (None, dy)
                for run in (cases.by_onepass, cases.by_torch)
            ]
        )
        rows.append(
            [
                *(_title(case), "×".join(map(str, case.shape)), _layout(case), case.init, f"{plans.forward} | {plans.backward}"),
                *(f"{ours.forward:.2g}", f"{torchs.forward:.2g}", *(_milliseconds(t.median) for t in speed)),
            ]
        )
    print(table(rows))
    print("\nplan: forward | backward. native: C kernels; without a compiler, torch's own or torch operations (aten, formula)")
    print("every result of onepass, gradients included, is within the budget" if within else "FAILED: an error exceeds the budget")
    _draw(args.picture)
    return 0 if within else 1


def _draw(path: Path) -> None:
    if find_spec("matplotlib") is None:
        print("no picture: it needs matplotlib, `pip install onepass[demo]`")
        return
    picture.draw(path)
    print(f"which elements each norm averages over: {path}")


def _doctor(args: argparse.Namespace) -> int:
    triton = "found" if find_spec("triton") else "not installed; needed only by GPU kernels"
    print(f"onepass {__version__}\npython  {platform.python_version()} on {platform.machine()}")
    print(f"torch   {torch.__version__}\ntriton  {triton}")
    devices = ["cpu", *(f"cuda:{i}" for i in range(torch.cuda.device_count()))]
    broken = 0
    for name in devices:
        described = device.describe(torch.device(name))
        print(f"\n{name}  {described.name or f'{torch.get_num_threads()} threads'}")
        if name == "cpu":
            print(f"  C kernels       {described.no_native or native.state()}")
        for op in cases.OPS:
            for layout in ("contiguous", "channels_last"):
                case = Case(op, (2, 8, 6, 6), layout, groups=4)
                trouble = _trouble(case, name)
                broken += bool(trouble)
                if trouble:
                    print(f"  {op:16}{_layout(case):6}{trouble}")
                    continue
                operands = cases.make(case, device=name)
                plans = explain(cases.by_onepass, case, operands)
                print(f"  {op:16}{_layout(case):6}ok  route {ops.route(*operands[:3])}", end="; ")
                print(f"{plans.forward}, backward {plans.backward}")
                for plan in (plans.forward, plans.backward):
                    for families, reason in grouped((family, "; ".join(reasons)) for family, reasons in plan.why_not):
                        print(f"      {plan.direction} not {families}: {reason}")
    print("\nAll well." if not broken else f"\nBROKEN: {broken} checks failed; please report this with the output of `onepass verify`.")
    return 1 if broken else 0


class _Seen(TorchDispatchMode):
    """Any dispatch mode sends calls through the registered op."""

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        return func(*args, **(kwargs or {}))


def _trouble(case: Case, name: str) -> str:
    """What is wrong with a small problem on a device, by the direct route and by the registered op; "" if nothing."""
    try:
        operands = cases.make(case, device=name)
        dy = cases.make_dy(operands)
        exact = oracle.exact(case, operands, dy)
        worst = oracle.worst(oracle.evaluate(case, operands, dy), exact.value, exact.allowed)
        with _Seen():
            by_op = oracle.worst(oracle.evaluate(case, operands, dy), exact.value, exact.allowed)
    except Exception as error:
        return f"FAILED ({type(error).__name__}: {error}) "
    error = max(worst.forward, worst.backward or 0, by_op.forward, by_op.backward or 0)
    return "" if error <= 1 else f"FAILED (error {error:.2g} of the budget) "


def _add_verify(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--op", choices=list(cases.OPS), help="only this norm")
    parser.add_argument("--dtype", choices=[dtype_name(d) for d in verify.DTYPES], help="only this dtype")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--reasons", action="store_true", help="say why each family passes")
    parser.add_argument("--out", type=Path, help="also write the cells to this file, one JSON object a line")
    parser.set_defaults(run=_verify)


def _verify(args: argparse.Namespace) -> int:
    which = [case for case in cases.CASES if args.op in (None, case.op)]
    dtypes = [d for d in verify.DTYPES if args.dtype in (None, dtype_name(d))]
    total = len(which) * len(dtypes) * len(FAMILIES)
    print(f"onepass {__version__}, torch {torch.__version__}, {args.device} {record.machine(args.device)}")
    print("forward/backward: the worst error as a fraction of the budget; – : not supported there, --reasons says why\n")
    cells: dict[tuple[str, str], dict[torch.dtype, verify.Cell]] = defaultdict(dict)
    for cell in progress(verify.verify(which, dtypes, args.device, args.seed), total, lambda cell: cell.case.name):
        cells[cell.case.name, cell.family][cell.dtype] = cell
    rows = [["case", "family", *map(dtype_name, dtypes)]]
    rows += [[name, family, *(_cell(row[d]) for d in dtypes)] for (name, family), row in cells.items()]
    print(table(rows))
    every = [cell for row in cells.values() for cell in row.values()]
    failed = [cell for cell in every if not cell.ok]
    for cell in failed:
        print(f"FAILED {cell.case.name}, {cell.family}, {dtype_name(cell.dtype)}: {cell.fault or 'error beyond the budget'}")
    if args.reasons:
        print()
        for reason in sorted({reason for cell in every for reason in cell.reasons}):
            print(f"- {reason}")
    if args.out:
        origin = record.origin(args.device)
        record.write(args.out, (_record(cell) | origin for cell in every))
    ran = sum(cell.forward is not None for cell in every)
    print(f"\n{len(every)} cells: {ran - len(failed)} within the budget, {len(every) - ran} not supported, {len(failed)} failed")
    return 1 if failed else 0


def _record(cell: verify.Cell) -> dict[str, Any]:
    numbers = {"forward": cell.forward, "backward": cell.backward, "ok": cell.ok}
    return {"case": cell.case.name, "family": cell.family, "dtype": dtype_name(cell.dtype), **numbers}


def _cell(cell: verify.Cell) -> str:
    if cell.forward is None:
        return "–" if cell.reasons else "MISSING"
    text = f"{cell.forward:.2f}/" + ("–" if cell.backward is None else f"{cell.backward:.2f}")
    return text if cell.ok else text + " !"


def _add_run(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("op", choices=list(cases.OPS))
    parser.add_argument("--shape", required=True, type=lambda text: tuple(map(int, text.split(","))), help="for example 32,512,64,64")
    parser.add_argument("--layout", default="contiguous", choices=[*_LAYOUT, *cases.LAYOUTS])
    parser.add_argument("--groups", type=int, default=32, help="group_norm")
    parser.add_argument("--rank", type=int, default=1, help="how many trailing dimensions layer_norm and rms_norm normalize")
    parser.add_argument("--affine", default="both", choices=cases.AFFINES)
    parser.add_argument("--wide", action="store_true", help="float32 parameters beside a half-type input")
    parser.add_argument("--init", default="normal", choices=cases.INITS)
    parser.add_argument("--eps", type=float, default=1e-5)
    parser.add_argument("--running", action="store_true", help="batch_norm, instance_norm: update running statistics")
    parser.add_argument("--evaluate", action="store_true", help="batch_norm, instance_norm: use running statistics")
    parser.add_argument("--momentum", type=float, default=0.1)
    parser.add_argument("--activation", default="", choices=ACTIVATIONS, help="applied last")
    parser.add_argument("--modulate", action="store_true", help="with a scale and shift per sample")
    parser.add_argument("--residual", action="store_true", help="layer_norm, rms_norm, group_norm: add a residual first")
    parser.add_argument("--save", choices=("x", "y"), default="x", help="what the backward is computed from (x)")
    parser.add_argument("--offset", type=float, default=0.0, help="layer_norm, rms_norm: weight_offset")
    parser.add_argument("--granularity", default="element", choices=GRANULARITIES, help="layer_norm: what its parameters belong to")
    parser.add_argument("--last", action="store_true", help="group, instance, batch and switchable norm: channels last, (N, *, C)")
    parser.add_argument("--no-bn", dest="using_bn", action="store_false", help="switchable_norm: without BatchNorm")
    parser.add_argument("--dtype", default="float32", choices=[dtype_name(d) for d in verify.DTYPES])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--family", choices=[family.name for family in FAMILIES], help="pin a kernel family")
    parser.add_argument("--verify", action="store_true", help="hold output and gradients against both oracles")
    parser.add_argument("--time", action="store_true", help="time it beside torch")
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    fields = {name: getattr(args, name) for name in Case.__dataclass_fields__}
    case = Case(**{**fields, "layout": _LAYOUT.get(args.layout, args.layout)})
    operands = cases.make(case, getattr(torch, args.dtype), args.device, args.seed)
    dy = cases.make_dy(operands, args.seed)
    with force(args.family):
        print(f"{case.name}\n\n{explain(cases.by_onepass, case, operands)}")
        y = oracle.evaluate(case, operands, None).y
        print(f"\ny: mean {y.double().mean():.4g}, standard deviation {y.double().std():.4g}, strides {y.stride()}")
        ok = _report_errors(case, operands, dy) if args.verify else True
        if args.time:
            _report_times(case, operands, dy)
    return 0 if ok else 1


def _add_patch(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model", metavar="MODULE:FACTORY", help="what makes the model, or the model: torchvision.models:resnet50, mine:model"
    )
    parser.add_argument("arguments", nargs="*", metavar="VALUE | NAME=VALUE", help="what to call the factory with")
    parser.add_argument("--dry-run", action="store_true", help="change nothing, only say what would be done")
    parser.add_argument("--no-fuse", dest="fuse", action="store_false", help="replace norms, fuse none")
    parser.add_argument("--channels-last", action="store_true", help="also lay out convolutions channels-last")
    parser.set_defaults(run=_patch)


def _patch(args: argparse.Namespace) -> int:
    module, colon, path = args.model.partition(":")
    if not colon or not path:
        raise ValueError(f"model={args.model!r} has no factory; expected MODULE:FACTORY, for example torchvision.models:resnet50")
    sys.path.insert(0, "")  # a module of the user's, beside which the command was called
    try:
        made: Any = import_module(module)
        for name in path.split("."):
            made = getattr(made, name)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"model={args.model!r} was not found: {error}; expected MODULE:FACTORY as Python imports it from here") from error
    if not isinstance(made, torch.nn.Module):
        named = [text.partition("=")[::2] for text in args.arguments if "=" in text]
        made = made(*[_value(text) for text in args.arguments if "=" not in text], **{name: _value(value) for name, value in named})
    print(patch(made, fuse=args.fuse, dry_run=args.dry_run, channels_last=args.channels_last))
    return 0


def _value(text: str) -> Any:
    """A literal of Python where it is one, else the text itself."""
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def _report_errors(case: Case, operands: cases.Operands, dy: torch.Tensor) -> bool:
    exact = oracle.exact(case, operands, dy)
    rows = [["", "largest error", "of the budget", "torch's, of the budget"]]
    ours, torchs = (oracle.evaluate(case, operands, dy, run) for run in (cases.by_onepass, cases.by_torch))
    worst, torch_worst = (oracle.worst(outcome, exact.value, exact.allowed) for outcome in (ours, torchs))
    for name, outcome, value, error, other in zip(ours._fields, ours, exact.value, worst.parts, torch_worst.parts):
        if outcome is not None and value is not None and error is not None:
            largest = (outcome.double() - value).abs().nan_to_num().max().item() if outcome.numel() else 0.0
            rows.append([name, f"{largest:.3g}", f"{error:.3f}", f"{other:.3f}"])
    print(f"\n{table(rows)}\nthe two oracles differ by {exact.disagreement:.2g} of what they may")
    return exact.disagreement <= 1 and max(worst.forward, worst.backward or 0) <= 1


def _report_times(case: Case, operands: cases.Operands, dy: torch.Tensor) -> None:
    rows = [["milliseconds", "onepass", "torch", "copy of x"]]
    for name, gradient in (("forward", None), ("with backward", dy)):
        runs: list[Callable[[], Any]] = [
            lambda f=run, g=gradient: oracle.evaluate(case, operands, g, f) for run in (cases.by_onepass, cases.by_torch)
        ]
        times = timing.interleaved([*runs, operands.x.clone])
        rows.append([name, *(f"{_milliseconds(t.median)} ({_milliseconds(t.low)}-{_milliseconds(t.high)})" for t in times)])
    print(f"\n{table(rows)}")


if __name__ == "__main__":
    sys.exit(main())
