"""`onepass doctor`: check every norm on each device, and print versions and the kernels they use."""

from __future__ import annotations

import argparse
import platform
import textwrap
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from onepass import __version__
from onepass.backends.c import library
from onepass.bench.terminal import print_table
from onepass.core import device
from onepass.dispatch import front_door, route
from onepass.planning.explain import Explanation, explain, grouped
from onepass.verify import calls, oracle, tensors
from onepass.verify.cases import Case

from .formatting import layout_name

WIDTH = 100


class Check(NamedTuple):
    """One norm in one layout on one device: why it failed, or how it runs."""

    case: Case
    failure: str
    route: str = ""
    plans: Explanation | None = None

    @property
    def kernels(self) -> str:
        """The families of forward and backward: "c" if they are the same, otherwise "row / tile"."""
        if self.plans is None:
            return "FAILED"
        forward, backward = self.plans.forward.family, self.plans.backward.family
        return forward if forward == backward else f"{forward} / {backward}"


def run(args: argparse.Namespace) -> int:
    triton = "found" if find_spec("triton") else "not installed (only the GPU kernels need it)"
    print(f"onepass {__version__}, python {platform.python_version()} on {platform.machine()}, torch {torch.__version__}, triton {triton}")
    names = ["cpu", *(f"cuda:{i}" for i in range(torch.cuda.device_count()))]
    _print_devices(names)
    checks = {name: [_check(Case(op, (2, 8, 6, 6), layout, groups=4), name) for op in calls.OPS for layout in _LAYOUTS] for name in names}
    print()
    if args.verbose:
        for name, found in checks.items():
            print(name)
            for check in found:
                _print_check(check)
    else:
        _print_kernels(checks)
    failed = [(name, check) for name, found in checks.items() for check in found if check.failure]
    for name, check in failed:
        print(f"{name} {check.case.op} {layout_name(check.case)}: {check.failure}")
    well = "All well." if args.verbose else "All well: each norm was checked on each device. --verbose says why not other kernels."
    print(f"\n{well}" if not failed else f"\nBROKEN: {len(failed)} checks failed; please report this with the output of `onepass verify`.")
    return 1 if failed else 0


_LAYOUTS = ("contiguous", "channels_last")


def _print_devices(names: list[str]) -> None:
    _print_fact("cpu", f"{torch.get_num_threads()} threads")
    _print_fact("  C kernels", device.describe(torch.device("cpu")).no_c or library.state())
    closed = front_door.open_now()
    _print_fact("  C++ front door", f"closed: {closed}" if closed else "open")
    gpus: dict[str, list[str]] = {}
    for name in names[1:]:
        gpus.setdefault(device.describe(torch.device(name)).name, []).append(name)
    for model, of_it in gpus.items():
        _print_fact(_range(of_it), model)
    if not gpus:
        _print_fact("gpu", "torch finds none")


def _print_fact(name: str, text: str) -> None:
    """Print a name and a text, on several lines if it is long."""
    print(textwrap.fill(text, WIDTH, initial_indent=f"{name:18}", subsequent_indent=" " * 18, break_on_hyphens=False))


def _range(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}"


def _print_kernels(checks: dict[str, list[Check]]) -> None:
    """Print the kernels of each norm, of forward / backward if they differ. Devices with the same kernels share columns."""
    alike: dict[tuple[str, ...], list[str]] = {}
    for name, found in checks.items():
        alike.setdefault(tuple(check.kernels for check in found), []).append(name)
    head = ["kernels of", *(f"{_range(names)} {layout}" for names in alike.values() for layout in ("nchw", "nhwc"))]
    rows = [[op, *(kernels[2 * i + j] for kernels in alike for j in (0, 1))] for i, op in enumerate(calls.OPS)]
    print_table([head, *rows])
    print("c: C kernels. aten, blockwise: torch's. Other names: GPU kernels. Two names: forward / backward.")


def _check(case: Case, name: str) -> Check:
    failure = _failure(case, name)
    if failure:
        return Check(case, failure)
    operands = tensors.make(case, device=name)
    return Check(case, "", route.route(*operands[:3]), explain(calls.by_onepass, case, operands))


def _print_check(check: Check) -> None:
    """Print the route and the plans of a norm, and why other families do not run."""
    if check.plans is None:
        return
    plans = check.plans
    print(f"  {check.case.op:16}{layout_name(check.case):6}ok  route {check.route}; {plans.forward}, backward {plans.backward}")
    for plan in (plans.forward, plans.backward):
        for families, reason in grouped((family, "; ".join(reasons)) for family, reasons in plan.why_not):
            print(f"      {plan.direction} not {families}: {reason}")


class _AnyMode(TorchDispatchMode):
    """A dispatch mode that does nothing itself. Under any dispatch mode, onepass calls its registered op."""

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        return func(*args, **(kwargs or {}))


def _failure(case: Case, name: str) -> str:
    """Run a case on a device, directly and by the registered op. Return a message if either fails, else ""."""
    try:
        operands = tensors.make(case, device=name)
        dy = tensors.make_dy(operands)
        exact = oracle.exact(case, operands, dy)
        worst = oracle.worst(oracle.evaluate(case, operands, dy), exact.value, exact.allowed)
        with _AnyMode():
            by_op = oracle.worst(oracle.evaluate(case, operands, dy), exact.value, exact.allowed)
    except Exception as error:
        return f"FAILED ({type(error).__name__}: {error})"
    error = max(worst.forward, worst.backward or 0, by_op.forward, by_op.backward or 0)
    return "" if error <= 1 else f"FAILED (the error is {error:.2g} times the budget)"
