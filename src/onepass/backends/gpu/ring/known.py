"""What the groups of the backward kernel of ring must know of each element besides x and dy: mean, rstd, gain and term.

x_hat = (x - mean)·rstd, and z = x_hat·gain + term. If each column has its own (the kind COLUMNS of ring/launch_backward.py), one group
of warps stores them as lines, one value for each column, for another group. Otherwise all elements of a block share them, or only mean and
rstd: then each group loads those of the next block while it works on a block. Parameters that differ from element to element are kept in
shared memory (ring/parameters.py).
"""

from onepass.backends.gpu.device.affine import fold_affine
from onepass.backends.gpu.device.axes import AXIS_R, AXIS_S, AXIS_T, NO_AXIS
from onepass.backends.gpu.device.gradients import load_saved, store_cells
from onepass.backends.gpu.device.groups import Place

from .exchange import set_of
from .gluon import gl, jit
from .launch_backward import BLOCKS_OF_UNIT as _BLOCKS_OF_UNIT
from .launch_backward import KINDS

COLUMNS, BLOCKS, SET, ELEMENTS = (gl.constexpr(kind) for kind in KINDS)

BLOCKS_OF_UNIT = gl.constexpr(_BLOCKS_OF_UNIT)

KNOWN = gl.constexpr(4)  # lines of a tile: mean, rstd, gain and term


@jit
def place_of_columns(unit, tile, view, split, mode: gl.constexpr, WARPS: gl.constexpr):
    """Return the Place of the columns of a tile, for WARPS warps."""
    within = tile * mode.block_j + gl.arange(0, mode.block_j, gl.BlockedLayout([1], [32], [WARPS], [0]))
    column = unit % split.spans * split.span + within
    of = set_of(column, view.run)
    inside = (column < split.columns) & (within < split.span)
    return Place(o=unit // split.spans, r=0, s=of, t=column - of * view.run, i_inside=inside, j_inside=inside)


@jit
def store_lines(channel, at, unit, tile, affine, values, view, maps, split, norm: gl.constexpr, mode: gl.constexpr, WARPS: gl.constexpr):
    """Store mean, rstd, gain and term of the columns of a tile, in four lines from `at`."""
    place = place_of_columns(unit, tile, view, split, mode, WARPS)
    mean, rstd = load_saved(values, place.o * view.sets + place.s, place.j_inside)
    gain, term = fold_affine(1.0, affine, maps, place, norm, AXIS_R, AXIS_S | AXIS_T)
    zero = gl.zeros([mode.block_j], gl.float32, gl.BlockedLayout([1], [32], [WARPS], [0]))
    channel.buffer.index(at).store(zero + mean)
    channel.buffer.index(at + 1).store(zero + rstd)
    channel.buffer.index(at + 2).store(zero + gain)
    channel.buffer.index(at + 3).store(zero + term)


@jit
def load_line(channel, at, BLOCK: gl.constexpr):
    """Return a line, of shape [1, J]."""
    return gl.expand_dims(channel.buffer.index(at).load(gl.SliceLayout(0, BLOCK)), 0)


@jit
def load_value(channel, at, BLOCK: gl.constexpr):
    """Return the first value of a line, of shape [1, 1]."""
    return gl.expand_dims(channel.buffer.index(at).slice(0, 1).load(gl.SliceLayout(0, BLOCK)), 0)


@jit
def place_of_block(unit, tile, block, work, total, split, mode: gl.constexpr):
    """Return the Place of a member's block whose elements share mean and rstd. Its t is a channel."""
    if mode.kind == SET:
        o, s, t = unit // split.spans, unit % split.spans, 0
        inside = unit < work.units
    else:
        o, s = unit * mode.tiles + tile, 0
        t = (work.member + block * split.members) * mode.block_i // gl.maximum(split.channel_rows, 1)
        inside = o < total
    return Place(o=o, r=0, s=s, t=t, i_inside=inside, j_inside=inside)


@jit
def corner_in_set(block, work, split, mode: gl.constexpr):
    """Return the first row and the first column of a member's block, within its set (SET).

    Neighbouring members have blocks side by side, which is the order of memory.
    """
    number = work.member + block * split.members
    return number // mode.across * mode.block_i, number % mode.across * mode.block_j


@jit
def of_block(place, affine, values, view, maps, norm: gl.constexpr, mode: gl.constexpr):
    """Return mean, rstd, gain and term of a block. For ELEMENTS, gain and term have no meaning; without centering, the mean."""
    mean, rstd = load_saved(values, place.o * view.sets + place.s, place.i_inside)
    if values.mean_ptr is None:
        mean = rstd
    gain = rstd
    term = rstd
    if mode.kind != ELEMENTS:
        gain, term = fold_affine(1.0, affine, maps, place, norm, NO_AXIS, NO_AXIS)
        gain, term = gl.where(place.i_inside, gain, 0.0), gl.where(place.i_inside, term, 0.0)  # numbers become tensors
    return mean, rstd, gain, term


@jit
def after(unit, tile, block, work, split, mode: gl.constexpr):
    """Return unit, tile and block of the next block of this member."""
    last = block + 1 == work.blocks
    ends = last & (tile + 1 == mode.tiles)
    next_tile = gl.where(ends, 0, gl.where(last, tile + 1, tile))
    return gl.where(ends, unit + split.teams, unit), next_tile, gl.where(last, 0, block + 1)


@jit
def store_totals(a, b, block, affine, cells, maps, work, view, split, norm: gl.constexpr, mode: gl.constexpr, BLOCK: gl.constexpr):
    """Store the sums of the gradients of a block's parameters as cells: one for each team and element of a run. (40)"""
    i = gl.expand_dims(gl.arange(0, mode.block_i, gl.SliceLayout(1, BLOCK)), 1)
    j = gl.expand_dims(gl.arange(0, mode.block_j, gl.SliceLayout(0, BLOCK)), 0)
    t = ((work.member + block * split.members) * mode.block_i + i) * mode.block_j + j
    inside = (t < view.length) & (block < work.blocks)
    place = Place(o=0, r=0, s=0, t=t, i_inside=inside, j_inside=inside)
    store_cells(cells, work.team.to(gl.int64) * view.length + t, inside, a, b, affine, maps, place, norm, AXIS_T, AXIS_T)
