"""The functions `patch` and `unpatch`.

`patch` first plans all changes, and then applies them. A change gives a module a new class, which a recipe describes
(class_swap.py). Both functions raise an error for scripted, traced and quantized models, and for a model whose forward
is running.
"""

from __future__ import annotations

import sys
from collections import Counter
from typing import Any, NamedTuple

import torch
from torch import nn

from . import function_source
from .channels_last import ChannelsLastRecipe, can_convert, to_channels_last, to_contiguous
from .class_swap import Recipe, Swapped, class_changed_after_swap, restore_class, swap_class
from .fast_path import may_bypass_its_norms
from .fusion.find import Fusion, ModelNorms, find_fusions
from .recognition.recognize import recognize
from .report import ALREADY, FUSED, LEFT, REPLACED, Report, Row, counted
from .swapped_norm import ONEPASS_CLASSES, NormRecipe


def patch(model: nn.Module, fuse: bool = True, dry_run: bool = False, channels_last: bool = False) -> Report:
    """Make onepass compute the norms of a model, in place, and return a report.

    Modules get new classes, but keep their parameters, buffers, hooks and state_dict. The new class of a module is a
    subclass of its original class.

    With `fuse`, a norm also computes the activation after it, or the sum before it. `patch` looks for these in
    nn.Sequential, and in the source of other modules' methods. With `channels_last`, the weights of convolutions become
    channels-last, so the outputs of convolutions do, too. With `dry_run`, nothing changes; the report says what would.

    Example: `print(onepass.patch(model))`; `with onepass.patch(model): ...` undoes the patch at the end of the block.
    """
    _check_patchable(model)
    plan = _make_plan(model, fuse, channels_last)
    function_source.clear_caches()
    changes = [] if dry_run else plan.changes

    def undo() -> None:
        _check_not_running(model)
        for module, recipe in changes:
            if vars(type(module)).get("_recipe") == recipe:
                _restore(module)

    try:
        for module, recipe in changes:
            swap_class(module, recipe)
            if isinstance(recipe, ChannelsLastRecipe):
                to_channels_last(module)
    except Exception:
        undo()
        raise
    return Report(plan.rows, plan.notes, dry_run, undo)


def unpatch(model: nn.Module) -> nn.Module:
    """Undo `patch`, and return the model. Modules get their original classes back, and weights their original layout.

    Example: `onepass.unpatch(model)`
    """
    _check_patchable(model)
    changed = [name for name, module in model.named_modules() if class_changed_after_swap(module)]
    if changed:
        cls = type(model.get_submodule(changed[0])).__name__
        raise RuntimeError(
            f"{changed[0]!r} was patched and then became a {cls}, by fully_shard or a parametrization; expected the class that patch "
            "gave it: undo that change first"
        )
    for module in model.modules():
        _restore(module)
    return model


def _restore(module: nn.Module) -> None:
    if isinstance(module, Swapped) and isinstance(module._recipe, ChannelsLastRecipe):
        to_contiguous(module)
    restore_class(module)


class _Plan(NamedTuple):
    rows: list[Row]
    changes: list[tuple[nn.Module, Recipe]]
    notes: list[str]


def _make_plan(model: nn.Module, fuse: bool, channels_last: bool) -> _Plan:
    """Return the changes that `patch` has to make, and the rows and notes of its report. The model stays unchanged."""
    modules = [(name, module) for name, module in model.named_modules() if not isinstance(module, torch.jit.ScriptModule)]
    results = {id(module): result for _, module in modules if (result := _recognize(module)) is not None}
    recipes = {key: result if isinstance(result, NormRecipe) else None for key, result in results.items() if not isinstance(result, str)}
    blocks: list[tuple[nn.Module, Recipe]] = []
    fusions: dict[int, list[Fusion]] = {}
    if fuse or channels_last:
        registered = Counter(id(child) for _, module in modules for child in module._modules.values() if child is not None)
        norms = ModelNorms(recipes if fuse else {}, {id(model): 1, **registered})
        for _, module in modules:
            found = find_fusions(module, norms, channels_last)
            blocks += [(module, found.recipe)] if found.recipe else []
            for fusion in found.fusions:
                fusions.setdefault(id(fusion.norm), []).append(fusion)
    rows = [_row(name, module, results[id(module)], fusions.get(id(module), [])) for name, module in modules if id(module) in results]
    swaps = [(module, results[id(module)]) for _, module in modules if _is_new(module, results.get(id(module)))]
    convolutions = [
        (module, ChannelsLastRecipe()) for _, module in modules if channels_last and can_convert(module) and not isinstance(module, Swapped)
    ]
    notes = [f"{counted(len(convolutions), 'convolution')} channels-last"] if channels_last else []
    bypassed = sum(may_bypass_its_norms(module) for _, module in modules)
    if bypassed:
        notes.append(
            f"{counted(bypassed, 'TransformerEncoderLayer')}: in evaluation without gradients, torch's fast path computes the whole layer, "
            "and none of its norms run; torch.backends.mha.set_fastpath_enabled(False) turns it off"
        )
    return _Plan(rows, [*swaps, *blocks, *convolutions], notes)  # pyright: ignore[reportArgumentType]


def _recognize(module: nn.Module) -> NormRecipe | str | bool | None:
    """Return the recipe for a norm, or the reason (a string) why there is none; None if the module is not a norm.

    For a patched norm, this is its present recipe. For a module of onepass.nn, which needs none, the result is True.
    """
    if isinstance(module, Swapped):
        return module._recipe if isinstance(module._recipe, NormRecipe) else None
    return True if type(module) in ONEPASS_CLASSES else recognize(module)


def _is_new(module: nn.Module, result: NormRecipe | str | bool | None) -> bool:
    """Return whether this call of `patch` replaces a norm: it has a recipe (`result` of `_recognize`), and is not patched yet."""
    return isinstance(result, NormRecipe) and not isinstance(module, Swapped)


def _row(name: str, module: nn.Module, result: NormRecipe | str | bool, fusions: list[Fusion]) -> Row:
    cls = module._original_class.__name__ if isinstance(module, Swapped) else type(module).__name__
    if isinstance(result, str):
        return Row(name, cls, LEFT, "", result)
    became = result.like.__name__ if isinstance(result, NormRecipe) else cls
    fused = [fusion.neighbour for fusion in fusions if not fusion.obstacle]
    if isinstance(result, NormRecipe) and result.activation and _is_new(module, result):
        fused = [f"its {result.activation}", *fused]
    if fused:
        return Row(name, cls, FUSED, became, " and ".join(dict.fromkeys(fused)))
    if not _is_new(module, result):
        return Row(name, cls, ALREADY, became, "")
    return Row(name, cls, REPLACED, became, "; ".join(dict.fromkeys(f"{fusion.neighbour}: {fusion.obstacle}" for fusion in fusions)))


def _check_patchable(model: Any) -> None:
    if not isinstance(model, nn.Module):
        if isinstance(model, type):
            raise TypeError(
                f"model must be a torch.nn.Module; got {model.__name__}, the class, not an instance: create the model first, and pass it"
            )
        raise TypeError(f"model must be a torch.nn.Module, not {type(model).__name__}; got {model!r:.80}: pass the model itself")
    if isinstance(model, torch.jit.ScriptModule):
        raise TypeError(
            f"model is a {type(model).__name__}, scripted or traced, so its norms are already compiled; expected an eager module: "
            "patch the eager module, and compile it with torch.compile"
        )
    for name, module in model.named_modules():
        if ".quantized" in type(module).__module__ and type(module).__module__.startswith(("torch.ao.", "torch.nn.")):
            raise TypeError(
                f"model is quantized: {name or 'it'!r} is a {type(module).__module__}.{type(module).__name__}; expected a model in "
                "floating point: patch it before you quantize it"
            )
    _check_not_running(model)


def _check_not_running(model: nn.Module) -> None:
    """Raise an error if any thread is running a forward of the model. Classes must not change during a call."""
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
