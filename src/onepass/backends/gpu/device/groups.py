"""Groups (NamedTuples) of arguments that several kernels take. launch/fields.py explains the annotations.

A device function must always get the same class for the same parameter: Triton tells compiled functions apart by the
types of the fields, not by their names. Build groups by keyword.

Memory is x[o, r, s, t]. A set is the elements of one o and s, which share a mean and a variance. Numbers such as (1) are
equations of docs/theory.md.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from onepass.backends.gpu.launch.fields import Index, Length, Pointer, Real, Stride


class Tensors(NamedTuple):
    """What a forward kernel reads and writes. With a residual, the kernel stores x + residual in `sum` and normalizes the sum."""

    x_ptr: Pointer
    residual_ptr: Pointer
    sum_ptr: Pointer
    y_ptr: Pointer


class Affine(NamedTuple):
    """The parameters of y = activation((x_hat·(offset + weight) + bias)·(1 + scale) + shift)."""

    weight_ptr: Pointer
    bias_ptr: Pointer
    scale_ptr: Pointer
    shift_ptr: Pointer


class Statistics(NamedTuple):
    """The mean, rstd and var of each set: tensors that are contiguous as [outer, sets]. A launch may update running ones, too."""

    mean_ptr: Pointer = None
    rstd_ptr: Pointer = None
    var_ptr: Pointer = None
    running_mean_ptr: Pointer = None
    running_var_ptr: Pointer = None
    momentum: Real = None
    unbiased: Real = None  # n/(n - 1), where n elements share one variance


class GradientTensors(NamedTuple):
    """What a backward kernel reads and writes. `dsum` is the gradient that arrives at x + residual."""

    x_ptr: Pointer
    dy_ptr: Pointer
    dsum_ptr: Pointer
    dx_ptr: Pointer


class SetValues(NamedTuple):
    """Tensors with one value for each set: mean and rstd, as the forward saved them, and the sums that give c1 and c2.

    These are the sums of (6) and (7), not yet divided by n.
    """

    mean_ptr: Pointer
    rstd_ptr: Pointer
    c1_ptr: Pointer
    c2_ptr: Pointer


class Cells(NamedTuple):
    """Partial sums (cells) of the gradients of parameters. `add_up` of partials/sums_kernel.py adds those of each parameter."""

    dweight_ptr: Pointer
    dbias_ptr: Pointer
    dscale_ptr: Pointer
    dshift_ptr: Pointer


class View(NamedTuple):
    """The sizes and strides of x[o, r, s, t] and of y. r has `reps` values, s `sets` and t `run`. Strides are in elements."""

    reps: Length
    sets: Index
    run: Stride
    x_o: Stride
    x_r: Stride
    x_s: Stride
    y_o: Stride
    y_r: Stride
    y_s: Stride


class ParamMap(NamedTuple):
    """The numbers of equation (1), which gives the index of the weight and bias of the element (o, r, s, t).

    The fields o, r, s and t are a, b, c and d of (1), and run is channel_run.
    """

    every: Index
    period: Index
    o: Index
    r: Index
    s: Stride
    run: Index
    t: Index


class ModulationMap(NamedTuple):
    """The numbers of equation (1) for scale and shift. The fields are those of ParamMap, in the same order."""

    every: Index
    period: Index
    o: Stride
    r: Index
    s: Stride
    run: Index
    t: Index


class Maps(NamedTuple):
    param: ParamMap
    modulation: ModulationMap


class Norm(NamedTuple):
    """Which norm a kernel computes. All fields are compile-time constants."""

    param_axes: int  # the mask of AXIS_O to AXIS_T (device/axes.py) on which weight and bias depend
    modulation_axes: int  # the mask of the axes on which scale and shift depend
    weight_offset: float
    centered: bool  # subtract the mean
    activation: str


class Place(NamedTuple):
    """The coordinates of the elements of a block, which has the shape [I, J].

    i_inside and j_inside are masks of the elements that exist along I and along J, or None if all do.
    """

    o: Any
    r: Any
    s: Any
    t: Any
    i_inside: Any
    j_inside: Any
