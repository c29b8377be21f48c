"""Decide which problems torch's own kernels can compute within the error budget of docs/theory.md."""

from __future__ import annotations

from math import prod

import torch

from onepass.backends.family import BACKWARD, Direction
from onepass.core.device import Device
from onepass.core.problem import NormProblem
from onepass.core.view import contiguous_stride


def variant(problem: NormProblem) -> str:
    """Return the variant of aten.py that fits the problem: "rows", "row_groups", "channels" or "given"; "" if none fits."""
    x, p = problem.x, problem.param
    if x is None or p is None:
        return ""
    if any(size > 1 and stride != dense for size, stride, dense in zip(x.sizes, x.strides, contiguous_stride(x.sizes))):
        return ""
    if x.outer == 1 and x.sets > 1 and (p.a, p.b, p.c, p.d) == (0, 0, 1, 0):
        return "given" if problem.given else "channels"
    if problem.given or x.reps > 1 or x.sets > 1:
        return ""
    if not problem.affine or (p.a == 0 and problem.param_size == x.run):
        return "rows"
    per_row = p.per_row(x)
    grouped = p.every == 1 and p.a == (per_row if p.period > 1 else 0) and p.d == (1 if per_row > 1 else 0)
    return "row_groups" if grouped and problem.spec.centered else ""


def unsupported(problem: NormProblem, device: Device, direction: Direction) -> list[str]:
    """Return the reasons why torch's kernels cannot run the problem within the error budget.

    The errors that the reasons mention were measured with torch 2.13 on an x86-64 CPU (2026-11-15).
    """
    if device.kind != "cpu":
        return [f"torch's kernels were compared with the error budget on the CPU only, this is {device.kind}"]
    if problem.x is None:
        return [problem.why_no_view]
    if problem.spec.mix:
        return ["none of torch's kernels mixes the statistics of several norms"]
    kernel = variant(problem)
    p = problem.param
    if not kernel and p and problem.x.reps > 1 and (p.a, p.b, p.c) == (0, 0, problem.x.run) and not problem.given:
        return ["torch's channels-last kernel takes E[x²] - E[x]²: 27000 times the error budget where the mean is 10⁴·std"]
    if not kernel:
        return ["none of torch's kernels supports this view with this parameter map"]
    # With a modulation or an activation, the kernel gets a float32 copy of x.
    half = problem.dtype in (torch.float16, torch.bfloat16) and not problem.has_post_affine
    reasons = []
    if kernel == "channels":
        if problem.x.run == 1:
            reasons.append("torch's channels-last batch statistics exceed the error budget (8.8x in float32)")
        if problem.dtype == torch.float64:
            reasons.append("torch sums float64 batch statistics one by one, beyond the error budget (4.4x at 540800 values)")
        if half:
            reasons.append("torch's half-type batch statistics exceed the error budget (1.7x with float32 parameters)")
        if prod(problem.shape) == problem.x.sets:
            reasons.append("torch returns the unbiased variance, which a set of one value does not have")
    elif problem.track:
        reasons.append("torch's row kernels return rstd, not the variance that running statistics need")
    if kernel in ("rows", "row_groups") and not problem.spec.eps:
        reasons.append("without an eps, torch's row kernels return NaN for a constant set, where the other kernels return 0")
    if direction == BACKWARD and kernel == "rows" and half:
        reasons.append("torch's half-type parameter gradients exceed the error budget (over 1000x)")
    if direction == BACKWARD and problem.addends and half:
        reasons.append("torch rounds dx to the half type before the gradient of the sum is added")
    if direction == BACKWARD and not problem.spec.centered:
        reasons.append("torch has no CPU kernel for the backward of rows without a mean")
    if direction == BACKWARD and kernel == "given":
        reasons.append("torch's backward with given statistics needs the variance, but rstd is saved")
    if direction == BACKWARD and problem.from_y:
        reasons.append("torch's backward takes x, and y is what is saved")
    return reasons
