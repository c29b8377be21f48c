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
from typing import Any, NamedTuple

import torch

from onepass import __version__
from onepass.backends.c import front_door, library
from onepass.bench import timing
from onepass.bench.terminal import growing_table
from onepass.dispatch.front_door import VARIABLE
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
    within, unsteady = True, False
    with growing_table(HEAD, WIDTHS) as add:
        for case in DEMO:
            row, ok = _measure(case)
            within &= ok
            unsteady |= row[-1].endswith("?")
            add(row)
    if unsteady:
        print("?: other programs kept this machine busy, so this time is uncertain. Run the demo again when it is idle.")
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
    times = fastest([lambda f=f: oracle.evaluate(case, operands, dy, f) for f in (calls.by_onepass, calls.by_torch)])
    ours, torchs = times.seconds
    speed = f"{torchs / ours:.1f}x" + ("" if times.steady else " ?")
    row = [_title(case), "×".join(map(str, case.shape)), f"{ours * 1e3:.2f}", f"{torchs * 1e3:.2f}", speed]
    return row, max(worst.forward, worst.backward or 0) <= 1


class Fastest(NamedTuple):
    seconds: list[float]  # of the fastest sample of each call
    steady: bool  # False if the machine was so busy that few samples come near them


def fastest(variants: Sequence[Callable[[], Any]], least: float = 0.5, most: float = 4.0) -> Fastest:
    """Time several calls in turn, for `least` seconds, or up to `most` until the times are steady.

    Another process on the machine can only add time. So the fastest of many short samples is the one least disturbed.
    """
    samples: list[list[float]] = [[timing.once(call, 1)] for call in variants]  # the first is slow, and never the fastest
    start = time.perf_counter()
    while (elapsed := time.perf_counter() - start) < least or (elapsed < most and not _steady(samples)):
        for call, taken in zip(variants, samples):
            taken.append(timing.once(call, 1))
    return Fastest([min(taken) for taken in samples], _steady(samples))


def _steady(samples: list[list[float]]) -> bool:
    """Return whether the fifth sample of each call is at most 15 % slower than its fastest."""
    return all(len(taken) > 5 and sorted(taken)[4] < 1.15 * min(taken) for taken in samples)


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
    """Make a first call, which compiles the C kernels if no cache has them, and say so.

    The call would also compile the C++ front door in the background. That would disturb the times, which it hardly improves.
    """
    try:
        front_door.load(may_compile=False)
    except Exception:  # for any reason, as in dispatch: Python can do its work
        os.environ.setdefault(VARIABLE, "off")
    with _said("compil"):  # "compiling ..." and "compiled ... in 6.5 s"
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
