"""The launch that computes a forward from a given mean and variance.

It is a launch of the row walk or of the tile walk, whichever uses more of the bytes that it reads.
"""

from __future__ import annotations

from math import ceil

from onepass.backends.gpu.launches import ForwardLaunch
from onepass.backends.gpu.row.schedule import row_parts
from onepass.backends.gpu.tile.schedule import tile_apply
from onepass.backends.gpu.walk import ROW, TILE, used_fraction, walk
from onepass.core.device import Device
from onepass.core.problem import NormProblem


def apply_launches(problem: NormProblem, device: Device, invariant: bool) -> tuple[ForwardLaunch, ...]:
    if used_fraction(problem, ROW) >= used_fraction(problem, TILE):
        w = walk(problem, cut=True)
        return (row_parts(w, device, ceil(8 * device.sms / w.total), 4096, 512, apply=True),)
    return (tile_apply(problem, walk(problem), device),)
