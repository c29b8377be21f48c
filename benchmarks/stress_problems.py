"""Random problems for stress.py. The seed and the index alone determine a problem.

A set is the elements that share one mean and variance. In these problems, the elements of a set are not contiguous.

A kernel is compiled for given dtypes, operands, divisors of strides and powers of two. 10000 shapes drawn freely would need
thousands of kernels. So there are only 60 kinds of problems, and a kind fixes all that a kernel is compiled for. Batch size,
height, width, number of groups and data are drawn for each problem.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from random import Random
from typing import NamedTuple

import torch

from onepass.backends.family import BACKWARD, FORWARD, Direction
from onepass.bench.record import dtype_name
from onepass.verify import tensors
from onepass.verify.cases import Case
from onepass.verify.tensors import Operands, lay_out

KINDS = 60
CHANNELS = (10, 1, 16, 40, 3, 32, 20, 7, 64, 2, 30, 5, 60, 4, 33, 8, 13, 24, 80)  # the numbers of channels in a group
WIDEST = 2**13  # the most channels
SMALL, LARGE = 2**22, 2**26  # bytes of x: nine of ten problems have at most SMALL, the others up to LARGE
INITS = ("normal", "normal", "shifted", "const")
# For init="shifted": what is added to values with a standard deviation of 1.
SHIFT = {torch.float32: 1e4, torch.float16: 30.0, torch.bfloat16: 30.0}


class Kind(NamedTuple):
    """What problems that use the same kernels have in common: a case without a shape, and rules for the shape."""

    case: Case
    dtype: torch.dtype
    stats: bool  # whether to call with return_stats=True
    channels: int  # channels in a group
    several: bool  # whether the batch has several samples
    positions: int  # the largest height·width
    width: int  # the width is an odd multiple of this
    groups: int  # the number of groups is an odd multiple of this
    narrow: bool  # whether the number of groups is exactly `groups`


@dataclass(frozen=True)
class Problem:
    index: int
    case: Case
    dtype: torch.dtype
    stats: bool
    direction: Direction = FORWARD

    @property
    def name(self) -> str:
        statistics, backward = " with statistics" * self.stats, " backward" * (self.direction == BACKWARD)
        return f"{self.case.name} {dtype_name(self.dtype)}{statistics}{backward}"


@cache
def kinds(seed: int) -> tuple[Kind, ...]:
    return tuple(_kind(Random(f"kind {seed} {i}"), i) for i in range(KINDS))


def _kind(rng: Random, i: int) -> Kind:
    def maybe(chance: float) -> bool:
        return rng.random() < chance

    op = "batch_norm" if i % 15 == 7 else "instance_norm" if i % 6 == 2 else "group_norm"
    dtype = rng.choice((torch.float16, torch.float16, torch.bfloat16, torch.float32))
    residual, last = op == "group_norm" and maybe(0.25), maybe(0.3)
    case = Case(
        op,
        (),
        layout="contiguous" if last else "channels_last",
        last=last,
        affine=rng.choice(("both", "both", "both", "weight", "bias", "none")),
        wide=dtype != torch.float32 and maybe(0.3),
        activation=rng.choice(("silu", "silu", "gelu", "relu", "", "")),
        modulate=maybe(0.25),
        residual=residual,
        running=op == "batch_norm",
    )
    return Kind(
        case=case,
        dtype=dtype,
        stats=not residual and maybe(0.3),
        channels=CHANNELS[i % len(CHANNELS)] if op == "group_norm" else 1,
        several=maybe(0.7),
        positions=2 ** rng.choice((0, *range(2, 17))),
        width=rng.choice((1, 1, 1, 4, 16)),
        groups=rng.choice((1, 3, 8, 16, 32)),
        narrow=maybe(0.2),
    )


def draw(seed: int, index: int) -> Problem:
    """Return problem number `index`. It is the same on every machine.

    Example: `draw(0, 17).case.name`
    """
    rng = Random(f"problem {seed} {index}")
    kind = rng.choice(kinds(seed))
    group = kind.channels * kind.dtype.itemsize * kind.groups  # the least bytes at a position
    positions = min(kind.positions, SMALL // group) * rng.uniform(0.78, 1)
    width = _odd(positions ** rng.random() / kind.width) * kind.width
    height = _odd(positions / width)
    if kind.channels * height * width == 1:
        width = 3  # a set of one element has no variance
    # Choose a size in bytes, and fill it with groups and samples.
    least = group * height * width
    size = _between(rng, least, SMALL) if rng.random() < 0.9 else _between(rng, SMALL, LARGE)
    times = max(size / least, 1)
    groups = 1 if kind.narrow else _odd(min(times if not kind.several else times ** rng.random(), WIDEST / kind.channels / kind.groups))
    samples = max(int(times / groups), 2) if kind.several else 1
    channels = kind.channels * kind.groups * groups
    shape = (samples, height, width, channels) if kind.case.last else (samples, channels, height, width)
    case = replace(kind.case, shape=shape, groups=kind.groups * groups, init=rng.choice(INITS))
    return Problem(index, case, kind.dtype, kind.stats)


def draw_backward(seed: int, index: int) -> Problem:
    """Return the backward of the problem that `draw` returns."""
    return replace(draw(seed, index), direction=BACKWARD)


def _between(rng: Random, low: float, high: float) -> float:
    """Return a random number between low and high whose logarithm is uniform."""
    return low * (max(high, low) / low) ** rng.random()


def _odd(n: float) -> int:
    """Return an odd number near n, at least 1.

    Kernels are compiled for the powers of two that divide strides. An odd factor does not change these.
    """
    return max(2 * round((n - 1) / 2) + 1, 1)


def make(problem: Problem, device: str, seed: int = 0) -> Operands:
    """Return the operands of a problem, drawn on the device. The residual has the strides of x, so that a kernel can add it."""
    case = problem.case
    operands = tensors.make(case, problem.dtype, device, seed + problem.index, on_device=True)
    if case.init == "shifted":
        operands.x.add_(SHIFT[problem.dtype])
    elif case.init == "const":
        operands.x.fill_(3.0)
    if operands.residual is None:
        return operands
    return operands._replace(residual=lay_out(operands.residual, case.layout, device))
