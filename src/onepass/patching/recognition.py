"""Which of our norms a module is: by its class where that is torch.nn's or registered, else by structure and a trial.

A module nobody here has heard of is a candidate if it has one or two parameters, one-dimensional and of one size, and its forward takes
one tensor. Each norm it could be is held against it on random input; the first that agrees is its recipe, and a module with which none
agrees is left alone. Trials run on a stand-in with random parameters of its own, on the CPU in float32: what is in the module, where it
lies and whether it is there at all (a meta device, shards) does not matter, and nothing of it is touched.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from functools import cache
from itertools import permutations
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode

from .. import nn as ours
from .classes import made
from .norms import ACTIVATIONS, HALVES, Norm, Source

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
OFF = 2e-5  # what a trial may be off, relative to the largest value: rounding in float32, not another eps or formula


_MODULE = {*vars(nn.Module()), "training"}  # what every module has

_registered: dict[type[nn.Module], Norm] = {}
_found: dict[Any, Norm | str] = {}


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
    if not looks and (children or not _like_a_norms(_own(module)) or cls.__module__.startswith("torch.")):
        return None
    key = _kind(module)
    if key not in _found:
        _found[key] = _trial(module, registered)
    found = _found[key]
    return found if looks or isinstance(found, Norm) else None


def _obstacle(module: nn.Module) -> str:
    """What forbids to change the class of a module."""
    for cls, reason in OTHER.items():
        if isinstance(module, cls):
            return reason
    if isinstance(module, LazyModuleMixin) or any(is_lazy(p) for p in _own(module).values()):
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


def hooks_of(module: nn.Module) -> bool:
    """Whether someone watches what goes into a module, or comes out."""
    own = module.__dict__
    return bool(own["_forward_hooks"] or own["_forward_pre_hooks"] or own["_backward_hooks"] or own["_backward_pre_hooks"])


def _own(module: nn.Module) -> dict[str, Tensor]:
    return {name: param for name, param in module._parameters.items() if param is not None}


def _like_a_norms(params: dict[str, Tensor]) -> bool:
    """A weight, or weight and bias, with an element for each channel."""
    return 1 <= len(params) <= 2 and all(p.dim() == 1 for p in params.values()) and len({p.shape for p in params.values()}) == 1


def _kind(module: nn.Module) -> Any:
    """What modules have in common of which one trial is enough: class, shapes, and all plain attributes, also their children's."""
    tensors = [(name, None if t is None else tuple(t.shape)) for name, t in (*module._parameters.items(), *module._buffers.items())]
    return (
        type(module),
        type(module).forward,
        tuple(tensors),
        tuple(_attributes(module)),
        tuple(_kind(child) for child in module.children()),
    )


def _attributes(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """What a class has put into its module; of what is no plain value, nothing is like anything else."""
    for name, value in sorted(module.__dict__.items()):
        if name not in _MODULE:
            yield name, repr(value) if _is_plain(value) else _Unlike(value)


def _is_plain(value: Any) -> bool:
    if isinstance(value, (list, tuple, set, dict)):
        return len(value) < 100 and all(map(_is_plain, value.values() if isinstance(value, dict) else value))
    return isinstance(value, (int, float, str, type(None), torch.dtype))


class _Unlike:
    """Equal to itself alone, and keeps what it stands for, so that no other takes its identity."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Unlike) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)


def _trial(module: nn.Module, registered: Norm | None) -> Norm | str:
    cls, nearest = type(module), (float("inf"), "")
    argument = _argument(cls)
    if argument is None:
        return "its forward does not take one tensor alone, or calls something else activation or residual"
    if getattr(module, "_fast_norm", False):
        return "timm's fast norm: under autocast it computes in half precision"
    for recipe in [registered] if registered else _candidates(module):
        recipe = replace(recipe, argument=argument)
        off = _off(module, recipe)
        if off > OFF:
            nearest = min(nearest, (off, recipe.like.__name__), key=lambda pair: pair[0])
            continue
        return recipe if registered else _with_dtypes(module, recipe)
    if nearest[0] == float("inf"):
        return "its parameters, or its input, are none of a norm that onepass has"
    return f"no norm of onepass agrees with it: the nearest, {nearest[1]}, is off by {nearest[0]:.2g}"


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
    names = list(_own(module))
    if len(names) > 2 or any(t is not None for t in module._buffers.values()) or any(t.numel() == 1 for t in _own(module).values()):
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


def stand_in(module: nn.Module, cls: type[nn.Module], dtype: torch.dtype = torch.float32, scale: float = 1.0) -> nn.Module:
    """A module of class `cls` with the attributes of `module`, and tensors of its own."""
    twin = object.__new__(cls)
    twin.__dict__.update({name: _copied(value) if name not in _MODULE else value for name, value in module.__dict__.items()})
    cpu: Any = {"device": "cpu", "dtype": dtype, "generator": torch.Generator("cpu").manual_seed(0)}
    params = {
        name: None if p is None else nn.Parameter(scale * (1 + torch.randn(p.shape, **cpu) / 2)) for name, p in module._parameters.items()
    }
    buffers = {
        name: None
        if b is None
        else torch.rand(b.shape, **cpu) + 0.5
        if b.is_floating_point()
        else torch.zeros(b.shape, dtype=b.dtype, device="cpu")
        for name, b in module._buffers.items()
    }
    children = {name: copy.deepcopy(child) for name, child in module._modules.items()}
    twin.__dict__.update(_parameters=params, _buffers=buffers, _modules=children)
    return twin


def _copied(value: Any) -> Any:
    try:
        return copy.deepcopy(value)
    except Exception:
        return value


def _inputs(module: nn.Module, like: type[nn.Module]) -> list[Tensor]:
    """Inputs that tell norms apart: several ranks, a mean, and scales at which every usual eps weighs in."""
    given, own = getattr(module, "normalized_shape", ()), [tuple(param.shape) for param in _own(module).values() if param.dim()]
    rows = (given,) if isinstance(given, int) else tuple(given) or (own[0] if own else (24,))
    size = getattr(module, "num_channels", None) or getattr(module, "num_features", None) or rows[0]
    if like in (ours.LayerNorm, ours.RMSNorm):
        shapes = [(2, 3, *rows), (2, 3, 5, *rows), (7, *rows)]
    elif like in (ours.LayerNorm2d, ours.GroupNorm):
        shapes = [(2, size, 5, 3)] + [(2, size, 7), (4, size)] * (like is ours.GroupNorm)
    else:
        shapes = [(3, size, *(5, 4, 3)[: int(like.__name__[-2])])]
    generator = torch.Generator("cpu").manual_seed(1)
    normal = [torch.randn(shape, device="cpu", dtype=torch.float32, generator=generator) for shape in shapes]
    return [scale * (x + 0.3) for at, x in enumerate(normal) for scale in ((1.0, 1e-2, 1e-4, 1e4) if at == 0 else (1.0,))]


def _off(module: nn.Module, recipe: Norm) -> float:
    """The largest difference of output, gradients or buffers between a module and its recipe, relative to the largest value of each.
    Infinite where one of them fails, or the module keeps a state that is in no buffer."""
    cls, worst = type(module), 0.0
    with _apart():
        for training in (True, False):
            for x in _inputs(module, recipe.like):
                scale = 100.0 if x.abs().max() > 100 else 1.0  # what is clamped shows
                try:
                    worst = max(worst, _distance(module, made(cls, recipe), x, training, scale))
                except Exception:
                    return float("inf")
                if worst > OFF:
                    return worst
    return worst


def _distance(module: nn.Module, becomes: type[nn.Module], x: Tensor, training: bool, scale: float) -> float:
    cls = type(module)
    theirs, mine = stand_in(module, cls, scale=scale), stand_in(module, becomes, scale=scale)
    theirs.training = mine.training = training
    kind, hidden = _kind(theirs), set(dir(becomes)) - set(dir(cls))
    pairs = list(zip(_outcome(cls, theirs, x), _outcome(becomes, mine, x)))
    if _kind(theirs) != kind or hidden & {*module._parameters, *module._buffers, *module._modules}:
        return float("inf")
    worst = 0.0
    for a, b in pairs:
        if isinstance(a, Tensor) and isinstance(b, Tensor) and a.shape == b.shape and a.dtype == b.dtype:
            off = ((a - b).abs().max() / a.abs().max().clamp_min(1e-30)).item()
            worst = max(worst, off) if off == off else float("inf")
        elif a is not b:
            return float("inf")
    return worst


def _apart() -> Any:
    """A place for trials, in which nothing of what the user has set matters, or changes."""
    stack = ExitStack()
    for context in (torch.random.fork_rng(devices=[]), torch.autocast("cpu", enabled=False), torch.device("cpu"), torch.enable_grad()):
        stack.enter_context(context)
    return stack


def _outcome(cls: type[nn.Module], module: nn.Module, x: Tensor) -> list[Tensor | None]:
    """The output, the gradients of input and parameters, and the buffers after it."""
    x = x.clone().requires_grad_()
    y = cls.forward(module, x)
    dy = torch.randn(y.shape, generator=torch.Generator("cpu").manual_seed(2))
    return [y.detach(), *torch.autograd.grad(y, [x, *_own(module).values()], dy, allow_unused=True), *module._buffers.values()]


def _with_dtypes(module: nn.Module, recipe: Norm) -> Norm | str:
    """The recipe with the rules of the module's class for dtypes: of its result, beside parameters of another; under autocast."""
    cls, bf16, results = type(module), torch.bfloat16, {}
    x, watch = _inputs(module, recipe.like)[0], _Watch()
    with _apart(), torch.no_grad():
        for of_x, of_weight in ((bf16, bf16), (bf16, torch.float32), (torch.float32, bf16)):
            try:
                with watch if of_x == of_weight else nullcontext():
                    results[of_x, of_weight] = cls.forward(stand_in(module, cls, of_weight), x.to(of_x)).dtype
            except Exception:
                continue  # it takes no such pair, and need not
    autocast = any(dtype in HALVES for dtype in watch.seen)
    if recipe.weight is None or not _own(module):
        return (
            replace(recipe, autocast=autocast)
            if all(y == x for (x, _), y in results.items())
            else "its result has not the dtype of its input"
        )
    rules = {"x": lambda x, w: x, "weight": lambda x, w: w, "promoted": torch.promote_types}
    fits = [name for name, rule in rules.items() if all(rule(*pair) == y for pair, y in results.items())]
    if not fits:
        return "the dtype of its result is neither that of its input nor of its weight"
    only_torchs = autocast and results.keys() <= {(bf16, bf16), (bf16, torch.float32)} and fits[0] == "x"
    return replace(recipe, result="" if only_torchs else fits[0], autocast=autocast)


class _Watch(TorchFunctionMode):
    """Sees the dtypes in which torch's own norms are called: where these are the input's, autocast has a say."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[torch.dtype] = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if getattr(func, "__name__", "") in ("layer_norm", "rms_norm", "group_norm", "batch_norm", "instance_norm") and args:
            self.seen.append(args[0].dtype)
        return func(*args, **(kwargs or {}))


_acting: dict[Any, str | None] = {}


def activation_of(act: Any) -> str | None:
    """The name of an activation, a module or a function of one tensor, if a norm can apply it: by a trial, whatever it is called."""
    if isinstance(act, nn.Module) and (
        any(True for _ in act.parameters()) or any(True for _ in act.children()) or "forward" in act.__dict__
    ):
        return None
    key = _kind(act) if isinstance(act, nn.Module) else act
    if key not in _acting:
        try:
            with _apart(), torch.no_grad():
                agree = [name for name, function in ACTIVATIONS.items() if _acts_as(act, function)]
        except Exception:
            agree = []
        _acting[key] = agree[0] if agree else None
    return _acting[key]


def _acts_as(act: Any, function: Callable[[Tensor], Tensor]) -> bool:
    far = torch.tensor([-1e6, -1e3, -100, 100, 1e3, 1e6], dtype=torch.float32)
    x = torch.cat([torch.linspace(-20, 20, 4001, dtype=torch.float32), far])
    twins = [stand_in(act, type(act)) for _ in range(2)] if isinstance(act, nn.Module) else []
    kinds = [_kind(twin) for twin in twins]
    for training, twin in zip((True, False), twins):
        twin.training = training
    for call in [twin.forward for twin in twins] or [act]:
        if not torch.allclose(call(x.clone()), function(x), rtol=1e-6, atol=1e-6) or call(x.bfloat16()).dtype != torch.bfloat16:
            return False
    return kinds == [_kind(twin) for twin in twins]
