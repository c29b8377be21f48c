"""Loads the parameters that differ within a column: those of a folded walk, and those of rows.

A folded walk (gpu/walk.py) takes a run as rows r of block_j elements t, so the element (r, t) is number r·block_j + t of the
run. A team of programs, its members, shares a unit of work, which is some values of o. A member has the same rows of every
unit. So if each element of a run has its own weight and bias, and all o share them, a member can keep those of its rows
in shared memory.
"""

from typing import Any, NamedTuple

from onepass.backends.gpu.device.affine import fold_affine, parameter, scale_and_shift
from onepass.backends.gpu.device.axes import AXIS_R, AXIS_T, NO_AXIS
from onepass.backends.gpu.device.groups import Place

from .elements import as_float32
from .gluon import barrier, gl, jit
from .layouts import flat_layout

# What parameters differ by: RingMode.differ of ring/launch.py.
ELEMENT, ROW, BLOCK = gl.constexpr("element"), gl.constexpr("row"), gl.constexpr("block")


class Kept(NamedTuple):
    """Weight and bias of a member's rows in shared memory, of shape [blocks of a run, block_i, block_j]."""

    weight: Any
    bias: Any


@jit
def keep(affine, ring, mode: gl.constexpr):
    """Allocate shared memory for the parameters that a member keeps. What is not kept is a placeholder: the ring's buffer."""
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    weight = ring.buffer
    bias = ring.buffer
    if mode.kept > 0:
        if affine.weight_ptr is not None:
            weight = gl.allocate_shared_memory(affine.weight_ptr.dtype.element_ty, [mode.kept, mode.block_i, mode.block_j], PLAIN)
        if affine.bias_ptr is not None:
            bias = gl.allocate_shared_memory(affine.bias_ptr.dtype.element_ty, [mode.kept, mode.block_i, mode.block_j], PLAIN)
    return Kept(weight=weight, bias=bias)


@jit
def fill(kept, phase, affine, maps, work, view, split, norm: gl.constexpr, mode: gl.constexpr, LAYOUT: gl.constexpr):
    """Load the parameters of this member's rows, at the phase of x.

    If phases differ, parameters are loaded one by one, by threads with neighbouring elements. Otherwise each thread loads vectors,
    and later reads what it has stored itself, so that no barrier is needed.
    """
    FLAT: gl.constexpr = flat_layout(mode.block_j, mode.warps) if mode.phases > 1 else LAYOUT
    if mode.phases > 1:  # others may still read the parameters of the phase before
        barrier()
    weight, bias = _of_block(0, phase, affine, maps, work, view, split, norm, mode, FLAT)
    for block in range(work.blocks):  # load those of the next block before these arrive; beyond the last block there are none
        next_weight, next_bias = _of_block(block + 1, phase, affine, maps, work, view, split, norm, mode, FLAT)
        if affine.weight_ptr is not None:
            kept.weight.index(block).store(weight.to(kept.weight.dtype))
        if affine.bias_ptr is not None:
            kept.bias.index(block).store(bias.to(kept.bias.dtype))
        weight, bias = next_weight, next_bias
    if mode.phases > 1:
        barrier()


@jit
def _of_block(block, phase, affine, maps, work, view, split, norm: gl.constexpr, mode: gl.constexpr, LAYOUT: gl.constexpr):
    """Load weight and bias of this member's block number `block`. If a norm has no weight or no bias, return 0 for it."""
    place = _place(0, phase, (work.member + block * split.members) * mode.block_i, view, split, mode, LAYOUT)
    weight = 0.0
    bias = 0.0
    if affine.weight_ptr is not None:
        weight = parameter(affine.weight_ptr, maps.param, place, norm.param_axes, AXIS_T, AXIS_T)
    if affine.bias_ptr is not None:
        bias = parameter(affine.bias_ptr, maps.param, place, norm.param_axes, AXIS_T, AXIS_T)
    return weight, bias


@jit
def gain_and_term(kept, affine, maps, run, first, block, view, split, norm: gl.constexpr, mode: gl.constexpr, LAYOUT: gl.constexpr):
    """Return gain and term such that y = activation((x - mean)·rstd·gain + term), for a block of rows from `first`.

    `block` is the number of the block among those of this member in one run.
    """
    place = _place(run.o, run.phase, first, view, split, mode, LAYOUT)
    if mode.kept > 0:
        gain = 1.0
        term = 0.0
        if affine.weight_ptr is not None:
            gain = as_float32(kept.weight.index(block).load(LAYOUT))
            if norm.weight_offset != 0.0:
                gain = gain + norm.weight_offset
        if affine.bias_ptr is not None:
            term = as_float32(kept.bias.index(block).load(LAYOUT))
        HAS_TERM: gl.constexpr = affine.bias_ptr is not None
        gain, term = scale_and_shift(
            gain, term, affine.scale_ptr, affine.shift_ptr, maps.modulation, place, 1.0, norm.modulation_axes, AXIS_T, AXIS_T, HAS_TERM
        )
    elif mode.differ == BLOCK:
        gain, term = fold_affine(1.0, affine, maps, place, norm, NO_AXIS, NO_AXIS)
    elif mode.differ == ROW:
        gain, term = fold_affine(1.0, affine, maps, place, norm, AXIS_T, NO_AXIS)
    else:
        gain, term = fold_affine(1.0, affine, maps, place, norm, AXIS_T, AXIS_T)
    return gain, term


@jit
def _place(o, phase, first, view, split, mode: gl.constexpr, LAYOUT: gl.constexpr):
    """Return the Place of a block whose first row is `first`. Its t is a channel, if parameters differ by row or by block."""
    r = first + gl.expand_dims(gl.arange(0, mode.block_i, gl.SliceLayout(1, LAYOUT)), 1)
    j = gl.expand_dims(gl.arange(0, mode.block_j, gl.SliceLayout(0, LAYOUT)), 0)
    if mode.differ == BLOCK:
        t = first // split.channel_rows
    elif mode.differ == ROW:  # r // channel_rows, in three instructions instead of twenty; exact for r below 2²⁰
        t = ((r.to(gl.float32) + 0.5) * (1.0 / split.channel_rows)).to(gl.int32)
    else:
        t = r * mode.block_j + j - phase
    inside = r < view.reps
    if mode.phased:
        inside = (t >= 0) & (t < view.length)
    return Place(o=o, r=0, s=0, t=t, i_inside=inside, j_inside=j < mode.block_j)


@jit
def of_rows(o, first, affine, maps, view, norm: gl.constexpr, mode: gl.constexpr, LAYOUT: gl.constexpr):
    """Return gain and term of the rows of a block, from row `first` of o. Both have the shape [I, 1]. The walk is not folded."""
    r = first + gl.expand_dims(gl.arange(0, mode.block_i, gl.SliceLayout(1, LAYOUT)), 1)
    place = Place(o=o, r=r, s=0, t=0, i_inside=r < view.reps, j_inside=None)
    gain, term = fold_affine(1.0, affine, maps, place, norm, AXIS_R, NO_AXIS)
    zero = gl.zeros([mode.block_i, 1], gl.float32, LAYOUT)
    return zero + gain, zero + term
