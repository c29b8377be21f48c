"""Where the runs of a folded walk lie (gpu/walk.py): each tile of a unit is one run.

A copy by descriptor begins at a multiple of 16 bytes, but a run of odd length may not. So a run is read from the multiple of
16 bytes before it, which is `phase` elements away. y has the same strides as x, so that both are read and written in whole
vectors. Weight and bias of each element must follow: they are kept in shared memory, at the same phase as x (ring/parameters.py).
To keep them there for long, all runs of a unit have the same phase, and a team takes units of as few phases as possible. With
`phases` phases, every phases-th run has the same one.
"""

from typing import Any, NamedTuple

from .gluon import gl, jit


class Runs(NamedTuple):
    """The runs of one unit. They are found once for each unit, because divisions take long."""

    first: Any  # the o of the first run; the next ones are `phases` apart
    phase: Any  # how many elements before each run it is read from


class Run(NamedTuple):
    o: Any
    phase: Any
    start: Any  # elements from the start of x to where the run is read from
    end: Any  # elements from there to the end of the run


@jit
def runs_of(unit, total, view, split, mode: gl.constexpr):
    first = unit * mode.tiles
    phase = 0
    if mode.phases > 1:
        # The teams take their units in turn. Here each team gets neighbours instead: `rounds` units of one or a few phases.
        number = unit % split.teams * split.rounds + unit // split.teams
        which = number // split.units_of_phase
        rest = number - split.longer * split.units_of_phase  # the number among the units of the other phases
        other = rest // gl.maximum(split.units_of_others, 1)
        index = gl.where(rest < 0, number - which * split.units_of_phase, rest - other * split.units_of_others)
        which = gl.where(rest < 0, which, split.longer + other)
        first = which + index * (mode.tiles * mode.phases)
        first = gl.where(which < mode.phases, first, total)  # the last teams may have fewer units: then there is no such run
        phase = which * (view.length % mode.vector) % mode.vector
    return Runs(first=first, phase=phase)


@jit
def run_of(runs, tile, view, mode: gl.constexpr):
    """Return the run of a tile. If its o is `total` or more, there is no such run."""
    o = runs.first + tile * mode.phases
    start = o.to(gl.int64) * view.length
    if mode.phases > 1:
        start = start // mode.vector * mode.vector  # the compiler sees that this is a multiple
    return Run(o=o, phase=runs.phase, start=start, end=view.length + runs.phase)
