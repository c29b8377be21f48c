"""`patch`: swap and fuse the norms of an existing model; `unpatch`: undo it; `register`: teach it a class.

`recognition` says what a norm is, by `trials` and by `reading` what its forward decides by; `norms` computes it, and looks at its `state`;
`source` and `blocks` find what stands beside it, `layout` makes convolutions channels-last, `classes` changes classes, `report` says
what was done. Here they are put together, and what cannot be patched is refused.
"""

from __future__ import annotations

import sys
from collections import Counter
from typing import Any, NamedTuple

import torch
from torch import nn

from onepass import nn as ours

from . import source
from .blocks import Fusion, Norms
from .blocks import fuse as _fuse
from .classes import Recipe, Swapped, restore, swap, wrapped_since
from .layout import ChannelsLast, convert, convertible, revert
from .norms import Norm
from .recognition import recognize, register
from .report import ALREADY, FUSED, LEFT, REPLACED, Report, Row, counted

__all__ = ["Report", "Row", "patch", "register", "unpatch"]


def patch(model: nn.Module, fuse: bool = True, dry_run: bool = False, channels_last: bool = False) -> Report:
    """Let onepass compute the norms of a model, in place, and return what was done.

    Modules change their class and nothing else: parameters, buffers, hooks and state_dict stay, and the classes they had remain their base
    classes. With `fuse`, norms also take over activations that follow them and sums that precede them, in nn.Sequential and wherever the
    source of a module's methods shows it. With `channels_last`, convolutions' weights are laid out channels-last, and so is all that
    follows from them. With `dry_run` nothing is changed.

    Example: `print(onepass.patch(model))`; `with onepass.patch(model): ...` undoes it at the end.
    """
    _check(model)
    survey = _survey(model, fuse, channels_last)
    source.forget()
    changes = [] if dry_run else survey.changes

    def undo() -> None:
        _check_idle(model)
        for module, recipe in changes:
            if vars(type(module)).get("_recipe") == recipe:
                _restore(module)

    try:
        for module, recipe in changes:
            swap(module, recipe)
            if isinstance(recipe, ChannelsLast):
                convert(module)
    except Exception:
        undo()
        raise
    return Report(survey.rows, survey.notes, dry_run, undo)


def unpatch(model: nn.Module) -> nn.Module:
    """Give every module of a model the class, and convolutions the layout, that they had before `patch`. Returns the model.

    Example: `onepass.unpatch(model)`
    """
    _check(model)
    wrapped = [name for name, module in model.named_modules() if wrapped_since(module)]
    if wrapped:
        cls = type(model.get_submodule(wrapped[0])).__name__
        raise RuntimeError(
            f"{wrapped[0]!r} was patched and then became a {cls}, by fully_shard or a parametrization; expected the class that patch "
            "gave it: undo that first"
        )
    for module in model.modules():
        _restore(module)
    return model


def _restore(module: nn.Module) -> None:
    if isinstance(module, Swapped) and isinstance(module._recipe, ChannelsLast):
        revert(module)
    restore(module)


class _Survey(NamedTuple):
    rows: list[Row]
    changes: list[tuple[nn.Module, Recipe]]
    notes: list[str]


def _survey(model: nn.Module, fuse: bool, channels_last: bool) -> _Survey:
    """Everything that is to be done and said; nothing is changed."""
    modules = [(name, module) for name, module in model.named_modules() if not isinstance(module, torch.jit.ScriptModule)]
    found = {id(module): result for _, module in modules if (result := _known(module)) is not None}
    recipes = {at: result if isinstance(result, Norm) else None for at, result in found.items() if not isinstance(result, str)}
    blocks: list[tuple[nn.Module, Recipe]] = []
    fusions: dict[int, list[Fusion]] = {}
    if fuse or channels_last:
        registered = Counter(id(child) for _, module in modules for child in module._modules.values() if child is not None)
        norms = Norms(recipes if fuse else {}, {id(model): 1, **registered})
        for _, module in modules:
            fused = _fuse(module, norms, channels_last)
            blocks += [(module, fused.recipe)] if fused.recipe else []
            for fusion in fused.fusions:
                fusions.setdefault(id(fusion.norm), []).append(fusion)
    rows = [_row(name, module, found[id(module)], fusions.get(id(module), [])) for name, module in modules if id(module) in found]
    swaps = [(module, found[id(module)]) for _, module in modules if _new(module, found.get(id(module)))]
    convolutions = [
        (module, ChannelsLast()) for _, module in modules if channels_last and convertible(module) and not isinstance(module, Swapped)
    ]
    notes = [f"{counted(len(convolutions), 'convolution')} channels-last"] if channels_last else []
    return _Survey(rows, [*swaps, *blocks, *convolutions], notes)  # pyright: ignore[reportArgumentType]


def _known(module: nn.Module) -> Norm | str | bool | None:
    """As `recognize`; True for a norm that is one of onepass.nn."""
    if isinstance(module, Swapped):
        return module._recipe if isinstance(module._recipe, Norm) else None
    return True if type(module).__module__ == ours.__name__ else recognize(module)


def _new(module: nn.Module, found: Norm | str | bool | None) -> bool:
    return isinstance(found, Norm) and not isinstance(module, Swapped)


def _row(name: str, module: nn.Module, found: Norm | str | bool, fusions: list[Fusion]) -> Row:
    cls = module._original.__name__ if isinstance(module, Swapped) else type(module).__name__
    if isinstance(found, str):
        return Row(name, cls, LEFT, "", found)
    became = found.like.__name__ if isinstance(found, Norm) else cls
    fused = [fusion.what for fusion in fusions if not fusion.obstacle]
    if isinstance(found, Norm) and found.activation and _new(module, found):
        fused = [f"its {found.activation}", *fused]
    if fused:
        return Row(name, cls, FUSED, became, " and ".join(dict.fromkeys(fused)))
    if not _new(module, found):
        return Row(name, cls, ALREADY, became, "")
    return Row(name, cls, REPLACED, became, "; ".join(f"{fusion.what}: {fusion.obstacle}" for fusion in fusions))


def _check(model: Any) -> None:
    if not isinstance(model, nn.Module):
        kind = "the class, not an instance" if isinstance(model, type) else type(model).__name__
        raise TypeError(f"model must be a torch.nn.Module, not {kind}; got {model!r:.80}: pass the model itself")
    if isinstance(model, torch.jit.ScriptModule):
        raise TypeError(
            f"model is a {type(model).__name__}, scripted or traced, with its norms compiled in; expected an eager module: patch that, "
            "and compile it with torch.compile"
        )
    for name, module in model.named_modules():
        if ".quantized" in type(module).__module__ and type(module).__module__.startswith(("torch.ao.", "torch.nn.")):
            raise TypeError(
                f"model is quantized: {name or 'it'!r} is a {type(module).__module__}.{type(module).__name__}; expected a model in "
                "floating point: patch it first, and quantize it then"
            )
    _check_idle(model)


def _check_idle(model: nn.Module) -> None:
    """Refuses while a forward of the model runs, in any thread: its modules would change under its feet."""
    modules = {id(module): name for name, module in model.named_modules()}
    for frame in sys._current_frames().values():
        while frame is not None:
            first = frame.f_code.co_varnames[:1] if frame.f_code.co_name in ("forward", "_call_impl") else ()
            caller = frame.f_locals.get(first[0]) if first else None
            if id(caller) in modules and isinstance(caller, nn.Module):
                place = modules[id(caller)] or type(caller).__name__
                raise RuntimeError(
                    f"model is in the middle of a forward, in {place!r}; expected it to be idle: patch it before or after the call"
                )
            frame = frame.f_back
