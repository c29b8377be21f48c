"""A norm bound to memory: x seen as four axes, and which parameter belongs to which element.

`bind` reads shapes, strides and dtypes, but no data. `view.py` finds the four axes.
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
    """A spec bound to tensors. Two calls with equal problems run the same plan.

    With a residual, the sum is normalized: shape, dtype, strides and views are the sum's.
    """

    spec: NormSpec
    shape: tuple[int, ...]
    dtype: torch.dtype
    weight: torch.dtype | None
    bias: torch.dtype | None
    given: bool  # mean and variance are operands, not computed: evaluation mode
    last_given: bool  # the same for the last norm of a mix
    track: bool  # the result must have the variance, for running statistics
    x: View | None  # None: this memory has no four-axis view
    y: View | None
    stride: tuple[int, ...]  # of x
    y_stride: tuple[int, ...]  # of y and dx: dense, in the order of x's memory
    param: ParamMap | None
    stat_shape: tuple[int, ...]  # of mean and rstd: the kept axes, in logical order
    stat_stride: tuple[int, ...]  # dense, in the order of x's memory
    copied: str  # why x must be copied to have this view, or ""
    scale: torch.dtype | None
    shift: torch.dtype | None
    modulation: ParamMap | None  # which scale and shift an element uses
    addends: tuple[torch.dtype, torch.dtype] | None  # of x and residual

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
        """Why x has no view of four axes, for families that need one."""
        return "x has no elements" if 0 in self.shape else f"no four-axis view of strides {self.stride}"

    def for_direction(self, direction: str) -> NormProblem:
        """The problem to plan for a direction. In a backward that gets y instead of x, x has the memory layout of y."""
        if direction == "forward" or not self.from_y:
            return self
        return replace(self, x=self.y, stride=self.y_stride, copied="")

    @property
    def param_size(self) -> int:
        """How many elements weight and bias have."""
        return prod(axis.size for axis in self.spec.factor(self.shape) if axis.param)

    @property
    def modulation_size(self) -> int:
        """How many elements scale and shift have."""
        return prod(axis.size for axis in self.spec.factor(self.shape) if axis.modulation)

    def min_bytes(self, direction: str) -> int:
        """The bytes that every kernel must move: x read and y written, or x and dy read and dx written, and each parameter once.

        With a residual both addends are read and the sum is written too; its backward reads the sum, and the gradient that arrives there.
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
    """Bind a spec to tensors.

    Example: `bind(norms.group_norm(32), torch.empty(2, 320, 8, 8)).x` is `View(outer=64, reps=1, sets=1, run=640, ...)`.
    """
    addends = None
    if optional.residual is not None:
        addends = x.dtype, optional.residual.dtype
        # The sum: dense, in the order of x's memory.
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
    """Bind a spec to what a backward gets. If there is a gradient of the sum, x is the sum, which is dense."""
    problem = bind(spec, saved.x, saved.weight, saved.bias, given, optional=saved.optional)
    return problem if dsum is None else replace(problem, addends=(saved.x.dtype, dsum.dtype))


def summed_like(x: Tensor, residual: Tensor | None) -> Tensor:
    """x, or with a residual a tensor with the shape and dtype of the sum. It has no memory of its own."""
    return x if residual is None else x.new_empty((), dtype=torch.promote_types(x.dtype, residual.dtype)).expand(x.shape)
