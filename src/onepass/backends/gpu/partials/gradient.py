"""The base class of the launches of a backward, and the arguments that their kernels share.

A set is the elements that share one mean and variance. A segment is a group of sets that use the same parameters. A cell
is a partial sum of the gradient of a parameter. c1 and c2 are sums over sets, equations (6) and (7) of docs/theory.md.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from onepass.backends.gpu.device.groups import Affine, Cells, GradientTensors, SetValues
from onepass.backends.gpu.launch.fields import Count, Index
from onepass.backends.gpu.launches import ChainedLaunch, TeamsLaunch
from onepass.backends.gpu.walk import Walk
from onepass.core.operands import Needs
from onepass.core.problem import NormProblem

from .parameters import Segments

PARAMETERS = ("weight", "bias", "scale", "shift")

MOST_MEMORY, SMALL = 0.02, 2**24  # what sums may take besides the gradients, as a fraction of x, if x has more than SMALL bytes


class BackwardOptions(NamedTuple):
    """What one launch of a backward has to compute."""

    needs: Needs
    dsum: bool  # x + residual, an output of the forward, has a gradient of its own
    writes_cells: bool = False  # the launch stores partial sums of the gradients of parameters (cells)
    single_cells: frozenset[str] = frozenset()  # names of parameters with only one cell for each element of their gradient


class SegmentArguments(NamedTuple):
    every: Index
    period: Index
    members: Count


class SplitArguments(NamedTuple):
    """The fields of a Split (partials/combine.py). chunk_r counts runs, chunk_t counts blocks."""

    parts_r: Count
    parts_t: Count
    chunk_r: Count
    chunk_t: Count


@dataclass(frozen=True, kw_only=True)
class BackwardLaunch(ChainedLaunch):
    """A launch of a backward that reads x and dy. It computes sums over sets, or dx, or both."""

    walk: Walk
    stages: int = 1  # blocks that are loaded or worked on at the same time
    resident: bool = False  # x and dy are read once: they stay in registers, or the mean and variance were given
    reduce: bool = False  # compute the sums over sets, c1 and c2
    apply: bool = False  # compute dx
    segments: Segments | None = None  # if not None, a program takes the sets of one segment in turn and sums gradients over them

    @property
    def reads(self) -> int:
        return self.reduce + self.apply - self.resident

    @property
    def cooperative(self) -> bool:
        """Whether programs wait for each other, so that all of them must run at the same time."""
        return False

    @property
    def experimental(self) -> bool:
        """Whether the kernel uses Gluon, which is experimental: another version of Triton may not compile it."""
        return False

    @property
    def partial_sums(self) -> int:
        """How many float32 numbers (sums over sets) programs store for each other."""
        return 0

    @property
    def counters(self) -> int:
        """How many int32 counters the programs need to wait for each other."""
        return 0

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
        """Return the Kernel of launch/kernel.py that runs this launch, with its arguments."""

    def pointers(self, problem: NormProblem, options: BackwardOptions) -> tuple[GradientTensors, Affine, SetValues, Cells]:
        """Return the dtypes of the tensors that the kernel gets, in four groups. A tensor that it does not get is None."""
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


@dataclass(frozen=True, kw_only=True)
class SharedSetBackwardLaunch(TeamsLaunch, BackwardLaunch):
    """A launch of a backward whose programs form teams."""

    @property
    def shape(self) -> str:
        return f"{super().shape}, teams of {self.members}"

    @property
    def partial_sums(self) -> int:
        return self.parts


def needs_set_sums(problem: NormProblem, needs: Needs) -> bool:
    """Return whether the gradients that are needed depend on the sums over sets, c1 and c2."""
    return not problem.given and (needs.x or needs.mean_weight or needs.var_weight)
