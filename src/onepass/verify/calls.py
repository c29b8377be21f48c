"""Runs a case (one call of one norm) with onepass or with torch's operations, and makes its NormSpec."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from onepass import functional
from onepass.core import norms
from onepass.core.spec import NormSpec

from . import torch_norms
from .cases import Case
from .tensors import Operands


class Op(NamedTuple):
    """How to call one norm with onepass and with torch, and how to make its NormSpec."""

    arguments: Callable[[Case, Operands], tuple[Any, ...]]  # the arguments after x: the same for our function and torch's
    torch: Callable[..., Tensor]
    spec: Callable[..., NormSpec]  # (case, **fields) -> NormSpec


OPS = {
    "layer_norm": Op(
        lambda c, t: (t.x.shape[-c.rank :], t.weight, t.bias, c.eps),
        F.layer_norm,
        lambda c, **fields: norms.layer_norm(c.rank, c.eps, c.granularity, c.modulate, weight_offset=c.offset, **fields),
    ),
    "rms_norm": Op(
        lambda c, t: (t.x.shape[-c.rank :], t.weight, c.eps),
        F.rms_norm,
        lambda c, **fields: norms.rms_norm(c.rank, c.eps, c.modulate, weight_offset=c.offset, **fields),
    ),
    "group_norm": Op(
        lambda c, t: (c.groups, t.weight, t.bias, c.eps),
        torch_norms.group_norm,
        lambda c, **fields: norms.group_norm(c.groups, c.eps, -1 if c.last else 1, c.modulate, **fields),
    ),
    "instance_norm": Op(
        lambda c, t: (t.running_mean, t.running_var, t.weight, t.bias, not c.evaluate, c.momentum, c.eps),
        F.instance_norm,
        lambda c, **fields: (norms.batch_norm if c.evaluate else norms.instance_norm)(c.eps, -1 if c.last else 1, c.modulate, **fields),
    ),
    "batch_norm": Op(
        lambda c, t: (t.running_mean, t.running_var, t.weight, t.bias, not c.evaluate, c.momentum, c.eps),
        F.batch_norm,
        lambda c, **fields: norms.batch_norm(c.eps, -1 if c.last else 1, c.modulate, **fields),
    ),
    "layer_norm2d": Op(
        lambda c, t: (t.weight, t.bias, c.eps),
        torch_norms.layer_norm2d,
        lambda c, **fields: norms.layer_norm2d(c.eps, c.modulate, **fields),
    ),
    "switchable_norm": Op(
        lambda c, t: (
            *(t.mean_weight, t.var_weight, t.running_mean, t.running_var, t.weight, t.bias),
            *(not c.evaluate, c.momentum, c.eps, c.using_bn),
        ),
        torch_norms.switchable_norm,
        lambda c, **fields: norms.switchable_norm(len(c.shape) > 2, c.using_bn, c.eps, -1 if c.last else 1, c.modulate, **fields),
    ),
}

Output = Tensor | tuple[Tensor, Tensor]  # y, or (y, x + residual) if the case has a residual


def onepass_call(case: Case, t: Operands) -> Callable[[], Output]:
    """Return a call without arguments that runs the case with onepass."""
    keywords: dict[str, Any] = {}
    if case.modulate:
        keywords["modulate"] = t.scale, t.shift
    if case.activation:
        keywords["activation"] = case.activation
    if case.offset:
        keywords["weight_offset"] = case.offset
    if case.granularity != "element":
        keywords["granularity"] = case.granularity
    if case.last:
        keywords["channel_dim"] = -1
    if case.save != "x":
        keywords["save"] = case.save
    arguments = OPS[case.op].arguments(case, t)
    if t.residual is not None:
        return partial(getattr(functional, f"add_{case.op}"), t.x, t.residual, *arguments, **keywords)
    return partial(getattr(functional, case.op), t.x, *arguments, **keywords)


def by_onepass(case: Case, t: Operands) -> Output:
    return onepass_call(case, t)()


def by_torch(case: Case, t: Operands) -> Output:
    """Run a case with separate operations of torch: add the residual, normalize, modulate, apply the activation."""
    total = t.x if t.residual is None else t.x + t.residual
    # torch's kernels lose digits on channels-last memory, so give them contiguous memory.
    x = total.movedim(-1, 1).clone(memory_format=torch.contiguous_format) if case.last else total
    weight, bias = (None if p is None else torch_norms.per_element(p, case.granularity, x.shape[-case.rank :]) for p in (t.weight, t.bias))
    weight = weight if weight is None or not case.offset else weight + case.offset
    u = OPS[case.op].torch(x, *OPS[case.op].arguments(case, t._replace(x=x, weight=weight, bias=bias)))
    y = torch_norms.modulate_and_activate(u, t.scale, t.shift, 1 if case.last else case.channel_dim, case.activation)
    y = y.movedim(1, -1) if case.last else y
    return y if t.residual is None else (y, total)


def spec_of(case: Case) -> NormSpec:
    return OPS[case.op].spec(case, activation=case.activation, from_y=case.save == "y")
