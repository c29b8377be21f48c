"""The arguments that several kernels take, as groups. See launch/fields.py for the annotations.

A device function must always get the same class for the same parameter: Triton tells compiled functions apart by the
types of the fields, not by their names. Build groups by keyword.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from onepass.backends.gpu.launch.fields import Index, Length, Pointer, Stride


class Tensors(NamedTuple):
    """What a forward reads and writes. With a residual, it stores x + residual in `sum` and normalizes that."""

    x_ptr: Pointer
    residual_ptr: Pointer
    sum_ptr: Pointer
    y_ptr: Pointer


class Affine(NamedTuple):
    """The parameters: y = activation((x_hat·(offset + weight) + bias)·(1 + scale) + shift)."""

    weight_ptr: Pointer
    bias_ptr: Pointer
    scale_ptr: Pointer
    shift_ptr: Pointer


class Statistics(NamedTuple):
    """One value for each set, contiguous as [outer, sets]."""

    mean_ptr: Pointer
    rstd_ptr: Pointer
    var_ptr: Pointer


class GradientTensors(NamedTuple):
    """What a backward reads and writes. `dsum` is the gradient that arrives at x + residual."""

    x_ptr: Pointer
    dy_ptr: Pointer
    dsum_ptr: Pointer
    dx_ptr: Pointer


class SetValues(NamedTuple):
    """One value for each set: what the forward saved, and the sums c1 and c2. (6), (7)"""

    mean_ptr: Pointer
    rstd_ptr: Pointer
    c1_ptr: Pointer
    c2_ptr: Pointer


class Cells(NamedTuple):
    """Partial sums of the gradients of parameters. `add_up` adds the cells of each parameter."""

    dweight_ptr: Pointer
    dbias_ptr: Pointer
    dscale_ptr: Pointer
    dshift_ptr: Pointer


class View(NamedTuple):
    """Memory as x[o, r, s, t] with `reps` values of r, `sets` of s and `run` of t. Strides are in elements."""

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
    """Which weight and bias the element (o, r, s, t) uses. (1)"""

    every: Index
    period: Index
    o: Index
    r: Index
    s: Stride
    run: Index
    t: Index


class ModulationMap(NamedTuple):
    """Which scale and shift the element (o, r, s, t) uses. The fields are those of ParamMap, in the same order. (1)"""

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
    """What the kernel computes. All of it is compiled in."""

    param_axes: int  # the axes on which weight and bias depend, as a mask of AXIS_O to AXIS_T
    modulation_axes: int  # the axes on which scale and shift depend
    weight_offset: float
    centered: bool  # subtract the mean
    activation: str


class Place(NamedTuple):
    """The coordinates of a block's elements, and whether they exist along I and along J (None: all do)."""

    o: Any
    r: Any
    s: Any
    t: Any
    i_inside: Any
    j_inside: Any
