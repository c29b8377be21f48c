"""`onepass doctor`: print versions and devices, and check every norm on each device."""

from __future__ import annotations

import argparse
import platform
from importlib.util import find_spec
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from onepass import __version__
from onepass.backends.c import library
from onepass.core import device
from onepass.dispatch import front_door, route
from onepass.planning.explain import explain, grouped
from onepass.verify import calls, oracle, tensors
from onepass.verify.cases import Case

from .formatting import layout_name


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    triton = "found" if find_spec("triton") else "not installed; only the GPU kernels need it"
    print(f"onepass {__version__}\npython  {platform.python_version()} on {platform.machine()}")
    print(f"torch   {torch.__version__}\ntriton  {triton}")
    devices = ["cpu", *(f"cuda:{i}" for i in range(torch.cuda.device_count()))]
    broken = 0
    for name in devices:
        described = device.describe(torch.device(name))
        print(f"\n{name}  {described.name or f'{torch.get_num_threads()} threads'}")
        if name == "cpu":
            print(f"  C kernels       {described.no_c or library.state()}")
            closed = front_door.open_now()
            print(f"  C++ front door  {f'closed: {closed}' if closed else 'open'}")
        for op in calls.OPS:
            for layout in ("contiguous", "channels_last"):
                case = Case(op, (2, 8, 6, 6), layout, groups=4)
                failure = _failure(case, name)
                broken += bool(failure)
                if failure:
                    print(f"  {op:16}{layout_name(case):6}{failure}")
                    continue
                operands = tensors.make(case, device=name)
                plans = explain(calls.by_onepass, case, operands)
                print(f"  {op:16}{layout_name(case):6}ok  route {route.route(*operands[:3])}", end="; ")
                print(f"{plans.forward}, backward {plans.backward}")
                for plan in (plans.forward, plans.backward):
                    for families, reason in grouped((family, "; ".join(reasons)) for family, reasons in plan.why_not):
                        print(f"      {plan.direction} not {families}: {reason}")
    print("\nAll well." if not broken else f"\nBROKEN: {broken} checks failed; please report this with the output of `onepass verify`.")
    return 1 if broken else 0


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
