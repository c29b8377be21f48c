"""The list of all kernel families. A new family needs a line in `FAMILIES`."""

from __future__ import annotations

from onepass.backends.c.family import C
from onepass.backends.family import Family
from onepass.backends.gpu.apply.family import Apply
from onepass.backends.gpu.ring.family import Ring
from onepass.backends.gpu.row.family import Row, RowReread
from onepass.backends.gpu.team.family import Team
from onepass.backends.gpu.tile.family import Tile, TileReread
from onepass.backends.gpu.whole_set.family import WholeSet
from onepass.backends.torch_ops.aten import Aten
from onepass.backends.torch_ops.blockwise import Blockwise
from onepass.backends.torch_ops.reference import Reference

# The planner takes the cheapest family; of several with equal cost, the first in this list.
FAMILIES: tuple[Family, ...] = (
    C(),
    Aten(),
    Row(),
    Tile(),
    WholeSet(),
    Ring(),
    Team(),
    Apply(),
    RowReread(),
    TileReread(),
    Blockwise(),
    Reference(),
)

_BY_NAME = {family.name: family for family in FAMILIES}


def family_named(name: str) -> Family:
    return _BY_NAME[name]
