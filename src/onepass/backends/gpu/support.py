"""Reasons, shared by several families, why GPU kernels cannot run a problem."""

from __future__ import annotations

import torch

from onepass.core.device import Device
from onepass.core.problem import NormProblem


def no_gpu_kernel(problem: NormProblem, device: Device) -> list[str]:
    """Return the reasons why no GPU family can run the problem; an empty list if there are none."""
    if device.no_triton:
        return [device.no_triton]
    if problem.x is None:
        return [problem.why_no_view]
    reasons = []
    if problem.acc == torch.float64:
        reasons.append("the kernels compute in float32, which is too coarse for float64")
    if not problem.spec.eps and not problem.given:
        reasons.append("without an eps, the mean of a constant set must be exact, and the kernels round it")
    return reasons


def why_no_statistics(problem: NormProblem, device: Device) -> list[str]:
    """Return the reasons why no GPU family that computes statistics can run the problem."""
    reasons = no_gpu_kernel(problem, device)
    return reasons or (["the statistics are given: there is nothing to reduce"] if problem.given else [])


def why_no_single_read(problem: NormProblem, device: Device) -> list[str]:
    """Return the reasons why no GPU family that reads x only once can run the problem."""
    reasons = why_no_statistics(problem, device)
    return [*reasons, "a mix needs the statistics of all sets before it can apply them"] if problem.spec.mix else reasons
