"""The launch that merges the moments of the parts of sets.

A set is the elements that share one mean and variance. It has `reps` runs of `run` elements, each contiguous in memory. A
part is the share of a set that one program works on. Its moments are its mean and its M2, the sum of (x - mean)².
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch

from onepass.backends.gpu.arguments import computed_statistics
from onepass.backends.gpu.launch.fields import Count, Index, Length, Stride
from onepass.backends.gpu.launches import ChainedLaunch, ForwardLaunch, ForwardOptions, power_of_two, warps_for
from onepass.backends.gpu.walk import Walk
from onepass.core.device import Device
from onepass.core.problem import NormProblem


class Split(NamedTuple):
    """How a set is cut into parts_r x parts_t parts. A part has chunk_r runs, and chunk_t elements of each run.

    In launches where a comment says so, chunk_t counts blocks instead of elements.
    """

    parts_r: int = 1
    parts_t: int = 1
    chunk_r: int = 1
    chunk_t: int = 1


WHOLE = Split()  # a set that is not cut: one part


class PartArguments(NamedTuple):
    """The fields of a Split, and m2_offset: the M2 values of the parts are stored m2_offset elements after their means."""

    parts_r: Count
    parts_t: Count
    chunk_r: Count
    chunk_t: Count
    m2_offset: Count


class SetSizes(NamedTuple):
    """The sizes of sets: each has `reps` runs of `run` elements, and there are `sets` sets for each value of o.

    If `abreast` is not 1, that many neighbouring parts take the runs in turn.
    """

    reps: Length
    sets: Index
    run: Stride
    abreast: Index


class CombineMode(NamedTuple):
    block_i: int
    block_j: int
    centered: bool
    pdl_trigger: bool
    pdl_wait: bool


@dataclass(frozen=True, kw_only=True)
class CombineLaunch(ChainedLaunch, ForwardLaunch):
    """A launch of `combine`: each program merges the parts of one set, block_i x block_j parts at a time."""

    name: ClassVar[str] = "combine"
    split: Split  # how sets are cut into parts: chunk_r counts runs, chunk_t counts elements
    abreast: int = 1  # neighbouring parts that take the runs in turn

    @property
    def what(self) -> str:
        return "merge the parts of sets"

    def arguments(self, problem: NormProblem, options: ForwardOptions) -> tuple[Any, ...]:
        w, spec = self.walk, problem.spec
        return (
            torch.float32,
            computed_statistics(problem, options._replace(statistics=True)),  # the next launch reads them
            float(spec.eps),
            SetSizes(w.reps, w.sets, w.run, self.abreast),
            PartArguments(*self.split, m2_offset=w.total * self.split.parts_r * self.split.parts_t),
            CombineMode(self.block_i, self.block_j, spec.centered, self.pdl_trigger, self.pdl_wait),
        )

    def kernel(self, problem: NormProblem, options: ForwardOptions) -> Any:
        from onepass.backends.gpu.launch.kernel import Kernel

        from .combine_kernel import combine

        return Kernel(combine, self.arguments(problem, options), self.programs, self.warps, pdl=self.pdl_wait)


def combine_launch(w: Walk, split: Split, device: Device, abreast: int = 1) -> CombineLaunch:
    parts = split.parts_r * split.parts_t
    size = 64 if parts <= 64 else 1024 if parts <= 2048 else 8192  # parts merged at a time: three sizes only, as each is compiled
    block_j = min(power_of_two(split.parts_t), size)
    warps = warps_for(size // 8, device)
    return CombineLaunch(walk=w, programs=w.total, warps=warps, block_i=size // block_j, block_j=block_j, split=split, abreast=abreast)
