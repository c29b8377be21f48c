"""Find the norm that a module computes: by class for norms of torch.nn, by trials for all other modules.

A module is tried if its class is registered, if the name of its class contains "norm", or if it has one or two 1-D
parameters of the same size. Its forward must take one tensor. `trials` compares the module with each norm that it may
compute (`candidates`), on random input. The first norm that agrees becomes its recipe (`NormRecipe` of swapped_norm.py).
A module stays as it is if no norm agrees, or if its forward branches on what trials cannot vary, such as the device.
"""

from __future__ import annotations

import inspect
from dataclasses import replace
from functools import cache
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.parameter import is_lazy

from onepass import nn as onepass_nn
from onepass.patching.analysis.analyze import analyze_forward
from onepass.patching.analysis.values import Analysis, NotAnalyzable
from onepass.patching.guards import all_match, has_hooks, snapshot
from onepass.patching.swapped_norm import NormRecipe

from .candidates import TORCH_NORMS, candidates
from .stand_ins import own_parameters, plain_attributes, trial_key
from .trials import TOLERANCE, StateChanged, compare_in_all_cases, largest_difference, with_dtype_rules

UNSUPPORTED = {
    nn.SyncBatchNorm: "onepass does not support statistics across processes yet",
    nn.LocalResponseNorm: "it divides by its neighbours, not by a deviation: onepass has no such norm",
    nn.CrossMapLRN2d: "it divides by its neighbours, not by a deviation: onepass has no such norm",
}


_registered: dict[type[nn.Module], NormRecipe] = {}


# A cache. Maps `trial_key` of a module (stand_ins.py) to the result of `_find_recipe`, and to the values that forward reads.
_results: dict[Any, tuple[NormRecipe | str, dict[str, Any]]] = {}


def register(cls: type[nn.Module], like: type[nn.Module], **where: Any) -> None:
    """Tell `onepass.patch` that modules of class `cls` compute what `like`, a class of onepass.nn, computes.

    `weight`, `bias` and `eps` say where a module keeps these values, if not in attributes of the same names. Each is the
    name of an attribute, a function of the module, or the value itself (`bias=None`: there is no bias). `weight_offset`
    and `activation` mean the same as in onepass.nn. `result` is the dtype of the output if x and weight have different
    dtypes: that of "x" (the default), that of "weight", or the "promoted" one. `onepass.patch` still compares every module
    with `like` on random input before it replaces the module.

    Example: `onepass.register(MyNorm, onepass.nn.RMSNorm, weight="gain", eps=1e-6)`
    """
    if not (isinstance(cls, type) and issubclass(cls, nn.Module)):
        raise TypeError(f"cls={cls!r} is not a module class; expected a subclass of torch.nn.Module, not an instance: pass type(module)")
    if like not in {recipe.like for recipe in TORCH_NORMS.values()} | {onepass_nn.LayerNorm2d}:
        names = ", ".join(sorted({recipe.like.__name__ for recipe in TORCH_NORMS.values()} | {"LayerNorm2d"}))
        raise ValueError(f"like={like!r} is not a norm that can replace a module; expected one of onepass.nn's {names}")
    unknown = where.keys() - {"weight", "bias", "eps", "weight_offset", "activation", "result"}
    if unknown:
        raise TypeError(f"register() got {sorted(unknown)[0]!r}; expected weight, bias, eps, weight_offset, activation or result")
    if where.get("result", "x") not in ("x", "weight", "promoted"):
        raise ValueError(f'result={where["result"]!r} is unknown; expected "x", "weight" or "promoted"')
    defaults = {"bias": None} if like is onepass_nn.RMSNorm else {}
    _registered[cls] = NormRecipe(like, **{"result": "x", **defaults, **where}, argument=_input_name(cls) or "input")
    _results.clear()


def recognize(module: nn.Module) -> NormRecipe | str | None:
    """Return the recipe for a norm, or the reason (a string) why there is none; None if the module does not look like a norm."""
    cls = type(module)
    registered = next((_registered[base] for base in cls.__mro__ if base in _registered), None)
    is_named_norm = "norm" in cls.__name__.lower() and not cls.__module__.startswith("torch.")
    is_known_norm = isinstance(module, (*TORCH_NORMS, *UNSUPPORTED, nn.modules.batchnorm._NormBase))
    is_norm = registered is not None or is_known_norm or is_named_norm
    obstacle = _obstacle(module)
    if obstacle:
        return obstacle if is_norm else None
    if registered is None and cls in TORCH_NORMS:
        return TORCH_NORMS[cls]
    children = [child for child in module.children() if not isinstance(child, nn.Identity)]
    with_parameters = [name for name, child in module.named_children() if any(True for _ in child.parameters())]
    if with_parameters:
        if not is_norm or any(recognize(child) is not None for _, child in module.named_modules() if child is not module):
            return None
        name = with_parameters[0]
        return f"it does more than normalize: it has a {type(getattr(module, name)).__name__}, {name!r}"
    if not is_norm and (children or not _are_norm_parameters(own_parameters(module)) or cls.__module__.startswith("torch.")):
        return None
    key = trial_key(module)
    if key not in _results or not all_match(module, _results[key][1]):
        analysis = Analysis()
        _results[key] = _find_recipe(module, registered, analysis), analysis.guarded
    result, _ = _results[key]
    return result if is_norm or isinstance(result, NormRecipe) else None


def _obstacle(module: nn.Module) -> str:
    """Return the reason why the class of a module must not change; "" if it may change."""
    for cls, reason in UNSUPPORTED.items():
        if isinstance(module, cls):
            return reason
    if isinstance(module, LazyModuleMixin) or any(is_lazy(p) for p in own_parameters(module).values()):
        return "it is lazy: run the model once, then patch it"
    if "forward" in module.__dict__:
        return "its forward was replaced on the instance"
    if hasattr(module, "parametrizations"):
        return "it is parametrized, and remove_parametrizations expects the class to stay the same"
    if any(has_hooks(child) for child in module.children()):
        return "a module inside it has hooks"
    if "__slots__" in type(module).__dict__:
        return "its class has __slots__, so its class cannot change"
    return ""


def _are_norm_parameters(params: dict[str, Tensor]) -> bool:
    """Return whether parameters look like those of a norm: one or two 1-D tensors of the same size."""
    return 1 <= len(params) <= 2 and all(p.dim() == 1 for p in params.values()) and len({p.shape for p in params.values()}) == 1


def _find_recipe(module: nn.Module, registered: NormRecipe | None, analysis: Analysis) -> NormRecipe | str:
    """Return the recipe of the first norm that agrees with a module, or the reason why there is none. Fills `analysis`."""
    cls, nearest = type(module), (float("inf"), "")
    argument = _input_name(cls)
    if argument is None:
        return "its forward does not take exactly one tensor, or has a parameter named activation or residual"
    if getattr(module, "_fast_norm", False):
        return "it is timm's fast norm, which computes in half precision under autocast"
    for recipe in [registered] if registered else candidates(module):
        recipe = replace(recipe, argument=argument)
        try:
            difference = largest_difference(module, recipe)
        except StateChanged as change:
            return f"it keeps state between calls: {change}"
        if difference <= TOLERANCE:
            return _confirm_registered(module, recipe) if registered else _confirm(module, recipe, analysis)
        nearest = min(nearest, (difference, recipe.like.__name__), key=lambda pair: pair[0])
    if nearest[0] == float("inf"):
        return "onepass has no norm with such parameters, or with such an input"
    return f"no norm of onepass computes the same: the nearest, {nearest[1]}, differs by up to {nearest[0]:.2g} of its largest value"


def _confirm_registered(module: nn.Module, recipe: NormRecipe) -> NormRecipe | str:
    """Compare a module of a registered class with its recipe in all cases.

    Return the completed recipe, or the reason why the recipe is wrong. The source is not analyzed, because the user
    vouches for the class.
    """
    verdict = compare_in_all_cases(module, recipe, None)
    return verdict.why or replace(
        recipe, child_classes=_child_classes(module), unsupported_ranks=verdict.ranks, unsupported_dtypes=verdict.dtypes
    )


def _confirm(module: nn.Module, recipe: NormRecipe, analysis: Analysis) -> NormRecipe | str:
    """Analyze the forward of a module that agrees with `recipe` in float32, and compare the two in all other cases.

    Return the completed recipe, which says what each call has to check, or the reason why the recipe is wrong.
    """
    try:
        analyze_forward(module, analysis)
    except NotAnalyzable as reason:
        return f"{reason}: if it always computes {recipe.like.__name__}, register its class"
    except Exception as error:  # source that the analysis does not foresee
        return f"its forward cannot be analyzed: {type(error).__name__}: {error}"
    typed = with_dtype_rules(module, recipe)
    if isinstance(typed, str):
        return typed
    verdict = compare_in_all_cases(module, typed, analysis)
    if verdict.why:
        return verdict.why
    for name, child in module.named_children():
        analysis.guarded |= {f"self.{name}.{key}": snapshot(value) for key, value in plain_attributes(child) if key != "inplace"}
    read_by_recipe = (*_attributes_read_by_ours(module), recipe.weight, recipe.bias, recipe.eps)
    unguarded = {f"self.{name}" for name in read_by_recipe if name not in analysis.attributes_in_conditions}
    guarded = tuple((path, value) for path, value in analysis.guarded.items() if path not in unguarded)
    return replace(
        typed,
        guarded=guarded,
        child_classes=_child_classes(module),
        unsupported_ranks=verdict.ranks,
        unsupported_dtypes=verdict.dtypes,
    )


def _attributes_read_by_ours(module: nn.Module) -> tuple[str, ...]:
    """Return the attributes that onepass reads anew in each call. They need no guard, because changes of them take effect."""
    return ("eps", "momentum", "num_groups", "normalized_shape", "weight", "bias") if isinstance(module, tuple(TORCH_NORMS)) else ()


def _child_classes(module: nn.Module) -> tuple[tuple[str, type], ...]:
    return tuple((name, type(child)) for name, child in module.named_children())


@cache
def _input_name(cls: type[nn.Module]) -> str | None:
    """Return the name of the input in the signature of forward, such as "x".

    Return None if forward needs more arguments, or if a parameter is named `activation` or `residual`.
    """
    try:
        _, *params = inspect.signature(cls.forward).parameters.values()
    except (ValueError, TypeError):
        return None
    named = [p for p in params if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    is_enough = named and not any(p.default is p.empty for p in named[1:]) and not {"activation", "residual"} & {p.name for p in params}
    return named[0].name if is_enough else None
