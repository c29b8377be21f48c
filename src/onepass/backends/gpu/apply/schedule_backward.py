"""The launches that compute a backward from a given mean and variance.

One launch computes dx and partial sums of the gradients of parameters. Others add up the partial sums.
"""

from __future__ import annotations

from onepass.backends.gpu.launches import with_chaining
from onepass.backends.gpu.partials.parameters import parameter_axes
from onepass.backends.gpu.partials.sums import Step, why_no_sums
from onepass.backends.gpu.row.schedule_backward import parts_of_sets
from onepass.backends.gpu.tile.schedule_backward import tile_reread_launches
from onepass.backends.gpu.walk import AXIS_R, AXIS_T, walk
from onepass.core.device import Device
from onepass.core.problem import NormProblem


@with_chaining
def apply_launches(problem: NormProblem, device: Device, invariant: bool) -> tuple[Step, ...]:
    w = walk(problem, cut=True)
    if not AXIS_T & parameter_axes(problem, w) and w.run > 1:
        return parts_of_sets(problem, w, device)
    return tile_reread_launches(problem, device, invariant)


def apply_unsupported(problem: NormProblem, device: Device) -> list[str]:
    w = walk(problem)
    axes = parameter_axes(problem, w)
    if axes & AXIS_R and (axes & AXIS_T or w.run == 1):
        return ["each element of a set has its own parameter: sums over parameters go across sets"]
    return why_no_sums(problem, device, apply_launches)
