"""The norms that a module may compute, as recipes (`NormRecipe` of swapped_norm.py). `recognize` tries them in order."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import permutations

import torch
from torch import nn

from onepass import nn as onepass_nn
from onepass.patching.swapped_norm import Location, NormRecipe

from .activations import activation_name
from .stand_ins import own_parameters

TORCH_NORMS: dict[type[nn.Module], NormRecipe] = {
    nn.LayerNorm: NormRecipe(onepass_nn.LayerNorm),
    nn.RMSNorm: NormRecipe(onepass_nn.RMSNorm, bias=None, argument="x"),
    nn.GroupNorm: NormRecipe(onepass_nn.GroupNorm),
    **{
        getattr(nn, name): NormRecipe(getattr(onepass_nn, name))
        for name in onepass_nn.__all__
        if name.startswith(("BatchNorm", "InstanceNorm"))
    },
}


USUAL_EPS = (1e-5, 1e-6, 1e-8, 1e-12, torch.finfo(torch.float32).eps)  # values of eps to try after the module's attributes


def candidates(module: nn.Module) -> Iterator[NormRecipe]:
    """Yield a recipe for every norm that fits the base class or the parameters of a module."""
    inner = [name for child in module.children() if (name := activation_name(child))]
    activations = [*inner[:1], None] if inner else [None]
    base = next((base for base in type(module).__mro__ if base in TORCH_NORMS), None)
    if base is not None:
        recipes = [TORCH_NORMS[base]]
        if base in (nn.LayerNorm, nn.RMSNorm):
            recipes += [replace(TORCH_NORMS[base], weight_offset=1.0)] if module.weight is not None else []
        if base is nn.LayerNorm:
            recipes += [NormRecipe(onepass_nn.LayerNorm2d)]
        yield from (replace(recipe, activation=activation) for recipe in recipes for activation in activations)
        return
    params = own_parameters(module)
    names = list(params)
    if len(names) > 2 or any(t is not None for t in module._buffers.values()) or any(t.numel() == 1 for t in params.values()):
        return
    pairs: list[tuple[Location, Location]] = [*permutations(names)] if len(names) == 2 else [(names[0] if names else None, None)]  # pyright: ignore[reportAssignmentType]
    for like in (onepass_nn.RMSNorm, onepass_nn.LayerNorm, onepass_nn.LayerNorm2d):
        for weight, bias in pairs:
            offsets = (0.0, 1.0) if weight is not None and like is not onepass_nn.LayerNorm2d else (0.0,)
            if not (like is onepass_nn.RMSNorm and bias is not None):
                yield from (
                    NormRecipe(like, weight, bias, eps, offset, activation)
                    for offset in offsets
                    for eps in _eps_candidates(module)
                    for activation in activations
                )


def _eps_candidates(module: nn.Module) -> list[Location]:
    """Return names of attributes, and values, that may be the eps of a module, in the order to try them.

    Attributes with a small value come first, beginning with those whose name contains "eps". The usual values follow,
    because a forward may contain eps as a constant.
    """
    small = [name for name, value in module.__dict__.items() if isinstance(value, float) and 0 < value < 0.1]
    small.sort(key=lambda name: "eps" not in name)
    return [*small, *USUAL_EPS]
