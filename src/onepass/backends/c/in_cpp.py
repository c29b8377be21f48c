"""Makes launchers in C++ that do the same as the Python launchers of minimal.py and extras.py. This file only describes them.

backends/front_door.py passes the descriptions to the C++ code. `careful` is the Python launcher, which handles unusual calls.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from onepass.backends.front_door import At, CStep, Launcher, Layout, New, launcher
from onepass.core.allocate import on_cpu
from onepass.core.statistics import packed_shape, packed_stride
from onepass.core.view import contiguous_stride

from .problem import Call

# The fields of struct Tensors in src/problem.h, in their order.
FIELDS = (
    "x", "residual", "weight", "bias", "scale", "shift", "mean", "rstd", "var", "y", "sum",
    "dy", "dsum", "dx", "dweight", "dbias", "dscale", "dshift", "c1", "c2",
)  # fmt: skip
FORWARD, TRACK, BACKWARD = range(3)
PARAMETERS = "weight", "bias", "scale", "shift"
PARAMETER = Layout(contiguous=True)
EXTRAS = "residual", "scale", "shift"


def described_forward(call: Call, careful: Callable[..., Any], train: bool, tracks: bool = False, extras: bool = False) -> Launcher | None:
    """Return the launcher of `infer`, `train_forward`, `track` or `train_track` in C++, or None if the front door is closed.

    `train` and `tracks` choose which of the four: `track` is the one with `tracks` only, `train_track` the one with both. With
    `extras`, it is the launcher of `infer_extras` or `train_extras`.
    """
    problem, library = call.problem, call.library
    statistic = Layout(problem.stat_stride, problem.stat_shape, torch.float32)
    inputs = dict.fromkeys(("x", "residual"), Layout(problem.stride)) if problem.addends else {"x": Layout()}
    inputs |= _parameters(problem)
    outputs = {"y": New(problem.shape, problem.y_stride, problem.dtype)}
    if problem.addends:
        outputs["sum"] = New(problem.shape, problem.stride, problem.dtype)
    fields, copies = {name: At(name) for name in (*inputs, *outputs)}, []
    running = ("mean", "var") if problem.given else ("running_mean", "running_var")
    if train:
        outputs["statistics"] = New(packed_shape(problem), packed_stride(problem), torch.float32)
        fields["rstd"] = At("statistics", 4 * packed_stride(problem)[0])
        if problem.given:  # save a copy of the mean: running statistics may change before the backward
            copies.append((At("mean") if problem.spec.centered else None, At("statistics")))
        elif problem.spec.centered:
            fields["mean"] = At("statistics")
    if problem.given:
        given = running if problem.spec.centered else running[1:]
        inputs |= dict.fromkeys(given, statistic)
        fields |= {name: At(name) for name in given}
    if tracks:
        inputs |= dict.fromkeys(running, Layout((1,), problem.stat_shape, torch.float32))
    step = CStep(
        TRACK if tracks else FORWARD,
        _address(library.track if tracks else library.forward),
        call.packed(problem.given, bool(problem.addends)),
        _tensors(fields),
        None if call.small else library.threads,
        copies,
        4 * prod(problem.stat_shape),
        (At(running[0]), At(running[1])) if tracks else (None, None),
        5 if tracks else -1,
    )
    more = EXTRAS if extras else running if tracks or problem.given or not train else ()
    arguments = "x", "weight", "bias", *more, *["momentum"] * tracks
    returned = ("y", "statistics") if train else "y"
    if extras:
        returned = "y", *["statistics"] * train, "sum" if problem.addends else None
    return launcher(careful, -1, arguments, inputs, outputs, on_cpu, returned, c_step=step, changed=running if tracks else ())


def described_backward(
    call: Call, careful: Callable[..., Any], needs: tuple[bool, ...], params: Sequence[Tensor | None], dsum: bool | None = None
) -> Launcher:
    """Return the launcher of `train_backward` in C++, or one in Python if the front door is closed.

    `params` are weight and bias, then scale and shift if it is the launcher of `train_extras_backward`. Only their shapes and dtypes are
    read here. `needs` says whether dx and the gradient of each parameter are computed. `dsum` says whether that gradient is there; it is
    None for `train_backward`, whose launcher does not take it.
    """
    problem, second = call.problem, 4 * packed_stride(call.problem)[0]
    inputs = {"dy": Layout(), "x": Layout()} | _parameters(problem) | {"statistics": Layout()}
    if dsum:
        inputs["dsum"] = Layout(problem.y_stride, dtype=problem.dtype)
    outputs = {"dx": New(problem.shape, problem.y_stride, problem.dtype)} if needs[0] else {}
    names = [f"d{name}" for name, _ in zip(PARAMETERS, params)]
    for name, param, needed in zip(names, params, needs[1:]):
        if param is not None and needed:
            outputs[name] = New(tuple(param.shape), contiguous_stride(tuple(param.shape)), param.dtype)
    fields = {name: At(name) for name in (*inputs, *outputs) if name != "statistics"}
    fields |= {"mean": At("statistics")} if problem.spec.centered else {}
    fields["rstd"] = At("statistics", second)
    threads, packed = None if call.small else call.library.threads, call.packed(problem.given, False)
    step = CStep(BACKWARD, _address(call.library.backward), packed, _tensors(fields), threads)
    arguments = "dy", "x", "weight", "bias", "statistics", *([] if dsum is None else ["scale", "shift", "dsum"])
    returned = [name if name in outputs else None for name in ("dx", *names)]

    def with_needs(*tensors: Tensor | None) -> Any:
        return careful(*tensors, needs)

    found = launcher(with_needs, -1, arguments, inputs, outputs, on_cpu, returned, c_step=step)
    return found or with_needs


def _parameters(problem: Any) -> dict[str, Layout]:
    return {name: PARAMETER for name in PARAMETERS if getattr(problem, name) is not None}


def _tensors(fields: dict[str, At]) -> Sequence[At | None]:
    return [fields.get(name) for name in FIELDS]


def _address(function: Any) -> int:
    return ctypes.cast(function, ctypes.c_void_p).value or 0
