"""Random programs around one call of a norm: what users do to its tensors before it, and between forward and backward.

`python -m benchmarks.fuzz_calls --count 5000`. Each program runs by torch and by us on equal tensors. Both raise, or both give the same
numbers. `make sanitize` runs it with C kernels compiled with sanitizers. A program follows from its seed and index alone; `--only INDEX`
repeats one. Where the process ends, the last line printed (with `--loud`) names the program.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from random import Random
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from onepass import functional as O
from onepass.core import norms

TOLERANCE = {torch.float64: 1e-9, torch.float32: 2e-4, torch.float16: 1e-2, torch.bfloat16: 6e-2}  # of the largest element


GROUPS = 4


CHANNELS = (4, 12, 64, 200)


@dataclass
class Tensors:
    """The operands of one run. Some have no gradient, some are missing."""

    x: Tensor
    weight: Tensor | None
    bias: Tensor | None
    residual: Tensor
    scale: Tensor
    running_mean: Tensor
    running_var: Tensor

    @property
    def leaves(self) -> list[Tensor]:
        return [t for t in (self.x, self.weight, self.bias) if isinstance(t, Tensor) and t.is_leaf and t.requires_grad]


def _rows(norm: str) -> Callable[[Any, Tensors], Any]:
    def call(m: Any, t: Tensors) -> Any:
        shape = t.x.shape[-1:]
        return m.rms_norm(t.x, shape, t.weight, 1e-5) if norm == "rms_norm" else m.layer_norm(t.x, shape, t.weight, t.bias)

    return call


def _added(m: Any, t: Tensors) -> Any:
    if m is O:
        return O.add_layer_norm(t.x, t.residual, t.x.shape[-1:], t.weight, t.bias)
    total = t.x + t.residual
    return F.layer_norm(total, t.x.shape[-1:], t.weight, t.bias), total


def _activated(m: Any, t: Tensors) -> Any:
    if m is O:
        return O.group_norm(t.x, GROUPS, t.weight, t.bias, activation="silu")
    return F.silu(F.group_norm(t.x, GROUPS, t.weight, t.bias))


def _modulated(m: Any, t: Tensors) -> Any:
    if m is O:
        return O.group_norm(t.x, GROUPS, t.weight, t.bias, modulate=(t.scale, None))
    return F.group_norm(t.x, GROUPS, t.weight, t.bias) * (1 + t.scale.reshape(*t.scale.shape, *[1] * (t.x.dim() - 2)))


OPS: dict[str, Callable[[Any, Tensors], Any]] = {
    "layer_norm": _rows("layer_norm"),
    "rms_norm": _rows("rms_norm"),
    "group_norm": lambda m, t: m.group_norm(t.x, GROUPS, t.weight, t.bias),
    "group_norm, silu": _activated,
    "group_norm, modulated": _modulated,
    "add_layer_norm": _added,
    "instance_norm": lambda m, t: m.instance_norm(t.x, None, None, t.weight, t.bias),
    "instance_norm, tracking": lambda m, t: m.instance_norm(t.x, t.running_mean, t.running_var, t.weight, t.bias),
    "batch_norm": lambda m, t: m.batch_norm(t.x, None, None, t.weight, t.bias, training=True),
    "batch_norm, tracking": lambda m, t: m.batch_norm(t.x, t.running_mean, t.running_var, t.weight, t.bias, training=True),
    "batch_norm, evaluation": lambda m, t: m.batch_norm(t.x, t.running_mean, t.running_var, t.weight, t.bias),
}


FUSED = ("group_norm, silu", "group_norm, modulated", "add_layer_norm")


LAST = ("layer_norm", "rms_norm", "add_layer_norm")  # channels are the last dimension


_zero: Any = torch._efficientzerotensor  # pyright: ignore[reportPrivateImportUsage]


def free(t: Tensor) -> Tensor:
    """As FSDP frees a parameter. torch's elementwise operations then end the process, so only we run such a program."""
    t.untyped_storage().resize_(0)
    return t


def _negative(t: Tensor) -> Tensor:
    found = (-t.detach())._neg_view()
    return found.requires_grad_(t.requires_grad)


def _assign(name: str, change: Callable[[Tensor], Tensor]) -> Callable[[Tensors], None]:
    def do(t: Tensors) -> None:
        target = getattr(t, name)
        if target is not None:
            target.data = change(target.data)

    return do


def _replace(name: str, change: Callable[[Tensor], Any]) -> Callable[[Tensors], None]:
    def do(t: Tensors) -> None:
        if getattr(t, name) is not None:
            setattr(t, name, change(getattr(t, name)))

    return do


def _in_place(name: str) -> Callable[[Tensors], None]:
    def do(t: Tensors) -> None:
        if getattr(t, name) is not None:
            with torch.no_grad():
                getattr(t, name).add_(1)

    return do


def _strided(t: Tensor) -> Tensor:
    return torch.stack([t, t], -1)[..., 0]


CONVERSIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "half": lambda t: t.half(),
    "bfloat16": lambda t: t.bfloat16(),
    "double": lambda t: t.double(),
    "shorter": lambda t: t[: max(t.shape[0] // 2, 1)].clone(),
    "longer": lambda t: torch.cat([t, t]),
    "strided": _strided,
    "cloned": torch.clone,
    "other values": lambda t: t + 1,
    "free": free,
}


# What happens to operands before the call, and between forward and backward.
BEFORE: dict[str, Callable[[Tensors], None]] = {
    **{f"{name} {how}": _replace(name, change) for name in ("x", "weight", "bias") for how, change in CONVERSIONS.items() if how != "free"},
    **{f"{name} freed": _replace(name, free) for name in ("x", "weight", "bias", "running_mean", "running_var")},
    **{f"{name} negative": _replace(name, _negative) for name in ("x", "weight", "bias", "running_mean")},
    **{f"{name} zero": _replace(name, lambda t: _zero(t.shape, dtype=t.dtype, device=t.device)) for name in ("weight", "bias")},
    **{f"{name} zeros": _replace(name, torch.zeros_like) for name in ("weight", "bias")},
    **{f"{name} meta": _replace(name, lambda t: t.to("meta")) for name in ("weight", "bias", "running_mean")},
    "weight a list": _replace("weight", lambda t: t.tolist()),
    "no running_var": _replace("running_var", lambda t: None),
    "no running_mean": _replace("running_mean", lambda t: None),
}


BETWEEN: dict[str, Callable[[Tensors], None]] = {
    **{f"{name}.data {how}": _assign(name, change) for name in ("x", "weight") for how, change in CONVERSIONS.items()},
    **{f"{name} in place": _in_place(name) for name in ("x", "weight", "bias", "running_mean", "running_var")},
    "running_mean.data half": _assign("running_mean", lambda t: t.half()),
}


HOOKS: dict[str, Callable[[Tensor], Any]] = {
    "same": lambda t: t,
    "clone": lambda t: t.clone(),
    "strided": _strided,
    "half": lambda t: t.half(),
    "double": lambda t: t.double(),
    "shorter": lambda t: t.flatten()[:1],
    "numpy": lambda t: torch.from_numpy(t.detach().double().numpy(force=True).copy()).to(t),
    "freed": lambda t: free(t.clone()),
}


CONVERTING = ("half", "bfloat16", "double", "shorter", "longer")


CONTEXTS = ("", "", "", "no_grad", "inference_mode", "checkpoint", "checkpoint, reentrant", "hooks", "hooks", "autocast", "default_device")


GRADIENTS: dict[str, Callable[[Tensor], Tensor]] = {
    "plain": lambda y: torch.linspace(-1, 1, y.numel(), device=y.device).view(y.shape).to(y.dtype),
    "strided": lambda y: _strided(GRADIENTS["plain"](y)),
    "expanded": lambda y: torch.full((), 0.5, dtype=y.dtype, device=y.device).expand(y.shape),
    "negative": lambda y: _negative(GRADIENTS["plain"](y)),
    "zero": lambda y: _zero(y.shape, dtype=y.dtype, device=y.device),
    "zeros": torch.zeros_like,
    "freed": lambda y: free(torch.zeros_like(y, requires_grad=False)),
    "short": lambda y: GRADIENTS["plain"](y)[:1],
    "double": lambda y: GRADIENTS["plain"](y).double(),
}


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda t: t,
    "transposed": lambda t: t.transpose(0, 1).contiguous().transpose(0, 1),
    "last": lambda t: t.movedim(1, -1).contiguous().movedim(-1, 1),
    "offset": lambda t: torch.cat([t.flatten()[:1], t.flatten()])[1:].view(t.shape),
    "strided": _strided,
    "expanded": lambda t: t[:1].expand(t.shape),
}


@dataclass(frozen=True)
class Program:
    op: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    wide: bool  # parameters in float32
    affine: str
    layout: str
    needs: tuple[bool, bool, bool]  # gradients of x, weight and bias
    before: str
    context: str
    hook: str
    between: str
    gradient: str
    twice: str  # "", "retain", "again" (without retaining), "create" (a second derivative)

    @property
    def name(self) -> str:
        words = [self.op, "x".join(map(str, self.shape)), str(self.dtype)[6:], self.layout, self.affine, f"needs {self.needs}"]
        words += [f"{k}: {v}" for k in ("before", "context", "hook", "between", "gradient", "twice") if (v := getattr(self, k))]
        return ", ".join(words)

    @property
    def freed(self) -> bool:
        return any("free" in word for word in (self.before, self.between, self.hook, self.gradient))


def draw(seed: int, index: int) -> Program:
    """A program, the same on every machine.

    Example: `draw(0, 17).name`
    """
    rng = Random(f"calls {seed} {index}")

    def one_of(chance: float, words: Any, otherwise: str = "") -> str:
        return rng.choice(list(words)) if rng.random() < chance else otherwise

    op = rng.choice(list(OPS))
    channels = rng.choice(CHANNELS)
    dims = rng.randint(2, 4) if op in LAST or op.startswith("batch_norm") else rng.randint(3, 4)
    others = [rng.choice((1, 2, 3, 5, 17)) for _ in range(dims - 1)]
    shape = (*others, channels) if op in LAST else (others[0], channels, *others[1:])
    context = rng.choice(CONTEXTS)
    hook = rng.choice(list(HOOKS)) if context == "hooks" else ""
    before = one_of(0.3, BEFORE)
    between = one_of(0.4, BETWEEN)
    layout = one_of(0.5, LAYOUTS, "contiguous")
    if between.endswith("other values") and (op in FUSED or op.startswith("instance_norm") or between.startswith("x")):
        between = ""  # torch goes on with what it computed or copied from the old ones
    if op in FUSED and before.endswith(CONVERTING):
        before = ""  # what several calls of torch's broadcast or promote, one call of ours refuses
    gradient = one_of(0.5, GRADIENTS, "plain")
    if op.startswith("group_norm") and layout == "last" and before.startswith("x"):
        before = ""  # x would be no leaf; see `needs` below
    if op.endswith("tracking") and before == "running_mean negative":
        before = ""  # torch's update of it is lost
    if hook and between.endswith("in place"):
        between = ""  # hooks switch torch's check of versions off
    if (
        sum("free" in word for word in (hook, before, between, gradient)) > 1
        or ("free" in before and between)
        or ("free" in before + between and hook)
    ):
        hook, between, gradient = hook and "same", "", "plain"  # torch's own operations around the norm would end the process
    # torch 2.13's backward of a channels-last group_norm ends the process where x needs no gradient.
    return Program(
        op=op,
        shape=shape,
        dtype=rng.choice((torch.float32, torch.float32, torch.bfloat16, torch.float16, torch.float64)),
        wide=rng.random() < 0.3,
        affine=rng.choice(("both", "both", "both", "weight", "none")),
        layout=layout,
        needs=(rng.random() < 0.8 or (op.startswith("group_norm") and layout == "last"), rng.random() < 0.7, rng.random() < 0.7),
        before=before,
        context=context,
        hook=hook,
        between=between,
        gradient=gradient,
        twice=one_of(0.3, ("retain", "again", "create")),
    )


def make(program: Program, seed: int, exact: bool = False, device: str = "cpu") -> Tensors:
    """Equal tensors at each call; `exact`: the same values in float64."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int, dtype: torch.dtype = program.dtype) -> Tensor:
        drawn = torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)
        return (drawn.double() if exact else drawn).to(device)

    channels = program.shape[-1] if program.op in LAST else program.shape[1]
    param = torch.float32 if program.wide and program.dtype in (torch.float16, torch.bfloat16) else program.dtype
    x = LAYOUTS[program.layout](normal(*program.shape)).detach().requires_grad_(program.needs[0])
    weight = normal(channels, dtype=param).requires_grad_(program.needs[1]) if program.affine in ("both", "weight") else None
    bias = normal(channels, dtype=param).requires_grad_(program.needs[2]) if program.affine == "both" else None
    if program.op == "rms_norm":
        bias = None
    if weight is not None and weight.requires_grad:
        weight = torch.nn.Parameter(weight.detach())
    running = normal(channels, dtype=param), normal(channels, dtype=param).abs() + 0.5
    return Tensors(x, weight, bias, normal(*program.shape), normal(program.shape[0], channels), *running)


class Outcome:
    """What a program gave, or the exception that ended it."""

    def __init__(self) -> None:
        self.values: dict[str, Tensor] = {}
        self.error: Exception | None = None


def execute(program: Program, module: Any, seed: int, exact: bool = False, device: str = "cpu") -> Outcome:
    """One program by torch's functional module or ours."""
    found, tensors = Outcome(), make(program, seed, exact, device)
    try:
        _steps(program, module, tensors, found.values)
    except Exception as error:  # which ones torch raises is what this looks at
        found.error = error
    return found


def _steps(program: Program, module: Any, tensors: Tensors, values: dict[str, Tensor]) -> None:
    if program.before:
        BEFORE[program.before](tensors)
    leaves, op = tensors.leaves, OPS[program.op]
    with ExitStack() as stack:
        if program.context in ("no_grad", "inference_mode"):
            stack.enter_context(getattr(torch, program.context)())
        elif program.context == "hooks":
            stack.enter_context(saved_tensors_hooks(lambda t: t, HOOKS[program.hook]))
        elif program.context == "autocast":
            stack.enter_context(torch.autocast("cpu", torch.bfloat16))
        elif program.context == "default_device":
            stack.enter_context(torch.device("meta"))
        if program.context.startswith("checkpoint"):
            reentrant = program.context.endswith("reentrant")
            output = checkpoint(lambda x: op(module, _with(tensors, x)), tensors.x, use_reentrant=reentrant)
        else:
            output = op(module, tensors)
    outputs = output if isinstance(output, tuple) else (output,)
    for name, t in zip(("y", "sum"), outputs):
        values[name] = t.detach().clone()
    if not program.freed:
        values |= {name: t.detach().clone() for name in ("running_mean", "running_var") if (t := getattr(tensors, name)) is not None}
    if program.between:
        BETWEEN[program.between](tensors)
    y = outputs[0]
    if not y.requires_grad:
        return
    create = program.twice == "create"
    retain = create or program.twice == "retain"
    grads = torch.autograd.grad(y, leaves, GRADIENTS[program.gradient](y.detach()), retain, create, allow_unused=True)
    values |= {f"gradient {i}": t.detach().clone() for i, t in enumerate(grads) if t is not None}
    if program.twice in ("retain", "again"):
        again = torch.autograd.grad(y, leaves, GRADIENTS["plain"](y.detach()), allow_unused=True)
        values |= {f"gradient {i} again": t for i, t in enumerate(again) if t is not None}
    elif create:
        total = sum(t.double().square().sum() for t in grads if t is not None and t.requires_grad)
        if isinstance(total, Tensor):
            second = torch.autograd.grad(total, leaves, allow_unused=True)
            values |= {f"second gradient {i}": t for i, t in enumerate(second) if t is not None}


def _with(tensors: Tensors, x: Tensor) -> Tensors:
    return Tensors(x, *(getattr(tensors, name) for name in list(tensors.__dataclass_fields__)[1:]))


def lenient(program: Program) -> bool:
    """Whether we may compute where torch raises: it saves or checks what its own gradient does not need."""
    return (
        program.between == "bias in place"
        or program.between.startswith("running")
        or "zero" in (program.gradient, *program.before.split())
        or program.layout == "expanded"
    )


def strict(program: Program) -> bool:
    """Whether we may raise where torch computes, since what we save is not what torch saves.

    - torch's instance_norm saves copies, and its group_norm of x in some layouts;
    - a fused backward takes z from the bias again;
    - torch's rms_norm saves x_hat, and its weight only where x needs a gradient;
    - other norms of torch go on with tensors of other sizes or dtypes where the gradient that is wanted does not show it.
    """
    return (
        (program.op.startswith("instance_norm") and bool(program.between))
        or (program.context == "checkpoint" and program.between == "x.data strided")  # other tensors are saved the second time
        or (program.layout != "contiguous" and program.between == "x in place")
        or (program.op in FUSED and program.between == "bias in place")
        or (program.op == "rms_norm" and program.between in ("x in place", "weight in place"))
        or converts(program)
    )


def converts(program: Program) -> bool:
    """Whether dtypes or sizes change between forward and backward."""
    return program.hook in CONVERTING or program.between.endswith(CONVERTING)


def by_torch(program: Program) -> Program:
    """The program without what changes no value.

    torch's group_norm reads other memory where x was laid out anew before a backward, or where a parameter or dy is a zero tensor; the
    backward of its batch_norm where the weight is strided.
    """
    gradient = "zeros" if program.gradient == "zero" else program.gradient
    hook = "same" if program.hook in ("clone", "strided", "numpy") else program.hook
    before = f"{program.before}s" if program.before.endswith("zero") else program.before.replace("strided", "cloned")
    between = "" if program.between.endswith("strided") else program.between
    return replace(program, hook=hook, before=before, between=between, gradient=gradient)


_ERRORS = (RuntimeError, TypeError, ValueError, IndexError)  # what torch's norms raise


def judge(program: Program, torchs: Outcome | None, ours: Outcome, exact: Callable[[], Outcome]) -> str:
    """What is wrong with our outcome, or "". Without torch's, it may be anything but a crash.

    Where the two differ, `exact`, in float64, says who is nearer.
    """
    if torchs is None:
        return "" if ours.error is None or isinstance(ours.error, _ERRORS) else f"we raise {ours.error!r:.150}"
    if torchs.error is not None:
        if ours.error is None:
            return "" if lenient(program) else f"torch raises {torchs.error!r:.150}, we do not"
        return "" if isinstance(ours.error, _ERRORS) else f"torch raises {torchs.error!r:.150}, we {ours.error!r:.150}"
    if ours.error is not None:
        return "" if strict(program) else f"torch does not raise, we {ours.error!r:.300}"
    if converts(program):  # both promote, each in its own order
        return ""
    if torchs.values.keys() != ours.values.keys():
        return f"torch has {sorted(torchs.values)}, we {sorted(ours.values)}"
    half = program.dtype in (torch.float16, torch.bfloat16) or program.before.endswith(CONVERTING[:2])
    compared = {name: t for name, t in torchs.values.items() if not (half and name.startswith("second"))}  # rounded twice
    dtype = program.dtype if not half else torch.bfloat16
    wrong = {name: error for name, t in compared.items() if (error := _differs(name, ours.values[name], t, dtype))}
    if wrong and program.dtype != torch.float64:
        right = exact().values
        for name in [name for name in wrong if name in right]:
            if _no_farther(ours.values[name], torchs.values[name], right[name]):
                del wrong[name]
    return "; ".join(wrong.values())


def _no_farther(ours: Tensor, torchs: Tensor, right: Tensor) -> bool:
    """Whether ours is at most four times as far from what is right as torch's: both round, in other orders."""
    if not ours.shape == torchs.shape == right.shape or ours.dtype != torchs.dtype:
        return False
    distances = [(t.double() - right.double()).abs().nan_to_num(nan=torch.inf).max().item() for t in (ours, torchs)]
    return distances[0] <= 4 * distances[1]


def _differs(name: str, ours: Tensor, torchs: Tensor, dtype: torch.dtype) -> str:
    if ours.shape != torchs.shape or ours.dtype != torchs.dtype or ours.device != torchs.device:
        return f"{name}: {ours.dtype} {list(ours.shape)} {ours.device}, torch's {torchs.dtype} {list(torchs.shape)} {torchs.device}"
    if ours.is_meta or not ours.numel():
        return ""
    a, b = ours.double(), torchs.double()
    odd = ~b.isfinite()
    if not torch.equal(~a.isfinite(), odd):
        return f"{name}: {int((~a.isfinite()).sum())} elements are not finite, torch's {int(odd.sum())}"
    size, error = (t[~odd].abs().max().item() if not odd.all() else 0.0 for t in (b, a - b))
    allowed = max(TOLERANCE[ours.dtype], TOLERANCE[dtype]) * max(size, 1.0) * (10 if "second" in name else 1)
    return "" if error <= allowed else f"{name}: off by {error:.3g}, allowed {allowed:.3g}"


RAW = ("residual", "scale", "shift", "weight", "bias", "mean", "var", "dy", "dsum", "rstd")


def raw(seed: int, index: int, device: str = "cpu") -> str:
    """A registered op with one operand of a wrong size: it must raise."""
    rng = Random(f"raw {seed} {index}")
    rows, width = rng.randint(1, 9), rng.choice((3, 16, 65, 300))
    wrong = rng.choice(RAW)
    sizes = {"residual": (rows, width), "scale": (rows, width), "shift": (rows, width), "weight": (width,), "bias": (width,)}
    sizes |= {"mean": (rows,), "var": (rows,), "dy": (rows, width), "dsum": (rows, width), "rstd": (rows,)}

    def operand(name: str, there: bool = True) -> Tensor | None:
        if not there and name != wrong:
            return None
        shape = sizes[name]
        if name == wrong:
            at = rng.randrange(len(shape))
            shape = tuple(n + rng.choice((-1, 1, n, -n)) if i == at else n for i, n in enumerate(shape))
        return torch.randn(shape, device=device)

    definition = norms.layer_norm(1, modulated=True)
    x = torch.randn(rows, width, device=device)
    weight, bias = operand("weight"), operand("bias")
    extras = operand("scale"), operand("shift"), None, None, None, None
    try:
        if wrong in ("dy", "dsum", "rstd") or (wrong != "residual" and wrong != "var" and rng.random() < 0.5):
            needs = [True] * 5 + [False] * 2
            residual = operand("dsum", rng.random() < 0.5)
            torch.ops.onepass.norm_backward(
                operand("dy"), x, weight, bias, operand("mean"), operand("rstd"), *definition.pack(), False, needs, None, residual, *extras
            )
        else:
            given = wrong in ("mean", "var")
            mean, var = (operand("mean"), operand("var")) if given else (None, None)
            torch.ops.onepass.norm(x, weight, bias, mean, var, *definition.pack(), False, operand("residual", rng.random() < 0.5), *extras)
    except (ValueError, RuntimeError):
        return ""
    return f"{wrong} of a wrong size was taken"


def run(seed: int, index: int, device: str = "cpu") -> str:
    """What is wrong with a program, or ""."""
    if index % 10 == 9:
        return raw(seed, index, device)
    program = draw(seed, index)
    reference = by_torch(program)
    torchs = None if program.freed else execute(reference, F, index, device=device)
    exact = replace(reference, before="" if reference.before.endswith(CONVERTING[:3]) else reference.before)
    return judge(program, torchs, execute(program, O, index, device=device), lambda: execute(exact, F, index, True, device))


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fuzz_calls", description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--start", type=int, default=0, help="the first index")
    parser.add_argument("--only", type=int, help="one index")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--loud", action="store_true", help="name each program before it runs")
    options = parser.parse_args(arguments)
    indices = range(options.start, options.start + options.count) if options.only is None else [options.only]
    failed, started = 0, time.perf_counter()
    for index in indices:
        if options.loud:
            print(index, "raw" if index % 10 == 9 else draw(options.seed, index).name, flush=True)
        wrong = run(options.seed, index, options.device)
        if wrong:
            failed += 1
            print(f"{index} {'raw' if index % 10 == 9 else draw(options.seed, index).name}: {wrong}", flush=True)
        if (index + 1) % 1000 == 0:
            print(f"{index + 1}: {failed} failed, {time.perf_counter() - started:.0f} s", file=sys.stderr)
    print(f"{len(indices)} programs, seed {options.seed}: {failed} failed, {time.perf_counter() - started:.0f} s")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
