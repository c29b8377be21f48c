"""Trials: a module beside what is to replace it, on stand-ins with random tensors of their own, on the CPU.

`off` is the quick one, in float32, by which a recipe is found. `differs` goes on from there: dtypes, ranks, sizes, layouts, training,
gradients and autocast are varied, and every condition that varies has to go both ways. Nothing of the module itself is touched: what is
in it, where it lies and whether it is there at all (a meta device, shards) does not matter.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from itertools import product
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from onepass import nn as ours

from .classes import made
from .listening import Listener
from .norms import HALVES, Norm
from .state import is_plain
from .values import Reading

OFF = 2e-5  # what a trial may be off, relative to the largest value: rounding in float32, not another eps or formula


ROUNDING = {torch.bfloat16: 4 * torch.finfo(torch.bfloat16).eps, torch.float16: 8 * torch.finfo(torch.float16).eps}


LARGE = 2**19  # elements of the largest input


_MODULE = {*vars(nn.Module()), "training"}  # what every module has


def own(module: nn.Module) -> dict[str, Tensor]:
    return {name: param for name, param in module._parameters.items() if param is not None}


def kind_of(module: nn.Module) -> Any:
    """What modules have in common of which one trial is enough: class, shapes, and all plain attributes, also their children's."""
    tensors = [(name, None if t is None else tuple(t.shape)) for name, t in (*module._parameters.items(), *module._buffers.items())]
    return (
        type(module),
        type(module).forward,
        tuple(tensors),
        tuple(_attributes(module)),
        tuple(kind_of(child) for child in module.children()),
    )


def _attributes(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """What a class has put into its module; of what is no plain value, nothing is like anything else."""
    for name, value in sorted(module.__dict__.items()):
        if name not in _MODULE:
            yield name, repr(value) if is_plain(value) else _Unlike(value)


def plain_attributes(module: nn.Module) -> list[tuple[str, Any]]:
    return [(name, value) for name, value in module.__dict__.items() if name not in _MODULE and is_plain(value)]


class _Unlike:
    """Equal to itself alone, and keeps what it stands for, so that no other takes its identity."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Unlike) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)


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
    rows, size = _extents(module)
    if like in (ours.LayerNorm, ours.RMSNorm):
        shapes = [(2, 3, *rows), (2, 3, 5, *rows), (7, *rows)]
    elif like in (ours.LayerNorm2d, ours.GroupNorm):
        shapes = [(2, size, 5, 3)] + [(2, size, 7), (4, size)] * (like is ours.GroupNorm)
    else:
        shapes = [(3, size, *(5, 4, 3)[: int(like.__name__[-2])])]
    normal = _random(*shapes)
    return [scale * (x + 0.3) for at, x in enumerate(normal) for scale in ((1.0, 1e-2, 1e-4, 1e4) if at == 0 else (1.0,))]


def _extents(module: nn.Module) -> tuple[tuple[int, ...], int]:
    """What a row is, and how many channels there are."""
    given, mine = getattr(module, "normalized_shape", ()), [tuple(param.shape) for param in own(module).values() if param.dim()]
    rows = (given,) if isinstance(given, int) else tuple(given) or (mine[0] if mine else (24,))
    return rows, getattr(module, "num_channels", None) or getattr(module, "num_features", None) or rows[0]


def _random(*shapes: tuple[int, ...]) -> list[Tensor]:
    generator = torch.Generator("cpu").manual_seed(1)
    return [torch.randn(shape, device="cpu", dtype=torch.float32, generator=generator) for shape in shapes]


def off(module: nn.Module, recipe: Norm) -> float:
    """The largest difference of output, gradients or buffers between a module and its recipe, relative to the largest value of each.
    Infinite where one of them fails, or the module keeps a state that is in no buffer."""
    cls, worst = type(module), 0.0
    with apart():
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
    for twin in (theirs, mine):
        nn.Module.train(twin, training)  # with its children
    kind, hidden = kind_of(theirs), set(dir(becomes)) - set(dir(cls))
    pairs = list(zip(_outcome(cls.forward, theirs, x), _outcome(becomes.forward, mine, x)))
    if kind_of(theirs) != kind or hidden & {*module._parameters, *module._buffers, *module._modules}:
        return float("inf")
    return max(_relative(a, b) for a, b in pairs)


def _relative(a: Any, b: Any) -> float:
    """How far b is from a, relative to a's largest value; infinite where they are not of one kind."""
    if not (isinstance(a, Tensor) and isinstance(b, Tensor) and a.shape == b.shape and a.dtype == b.dtype):
        return 0.0 if a is b else float("inf")
    if not a.numel():
        return 0.0
    wide = torch.promote_types(a.dtype, torch.float32)
    off = ((a.to(wide) - b.to(wide)).abs().max() / a.to(wide).abs().max().clamp_min(1e-30)).item()
    return off if off == off else float("inf")


def apart() -> Any:
    """A place for trials, in which nothing of what the user has set matters, or changes."""
    stack = ExitStack()
    stack.enter_context(warnings.catch_warnings())
    warnings.simplefilter("ignore")  # of what a model never does
    contexts = [torch.random.fork_rng(devices=[]), torch.autocast("cpu", enabled=False), torch.inference_mode(False), torch.enable_grad()]
    if torch.get_default_device().type != "cpu":
        contexts.append(torch.device("cpu"))
    for context in contexts:
        stack.enter_context(context)
    return stack


def _outcome(forward: Callable[..., Any], module: nn.Module, x: Tensor, needs: bool = True) -> list[Tensor | None]:
    """The output, the gradients of input and parameters where there are any, and the buffers after it."""
    x = x.detach().requires_grad_(needs)
    y = forward(module, x)
    inputs = [t for t in (x, *own(module).values()) if t.requires_grad] if y.requires_grad else []
    dy = torch.randn(y.shape, generator=torch.Generator("cpu").manual_seed(2), dtype=torch.float32).to(y.dtype)
    grads = torch.autograd.grad(y, inputs, dy, allow_unused=True) if inputs else ()
    return [y.detach(), *grads, *module._buffers.values()]


class Case(NamedTuple):
    """What one trial is about."""

    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    weight: torch.dtype = torch.float32
    training: bool = True
    mode: str = "grad"  # or "no_grad", "inference"
    scale: float = 1.0
    layout: str = "dense"  # or "strided"
    needs: str = "all"  # who needs a gradient: or "x", "parameters"
    autocast: bool = False

    def __str__(self) -> str:
        words = [f"x of shape {list(self.shape)} in {str(self.dtype)[6:]}"]
        words += [f"with parameters in {str(self.weight)[6:]}"] if self.weight != self.dtype else []
        words += ["in training" if self.training else "in evaluation"]
        words += {"grad": [], "no_grad": ["without gradients"], "inference": ["in inference mode"]}[self.mode]
        words += [f"of size {self.scale:g}"] if self.scale != 1 else []
        words += ["not contiguous"] if self.layout == "strided" else []
        words += [f"where only {self.needs} needs gradients"] if self.needs != "all" else []
        return ", ".join(words + (["under autocast"] if self.autocast else []))


DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


MIXED = [(a, b) for a, b in product(DTYPES, DTYPES) if a != b]


def _cases(module: nn.Module, like: type[nn.Module], registered: bool) -> Iterator[Case]:
    rows, size = _extents(module)
    if like in (ours.LayerNorm, ours.RMSNorm):
        ranks = [(*lead, *rows) for lead in ((2, 3), (), (7,), (2, 3, 5), (2, 1, 3, 2))]
        many = max(2, min(1031, LARGE // max(prod(rows), 1)))
        sizes = [(1, 1, *rows), (0, 3, *rows), (1, many, *rows), (many, 1, *rows)]
    else:
        spatial = {"1d": (7,), "2d": (5, 3), "3d": (2, 5, 3)}.get(like.__name__[-2:], (5, 3))
        ranks = [(3, size, *spatial), (4, size), (3, size, 7), (3, size, 5, 3), (2, size, 2, 5, 3)]
        many = max(2, min(37, int((LARGE // max(size, 1)) ** (1 / len(spatial)))))
        sizes = [(1, size, *(1 for _ in spatial)), (0, size, *spatial), (1, size, *(many for _ in spatial)), (many, size, *spatial)]
    base, shapes = ranks[0], list(dict.fromkeys(ranks))
    for dtype, training, mode in product(DTYPES, (True, False), ("grad", "no_grad")):
        yield from (Case(shape, dtype, dtype, training, mode) for shape in (shapes if dtype == torch.float32 else [base]))
    for dtype in DTYPES:
        plain = Case(base, dtype, dtype)
        yield from (plain._replace(shape=shape) for shape in shapes[1:])
        yield from (plain._replace(scale=1e-2), plain._replace(layout="strided"), plain._replace(mode="inference", training=False))
    for training in (True, False):
        plain = Case(base, training=training)
        yield from (plain._replace(needs="x"), plain._replace(needs="parameters"), plain._replace(mode="inference"))
        yield from (plain._replace(layout="strided", shape=shape, mode="no_grad") for shape in shapes)
        yield from (Case(shape, training=training, mode="no_grad") for shape in sizes)
    if registered:
        return  # who registers a class says what its dtypes are
    yield from (Case(base, dtype, weight) for dtype, weight in (MIXED if own(module) else []))
    for dtype, mode in product(DTYPES, ("grad", "no_grad")):
        yield Case(base, dtype, dtype, mode == "grad", mode, autocast=True)


@contextmanager
def _settings(case: Case) -> Iterator[None]:
    """Gradients and autocast as a case has them; that of CUDA too, which code may ask for on a CPU."""
    mode = {"grad": torch.enable_grad, "no_grad": torch.no_grad, "inference": torch.inference_mode}[case.mode]
    before = torch.is_autocast_enabled("cuda")
    with mode(), torch.autocast("cpu", torch.bfloat16, enabled=case.autocast):
        torch.set_autocast_enabled("cuda", case.autocast)
        try:
            yield
        finally:
            torch.set_autocast_enabled("cuda", before)


class Verdict(NamedTuple):
    """Why a recipe is not what a module is, or ""; and ranks and dtypes in which it is not, so that the class that was there computes."""

    why: str = ""
    ranks: tuple[int, ...] = ()
    dtypes: tuple[tuple[torch.dtype, torch.dtype], ...] = ()  # of x and of parameters


def differs(module: nn.Module, recipe: Norm, reading: Reading | None) -> Verdict:
    """Whether a module does what its recipe does in everything that can be varied."""
    cls, becomes = type(module), made(type(module), recipe)
    listener = Listener(reading or Reading())
    theirs = listener.heard(cls.forward)
    known = {x.dim() for x in _inputs(module, recipe.like)}
    ranks: dict[int, None] = {}
    dtypes: dict[tuple[torch.dtype, torch.dtype], None] = {}
    with apart():
        for case in _cases(module, recipe.like, reading is None):
            rank, pair = len(case.shape), (case.dtype, case.weight)
            if rank in ranks or pair in dtypes:
                continue
            try:
                before, after = _attempt(module, cls, theirs, case), _attempt(module, becomes, becomes.forward, case)
            except _Keeps:
                return Verdict(f"it keeps a state, for {case}")
            if (isinstance(before, Exception) and isinstance(after, Exception)) or _agree(before, after, case, recipe.activation):
                continue
            one_fails = isinstance(before, Exception) or isinstance(after, Exception)
            if case.dtype != case.weight or (one_fails and case.dtype != torch.float32):
                dtypes[pair] = None
            elif rank not in known:
                ranks[rank] = None
            elif not (isinstance(before, Exception) and min(case.shape) < 2):  # it may refuse an empty batch
                return Verdict(f"it is no {recipe.like.__name__} for {case}")
    question = listener.unanswered()
    return Verdict(f"it branches on {question}, of which trials see one side" if question else "", tuple(ranks), tuple(dtypes))


class _Keeps(Exception):
    """A module has changed its own attributes."""


def _attempt(module: nn.Module, cls: type[nn.Module], forward: Callable[..., Any], case: Case) -> list[Tensor | None] | Exception:
    """What comes out of a case: first the output, then the rest. Or the error."""
    twin = stand_in(module, cls, case.weight)
    nn.Module.train(twin, case.training)
    twin.requires_grad_(case.needs != "x")
    x = _random(case.shape)[0].add_(0.3).mul_(case.scale).to(case.dtype)
    if case.layout == "strided":
        x = x.permute(*reversed(range(x.dim()))).contiguous().permute(*reversed(range(x.dim())))
    kind = kind_of(twin)
    try:
        with _settings(case):
            outcome = _outcome(forward, twin, x, case.needs != "parameters")
    except Exception as error:
        return error
    if kind_of(twin) != kind:
        raise _Keeps
    return outcome


def _agree(theirs: list[Any] | Exception, mine: list[Any] | Exception, case: Case, activation: str | None) -> bool:
    """Whether two outcomes differ by rounding alone. In half precision gradients may overflow where x is small, and jump at a ReLU."""
    if isinstance(theirs, Exception) or isinstance(mine, Exception):
        return False
    halves = [ROUNDING[dtype] for dtype in (case.dtype, case.weight, torch.bfloat16 if case.autocast else None) if dtype in ROUNDING]
    if len(theirs) != len(mine) or _relative(theirs[0], mine[0]) > max([OFF, *halves]):
        return False
    if halves and (case.scale != 1 or activation is not None):
        return True
    return all(_relative(a, b) <= max([OFF, *(4 * rounding for rounding in halves)]) for a, b in zip(theirs, mine))


def with_dtypes(module: nn.Module, recipe: Norm) -> Norm | str:
    """The recipe with the rules of the module's class for dtypes: of its result, beside parameters of another; under autocast."""
    cls, bf16, results = type(module), torch.bfloat16, {}
    x, watch = _inputs(module, recipe.like)[0], _Watch()
    with apart(), torch.no_grad():
        for of_x, of_weight in ((bf16, bf16), (bf16, torch.float32), (torch.float32, bf16)):
            try:
                with watch if of_x == of_weight else nullcontext():
                    results[of_x, of_weight] = cls.forward(stand_in(module, cls, of_weight), x.to(of_x)).dtype
            except Exception:
                continue  # it takes no such pair, and need not
    autocast = any(dtype in HALVES for dtype in watch.seen)
    if recipe.weight is None or not own(module):
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
