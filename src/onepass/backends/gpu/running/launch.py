"""The launch that updates running statistics in place. (12) and (13) are equations of docs/theory.md."""

from __future__ import annotations

from math import prod
from typing import NamedTuple

import torch

from onepass.backends.gpu.launch.chain import Step
from onepass.backends.gpu.launch.fields import Count, Pointer, Real
from onepass.backends.gpu.launch.kernel import Kernel
from onepass.core.problem import NormProblem


class Block(NamedTuple):
    size: int


BLOCK, WARPS = Block(512), 4  # a program updates 512 channels


class RunningStatistics(NamedTuple):
    """The mean and variance of this batch, and the running ones, which the kernel updates."""

    mean_ptr: Pointer
    var_ptr: Pointer
    running_mean_ptr: Pointer
    running_var_ptr: Pointer


class Update(NamedTuple):
    channels: Count
    momentum: Real
    unbiased: Real  # n/(n - 1), where n elements share one variance


def update_step(problem: NormProblem, momentum: float) -> Step:
    """Return the step of a chain that updates running_mean and running_var from mean and var."""
    from .kernel import update_running

    channels, fp32 = prod(problem.stat_shape), torch.float32
    count = prod(problem.shape) // channels
    numbers = Update(channels=channels, momentum=momentum, unbiased=count / max(count - 1, 1))
    arguments = RunningStatistics(fp32, fp32, fp32, fp32), numbers, BLOCK
    kernel = Kernel(update_running, arguments, -(-channels // BLOCK.size), WARPS)
    return Step(kernel, list(kernel.pointers))
