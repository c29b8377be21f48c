from __future__ import annotations

from onepass.backends.gpu.launches import with_chaining
from onepass.backends.gpu.partials.parameters import any_axis, varying_axes
from onepass.backends.gpu.partials.sums import Step, why_no_sums
from onepass.backends.gpu.row.schedule_backward import rows_of_sets
from onepass.backends.gpu.tile.schedule_backward import tile_reread_launches
from onepass.backends.gpu.walk import walk
from onepass.core.device import Device
from onepass.core.problem import NormProblem


@with_chaining
def apply_launches(problem: NormProblem, device: Device, invariant: bool) -> tuple[Step, ...]:
    """Given statistics: dx and the sums over parameters at once."""
    w = walk(problem, cut=True)
    if not 8 & any_axis(varying_axes(problem, w)) and w.run > 1:
        return rows_of_sets(problem, w, device)
    return tile_reread_launches(problem, device, invariant)


def apply_cannot(problem: NormProblem, device: Device) -> list[str]:
    w = walk(problem)
    own = any_axis(varying_axes(problem, w))
    if own & 2 and (own & 8 or w.run == 1):
        return ["each element of a set has a parameter of its own, and the sums over those go across"]
    return why_no_sums(problem, device, apply_launches)
