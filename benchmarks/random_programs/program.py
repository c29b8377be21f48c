"""Draws a random program, makes its tensors, and runs it with torch or with onepass.

A program is one call of a norm, and what happens to its tensors before the call and before the backward.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from random import Random
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from .calls import CHANNELS, FUSED, LAST, OPS, Tensors
from .changes import BEFORE, BETWEEN, CONTEXTS, CONVERTING, GRADIENTS, HOOKS, LAYOUTS


@dataclass(frozen=True)
class Program:
    op: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    wide: bool  # parameters in float32 even if x is float16 or bfloat16
    affine: str
    layout: str
    needs: tuple[bool, bool, bool]  # whether x, weight and bias need a gradient
    before: str
    context: str
    hook: str
    between: str
    gradient: str
    twice: str  # a second backward: "" none, "retain" the graph, "again" without retaining it, "create" a second derivative

    @property
    def name(self) -> str:
        words = [self.op, "x".join(map(str, self.shape)), str(self.dtype)[6:], self.layout, self.affine, f"needs {self.needs}"]
        words += [f"{k}: {v}" for k in ("before", "context", "hook", "between", "gradient", "twice") if (v := getattr(self, k))]
        return ", ".join(words)

    @property
    def freed(self) -> bool:
        return any("free" in word for word in (self.before, self.between, self.hook, self.gradient))


def draw(seed: int, index: int) -> Program:
    """Return program number `index`. It is the same on every machine.

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
        between = ""  # torch's backward would use what it computed or copied before the change
    if op in FUSED and before.endswith(CONVERTING):
        before = ""  # torch's separate operations broadcast or promote, where our fused call raises
    gradient = one_of(0.5, GRADIENTS, "plain")
    if op.startswith("group_norm") and layout == "last" and before.startswith("x"):
        before = ""  # x would be no leaf, so that no gradient of x is asked for: see the comment below
    if op.endswith("tracking") and before == "running_mean negative":
        before = ""  # torch's update of such a running_mean has no effect
    if hook and between.endswith("in place"):
        between = ""  # with hooks, torch does not notice changes in place
    if (
        sum("free" in word for word in (hook, before, between, gradient)) > 1
        or ("free" in before and between)
        or ("free" in before + between and hook)
    ):
        hook, between, gradient = hook and "same", "", "plain"  # torch's own operations around the norm would crash
    # x of a channels-last group_norm always needs a gradient: without one, the backward of torch 2.13 crashes.
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
    """Return the tensors of a program. Each call returns equal tensors. With `exact`, they are converted to float64."""
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
    """What a program computed, or the exception it raised."""

    def __init__(self) -> None:
        self.values: dict[str, Tensor] = {}
        self.error: Exception | None = None


def execute(program: Program, module: Any, seed: int, exact: bool = False, device: str = "cpu") -> Outcome:
    """Run a program with `module`, which is torch.nn.functional or onepass.functional, and return its Outcome."""
    found, tensors = Outcome(), make(program, seed, exact, device)
    try:
        _steps(program, module, tensors, found.values)
    except Exception as error:  # exceptions are part of what is compared
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
