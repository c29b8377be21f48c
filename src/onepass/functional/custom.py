"""A norm that this library does not define, from its spec."""

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
    """y = act((x - mean)/sqrt(var + eps)·(weight + offset) + bias), with sets and parameters as `spec` describes them.

    `scale` and `shift` are the modulation of a spec with `modulated` axes: u·(1 + scale) + shift. `mean_weight` and `var_weight` are the
    weights of a spec with a `mix`. All memory layouts, gradients, compile and export work as for the norms of this library.

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
