"""What is normalized: a NormSpec names the axes of a tensor, which of them share statistics, and which carry parameters.

Here belong the definitions of the norms and how a shape splits into their axes. Strides and dtypes live in `problem.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple


class Axis(NamedTuple):
    """One factor of one dimension of x."""

    size: int
    dim: int  # the dimension of x it is a factor of
    within: int  # how many elements of that dimension one step spans
    reduced: bool  # shares statistics along this axis
    param: int  # stride into weight and bias, 0 where they do not vary


@dataclass(frozen=True)
class NormSpec:
    """A norm, in words for axes.

    `axes` has one word per dimension of x. `(g k)` splits a dimension into factors, `*l` stands for any number of dimensions.
    `reduced` lists the axes over which mean and variance are taken, `params` the axes that index weight and bias.
    `sizes` gives the factors that the shape of x alone does not determine.

    Example: GroupNorm with 32 groups is `NormSpec("n (g k) *l", reduced="k *l", params="g k", sizes=(("g", 32),))`.
    """

    axes: str
    reduced: str
    params: str
    sizes: tuple[tuple[str, int], ...] = ()
    eps: float = 1e-5
    centered: bool = True

    def __post_init__(self) -> None:
        dims = _dims(self.axes)
        names = [name for dim in dims for name in dim]
        given = [name for name, _ in self.sizes]
        for field in ("reduced", "params"):
            unknown = [word for word in getattr(self, field).split() if word not in names]
            if unknown:
                raise ValueError(f"{field}={getattr(self, field)!r} names {unknown[0]!r}, which is no axis of {self.axes!r}")
        if len([name for name in names if name.startswith("*")]) > 1:
            raise ValueError(f"axes={self.axes!r} has several starred words: at most one can stand for the dimensions that are left")
        for dim in dims:
            open_ = [name for name in dim if name not in given]
            if len(open_) > 1:
                raise ValueError(f"sizes={self.sizes} leaves {open_} of one dimension open: give the size of all but one of them")

    def pack(self) -> tuple[str, list[int], float]:
        """The spec as plain values, numbers apart from words (under compile they may be symbols): how it travels through an op."""
        names = " ".join([name for name, _ in self.sizes])
        words = " | ".join([self.axes, self.reduced, self.params, names, "centered" if self.centered else ""])
        return words, [size for _, size in self.sizes], self.eps

    @staticmethod
    def unpack(words: str, sizes: Sequence[int], eps: float) -> NormSpec:
        axes, reduced, params, names, centered = (word.strip() for word in words.split("|"))
        return NormSpec(axes, reduced, params, tuple(zip(names.split(), sizes)), eps, centered == "centered")

    def __str__(self) -> str:
        sizes = "".join(f", {name}={size}" for name, size in self.sizes)
        moments = "mean and variance" if self.centered else "mean square"
        return f"[{self.axes}]{sizes}: {moments} over {self.reduced}, parameters per {self.params}, eps {self.eps:g}"

    def factor(self, shape: Sequence[int]) -> tuple[Axis, ...]:
        """The axes of a tensor of this shape, in logical order."""
        given = dict(self.sizes)
        dims = _dims(self.axes)
        spread = len(shape) - len([dim for dim in dims if not dim[0].startswith("*")])  # dimensions the starred word stands for
        if spread < 0 or (spread > 0 and "*" not in self.axes):
            raise ValueError(f"shape {list(shape)} has {len(shape)} dimensions, which do not match the axes {self.axes!r}")
        named: list[tuple[str, int, int, int]] = []  # name, size, dim, within
        at = 0
        for dim in dims:
            if dim[0].startswith("*"):
                named += [(dim[0], shape[i], i, 1) for i in range(at, at + spread)]
                at += spread
                continue
            known = prod([given[name] for name in dim if name in given])
            if shape[at] % known:
                raise ValueError(f"dimension {at} of shape {list(shape)} is not divisible by {known}, as {self.axes!r} needs")
            sizes = [given.get(name, shape[at] // known) for name in dim]
            named += [(name, sizes[i], at, prod(sizes[i + 1 :])) for i, name in enumerate(dim)]
            at += 1
        return _with_params(named, self.reduced.split(), self.params.split())

    def kept_shape(self, shape: Sequence[int]) -> list[int]:
        """The shape of the statistics: the axes that are not reduced, in logical order."""
        return [axis.size for axis in self.factor(shape) if not axis.reduced]


def _dims(axes: str) -> list[list[str]]:
    """The names in each dimension: "n (g k) *l" is [[n], [g, k], [*l]]."""
    dims: list[list[str]] = []
    inside = False
    for word in axes.split():
        if inside:
            dims[-1].append(word.strip("()"))
        else:
            dims.append([word.strip("()")])
        inside = (inside or word.startswith("(")) and not word.endswith(")")
    return dims


def _with_params(named: list[tuple[str, int, int, int]], reduced: list[str], params: list[str]) -> tuple[Axis, ...]:
    """Axes with their strides into a parameter that is stored contiguously over `params`, in that order."""
    strides = [0] * len(named)
    step = 1
    for word in reversed(params):
        for i in reversed([i for i, axis in enumerate(named) if axis[0] == word]):
            strides[i] = step
            step = step * named[i][1]
    return tuple([Axis(size, dim, within, name in reduced, p) for (name, size, dim, within), p in zip(named, strides)])


def layer_norm(rank: int, eps: float = 1e-5) -> NormSpec:
    """Over the last `rank` dimensions, a parameter per element."""
    inner = " ".join(f"d{i}" for i in range(rank))
    return NormSpec(f"*n {inner}", reduced=inner, params=inner, eps=eps)


def rms_norm(rank: int, eps: float) -> NormSpec:
    """Over the last `rank` dimensions, without the mean."""
    inner = " ".join(f"d{i}" for i in range(rank))
    return NormSpec(f"*n {inner}", reduced=inner, params=inner, eps=eps, centered=False)


def group_norm(num_groups: int, eps: float = 1e-5) -> NormSpec:
    """Over the channels of a group and all positions of a sample."""
    return NormSpec("n (g k) *l", reduced="k *l", params="g k", sizes=(("g", num_groups),), eps=eps)


def instance_norm(eps: float = 1e-5) -> NormSpec:
    """Over the positions of one channel of a sample."""
    return NormSpec("n c *l", reduced="*l", params="c", eps=eps)


def batch_norm(eps: float = 1e-5) -> NormSpec:
    """Over the batch and all positions of a channel."""
    return NormSpec("n c *l", reduced="n *l", params="c", eps=eps)


def layer_norm2d(eps: float = 1e-6) -> NormSpec:
    """Over the channels at each position."""
    return NormSpec("n c *l", reduced="c", params="c", eps=eps)
