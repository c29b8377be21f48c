"""Which function of torch computes a norm, if one does. For graphs in which torch's call takes the place of ours."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from onepass.core import norms
from onepass.core.spec import NormSpec


class TorchCall(NamedTuple):
    function: Callable[..., Tensor]
    arguments: Callable[[Tensor, Mapping[str, Any]], tuple[Any, ...]]  # (x, arguments of our op by name) -> the arguments after x


def torch_call(spec: NormSpec, given: bool = False) -> TorchCall | None:
    """Return torch's call for a norm without its activation, or None if torch has none. With `given`, statistics are operands."""
    plain, eps, sizes = replace(spec, activation="", from_y=False), spec.eps, dict(spec.sizes)
    rank = len(spec.reduced.split())
    if given:
        evaluated = TorchCall(F.batch_norm, lambda x, f: (f["mean"], f["var"], f["weight"], f["bias"], False, 0.0, f["eps"]))
        return evaluated if plain == norms.batch_norm(eps) else None
    if "g" in sizes and plain == norms.group_norm(sizes["g"], eps):
        return TorchCall(F.group_norm, lambda x, f: (f["sizes"][0], f["weight"], f["bias"], f["eps"]))
    if plain == norms.instance_norm(eps):
        return TorchCall(F.instance_norm, lambda x, f: (None, None, f["weight"], f["bias"], True, 0.1, f["eps"]))
    if plain == norms.layer_norm(rank, eps):
        return TorchCall(F.layer_norm, lambda x, f: (tuple(x.shape[-rank:]), f["weight"], f["bias"], f["eps"]))
    if plain == norms.rms_norm(rank, eps):
        return TorchCall(torch.rms_norm, lambda x, f: (tuple(x.shape[-rank:]), f["weight"], f["eps"]))
    return None
