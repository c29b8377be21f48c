"""The launch that computes a forward from a given mean and variance.

It is a launch of the row walk or of the tile walk, whichever uses more of the bytes that it reads. Short runs are read by the tile walk.
"""

from __future__ import annotations

from dataclasses import replace
from math import ceil, prod

from onepass.backends.gpu.launches import ForwardLaunch, peel_of
from onepass.backends.gpu.row.schedule import row_parts
from onepass.backends.gpu.tile.launch import TileLaunch
from onepass.backends.gpu.tile.schedule import rows_abreast, tile_apply, tile_parts
from onepass.backends.gpu.walk import ROW, TILE, Walk, run_by_run, used_fraction, walk
from onepass.core.device import Device
from onepass.core.problem import NormProblem

ONE_BLOCK_EACH = 2**20  # programs for each multiprocessor, or parts: so many that each has one block
SHORT = 512  # elements of a run, below which programs read across sets


def apply_launches(problem: NormProblem, device: Device, invariant: bool) -> tuple[ForwardLaunch, ...]:
    w = walk(problem)
    if used_fraction(problem, ROW) < used_fraction(problem, TILE) or (w.dense and w.run < SHORT):
        return (_across(problem, w, device),)
    w = walk(problem, cut=True)
    if w.outer > 1 or w.reps == 1:
        return (row_parts(w, device, ceil(16 * device.sms / w.total), 2048, 128, widest=1024, apply=True),)
    w = run_by_run(w)
    peel = peel_of(problem, w)
    if peel:
        size, threads, widest = 4096, 128, 4096
    else:
        size, threads, widest = (2048, 128, 1024) if problem.dtype.itemsize == 2 else (1024, 64, 1024)
    return (replace(row_parts(w, device, ONE_BLOCK_EACH, size, threads, widest=widest, apply=True), by_s=True, peel=peel),)


def _across(problem: NormProblem, w: Walk, device: Device) -> TileLaunch:
    abreast = rows_abreast(problem, w)
    if w.run > 1:
        return tile_parts(w, device, ONE_BLOCK_EACH, 128, 32, height=8, abreast=abreast)
    if prod(problem.shape) >= 2**22 and problem.dtype.itemsize == 4:
        return tile_parts(w, device, ONE_BLOCK_EACH, 64, 256, abreast=abreast)
    return tile_apply(problem, w, device, abreast)
