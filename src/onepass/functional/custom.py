"""custom_norm: computes a norm that this library does not define, from a NormSpec."""

from __future__ import annotations

from torch import Tensor

from onepass.check.tensors import require_tensors
from onepass.core.operands import OptionalOperands
from onepass.core.spec import NormSpec
from onepass.dispatch import call


def custom_norm(
    input: Tensor,
    spec: NormSpec,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    scale: Tensor | None = None,
    shift: Tensor | None = None,
    mean_weight: Tensor | None = None,
    var_weight: Tensor | None = None,
) -> Tensor:
    """Normalize `input` as `spec` defines, and return y = act(u·(1 + scale) + shift).

    u = (x - mean)/sqrt(var + eps)·(weight + weight_offset) + bias. `spec` says which elements share one mean and variance,
    and which weight, bias, scale and shift an element uses. `scale` and `shift` need a spec with `modulated` axes.
    `mean_weight` and `var_weight` need a spec with a `mix`. Each has one weight per entry of `mix`, three for "-, c, n",
    and its weights sum to 1. All memory layouts, gradients, compile and export work as for the norms of this library.

    Example: `custom_norm(torch.randn(4, 6, 5), NormSpec("n (g k) *l", reduced="k *l", params="g k", sizes=(("g", 3),)))`
    """
    if not isinstance(spec, NormSpec):
        raise TypeError(f"argument 'spec' must be NormSpec, not {type(spec).__name__}; make one with onepass.NormSpec")
    if scale is None and shift is None and mean_weight is None and var_weight is None:
        return call.normalize(_given_spec, (spec,), input, weight, bias)
    optional = OptionalOperands(scale=scale, shift=shift, mean_weight=mean_weight, var_weight=var_weight)
    return call.normalize_with(_given_spec, (spec,), input, weight, bias, optional=optional, stats=False).y


def _given_spec(x: Tensor, weight: Tensor | None, bias: Tensor | None, spec: NormSpec) -> NormSpec:
    require_tensors(("input", x), ("weight", weight), ("bias", bias))
    return spec
