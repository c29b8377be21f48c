"""The definition of each norm: a function that returns its NormSpec. `**fields` are further fields of NormSpec.

If `modulated`, the norm has a scale and a shift for each sample and channel.
"""

from __future__ import annotations

from typing import Any

from .spec import NormSpec


def layer_norm(rank: int, eps: float = 1e-5, granularity: str = "element", modulated: bool = False, **fields: Any) -> NormSpec:
    """Return the spec of LayerNorm, with statistics over the last `rank` dimensions.

    `granularity` says what has its own weight and bias: each "element", each "channel" (the first of the `rank` dimensions), or
    "global", all elements together. If `modulated`, the first dimension of x indexes the samples.
    """
    inner = " ".join([f"d{i}" for i in range(rank)])
    params = {"element": inner, "channel": "d0", "global": ""}[granularity]
    outer, per_sample = ("n *t", "n d0") if modulated else ("*n", "")
    return NormSpec(f"{outer} {inner}", reduced=inner, params=params, eps=eps, modulated=per_sample, **fields)


def rms_norm(rank: int, eps: float, modulated: bool = False, **fields: Any) -> NormSpec:
    """Return the spec of RMSNorm, with the mean square over the last `rank` dimensions."""
    return layer_norm(rank, eps, modulated=modulated, centered=False, **fields)


def group_norm(num_groups: int, eps: float = 1e-5, channel_dim: int = 1, modulated: bool = False, **fields: Any) -> NormSpec:
    """Return the spec of GroupNorm: each sample and group has statistics over the group's channels and all positions."""
    axes, per_sample = _with_channels("(g k)", channel_dim), "n g k" if modulated else ""
    return NormSpec(axes, reduced="k *l", params="g k", sizes=(("g", num_groups),), eps=eps, modulated=per_sample, **fields)


def instance_norm(eps: float = 1e-5, channel_dim: int = 1, modulated: bool = False, **fields: Any) -> NormSpec:
    """Return the spec of InstanceNorm: each sample and channel has statistics over all positions."""
    axes, per_sample = _with_channels("c", channel_dim), "n c" if modulated else ""
    return NormSpec(axes, reduced="*l", params="c", eps=eps, modulated=per_sample, **fields)


def batch_norm(eps: float = 1e-5, channel_dim: int = 1, modulated: bool = False, **fields: Any) -> NormSpec:
    """Return the spec of BatchNorm: each channel has statistics over all samples and positions."""
    axes, per_sample = _with_channels("c", channel_dim), "n c" if modulated else ""
    return NormSpec(axes, reduced="n *l", params="c", eps=eps, modulated=per_sample, **fields)


def layer_norm2d(eps: float = 1e-6, modulated: bool = False, **fields: Any) -> NormSpec:
    """Return the spec of LayerNorm2d: each sample and position has statistics over the channels."""
    return NormSpec("n c *l", reduced="c", params="c", eps=eps, modulated="n c" if modulated else "", **fields)


def switchable_norm(
    positions: bool, using_bn: bool = True, eps: float = 1e-5, channel_dim: int = 1, modulated: bool = False, **fields: Any
) -> NormSpec:
    """Return the spec of SwitchableNorm, which mixes the statistics of InstanceNorm, LayerNorm and BatchNorm.

    InstanceNorm takes part only if x has `positions` (dimensions besides samples and channels), BatchNorm only if `using_bn`.
    All three are computed from the statistics of each sample and channel.
    """
    norms = ["-"] * positions + ["c"] + ["n"] * using_bn
    return instance_norm(eps, channel_dim, modulated, mix=", ".join(norms), **fields)


def _with_channels(word: str, channel_dim: int) -> str:
    return f"n {word} *l" if channel_dim == 1 else f"n *l {word}"
