"""The providers that `onepass bench` compares: onepass, torch and torch.compile.

A provider takes a case and its operands, and returns a call without arguments. The call contains little Python, because
host time is measured too.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F

from onepass.verify import calls
from onepass.verify.calls import Output
from onepass.verify.cases import Case
from onepass.verify.tensors import Operands

Provider = Callable[[Case, Operands], Callable[[], Output]]


def _torch(case: Case, t: Operands) -> Callable[[], Output]:
    """Return a call that computes what `by_torch` of verify/calls.py computes.

    For simple cases, the operations are chosen once, here. Choosing them in each call takes 13 µs (2 x86-64 cores, 2026-11-15).
    """
    if case.residual or case.modulate or case.offset or case.last or case.granularity != "element" or case.activation == "gelu_tanh":
        return partial(calls.by_torch, case, t)
    op = calls.OPS[case.op]
    norm = partial(op.torch, t.x, *op.arguments(case, t))
    if not case.activation:
        return norm
    activation = getattr(F, case.activation)
    return lambda: activation(norm())


def _compiled(case: Case, t: Operands) -> Callable[[], Output]:
    torch.compiler.reset()  # so that no case runs code compiled for another, or reaches the recompilation limit
    return partial(torch.compile(partial(calls.by_torch, case), dynamic=False), t)


OURS = "onepass"
PROVIDERS: dict[str, Provider] = {OURS: calls.onepass_call, "torch": _torch, "torch.compile": _compiled}
