"""Walks: in which order a kernel reads the memory of a problem, and which fraction of the bytes read it uses.

Memory is x[o, r, s, t]. A set is the elements of one o and s, which share a mean and a variance. It consists of `reps`
runs, one for each r. A run is `run` contiguous elements. A column is one s and t.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil

from onepass.core.problem import NormProblem
from onepass.core.view import ParamMap

ROW, TILE = "row", "tile"  # the two walks: along the runs of a set, or across sets

AXIS_O, AXIS_R, AXIS_S, AXIS_T = 1, 2, 4, 8  # bits; a mask of them says on which axes a value depends


@dataclass(frozen=True)
class Walk:
    """The sizes and strides of x[o, r, s, t] and y. `total` counts the sets of all o, and `sets` those of one o."""

    total: int
    reps: int
    sets: int
    run: int
    x: tuple[int, int, int]  # strides of o, r, s, in elements
    y: tuple[int, int, int]
    param: ParamMap
    modulation: ParamMap
    folded: int = 0  # in a folded walk, the number of elements of a run: see `fold`

    @property
    def outer(self) -> int:
        return self.total // self.sets

    @property
    def columns(self) -> int:
        return self.sets * self.run

    @property
    def dense(self) -> bool:
        """Whether the columns (s, t) of each o are contiguous in x and y."""
        return self.sets == 1 or self.x[2] == self.y[2] == self.run

    @property
    def in_maps(self) -> tuple[int, int, int]:
        """The sizes of r, s and t as `param` and `modulation` count them: in a folded walk, t counts along the whole run."""
        return (1, self.sets, self.folded) if self.folded else (self.reps, self.sets, self.run)


def walk(problem: NormProblem, cut: bool = False) -> Walk:
    """Return the Walk of a problem.

    With `cut`, each channel of a run becomes a run of its own if that is possible, so that no index needs a division.
    """
    x, y, p, m = problem.x, problem.y, problem.param, problem.modulation
    assert x is not None and y is not None and p is not None and m is not None
    found = Walk(x.outer * x.sets, x.reps, x.sets, x.run, x.strides[:3], y.strides[:3], p, m)
    channel_run = max(p.channel_run, m.channel_run)
    if not cut or channel_run == 1 or x.reps > 1 or x.run % channel_run:
        return found
    x_strides, y_strides = ((v.strides[0], channel_run, v.strides[2]) for v in (x, y))
    params = _cut(p, channel_run), _cut(m, channel_run)
    return Walk(found.total, x.run // channel_run, x.sets, channel_run, x_strides, y_strides, *params)


def fold(w: Walk, width: int, before: int = 0) -> Walk:
    """Return the walk that takes each run as rows of `width` elements, which follow one another. w.reps must be 1.

    The last row may be shorter. Rows may begin up to `before` elements before the run. Folding changes how blocks cover
    memory, not which parameter an element has: the maps stay as they are, and their t is r·width + t of the folded walk.
    """
    assert w.reps == 1, w
    x, y = ((strides[0], width, strides[2]) for strides in (w.x, w.y))
    return replace(w, reps=ceil((w.run + before) / width), run=width, x=x, y=y, folded=w.run)


def by_channel(w: Walk) -> Walk:
    """Return a folded walk whose maps take the number of a channel as t."""
    return replace(w, param=replace(w.param, channel_run=1), modulation=replace(w.modulation, channel_run=1))


def run_by_run(w: Walk) -> Walk:
    """Return the walk whose sets are the runs of w, in the order of memory: r of w is its o. w.outer must be 1.

    Sets with the same s share their statistics, which must be given.
    """
    assert w.outer == 1, w
    x, y = ((strides[1], 0, strides[2]) for strides in (w.x, w.y))
    param, modulation = (replace(p, every=1, period=w.reps, a=p.b, b=0) for p in (w.param, w.modulation))
    return Walk(w.reps * w.sets, 1, w.sets, w.run, x, y, param, modulation)


def _cut(p: ParamMap, run: int) -> ParamMap:
    inner = p.channel_run < run
    return replace(p, b=run // p.channel_run * p.d, d=p.d if inner else 0, channel_run=p.channel_run if inner else 1)


def used_fraction(problem: NormProblem, way: str) -> float:
    """Return which fraction of the bytes read is used, if memory is read by the walk `way` in lines of 128 bytes."""
    assert problem.x is not None
    w = walk(problem)
    line, gaps = 128 // problem.dtype.itemsize, [stride for stride, n in zip(w.x, (w.outer, w.reps, w.sets)) if n > 1]
    if way == ROW:
        contiguous = w.reps > 1 and w.x[1] == w.run  # a set is one stretch of memory
        width, pitch = line if contiguous else w.run, min(gaps, default=w.run) if w.reps == 1 else line
    else:
        width, pitch = w.columns if w.dense else w.run, w.x[1] if w.reps > 1 else line
    return min(width / min(line, max(pitch, 1)), 1.0)


def axis_mask(p: ParamMap, w: Walk) -> int:
    """Return the axes on which a parameter depends, as a mask of AXIS_O to AXIS_T."""
    steps = zip((w.outer, *w.in_maps), (p.a, p.b, p.c, p.d))
    return sum(axis for axis, (extent, step) in zip((AXIS_O, AXIS_R, AXIS_S, AXIS_T), steps) if extent > 1 and step)


def needs_division(problem: NormProblem) -> bool:
    """Return whether runs have over 1024 elements, and each element finds its parameter by a division."""
    p, m = problem.param, problem.modulation
    if problem.x is None or problem.x.run <= 1024:
        return False
    by_param = problem.affine and p is not None and p.channel_run > 1
    return by_param or (bool(problem.scale or problem.shift) and m is not None and m.channel_run > 1)
