"""`onepass demo`: run every norm on this machine, compare with torch, and draw what each norm averages over."""

from __future__ import annotations

import argparse
from importlib.util import find_spec
from pathlib import Path

import torch

from onepass import __version__
from onepass.bench import timing
from onepass.bench.terminal import progress, table
from onepass.planning.explain import explain
from onepass.verify import calls, oracle, tensors
from onepass.verify.cases import Case

from . import picture
from .formatting import layout_name, milliseconds

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


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--picture", type=Path, default=Path("norms.png"), help="file for the picture (default: norms.png)")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    if not args.picture.absolute().parent.is_dir():
        raise FileNotFoundError(f"--picture {args.picture}: the folder {args.picture.absolute().parent} does not exist")
    print(f"onepass {__version__}, torch {torch.__version__}, {torch.get_num_threads()} threads, float32")
    print("error: the largest error of y against a float64 oracle, as a fraction of the error budget (docs/theory.md). Times in ms.\n")
    rows = [["norm", "shape", "layout", "data", "plan", "error", "torch's error", "forward", "torch", "with backward", "torch"]]
    within = True
    for case in progress(DEMO, len(DEMO), lambda case: case.name):
        operands = tensors.make(case)
        dy = tensors.make_dy(operands)
        exact = oracle.exact(case, operands, dy)
        ours, torchs = (
            oracle.worst(oracle.evaluate(case, operands, dy, run), exact.value, exact.allowed) for run in (calls.by_onepass, calls.by_torch)
        )
        within &= max(ours.forward, ours.backward or 0) <= 1
        plans = explain(calls.by_onepass, case, operands)
        speed = timing.interleaved(
            [
                lambda t=operands, c=case, f=run, g=gradient: oracle.evaluate(c, t, g, f)
                for gradient in (None, dy)
                for run in (calls.by_onepass, calls.by_torch)
            ]
        )
        rows.append(
            [
                *(_title(case), "×".join(map(str, case.shape)), layout_name(case), case.init, f"{plans.forward} | {plans.backward}"),
                *(f"{ours.forward:.2g}", f"{torchs.forward:.2g}", *(milliseconds(t.median) for t in speed)),
            ]
        )
    print(table(rows))
    print("\nplan: forward | backward. c: C kernels. Without a C compiler, aten (torch's kernels) or blockwise (torch operations) run.")
    print("Every result of onepass is within the budget, gradients included." if within else "FAILED: an error exceeds the budget")
    _draw(args.picture)
    return 0 if within else 1


def _title(case: Case) -> str:
    """Return the function with its modulation and activation, such as "group_norm + silu"."""
    extras = [word for word, there in (("modulate", case.modulate), (case.activation, case.activation)) if there]
    return " + ".join([f"add_{case.op}" if case.residual else case.op, *extras])


def _draw(path: Path) -> None:
    if find_spec("matplotlib") is None:
        print("No picture: it needs matplotlib. Install it with `pip install onepass[demo]`.")
        return
    picture.draw(path)
    print(f"{path} shows which elements each norm averages over.")
