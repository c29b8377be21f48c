"""Estimate who computes a norm in a graph of torch.compile faster: onepass, or inductor with its own kernels.

Inductor fuses a norm with the elementwise operations around it, so it never stores the tensors between them. A kernel of onepass
reads x from memory and writes y to memory. `choose` compares estimates, and measures nothing.

The constants for GPUs come from the benchmark on an H200 (results/bench-h200.jsonl, 2026-11-15, provider torch.compile). Those for
CPUs come from a Neoverse-N1.
"""

from __future__ import annotations

from math import prod
from typing import NamedTuple

from onepass.backends.family import BACKWARD, FORWARD, Direction
from onepass.core.device import Device
from onepass.core.problem import NormProblem

from .choose import plan
from .options import Options
from .registry import family_named

# How inductor sees a set: as one run of contiguous elements that a program can keep, as a longer run, or as strided elements.
SHORT, LONG, STRIDED = "a short run", "a long run", "strided"
SHORT_BYTES = 64 * 1024

# KERNELS: how many kernels inductor needs. TRAFFIC: the bytes that they move, divided by the least possible. Kernels that are slow
# for another reason count as if they moved more bytes.
KERNELS = {FORWARD: {SHORT: 1, LONG: 2, STRIDED: 2}, BACKWARD: {SHORT: 2, LONG: 3, STRIDED: 3}}
TRAFFIC = {FORWARD: {SHORT: 1.1, LONG: 1.0, STRIDED: 1.0}, BACKWARD: {SHORT: 1.45, LONG: 2.6, STRIDED: 7.0}}
TRAFFIC_ON_CPU = {FORWARD: {SHORT: 1.45, LONG: 1.45, STRIDED: 1.6}, BACKWARD: {SHORT: 1.45, LONG: 1.45, STRIDED: 1.6}}
NO_PARAMETERS = 1.1  # TRAFFIC of a backward of short runs without weight and bias: their gradients cost inductor the most

# In a forward that needs two kernels, the first reads x for the statistics. It is slow if there are few sets to share among the
# programs. It reads `start + each · sets` bytes per microsecond, `most` at the most.
STATISTICS = {LONG: (1e6, 1e4, 3.5e6), STRIDED: (4e5, 1.1e3, 3e6)}

KERNEL_US = {"cuda": 4.5, "cpu": 2.0}  # what a kernel takes at least
BANDWIDTH = {"cuda": 4.15e6, "cpu": 1e4}  # bytes per microsecond; on a CPU, only the ratio to KERNEL_US matters
FAMILY_US, FAMILY_SCALE = 0.8, 0.75  # time in a graph ≈ FAMILY_US + FAMILY_SCALE · Family.cost


class Choice(NamedTuple):
    """The estimated times of a norm in microseconds. `moved_us` is a part of `ours_us`: the traffic that fusion by inductor would save."""

    ours_us: float
    inductor_us: float
    moved_us: float

    @property
    def ours(self) -> bool:
        return self.ours_us < self.inductor_us

    def __str__(self) -> str:
        words = f"{'onepass' if self.ours else 'inductor'}: onepass is estimated at {self.ours_us:.0f} µs"
        words += f", of which {self.moved_us:.0f} µs are for neighbours that inductor would fuse" if self.moved_us else ""
        return words + f", inductor's own kernels at {self.inductor_us:.0f} µs"


def choose(
    problem: NormProblem, device: Device, options: Options, training: bool = False, moved: int = 0, bias_before: bool = False
) -> Choice:
    """Return the estimates for a norm in a graph.

    Inductor cannot fuse a norm of onepass with its neighbours. `moved` is how many more reads and writes of a tensor as large as x
    this takes. In training, the backward is assumed to have as many neighbours. With `bias_before`, a convolution makes x, and inductor
    would add its bias inside its own kernel of the norm.
    """
    directions = (FORWARD, BACKWARD) if training else (FORWARD,)
    tensor = problem.min_bytes(FORWARD) / 2 if not problem.addends else problem.min_bytes(FORWARD) / 4
    kernels = (moved + 1) // 2  # two moves, a write and a read, are one more kernel
    moved_us = len(directions) * (kernels * _of_kind(KERNEL_US, device) + moved * tensor / _of_kind(BANDWIDTH, device))
    # This costs a kernel, a write and a read. It is counted only where inductor needs one kernel for a forward. Where it needs two,
    # models gained from our kernels though their convolutions have biases (sd15-b2, vae-train; H200, 2026-11-17). In convnext-train,
    # inductor's kernels took 1.75 ms with the biases, and ours 1.95 ms without them.
    if bias_before and _shape(problem) is SHORT:
        moved_us += _of_kind(KERNEL_US, device) + 2 * tensor / _of_kind(BANDWIDTH, device)
    ours = sum(_ours(problem, device, options, direction) for direction in directions)
    return Choice(ours + moved_us, sum(_inductor(problem, device, direction) for direction in directions), moved_us)


def _ours(problem: NormProblem, device: Device, options: Options, direction: Direction) -> float:
    if device.kind != "cuda":
        return _of_kind(KERNEL_US, device) + problem.min_bytes(direction) / _of_kind(BANDWIDTH, device)
    problem = problem.for_direction(direction)
    family = family_named(plan(problem, device, direction, options).family)
    return FAMILY_US + FAMILY_SCALE * family.cost(problem, device, direction, options.invariant)


def _inductor(problem: NormProblem, device: Device, direction: Direction) -> float:
    shape, bandwidth, kernel = _shape(problem), _of_kind(BANDWIDTH, device), _of_kind(KERNEL_US, device)
    if device.kind != "cuda":
        return kernel + problem.min_bytes(direction) * TRAFFIC_ON_CPU[direction][shape] / bandwidth
    traffic = TRAFFIC[direction][shape]
    if direction == BACKWARD and shape is SHORT and not problem.weight and not problem.bias:
        traffic = NO_PARAMETERS
    time = KERNELS[direction][shape] * kernel + problem.min_bytes(direction) * traffic / bandwidth
    if direction == FORWARD and shape is not SHORT:
        start, each, most = STATISTICS[shape]
        time += prod(problem.shape) * problem.dtype.itemsize / min(start + each * prod(problem.stat_shape), most)
    return time


def _shape(problem: NormProblem) -> str:
    view = problem.x
    if view is None or view.reps > 1:
        return STRIDED
    return SHORT if view.run * problem.dtype.itemsize <= SHORT_BYTES else LONG


def _of_kind(table: dict[str, float], device: Device) -> float:
    return table.get(device.kind, table["cuda"])
