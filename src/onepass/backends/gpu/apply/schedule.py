"""The launch that computes a forward from a given mean and variance.

It is a launch of the row walk or of the tile walk, whichever uses more of the bytes that it reads.
"""

from __future__ import annotations

from math import ceil, prod

from onepass.backends.gpu.launches import ForwardLaunch
from onepass.backends.gpu.row.schedule import row_parts
from onepass.backends.gpu.tile.schedule import tile_apply, tile_parts
from onepass.backends.gpu.walk import ROW, TILE, used_fraction, walk
from onepass.core.device import Device
from onepass.core.problem import NormProblem

ONE_BLOCK_EACH = 2**20  # programs for each multiprocessor: so many that each has one block


def apply_launches(problem: NormProblem, device: Device, invariant: bool) -> tuple[ForwardLaunch, ...]:
    if used_fraction(problem, ROW) >= used_fraction(problem, TILE):
        w = walk(problem, cut=True)
        return (row_parts(w, device, ceil(16 * device.sms / w.total), 2048, 128, widest=1024, apply=True),)
    w = walk(problem)
    if prod(problem.shape) >= 2**22 and problem.dtype.itemsize == 4:
        return (tile_parts(w, device, ONE_BLOCK_EACH, 64, 256),)
    return (tile_apply(problem, w, device),)
