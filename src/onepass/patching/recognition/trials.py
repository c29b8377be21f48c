"""Trials: compare a module with the norm that may replace it, on copies with random tensors (stand_ins.py).

`largest_difference` is a quick comparison in float32, which selects a recipe. `compare_in_all_cases` then varies dtypes,
ranks, sizes, layouts, training, gradients and autocast. Over all these cases, every condition of the forward must be true
at least once and false at least once.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from onepass.patching.analysis.branch_recorder import BranchRecorder
from onepass.patching.analysis.values import Analysis
from onepass.patching.class_swap import swapped_class
from onepass.patching.swapped_norm import HALF_DTYPES, NormRecipe

from .stand_ins import isolated, own_parameters, stand_in, trial_key
from .trial_cases import Case, all_cases, quick_inputs, random_tensors

TOLERANCE = 2e-5  # relative to the largest value; more than float32 rounding, less than the effect of another eps or formula


HALF_TOLERANCE = {torch.bfloat16: 4 * torch.finfo(torch.bfloat16).eps, torch.float16: 8 * torch.finfo(torch.float16).eps}


def largest_difference(module: nn.Module, recipe: NormRecipe) -> float:
    """Return the largest difference in output, gradients or buffers between a module and its recipe.

    A difference is relative to the largest value of its tensor. The first one above `TOLERANCE` is returned at once. The
    result is infinite if a forward raises an error. If the module keeps state outside its buffers, raise StateChanged.
    """
    cls, worst = type(module), 0.0
    with isolated():
        for training in (True, False):
            for x in quick_inputs(module, recipe.like):
                scale = 100.0 if x.abs().max() > 100 else 1.0  # of the parameters; large ones reveal a clamp in the forward
                try:
                    worst = max(worst, _difference(module, swapped_class(cls, recipe), x, training, scale))
                except StateChanged:
                    raise
                except Exception:
                    return float("inf")
                if worst > TOLERANCE:
                    return worst
    return worst


def _difference(module: nn.Module, new_class: type[nn.Module], x: Tensor, training: bool, scale: float) -> float:
    cls = type(module)
    theirs, ours = stand_in(module, cls, scale=scale), stand_in(module, new_class, scale=scale)
    for twin in (theirs, ours):
        nn.Module.train(twin, training)  # also sets its children
    key, added_names, before = trial_key(theirs), set(dir(new_class)) - set(dir(cls)), dict(vars(theirs))
    pairs = list(zip(_run(cls.forward, theirs, x), _run(new_class.forward, ours, x)))
    if trial_key(theirs) != key:
        changed = [name for name, value in vars(theirs).items() if name not in before or value is not before[name]]
        raise StateChanged("its forward sets " + ", ".join(map(repr, changed)) if changed else "its forward changes an attribute")
    if added_names & {*module._parameters, *module._buffers, *module._modules}:
        return float("inf")
    return max(_relative_difference(a, b) for a, b in pairs)


def _relative_difference(a: Any, b: Any) -> float:
    """Return the largest difference of a and b, relative to the largest value of a; infinite if type, shape or dtype differ."""
    if not (isinstance(a, Tensor) and isinstance(b, Tensor) and a.shape == b.shape and a.dtype == b.dtype):
        return 0.0 if a is b else float("inf")
    if not a.numel():
        return 0.0
    wide = torch.promote_types(a.dtype, torch.float32)
    difference = ((a.to(wide) - b.to(wide)).abs().max() / a.to(wide).abs().max().clamp_min(1e-30)).item()
    return difference if difference == difference else float("inf")


def _run(forward: Callable[..., Any], module: nn.Module, x: Tensor, needs_grad: bool = True) -> list[Tensor | None]:
    """Run forward and backward. Return one list: output, gradients of x and of parameters (if any), buffers."""
    x = x.detach().requires_grad_(needs_grad)
    y = forward(module, x)
    inputs = [t for t in (x, *own_parameters(module).values()) if t.requires_grad] if y.requires_grad else []
    dy = torch.randn(y.shape, generator=torch.Generator("cpu").manual_seed(2), dtype=torch.float32).to(y.dtype)
    grads = torch.autograd.grad(y, inputs, dy, allow_unused=True) if inputs else ()
    return [y.detach(), *grads, *module._buffers.values()]


class Verdict(NamedTuple):
    """The result of comparing a module with a recipe. For some ranks and dtypes the original forward may have to run."""

    why: str = ""  # why the recipe is wrong; "" if it is right
    ranks: tuple[int, ...] = ()  # ranks of x for which the original forward has to run
    dtypes: tuple[tuple[torch.dtype, torch.dtype], ...] = ()  # pairs (dtype of x, of parameters) for which it has to run


def compare_in_all_cases(module: nn.Module, recipe: NormRecipe, analysis: Analysis | None) -> Verdict:
    """Compare a module with its recipe in each of `all_cases` (trial_cases.py). `analysis` is None for a registered class."""
    cls, new_class = type(module), swapped_class(type(module), recipe)
    recorder = BranchRecorder(analysis or Analysis())
    their_forward = recorder.instrumented(cls.forward)
    required_ranks = {x.dim() for x in quick_inputs(module, recipe.like)}
    ranks: dict[int, None] = {}
    dtypes: dict[tuple[torch.dtype, torch.dtype], None] = {}
    with isolated():
        for case in all_cases(module, recipe.like, analysis is None):
            rank, pair = len(case.shape), (case.dtype, case.weight_dtype)
            if rank in ranks or pair in dtypes:
                continue
            try:
                theirs, ours = _try_case(module, cls, their_forward, case), _try_case(module, new_class, new_class.forward, case)
            except StateChanged:
                return Verdict(f"it keeps state between calls ({case})")
            if (isinstance(theirs, Exception) and isinstance(ours, Exception)) or _agree(theirs, ours, case, recipe.activation):
                continue
            one_fails = isinstance(theirs, Exception) or isinstance(ours, Exception)
            if case.dtype != case.weight_dtype or (one_fails and case.dtype != torch.float32):
                dtypes[pair] = None
            elif rank not in required_ranks:
                ranks[rank] = None
            elif not (isinstance(theirs, Exception) and min(case.shape) < 2):  # a module may reject sizes of 0 or 1
                return Verdict(f"it does not compute {recipe.like.__name__} for {case}")
    condition = recorder.one_sided_condition()
    return Verdict(f"it branches on {condition}, and trials reach only one branch" if condition else "", tuple(ranks), tuple(dtypes))


class StateChanged(Exception):
    """Raised if a module changes its own attributes during a call."""


def _try_case(module: nn.Module, cls: type[nn.Module], forward: Callable[..., Any], case: Case) -> list[Tensor | None] | Exception:
    """Run a forward in one case. Return its results (a list, see `_run`), or the error that it raised."""
    twin = stand_in(module, cls, case.weight_dtype)
    nn.Module.train(twin, case.training)
    twin.requires_grad_(case.needs_grad != "x")
    x = random_tensors(case.shape)[0].add_(0.3).mul_(case.scale).to(case.dtype)
    if case.layout == "strided":
        x = x.permute(*reversed(range(x.dim()))).contiguous().permute(*reversed(range(x.dim())))
    key = trial_key(twin)
    try:
        with case.settings():
            results = _run(forward, twin, x, case.needs_grad != "parameters")
    except Exception as error:
        return error
    if trial_key(twin) != key:
        raise StateChanged
    return results


def _agree(theirs: list[Any] | Exception, ours: list[Any] | Exception, case: Case, activation: str | None) -> bool:
    """Return whether the results of two forwards (see `_run`) differ only by rounding; False if one raised an error.

    In half precision, gradients are not compared in two cases: if x is small, because gradients may overflow, and if the
    module has an activation, because the gradient of ReLU jumps.
    """
    if isinstance(theirs, Exception) or isinstance(ours, Exception):
        return False
    used_dtypes = (case.dtype, case.weight_dtype, torch.bfloat16 if case.autocast else None)
    halves = [HALF_TOLERANCE[dtype] for dtype in used_dtypes if dtype in HALF_TOLERANCE]
    if len(theirs) != len(ours) or _relative_difference(theirs[0], ours[0]) > max([TOLERANCE, *halves]):
        return False
    if halves and (case.scale != 1 or activation is not None):
        return True
    limit = max([TOLERANCE, *(4 * tolerance for tolerance in halves)])
    return all(_relative_difference(a, b) <= limit for a, b in zip(theirs, ours))


def with_dtype_rules(module: nn.Module, recipe: NormRecipe) -> NormRecipe | str:
    """Find the dtype rules of a module. Return the recipe with these rules, or the reason why no rule fits.

    The rules say which dtype y has if x and weight have different dtypes (`result`), and whether the module follows
    torch's autocast (`autocast`).
    """
    cls, bf16, results = type(module), torch.bfloat16, {}
    x, watch = quick_inputs(module, recipe.like)[0], _NormCalls()
    with isolated(), torch.no_grad():
        for x_dtype, weight_dtype in ((bf16, bf16), (bf16, torch.float32), (torch.float32, bf16)):
            try:
                with watch if x_dtype == weight_dtype else nullcontext():
                    results[x_dtype, weight_dtype] = cls.forward(stand_in(module, cls, weight_dtype), x.to(x_dtype)).dtype
            except Exception:
                continue  # the module does not support this pair, so its recipe need not either
    autocast = any(dtype in HALF_DTYPES for dtype in watch.dtypes)
    if recipe.weight is None or not own_parameters(module):
        if all(y == x for (x, _), y in results.items()):
            return replace(recipe, autocast=autocast)
        return "its result does not have the dtype of its input"
    rules = {"x": lambda x, w: x, "weight": lambda x, w: w, "promoted": torch.promote_types}
    fitting = [name for name, rule in rules.items() if all(rule(*pair) == y for pair, y in results.items())]
    if not fitting:
        return "its result has neither the dtype of its input nor that of its weight"
    follows_torch = autocast and results.keys() <= {(bf16, bf16), (bf16, torch.float32)} and fitting[0] == "x"
    return replace(recipe, result="" if follows_torch else fitting[0], autocast=autocast)


class _NormCalls(TorchFunctionMode):
    """Records the dtype of x in every call of a torch norm. Autocast affects only those calls in which x is in half precision."""

    def __init__(self) -> None:
        super().__init__()
        self.dtypes: list[torch.dtype] = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if getattr(func, "__name__", "") in ("layer_norm", "rms_norm", "group_norm", "batch_norm", "instance_norm") and args:
            self.dtypes.append(args[0].dtype)
        return func(*args, **(kwargs or {}))
