"""Which of our norms a module is: by its class where that is torch.nn's or registered, else by structure and a trial.

A module nobody here has heard of is a candidate if it has one or two parameters, one-dimensional and of one size, and its forward takes
one tensor. Each norm it could be is held against it on random input (`trials`); the first that agrees is its recipe, and a module with
which none agrees is left alone. So is one whose code decides by what no trial can vary (`reading`).
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from itertools import permutations, product
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.parameter import is_lazy

from onepass import nn as ours

from .listening import Listener
from .norms import ACTIVATIONS, COMPILED_TOO, Norm, Source
from .reading import read, read_function
from .state import hooks_of, is_plain, snapshot, unchanged
from .trials import DTYPES, OFF, apart, differs, kind_of, off, own, plain_attributes, stand_in, with_dtypes
from .values import Reading, Untriable

TORCH: dict[type[nn.Module], Norm] = {
    nn.LayerNorm: Norm(ours.LayerNorm),
    nn.RMSNorm: Norm(ours.RMSNorm, bias=None, argument="x"),
    nn.GroupNorm: Norm(ours.GroupNorm),
    **{getattr(nn, name): Norm(getattr(ours, name)) for name in ours.__all__ if name.startswith(("BatchNorm", "InstanceNorm"))},
}


OTHER = {
    nn.SyncBatchNorm: "statistics across processes are not built yet",
    nn.LocalResponseNorm: "divides by its neighbours, not by a deviation: onepass has no such norm",
    nn.CrossMapLRN2d: "divides by its neighbours, not by a deviation: onepass has no such norm",
}


EPS = (1e-5, 1e-6, 1e-8, 1e-12, torch.finfo(torch.float32).eps)  # tried where no attribute is the eps


_registered: dict[type[nn.Module], Norm] = {}


_found: dict[Any, tuple[Norm | str, dict[str, Any]]] = {}  # and what was read to know it


def register(cls: type[nn.Module], like: type[nn.Module], **where: Any) -> None:
    """Tell `onepass.patch` that modules of class `cls` compute what `like`, a class of onepass.nn, computes.

    `weight`, `bias` and `eps` say where such a module has them, if not under these names: the name of an attribute, a function of the
    module, or the value itself (`bias=None`: it has none). `weight_offset` and `activation` are what they are in onepass; `result` is the
    dtype of the output where weight has another than x: that of "x", of "weight", or "promoted". Every module is still held against its
    own class on random input before it is replaced.

    Example: `onepass.register(MyNorm, onepass.nn.RMSNorm, weight="gain", eps=1e-6)`
    """
    if not (isinstance(cls, type) and issubclass(cls, nn.Module)):
        raise TypeError(f"cls={cls!r} is no class of modules; expected a subclass of torch.nn.Module, not an instance: pass type(module)")
    if like not in {recipe.like for recipe in TORCH.values()} | {ours.LayerNorm2d}:
        names = ", ".join(sorted({recipe.like.__name__ for recipe in TORCH.values()} | {"LayerNorm2d"}))
        raise ValueError(f"like={like!r} is none of the norms a module can become; expected one of onepass.nn's {names}")
    unknown = where.keys() - {"weight", "bias", "eps", "weight_offset", "activation", "result"}
    if unknown:
        raise TypeError(f"register() got {sorted(unknown)[0]!r}; expected weight, bias, eps, weight_offset, activation or result")
    if where.get("result", "x") not in ("x", "weight", "promoted"):
        raise ValueError(f'result={where["result"]!r} is unknown; expected "x", "weight" or "promoted"')
    defaults = {"bias": None} if like is ours.RMSNorm else {}
    _registered[cls] = Norm(like, **{"result": "x", **defaults, **where}, argument=_argument(cls) or "input")
    _found.clear()


def recognize(module: nn.Module) -> Norm | str | None:
    """The recipe of a norm, why it has none, or None where there is no reason to take the module for a norm at all."""
    cls = type(module)
    registered = next((_registered[base] for base in cls.__mro__ if base in _registered), None)
    named = "norm" in cls.__name__.lower() and not cls.__module__.startswith("torch.")
    looks = registered is not None or isinstance(module, (*TORCH, *OTHER, nn.modules.batchnorm._NormBase)) or named
    obstacle = _obstacle(module)
    if obstacle:
        return obstacle if looks else None
    if registered is None and cls in TORCH:
        return TORCH[cls]
    children = [child for child in module.children() if not isinstance(child, nn.Identity)]
    inside = [name for name, child in module.named_children() if any(True for _ in child.parameters())]
    if inside:
        whole = looks and not any(recognize(child) is not None for _, child in module.named_modules() if child is not module)
        return f"does more than normalize: it has a {type(getattr(module, inside[0])).__name__}, {inside[0]!r}" if whole else None
    if not looks and (children or not _like_a_norms(own(module)) or cls.__module__.startswith("torch.")):
        return None
    key = kind_of(module)
    if key not in _found or not unchanged(module, _found[key][1]):
        reading = Reading()
        _found[key] = _trial(module, registered, reading), reading.held
    found, _ = _found[key]
    return found if looks or isinstance(found, Norm) else None


def _obstacle(module: nn.Module) -> str:
    """What forbids to change the class of a module."""
    for cls, reason in OTHER.items():
        if isinstance(module, cls):
            return reason
    if isinstance(module, LazyModuleMixin) or any(is_lazy(p) for p in own(module).values()):
        return "is lazy: run the model once, then patch it"
    if "forward" in module.__dict__:
        return "its forward was replaced on the instance"
    if hasattr(module, "parametrizations"):
        return "is parametrized: remove_parametrizations finds the class it left, and no other"
    if any(hooks_of(child) for child in module.children()):
        return "a module inside it has hooks"
    if "__slots__" in type(module).__dict__:
        return "its class has __slots__, so that it cannot be exchanged"
    return ""


def _like_a_norms(params: dict[str, Tensor]) -> bool:
    """A weight, or weight and bias, with an element for each channel."""
    return 1 <= len(params) <= 2 and all(p.dim() == 1 for p in params.values()) and len({p.shape for p in params.values()}) == 1


def _trial(module: nn.Module, registered: Norm | None, reading: Reading) -> Norm | str:
    cls, nearest = type(module), (float("inf"), "")
    argument = _argument(cls)
    if argument is None:
        return "its forward does not take one tensor alone, or calls something else activation or residual"
    if getattr(module, "_fast_norm", False):
        return "timm's fast norm: under autocast it computes in half precision"
    for recipe in [registered] if registered else _candidates(module):
        recipe = replace(recipe, argument=argument)
        distance = off(module, recipe)
        if distance <= OFF:
            return _registered_as(module, recipe) if registered else _tried(module, recipe, reading)
        nearest = min(nearest, (distance, recipe.like.__name__), key=lambda pair: pair[0])
    if nearest[0] == float("inf"):
        return "its parameters, or its input, are none of a norm that onepass has"
    return f"no norm of onepass agrees with it: the nearest, {nearest[1]}, is off by {nearest[0]:.2g}"


def _registered_as(module: nn.Module, recipe: Norm) -> Norm | str:
    """What cannot be tried is as its user says."""
    verdict = differs(module, recipe, None)
    return verdict.why or replace(recipe, children=_children(module), not_ranks=verdict.ranks, not_dtypes=verdict.dtypes)


def _tried(module: nn.Module, recipe: Norm, reading: Reading) -> Norm | str:
    """A recipe that agrees in float32, if it agrees in all else; with what has to stay as it is."""
    try:
        read(module, reading)
    except Untriable as reason:
        return f"{reason}: register its class if it is {recipe.like.__name__} all the same"
    except Exception as error:  # code that nobody has thought of
        return f"its forward cannot be read: {type(error).__name__}: {error}"
    if reading.asks_compiling and recipe.like in COMPILED_TOO:
        return "its forward asks whether it is compiled"
    typed = with_dtypes(module, recipe)
    if isinstance(typed, str):
        return typed
    verdict = differs(module, typed, reading)
    if verdict.why:
        return verdict.why
    for name, child in module.named_children():
        reading.held |= {f"self.{name}.{key}": snapshot(value) for key, value in plain_attributes(child) if key != "inplace"}
    looked_up = {f"self.{name}" for name in (*_looked_up(module), recipe.weight, recipe.bias, recipe.eps) if name not in reading.tested}
    held = tuple((path, value) for path, value in reading.held.items() if path not in looked_up)
    return replace(typed, held=held, children=_children(module), not_ranks=verdict.ranks, not_dtypes=verdict.dtypes)


def _looked_up(module: nn.Module) -> tuple[str, ...]:
    """Attributes that a norm of ours finds in the module, in each call, as torch's does."""
    return ("eps", "momentum", "num_groups", "normalized_shape", "weight", "bias") if isinstance(module, tuple(TORCH)) else ()


def _children(module: nn.Module) -> tuple[tuple[str, type], ...]:
    return tuple((name, type(child)) for name, child in module.named_children())


@cache
def _argument(cls: type[nn.Module]) -> str | None:
    """What the forward calls its input, if that is all it needs."""
    try:
        _, *params = inspect.signature(cls.forward).parameters.values()
    except (ValueError, TypeError):
        return None
    named = [p for p in params if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    alone = named and not any(p.default is p.empty for p in named[1:]) and not {"activation", "residual"} & {p.name for p in params}
    return named[0].name if alone else None


def _candidates(module: nn.Module) -> Iterator[Norm]:
    """What a module could be, by its base class or its parameters."""
    inner = [activation for child in module.children() if (activation := activation_of(child))]
    activations = [*inner[:1], None] if inner else [None]
    base = next((base for base in type(module).__mro__ if base in TORCH), None)
    if base is not None:
        likes = [TORCH[base]]
        if base in (nn.LayerNorm, nn.RMSNorm):
            likes += [replace(TORCH[base], weight_offset=1.0)] if module.weight is not None else []
        if base is nn.LayerNorm:
            likes += [Norm(ours.LayerNorm2d)]
        yield from (replace(like, activation=activation) for like in likes for activation in activations)
        return
    names = list(own(module))
    if len(names) > 2 or any(t is not None for t in module._buffers.values()) or any(t.numel() == 1 for t in own(module).values()):
        return
    pairs: list[tuple[Source, Source]] = [*permutations(names)] if len(names) == 2 else [(names[0] if names else None, None)]  # pyright: ignore[reportAssignmentType]
    for like in (ours.RMSNorm, ours.LayerNorm, ours.LayerNorm2d):
        for weight, bias in pairs:
            offsets = (0.0, 1.0) if weight is not None and like is not ours.LayerNorm2d else (0.0,)
            if not (like is ours.RMSNorm and bias is not None):
                yield from (
                    Norm(like, weight, bias, eps, offset, activation)
                    for offset in offsets
                    for eps in _eps(module)
                    for activation in activations
                )


def _eps(module: nn.Module) -> list[Source]:
    """Attributes that may be eps, by name, then by size; then the usual values, which may stand in the code."""
    small = [name for name, value in module.__dict__.items() if isinstance(value, float) and 0 < value < 0.1]
    small.sort(key=lambda name: "eps" not in name)
    return [*small, *EPS]


_acting: dict[Any, str | None] = {}


def activation_of(act: Any) -> str | None:
    """The name of an activation, a module or a function of one tensor, if a norm can apply it: by a trial, whatever it is called."""
    if isinstance(act, nn.Module) and (
        any(True for _ in act.parameters()) or any(True for _ in act.children()) or "forward" in act.__dict__
    ):
        return None
    key = kind_of(act) if isinstance(act, nn.Module) else act
    if key not in _acting:
        try:
            reading = read(act, Reading()) if isinstance(act, nn.Module) else read_function(act)
            changeable = [path for path, value in reading.held.items() if is_plain(value) and path != "self.inplace"]
            agree = [] if changeable else [name for name in ACTIVATIONS if _acts_as(act, name, reading)]
        except Exception:  # whatever it is, it is called as it was
            agree = []
        _acting[key] = agree[0] if agree else None
    return _acting[key]


def _acts_as(act: Any, name: str, reading: Reading) -> bool:
    """Whether an activation is one of ours for all dtypes, ranks and sizes, in training and evaluation, with gradients and without."""
    listener, function = Listener(reading), ACTIVATIONS[name]
    far = torch.tensor([-1e6, -1e3, -100, 100, 1e3, 1e6], dtype=torch.float32)
    line = torch.cat([torch.linspace(-20, 20, 4001, dtype=torch.float32), far])
    with apart():
        for x, dtype, needs, training in product((line, line[:24].view(2, 3, 4), line[:1], line[:0]), DTYPES, (True, False), (True, False)):
            call, twin = listener.heard(act), None
            if isinstance(act, nn.Module):
                twin = stand_in(act, type(act))
                call, twin.training = types.MethodType(listener.heard(type(act).forward), twin), training
            kind = None if twin is None else kind_of(twin)
            bounds = {torch.float16: 4e-3, torch.bfloat16: 3e-2}.get(dtype, 1e-6)
            given = [x.to(dtype).requires_grad_(needs) for _ in range(2)]
            with torch.set_grad_enabled(needs):
                found, expected = call(given[0] * 1), function(given[1])
            pairs = [(found, expected)]
            if needs and x.numel():
                pairs += zip(torch.autograd.grad(found.sum(), given[0]), torch.autograd.grad(expected.sum(), given[1]))
            if any(a.dtype != b.dtype or not torch.allclose(a, b, bounds, bounds, equal_nan=True) for a, b in pairs):
                return False
            if twin is not None and kind_of(twin) != kind:
                return False
    return not listener.unanswered()
