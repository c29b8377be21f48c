"""What the launches of a backward share: their operands, and the arguments that their kernels have in common."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from onepass.backends.gpu.device.groups import Affine, Cells, GradientTensors, SetValues
from onepass.backends.gpu.launch.fields import Count, Index
from onepass.backends.gpu.launches import ChainedLaunch
from onepass.backends.gpu.walk import Walk
from onepass.core.operands import Needs
from onepass.core.problem import NormProblem

from .parameters import Segments

PARAMETERS = ("weight", "bias", "scale", "shift")


class BackwardOptions(NamedTuple):
    """What a call asks of the launches of a backward."""

    needs: Needs
    dsum: bool  # a gradient arrives at x + residual, too
    writes_cells: bool = False  # this launch stores cells of the gradients of parameters
    single_cells: frozenset[str] = frozenset()  # parameters with one cell each, which is their gradient


class SegmentArguments(NamedTuple):
    every: Index
    period: Index
    members: Count


class SplitArguments(NamedTuple):
    """A Split, counted in runs or rows, and in blocks."""

    parts_r: Count
    parts_t: Count
    chunk_r: Count
    chunk_t: Count


@dataclass(frozen=True, kw_only=True)
class BackwardLaunch(ChainedLaunch):
    """A launch that reads x and dy."""

    walk: Walk
    stages: int = 1  # blocks in flight at a time
    resident: bool = False  # x and dy are read once: they stay in registers, or the statistics were given
    reduce: bool = False  # compute the sums of sets, c1 and c2
    apply: bool = False  # compute dx
    segments: Segments | None = None  # programs take the sets of a segment in turn, and sum the gradients of its parameters

    @property
    def reads(self) -> int:
        return self.reduce + self.apply - self.resident

    @property
    def what(self) -> str:
        words = " and ".join(word for word, does in (("reduce", self.reduce), ("apply", self.apply)) if does)
        return words if self.segments is None else f"{words} across sets"

    @property
    def segment_arguments(self) -> SegmentArguments:
        found = self.segments
        return SegmentArguments(found.every, found.period, found.members) if found else SegmentArguments(1, 1, 1)

    @abstractmethod
    def kernel(self, problem: NormProblem, options: BackwardOptions) -> Any:
        """The Kernel with its arguments."""

    def pointers(self, problem: NormProblem, options: BackwardOptions) -> tuple[GradientTensors, Affine, SetValues, Cells]:
        """The dtypes of the operands; None where there is none."""
        dtype, fp32, centered, needs = problem.dtype, torch.float32, problem.spec.centered, options.needs
        dx = dtype if self.apply and needs.x else None
        passes_sums = self.reduce != self.apply and needs_set_sums(problem, needs)
        cells = [None] * len(PARAMETERS)
        if options.writes_cells:
            cells = [self._cell(problem, options, name) for name in PARAMETERS]
        return (
            GradientTensors(dtype, dtype, dtype if options.dsum and dx else None, dx),
            Affine(problem.weight, problem.bias, problem.scale, problem.shift),
            SetValues(
                *(fp32 if centered and not problem.from_y else None, fp32),
                *(fp32 if passes_sums and centered else None, fp32 if passes_sums else None),
            ),
            Cells(*cells),
        )

    def _cell(self, problem: NormProblem, options: BackwardOptions, name: str) -> torch.dtype | None:
        if not getattr(options.needs, name):
            return None
        return getattr(problem, name) if name in options.single_cells else torch.float32


def needs_set_sums(problem: NormProblem, needs: Needs) -> bool:
    """Whether gradients need the sums of sets, c1 and c2."""
    return not problem.given and (needs.x or needs.mean_weight or needs.var_weight)
