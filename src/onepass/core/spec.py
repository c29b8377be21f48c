"""NormSpec, a norm in words: the axes of x, which of them are reduced, and which of them index the parameters.

It also splits the shape of a tensor into these axes. norms.py has the spec of each norm, and problem.py adds strides and dtypes.
A *set* is the elements that share one mean and variance.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

ACTIVATIONS = ("silu", "relu", "gelu", "gelu_tanh")


GRANULARITIES = ("element", "channel", "global")


class Axis(NamedTuple):
    """A dimension of x, or a factor of a dimension."""

    name: str
    size: int
    dim: int  # the dimension of x that this axis is part of
    within: int  # one step along this axis is this many steps along `dim`
    reduced: bool  # elements along this axis share statistics
    param: int  # stride of this axis in weight and bias; 0 if they do not vary along it
    modulation: int  # stride of this axis in scale and shift; 0 if they do not vary along it


@dataclass(frozen=True)
class NormSpec:
    """A norm, described by words for the axes of x.

    `axes` has one word per dimension of x. `(g k)` splits a dimension into factors, `*l` stands for any number of dimensions.
    `reduced` lists the axes over which mean and variance are computed; the others are *kept*. `params` lists the axes that index
    weight and bias, and `modulated` the axes that index scale and shift. `sizes` gives the sizes of factors such as g, which the
    shape of x alone does not tell.

    `mix`, if not empty, lists norms whose statistics are averaged with weights. An entry names the kept axes along which the norm
    merges the sets, or is "-" for none. Example: "-, c, n" mixes InstanceNorm, LayerNorm and BatchNorm.

    Example: GroupNorm with 32 groups is `NormSpec("n (g k) *l", reduced="k *l", params="g k", sizes=(("g", 32),))`.
    """

    axes: str
    reduced: str
    params: str
    sizes: tuple[tuple[str, int], ...] = ()
    eps: float = 1e-5
    centered: bool = True
    modulated: str = ""
    mix: str = ""
    weight_offset: float = 0.0  # added to the weight; 1 if the weight is stored as its difference from 1
    activation: str = ""  # applied last
    from_y: bool = False  # the backward gets y instead of x, and computes x_hat from y

    def __post_init__(self) -> None:
        dims = _dims(self.axes)
        names = [name for dim in dims for name in dim]
        given = [name for name, _ in self.sizes]
        for field in ("reduced", "params", "modulated"):
            unknown = [word for word in getattr(self, field).split() if word not in names]
            if unknown:
                raise ValueError(f"{field}={getattr(self, field)!r} names {unknown[0]!r}, which is no axis of {self.axes!r}")
        kept = [name for name in names if name not in self.reduced.split()]
        unkept = [word for word in self.mix.replace(",", " ").split() if word != "-" and word not in kept]
        if unkept:
            raise ValueError(f"mix={self.mix!r} names {unkept[0]!r}, which is none of the kept axes {kept}")
        if self.mix and not self.centered:
            raise ValueError(f"mix={self.mix!r} needs centered=True: sets are merged by their means")
        if self.activation and self.activation not in ACTIVATIONS:
            raise ValueError(f"activation={self.activation!r} is unknown; expected one of {', '.join(ACTIVATIONS)}")
        if self.from_y and (self.activation or self.mix):
            raise ValueError(f"from_y=True has no way back through activation={self.activation!r}, mix={self.mix!r}: expected neither")
        if len([name for name in names if name.startswith("*")]) > 1:
            raise ValueError(f"axes={self.axes!r} has several starred words: at most one can stand for the dimensions that are left")
        for dim in dims:
            open_ = [name for name in dim if name not in given]
            if len(open_) > 1:
                raise ValueError(f"sizes={self.sizes} leaves {open_} of one dimension open: give the size of all but one of them")

    def pack(self) -> tuple[str, list[int], float, float]:
        """Return the spec as arguments of a registered op. Numbers are not in the words: torch.compile may make them symbolic."""
        names = " ".join([name for name, _ in self.sizes])
        flags = "centered" if self.centered else "", "from_y" if self.from_y else ""
        words = " | ".join([self.axes, self.reduced, self.params, names, self.modulated, self.mix, self.activation, *flags])
        return words, [size for _, size in self.sizes], self.eps, self.weight_offset

    @staticmethod
    def packs_from_y(words: str) -> bool:
        """Return whether `from_y` is set in the `words` of a packed spec, without unpacking it."""
        return words.endswith("from_y")

    @staticmethod
    def unpack(words: str, sizes: Sequence[int], eps: float, weight_offset: float) -> NormSpec:
        axes, reduced, params, names, modulated, mix, activation, centered, from_y = [word.strip() for word in words.split("|")]
        given = tuple(zip(names.split(), sizes))
        return NormSpec(axes, reduced, params, given, eps, bool(centered), modulated, mix, weight_offset, activation, bool(from_y))

    def factor(self, shape: Sequence[int]) -> tuple[Axis, ...]:
        """Return the axes of a tensor of this shape, in the order of `axes`."""
        given = dict(self.sizes)
        dims = _dims(self.axes)
        spread = len(shape) - len([dim for dim in dims if not dim[0].startswith("*")])  # how many dimensions the starred word has
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
        reduced, params, modulation = self.reduced.split(), _strides(named, self.params), _strides(named, self.modulated)
        return tuple([Axis(*axis, axis[0] in reduced, p, m) for axis, p, m in zip(named, params, modulation)])

    def kept_shape(self, shape: Sequence[int]) -> list[int]:
        """Return the shape of the statistics: the sizes of the axes that are not reduced, in the order of `axes`."""
        return [axis.size for axis in self.factor(shape) if not axis.reduced]

    def mixed_dims(self, shape: Sequence[int]) -> list[list[int]]:
        """Return the dimensions of the statistics along which each norm of `mix` merges sets: [[], [1], [0]] for "-, c, n"."""
        kept = [axis.name for axis in self.factor(shape) if not axis.reduced]
        return [[i for i, name in enumerate(kept) if name in words.split()] for words in self.mix.split(",")]


def _dims(axes: str) -> list[list[str]]:
    """Return the names of the axes in each dimension. Example: "n (g k) *l" gives [["n"], ["g", "k"], ["*l"]]."""
    dims: list[list[str]] = []
    inside = False
    for word in axes.split():
        if inside:
            dims[-1].append(word.strip("()"))
        else:
            dims.append([word.strip("()")])
        inside = (inside or word.startswith("(")) and not word.endswith(")")
    return dims


def _strides(named: list[tuple[str, int, int, int]], words: str) -> list[int]:
    """Return the stride of each axis in a contiguous tensor whose dimensions are the axes in `words`, in that order.

    Axes that are not in `words` have stride 0. `named` lists the axes as (name, size, dim, within).
    """
    strides = [0] * len(named)
    step = 1
    for word in reversed(words.split()):
        for i in reversed([i for i, axis in enumerate(named) if axis[0] == word]):
            strides[i] = step
            step = step * named[i][1]
    return strides
