"""`onepass demo`: time every norm on this machine, compare speed and accuracy with torch, and draw what each norm averages over."""

from __future__ import annotations

import argparse
import logging
import os
import platform
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from onepass import __version__
from onepass.backends.c import library
from onepass.bench import timing
from onepass.bench.terminal import growing_table
from onepass.verify import calls, oracle, tensors
from onepass.verify.cases import Case

from . import picture

DEMO = [
    Case("layer_norm", (2048, 1024)),
    Case("rms_norm", (2048, 1024), eps=1e-6),
    Case("group_norm", (4, 320, 32, 32), groups=32),
    Case("group_norm", (4, 320, 32, 32), "channels_last", groups=32),
    Case("instance_norm", (8, 64, 56, 56)),
    Case("batch_norm", (16, 64, 28, 28), running=True),
    Case("batch_norm", (16, 64, 28, 28), "channels_last", running=True),
    Case("layer_norm2d", (8, 96, 28, 28), eps=1e-6),
    Case("switchable_norm", (8, 64, 28, 28), running=True),
    Case("group_norm", (4, 320, 32, 32), groups=32, activation="silu"),
    Case("layer_norm", (8, 256, 1024), modulate=True),
    Case("rms_norm", (2048, 1024), residual=True, eps=1e-6),
]
SHIFTED = Case("group_norm", (4, 320, 32, 32), "channels_last", groups=32, init="shifted")

HEAD = ["norm", "input", "onepass", "torch", "speed-up"]
WIDTHS = [30, 12, 9, 9, 8]


def run(args: argparse.Namespace) -> int:
    if not args.picture.absolute().parent.is_dir():
        raise FileNotFoundError(f"--picture {args.picture}: the folder {args.picture.absolute().parent} does not exist")
    print("This demo runs each norm of onepass on this machine, and compares its speed and accuracy with torch's.")
    threads = "1 thread" if torch.get_num_threads() == 1 else f"{torch.get_num_threads()} threads"
    print(f"onepass {__version__}, torch {torch.__version__}, {platform.machine()} CPU with {threads}, float32.", flush=True)
    _prepare()
    print("\nTime of a forward and a backward, in ms:\n", flush=True)
    within = True
    with growing_table(HEAD, WIDTHS) as add:
        for case in DEMO:
            row, ok = _measure(case)
            within &= ok
            add(row)
    within &= _tell_accuracy()
    print("All results of onepass, gradients included, are within the budget of rounding errors." if within else _FAILED)
    _draw(args.picture)
    print(f"\nTry next:\n{_next(_command())}")
    return 0 if within else 1


_FAILED = "FAILED: a result of onepass is outside the budget of rounding errors; please report this with the output of `onepass verify`."


def _measure(case: Case) -> tuple[list[str], bool]:
    """Return the row of a case in the table, and whether the errors of onepass are within the budget."""
    operands = tensors.make(case)
    dy = tensors.make_dy(operands, on_device=True)  # in the layout of y, as in a model
    exact = oracle.exact(case, operands, dy)
    worst = oracle.worst(oracle.evaluate(case, operands, dy), exact.value, exact.allowed)
    ours, torchs = fastest([lambda f=f: oracle.evaluate(case, operands, dy, f) for f in (calls.by_onepass, calls.by_torch)])
    speed = f"{torchs / ours:.1f}x"
    row = [_title(case), "×".join(map(str, case.shape)), f"{ours * 1e3:.2f}", f"{torchs * 1e3:.2f}", speed]
    return row, max(worst.forward, worst.backward or 0) <= 1


def fastest(variants: Sequence[Callable[[], Any]], seconds: float = 0.4, least: int = 15) -> list[float]:
    """Time several calls in turn, and return the seconds of the fastest sample of each.

    Another process on the machine can only add time. So the fastest of many short samples is the one least disturbed.
    """
    for call in variants:
        call()
    best = [float("inf") for _ in variants]
    end, samples = time.perf_counter() + seconds * len(variants), 0
    while samples < least or time.perf_counter() < end:
        best = [min(known, timing.once(call, 1)) for known, call in zip(best, variants)]
        samples += 1
    return best


def _tell_accuracy() -> bool:
    """Compare the errors on data with a large mean. Return whether the errors of onepass are within the budget."""
    operands = tensors.make(SHIFTED)
    dy = tensors.make_dy(operands)
    exact = oracle.exact(SHIFTED, operands, dy)
    outcomes = [oracle.evaluate(SHIFTED, operands, dy, f) for f in (calls.by_onepass, calls.by_torch)]
    ours, torchs = ((outcome.y.double() - exact.value.y).abs().max().item() for outcome in outcomes)
    print(
        f"\nAccuracy: if the mean of the data is 10,000 times its standard deviation, torch's channels-last group_norm is off by up to\n"
        f"{_short(torchs)}, and onepass's by {_short(ours)}. Correct outputs have a standard deviation of {exact.value.y.std().item():.1f}."
    )
    worst = oracle.worst(outcomes[0], exact.value, exact.allowed)
    return max(worst.forward, worst.backward or 0) <= 1


def _short(number: float) -> str:
    """Return two digits, without an exponent: "2,600" or "0.0012"."""
    return f"{float(f'{number:.2g}'):,.0f}" if number >= 10 else f"{number:.2g}"


def _title(case: Case) -> str:
    """Return the function with its extras, such as "group_norm + silu" or "group_norm, channels last"."""
    extras = [word for word, there in (("modulate", case.modulate), (case.activation, case.activation)) if there]
    title = " + ".join([f"add_{case.op}" if case.residual else case.op, *extras])
    return title + ", channels last" * (case.layout == "channels_last")


def _prepare() -> None:
    """Make a first call, which compiles the C kernels if no cache has them, and say so."""
    with _said("compil"):
        oracle.evaluate(Case("layer_norm", (2, 8)), tensors.make(Case("layer_norm", (2, 8))), None)
    state = library.state()
    if state.startswith("cannot be used"):
        print(f"The C kernels {state}. So onepass uses torch's operations here, and is not faster.")


@contextmanager
def _said(start: str) -> Iterator[None]:
    """Print what onepass logs in this block, if it begins with `start`."""
    logger, handler = logging.getLogger("onepass"), logging.StreamHandler(sys.stdout)
    handler.setFormatter(logging.Formatter("(%(message)s)"))
    handler.addFilter(lambda record: record.getMessage().startswith(start))
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.setLevel(level)
        logger.removeHandler(handler)


def _draw(path: Path) -> None:
    if find_spec("matplotlib") is None:
        print("No picture: it needs matplotlib. Install it with `pip install onepass[demo]`.")
        return
    picture.draw(path)
    print(f"Picture: {path} shows which elements of its input each norm averages over.")


def _command() -> str:
    """Return how to start onepass in this shell."""
    script = Path(sys.argv[0])
    if script.name != "onepass":
        return "python -m onepass"
    return "onepass" if shutil.which("onepass") else os.path.relpath(script)


def _next(onepass: str) -> str:
    commands = {
        f"{onepass} patch torch.nn:Transformer": "what onepass.patch would speed up in a model",
        f"{onepass} run group_norm --shape 4,320,32,32 --time": "one norm, with a shape of your own",
        f"{onepass} doctor": "which kernels each norm uses here",
    }
    width = max(map(len, commands))
    return "\n".join(f"  {command:{width}}  {what}" for command, what in commands.items())
