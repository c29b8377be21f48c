from __future__ import annotations

from typing import Any

from .spec import NormSpec

# The definitions. `clauses` are further fields of NormSpec.


def layer_norm(rank: int, eps: float = 1e-5, granularity: str = "element", modulated: bool = False, **clauses: Any) -> NormSpec:
    """Over the last `rank` dimensions; a parameter per element, per channel (the first of them) or for all.

    Modulated, the first dimension of x is the sample.
    """
    inner = " ".join([f"d{i}" for i in range(rank)])
    params = {"element": inner, "channel": "d0", "global": ""}[granularity]
    outer, per_sample = ("n *t", "n d0") if modulated else ("*n", "")
    return NormSpec(f"{outer} {inner}", reduced=inner, params=params, eps=eps, modulated=per_sample, **clauses)


def rms_norm(rank: int, eps: float, modulated: bool = False, **clauses: Any) -> NormSpec:
    """Over the last `rank` dimensions, without the mean."""
    return layer_norm(rank, eps, modulated=modulated, centered=False, **clauses)


def group_norm(num_groups: int, eps: float = 1e-5, channel_dim: int = 1, modulated: bool = False, **clauses: Any) -> NormSpec:
    """Over the channels of a group and all positions of a sample."""
    axes, per_sample = _with_channels("(g k)", channel_dim), "n g k" if modulated else ""
    return NormSpec(axes, reduced="k *l", params="g k", sizes=(("g", num_groups),), eps=eps, modulated=per_sample, **clauses)


def instance_norm(eps: float = 1e-5, channel_dim: int = 1, modulated: bool = False, **clauses: Any) -> NormSpec:
    """Over the positions of one channel of a sample."""
    axes, per_sample = _with_channels("c", channel_dim), "n c" if modulated else ""
    return NormSpec(axes, reduced="*l", params="c", eps=eps, modulated=per_sample, **clauses)


def batch_norm(eps: float = 1e-5, channel_dim: int = 1, modulated: bool = False, **clauses: Any) -> NormSpec:
    """Over the batch and all positions of a channel."""
    axes, per_sample = _with_channels("c", channel_dim), "n c" if modulated else ""
    return NormSpec(axes, reduced="n *l", params="c", eps=eps, modulated=per_sample, **clauses)


def layer_norm2d(eps: float = 1e-6, modulated: bool = False, **clauses: Any) -> NormSpec:
    """Over the channels at each position."""
    return NormSpec("n c *l", reduced="c", params="c", eps=eps, modulated="n c" if modulated else "", **clauses)


def switchable_norm(
    positions: bool, using_bn: bool = True, eps: float = 1e-5, channel_dim: int = 1, modulated: bool = False, **clauses: Any
) -> NormSpec:
    """A mix of InstanceNorm, if there are positions, LayerNorm, and BatchNorm, from the moments of each channel of a sample."""
    norms = ["-"] * positions + ["c"] + ["n"] * using_bn
    return instance_norm(eps, channel_dim, modulated, mix=", ".join(norms), **clauses)


def _with_channels(word: str, channel_dim: int) -> str:
    return f"n {word} *l" if channel_dim == 1 else f"n *l {word}"
