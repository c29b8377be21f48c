"""A problem as a kernel walks it, and how well a walk uses memory."""

from __future__ import annotations

from dataclasses import dataclass, replace

from onepass.core.problem import NormProblem
from onepass.core.view import ParamMap

ROW, TILE = "row", "tile"  # the two ways to walk: along the runs of a set, or across sets

AXIS_O, AXIS_R, AXIS_S, AXIS_T = 1, 2, 4, 8  # bits that say on which axes of a view something depends


@dataclass(frozen=True)
class Walk:
    """`total` sets, each of `reps` runs of `run` elements: x[o, r, s, t] with s below `sets`, and t contiguous."""

    total: int
    reps: int
    sets: int
    run: int
    x: tuple[int, int, int]  # strides of o, r, s, in elements
    y: tuple[int, int, int]
    param: ParamMap
    modulation: ParamMap

    @property
    def outer(self) -> int:
        return self.total // self.sets

    @property
    def columns(self) -> int:
        return self.sets * self.run

    @property
    def dense(self) -> bool:
        """Whether columns are contiguous in x and y."""
        return self.sets == 1 or self.x[2] == self.y[2] == self.run


def walk(problem: NormProblem, cut: bool = False) -> Walk:
    """The walk of a problem. With `cut`, each channel of a run becomes a run, so that no index needs a division."""
    x, y, p, m = problem.x, problem.y, problem.param, problem.modulation
    assert x is not None and y is not None and p is not None and m is not None
    found = Walk(x.outer * x.sets, x.reps, x.sets, x.run, x.strides[:3], y.strides[:3], p, m)
    channel_run = max(p.channel_run, m.channel_run)
    if not cut or channel_run == 1 or x.reps > 1 or x.run % channel_run:
        return found
    x_strides, y_strides = ((v.strides[0], channel_run, v.strides[2]) for v in (x, y))
    params = _cut(p, channel_run), _cut(m, channel_run)
    return Walk(found.total, x.run // channel_run, x.sets, channel_run, x_strides, y_strides, *params)


def _cut(p: ParamMap, run: int) -> ParamMap:
    inner = p.channel_run < run
    return replace(p, b=run // p.channel_run * p.d, d=p.d if inner else 0, channel_run=p.channel_run if inner else 1)


def used_fraction(problem: NormProblem, way: str) -> float:
    """The fraction of the bytes it reads that a walk uses. Memory is read in lines of 128 bytes."""
    assert problem.x is not None
    w = walk(problem)
    line, gaps = 128 // problem.dtype.itemsize, [stride for stride, n in zip(w.x, (w.outer, w.reps, w.sets)) if n > 1]
    if way == ROW:
        width, pitch = w.run, min(gaps, default=w.run) if w.reps == 1 else line
    else:
        width, pitch = w.columns if w.dense else w.run, w.x[1] if w.reps > 1 else line
    return min(width / min(line, max(pitch, 1)), 1.0)


def axis_mask(p: ParamMap, w: Walk) -> int:
    """The axes on which a parameter depends."""
    steps = zip((w.outer, w.reps, w.sets, w.run), (p.a, p.b, p.c, p.d))
    return sum(axis for axis, (extent, step) in zip((AXIS_O, AXIS_R, AXIS_S, AXIS_T), steps) if extent > 1 and step)


def needs_division(problem: NormProblem) -> bool:
    """Whether each element of a long row must find its parameter by a division."""
    p, m = problem.param, problem.modulation
    if problem.x is None or problem.x.run <= 1024:
        return False
    by_param = problem.affine and p is not None and p.channel_run > 1
    return by_param or (bool(problem.scale or problem.shift) and m is not None and m.channel_run > 1)
