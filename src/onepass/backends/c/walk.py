"""How the C kernels walk through memory.

They use the view x[outer, reps, sets, run] of core/view.py, sometimes with other sizes. A *set* is all elements of one
(outer, sets); they share one mean and variance. A *run* is consecutive elements of a set. A *row* is all of one (outer, reps).
"""

from __future__ import annotations

from typing import NamedTuple

from onepass.core.problem import NormProblem
from onepass.core.view import ParamMap


class Map(NamedTuple):
    """ParamMap of src/problem.h: the coefficients of equation (1) of docs/theory.md, and `size`, the number of parameters."""

    every: int
    period: int
    a: int
    b: int
    c: int
    channel_run: int
    d: int
    size: int

    @staticmethod
    def of(map_: ParamMap, size: int) -> Map:
        return Map(map_.every, map_.period, map_.a, map_.b, map_.c, map_.channel_run, map_.d, size)


class Walk(NamedTuple):
    """The view and parameter maps that the kernels use. With `tile`, the kernels go row by row across the sets (src/tiles.h)."""

    sizes: tuple[int, int, int, int]
    strides: tuple[int, int, int]  # of x along outer, reps and sets
    param: Map
    modulation: Map
    tile: bool
    copies: bool  # x must first be copied to the strides of y
    fold: int = 1  # how many narrow rows are walked as one; only with `tile`


SHORT = 64  # elements; with shorter runs, the kernels always go row by row across the sets
MANY = 64  # rows of a dense x; if a sample has as many, they do so for longer runs, too. Set by set would use parts of rows only
WIDE = 512  # elements; a wider row that is one set is faster by itself


NARROW = 1024  # elements; several rows are walked as one row if that row is at most this wide


def walk_of(problem: NormProblem) -> Walk:
    x, p, m = problem.x, problem.param, problem.modulation
    assert x is not None and p is not None and m is not None
    (o, r, s, t), (xo, xr, xs, _) = x.sizes, x.strides
    maps = Map.of(p, problem.param_size), Map.of(m, problem.modulation_size)
    copies = bool(problem.copied) or (r > 1 and t < SHORT and s > 1 and xs != t) or (r > 1 and s == 1 and t < SHORT and xr != t)
    if copies:
        xo, xr, xs = r * s * t, s * t, t
    if s == 1 and r > 1 and xr == t:  # a set is contiguous
        flat = [_flat(map_, t) for map_ in maps]
        if None not in flat:
            return Walk((o, 1, 1, r * t), (xo, 0, 0), *flat, tile=False, copies=copies)  # pyright: ignore[reportArgumentType]
    dense = xr == s * t and (xs == t or s == 1)
    tile, fold = r > 1 and (t < SHORT or (dense and r >= MANY and (s > 1 or t <= WIDE))), 1
    if tile and xr == s * t and not maps[0].b and not maps[1].b:
        fold = max(k for k in range(1, max(min(NARROW // (s * t), r // 16), 1) + 1) if r % k == 0)
    return Walk((o, r // fold, s, t), (xo, xr * fold, xs), *maps, tile, copies, fold)


def _flat(map_: Map, run: int) -> Map | None:
    """Return the map after the reps of a set, `run` elements each, are joined into one long run.

    Return None if the joined map does not have the form of equation (1).
    """
    if map_.b == 0 == map_.d:
        return map_
    if map_.d == 0:
        return map_._replace(b=0, channel_run=run, d=map_.b)
    if map_.b == run // map_.channel_run * map_.d:
        return map_._replace(b=0)
    return None
