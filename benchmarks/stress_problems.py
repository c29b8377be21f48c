"""Random problems for `stress`, whose sets are spread across memory. The seed and the index alone determine a problem.

A kernel is compiled for dtypes, operands, divisors of strides and powers of two. 10000 shapes drawn freely would need
thousands of kernels. So every problem has one of a few kinds, which fix what is compiled in. It draws the rest: batch,
height, width, groups and the data.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from random import Random
from typing import NamedTuple

import torch

from onepass.bench.record import dtype_name
from onepass.verify import tensors
from onepass.verify.cases import Case
from onepass.verify.tensors import Operands, lay_out

KINDS = 60
CHANNELS = (10, 1, 16, 40, 3, 32, 20, 7, 64, 2, 30, 5, 60, 4, 33, 8, 13, 24, 80)  # of a group
WIDEST = 2**13  # channels
SMALL, LARGE = 2**22, 2**26  # bytes of x: nine of ten problems are smaller than SMALL, none is larger than LARGE
INITS = ("normal", "normal", "shifted", "const")
SHIFT = {torch.float32: 1e4, torch.float16: 30.0, torch.bfloat16: 30.0}  # added to values with a standard deviation of 1


class Kind(NamedTuple):
    """What problems with the same kernels have in common: a case without shape and data, and limits for the shape."""

    case: Case
    dtype: torch.dtype
    stats: bool  # return_stats
    channels: int  # of a group
    several: bool  # several samples
    positions: int  # the largest H·W
    width: int  # W is an odd multiple of this
    groups: int  # the number of groups is an odd multiple of this
    narrow: bool  # exactly `groups` groups


@dataclass(frozen=True)
class Problem:
    index: int
    case: Case
    dtype: torch.dtype
    stats: bool

    @property
    def name(self) -> str:
        return f"{self.case.name} {dtype_name(self.dtype)}{' with statistics' if self.stats else ''}"


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
    """A problem, the same on every machine.

    Example: `draw(0, 17).case.name`
    """
    rng = Random(f"problem {seed} {index}")
    kind = rng.choice(kinds(seed))
    group = kind.channels * kind.dtype.itemsize * kind.groups  # bytes at a position
    positions = min(kind.positions, SMALL // group) * rng.uniform(0.78, 1)
    width = _odd(positions ** rng.random() / kind.width) * kind.width
    height = _odd(positions / width)
    if kind.channels * height * width == 1:
        width = 3  # a set of one element has no deviation
    # Samples and groups fill the rest of the size.
    least = group * height * width
    size = _between(rng, least, SMALL) if rng.random() < 0.9 else _between(rng, SMALL, LARGE)
    times = max(size / least, 1)
    groups = 1 if kind.narrow else _odd(min(times if not kind.several else times ** rng.random(), WIDEST / kind.channels / kind.groups))
    samples = max(int(times / groups), 2) if kind.several else 1
    channels = kind.channels * kind.groups * groups
    shape = (samples, height, width, channels) if kind.case.last else (samples, channels, height, width)
    case = replace(kind.case, shape=shape, groups=kind.groups * groups, init=rng.choice(INITS))
    return Problem(index, case, kind.dtype, kind.stats)


def _between(rng: Random, low: float, high: float) -> float:
    """A random number, uniform in its logarithm."""
    return low * (max(high, low) / low) ** rng.random()


def _odd(n: float) -> int:
    """An odd number near n. Odd factors do not change the divisors of strides, which are compiled in."""
    return max(2 * round((n - 1) / 2) + 1, 1)


def make(problem: Problem, device: str, seed: int = 0) -> Operands:
    """The tensors of a problem, drawn on the device. The residual has the strides of x, so that a kernel can add it."""
    case = problem.case
    operands = tensors.make(case, problem.dtype, device, seed + problem.index, on_device=True)
    if case.init == "shifted":
        operands.x.add_(SHIFT[problem.dtype])
    elif case.init == "const":
        operands.x.fill_(3.0)
    if operands.residual is None:
        return operands
    return operands._replace(residual=lay_out(operands.residual, case.layout, device))
