"""Compares what a program does with onepass and with torch, and defines where the two may differ."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from .calls import FUSED
from .changes import CONVERTING
from .program import Outcome, Program

# The allowed difference, relative to the largest element.
TOLERANCE = {torch.float64: 1e-9, torch.float32: 2e-4, torch.float16: 1e-2, torch.bfloat16: 6e-2}


def may_compute(program: Program) -> bool:
    """Return whether onepass may compute where torch raises.

    torch raises for some tensors that it saves or checks although its gradient does not need them.
    """
    return (
        program.between == "bias in place"
        or program.between.startswith("running")
        or "zero" in (program.gradient, *program.before.split())
        or program.layout == "expanded"
    )


def may_raise(program: Program) -> bool:
    """Return whether onepass may raise where torch computes, because onepass saves other tensors for the backward.

    - torch's instance_norm saves copies of its operands, and so does its group_norm for some layouts of x.
    - The backward of a fused call of onepass reads the bias, to compute the input of the activation again.
    - torch's rms_norm saves the normalized x instead of x, and saves its weight only if x needs a gradient.
    - Other norms of torch accept saved tensors of another size or dtype if the gradient does not depend on these.
    """
    return (
        (program.op.startswith("instance_norm") and bool(program.between))
        or (program.context == "checkpoint" and program.between == "x.data strided")  # the recomputation saves other tensors
        or (program.layout != "contiguous" and program.between == "x in place")
        or (program.op in FUSED and program.between == "bias in place")
        or (program.op == "rms_norm" and program.between in ("x in place", "weight in place"))
        or converts(program)
    )


def converts(program: Program) -> bool:
    """Return whether a tensor changes its dtype or size between forward and backward."""
    return program.hook in CONVERTING or program.between.endswith(CONVERTING)


def for_torch(program: Program) -> Program:
    """Return the program for torch: steps that can crash torch are replaced by steps with the same values.

    torch's group_norm reads wrong memory if the strides of x change before the backward, or if a parameter or dy is a tensor
    without memory (`_efficientzerotensor`). The backward of torch's batch_norm does so if the weight is strided.
    """
    gradient = "zeros" if program.gradient == "zero" else program.gradient
    hook = "same" if program.hook in ("clone", "strided", "numpy") else program.hook
    before = f"{program.before}s" if program.before.endswith("zero") else program.before.replace("strided", "cloned")
    between = "" if program.between.endswith("strided") else program.between
    return replace(program, hook=hook, before=before, between=between, gradient=gradient)


_ERRORS = (RuntimeError, TypeError, ValueError, IndexError)  # what torch's norms raise


def judge(program: Program, torchs: Outcome | None, ours: Outcome, exact: Callable[[], Outcome]) -> str:
    """Return what is wrong with our outcome, or "".

    If torch did not run, our outcome may be any result, or an exception of a type that torch's norms raise. If the numbers
    differ, `exact` runs the program in float64, and our error may be at most four times that of torch.
    """
    if torchs is None:
        return "" if ours.error is None or isinstance(ours.error, _ERRORS) else f"we raise {ours.error!r:.150}"
    if torchs.error is not None:
        if ours.error is None:
            return "" if may_compute(program) else f"torch raises {torchs.error!r:.150}, we do not"
        return "" if isinstance(ours.error, _ERRORS) else f"torch raises {torchs.error!r:.150}, we {ours.error!r:.150}"
    if ours.error is not None:
        return "" if may_raise(program) else f"torch does not raise, we {ours.error!r:.300}"
    if converts(program):  # both promote dtypes, but in a different order, so numbers may differ
        return ""
    if torchs.values.keys() != ours.values.keys():
        return f"torch has {sorted(torchs.values)}, we {sorted(ours.values)}"
    half = program.dtype in (torch.float16, torch.bfloat16) or program.before.endswith(CONVERTING[:2])
    # Second derivatives of 16-bit tensors are rounded twice, so they are not compared.
    compared = {name: t for name, t in torchs.values.items() if not (half and name.startswith("second"))}
    dtype = program.dtype if not half else torch.bfloat16
    wrong = {name: error for name, t in compared.items() if (error := _differs(name, ours.values[name], t, dtype))}
    if wrong and program.dtype != torch.float64:
        right = exact().values
        for name in [name for name in wrong if name in right]:
            if _is_close_enough(ours.values[name], torchs.values[name], right[name]):
                del wrong[name]
    return "; ".join(wrong.values())


def _is_close_enough(ours: Tensor, torchs: Tensor, right: Tensor) -> bool:
    """Return whether our error is at most four times the error of torch. Both round, but at different places."""
    if not ours.shape == torchs.shape == right.shape or ours.dtype != torchs.dtype:
        return False
    distances = [(t.double() - right.double()).abs().nan_to_num(nan=torch.inf).max().item() for t in (ours, torchs)]
    return distances[0] <= 4 * distances[1]


def _differs(name: str, ours: Tensor, torchs: Tensor, dtype: torch.dtype) -> str:
    if ours.shape != torchs.shape or ours.dtype != torchs.dtype or ours.device != torchs.device:
        return f"{name}: {ours.dtype} {list(ours.shape)} {ours.device}, torch's {torchs.dtype} {list(torchs.shape)} {torchs.device}"
    if ours.is_meta or not ours.numel():
        return ""
    a, b = ours.double(), torchs.double()
    odd = ~b.isfinite()
    if not torch.equal(~a.isfinite(), odd):
        return f"{name}: {int((~a.isfinite()).sum())} elements are not finite, torch's {int(odd.sum())}"
    size, error = (t[~odd].abs().max().item() if not odd.all() else 0.0 for t in (b, a - b))
    allowed = max(TOLERANCE[ours.dtype], TOLERANCE[dtype]) * max(size, 1.0) * (10 if "second" in name else 1)
    return "" if error <= allowed else f"{name}: off by {error:.3g}, allowed {allowed:.3g}"
