"""The definitions of the norms, each as a NormSpec. All of them take further fields of NormSpec as keywords."""

from __future__ import annotations

from typing import Any

from .spec import NormSpec


def layer_norm(rank: int, eps: float = 1e-5, granularity: str = "element", modulated: bool = False, **fields: Any) -> NormSpec:
    """Over the last `rank` dimensions.

    `granularity` says what a parameter belongs to: an element, a channel (the first of these dimensions), or all of them. If `modulated`,
    the first dimension of x is the sample.
    """
    inner = " ".join([f"d{i}" for i in range(rank)])
    params = {"element": inner, "channel": "d0", "global": ""}[granularity]
    outer, per_sample = ("n *t", "n d0") if modulated else ("*n", "")
    return NormSpec(f"{outer} {inner}", reduced=inner, params=params, eps=eps, modulated=per_sample, **fields)


def rms_norm(rank: int, eps: float, modulated: bool = False, **fields: Any) -> NormSpec:
    """Over the last `rank` dimensions, without the mean."""
    return layer_norm(rank, eps, modulated=modulated, centered=False, **fields)


def group_norm(num_groups: int, eps: float = 1e-5, channel_dim: int = 1, modulated: bool = False, **fields: Any) -> NormSpec:
    """Over the channels of a group and all positions of a sample."""
    axes, per_sample = _with_channels("(g k)", channel_dim), "n g k" if modulated else ""
    return NormSpec(axes, reduced="k *l", params="g k", sizes=(("g", num_groups),), eps=eps, modulated=per_sample, **fields)


def instance_norm(eps: float = 1e-5, channel_dim: int = 1, modulated: bool = False, **fields: Any) -> NormSpec:
    """Over the positions of one channel of a sample."""
    axes, per_sample = _with_channels("c", channel_dim), "n c" if modulated else ""
    return NormSpec(axes, reduced="*l", params="c", eps=eps, modulated=per_sample, **fields)


def batch_norm(eps: float = 1e-5, channel_dim: int = 1, modulated: bool = False, **fields: Any) -> NormSpec:
    """Over the batch and all positions of a channel."""
    axes, per_sample = _with_channels("c", channel_dim), "n c" if modulated else ""
    return NormSpec(axes, reduced="n *l", params="c", eps=eps, modulated=per_sample, **fields)


def layer_norm2d(eps: float = 1e-6, modulated: bool = False, **fields: Any) -> NormSpec:
    """Over the channels at each position."""
    return NormSpec("n c *l", reduced="c", params="c", eps=eps, modulated="n c" if modulated else "", **fields)


def switchable_norm(
    positions: bool, using_bn: bool = True, eps: float = 1e-5, channel_dim: int = 1, modulated: bool = False, **fields: Any
) -> NormSpec:
    """A mix of InstanceNorm (if there are `positions`), LayerNorm and BatchNorm, from the moments of each channel of a sample."""
    norms = ["-"] * positions + ["c"] + ["n"] * using_bn
    return instance_norm(eps, channel_dim, modulated, mix=", ".join(norms), **fields)


def _with_channels(word: str, channel_dim: int) -> str:
    return f"n {word} *l" if channel_dim == 1 else f"n *l {word}"
