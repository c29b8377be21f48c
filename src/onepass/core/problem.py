"""Bind a norm to tensors: `bind` turns a NormSpec and tensors into a NormProblem, which describes the memory of x.

Only shapes, strides and dtypes are read, no data. view.py finds the four-axis view, x[outer, reps, sets, run].
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod

import torch
from torch import Tensor

from .operands import NO_OPTIONAL, OptionalOperands, SavedTensors
from .spec import NormSpec
from .view import ParamMap, View, dense_stride, find_view, stat_stride


@dataclass(frozen=True)
class NormProblem:
    """A NormSpec with the shapes, strides and dtypes of a call. Calls with equal problems run the same plan.

    With a residual, x + residual is normalized. Then shape, dtype, strides and views are those of the sum.
    """

    spec: NormSpec
    shape: tuple[int, ...]
    dtype: torch.dtype
    weight: torch.dtype | None
    bias: torch.dtype | None
    given: bool  # mean and variance are operands and not computed, as in evaluation mode
    last_given: bool  # in a mix of norms, the statistics of the last norm are operands
    track: bool  # the forward must return the variance, to update running statistics
    x: View | None  # None if the memory of x has no four-axis view
    y: View | None
    stride: tuple[int, ...]  # of x
    y_stride: tuple[int, ...]  # of y and dx: dense, with dimensions in the order of x's memory
    param: ParamMap | None
    stat_shape: tuple[int, ...]  # of mean and rstd: the sizes of the axes that are not reduced, in the order of the spec
    stat_stride: tuple[int, ...]  # of mean and rstd: dense, with axes in the order of x's memory
    copied: str  # why x must be copied before it has the view `x`, or ""
    scale: torch.dtype | None
    shift: torch.dtype | None
    modulation: ParamMap | None  # which scale and shift an element uses
    addends: tuple[torch.dtype, torch.dtype] | None  # the dtypes of x and residual; None without a residual
    aligned: bool = True  # the address of x is a multiple of 16 bytes. `bind` does not look: see `PlannedLaunches` in backends/family.py

    @property
    def acc(self) -> torch.dtype:
        """The dtype of sums and statistics."""
        return accumulator(self.dtype)

    @property
    def affine(self) -> bool:
        return self.weight is not None or self.bias is not None

    @property
    def has_post_affine(self) -> bool:
        """Whether modulation or an activation follows the affine step."""
        return self.scale is not None or self.shift is not None or bool(self.spec.activation)

    @property
    def from_y(self) -> bool:
        """Whether the backward gets y instead of x."""
        return self.spec.from_y

    @property
    def why_no_view(self) -> str:
        """The reason why x has no four-axis view. Kernel families that need one report it."""
        return "x has no elements" if 0 in self.shape else f"no four-axis view of strides {self.stride}"

    def for_direction(self, direction: str) -> NormProblem:
        """Return the problem to plan for "forward" or "backward".

        With `from_y`, the backward reads y instead of x, so its problem has y's strides and view instead of x's.
        """
        if direction == "forward" or not self.from_y:
            return self
        return replace(self, x=self.y, stride=self.y_stride, copied="")

    @property
    def param_size(self) -> int:
        """The number of elements of the weight, which is also that of the bias."""
        return prod(axis.size for axis in self.spec.factor(self.shape) if axis.param)

    @property
    def modulation_size(self) -> int:
        """The number of elements of the scale, which is also that of the shift."""
        return prod(axis.size for axis in self.spec.factor(self.shape) if axis.modulation)

    def min_bytes(self, direction: str) -> int:
        """Return the smallest number of bytes that a kernel can read and write.

        A forward reads x and writes y. A backward reads x and dy and writes dx. Both read each parameter once.
        With a residual, the forward also reads the residual and writes the sum, and the backward also reads the sum's gradient.
        """
        params = sum(dtype.itemsize for dtype in (self.weight, self.bias) if dtype) * self.param_size
        params += sum(dtype.itemsize for dtype in (self.scale, self.shift) if dtype) * self.modulation_size
        element = self.dtype.itemsize * (2 if direction == "forward" else 3)
        if self.addends:
            element += sum(dtype.itemsize for dtype in self.addends) if direction == "forward" else self.dtype.itemsize
        return prod(self.shape) * element + params


def accumulator(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def bind(
    spec: NormSpec,
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    given: bool = False,
    track: bool = False,
    optional: OptionalOperands = NO_OPTIONAL,
) -> NormProblem:
    """Return the NormProblem of a spec and tensors.

    Example: `bind(norms.group_norm(32), torch.empty(2, 320, 8, 8)).x` is `View(outer=64, reps=1, sets=1, run=640, ...)`.
    """
    addends = None
    if optional.residual is not None:
        addends = x.dtype, optional.residual.dtype
        # From here on x is the sum, which is dense, with dimensions in the order of x's memory.
        x = torch.empty_like(x, dtype=torch.promote_types(x.dtype, optional.residual.dtype), device="meta")
    shape, stride, y_stride = tuple(x.shape), x.stride(), dense_stride(x)
    axes = spec.factor(shape)
    found, copied = find_view(axes, stride, y_stride), ""
    if found is None and stride != y_stride:
        found, copied = find_view(axes, y_stride, y_stride), f"no four-axis view of strides {tuple(stride)}"
    x_view, y_view, param, modulation = found or (None, None, None, None)
    return NormProblem(
        spec=spec,
        shape=shape,
        dtype=x.dtype,
        weight=None if weight is None else weight.dtype,
        bias=None if bias is None else bias.dtype,
        given=given,
        last_given=optional.running_mean is not None,
        track=track,
        x=x_view,
        y=y_view,
        stride=stride,
        y_stride=y_stride,
        param=param,
        stat_shape=tuple(spec.kept_shape(shape)),
        stat_stride=stat_stride(axes, y_stride),
        copied=copied if found else "",
        scale=None if optional.scale is None else optional.scale.dtype,
        shift=None if optional.shift is None else optional.shift.dtype,
        modulation=modulation,
        addends=addends,
    )


def bind_backward(spec: NormSpec, dsum: Tensor | None, saved: SavedTensors, given: bool) -> NormProblem:
    """Return the NormProblem of a backward. If `dsum`, the gradient of x + residual, is given, `saved.x` is that sum."""
    problem = bind(spec, saved.x, saved.weight, saved.bias, given, optional=saved.optional)
    return problem if dsum is None else replace(problem, addends=(saved.x.dtype, dsum.dtype))


def summed_like(x: Tensor, residual: Tensor | None) -> Tensor:
    """Return x if there is no residual, otherwise a placeholder with the shape, dtype and device of x + residual.

    The placeholder is one uninitialized element, expanded to that shape.
    """
    return x if residual is None else x.new_empty((), dtype=torch.promote_types(x.dtype, residual.dtype)).expand(x.shape)
