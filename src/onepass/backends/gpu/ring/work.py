"""The work of a program of the ring kernel (ring/kernel.py): which units it takes part in, and which blocks of them it has."""

from typing import Any, NamedTuple

from .gluon import gl, jit


class Work(NamedTuple):
    """The work of a program: the units team, team + teams, team + 2·teams, ... below `units`."""

    team: Any
    member: Any
    units: Any
    blocks: Any  # how many blocks this member has in each tile of a unit
    again: Any  # how many blocks of a unit this member loads twice


@jit
def of_tile(block, work, mode: gl.constexpr):
    """Return the tile of a unit that a member's block belongs to, and the number of the block in that tile."""
    if mode.tiles == 1:
        tile, within = 0, block
    elif mode.blocks > 0:
        tile, within = block // mode.blocks, block % mode.blocks
    else:  # members have different numbers of blocks
        tile, within = block // work.blocks, block % work.blocks
    return tile, within
