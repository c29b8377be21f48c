"""Calls the ops of `torch.ops.onepass` with one operand of a wrong size. Every such call must raise."""

from __future__ import annotations

from random import Random

import torch
from torch import Tensor

from onepass.core import norms

RAW = ("residual", "scale", "shift", "weight", "bias", "mean", "var", "dy", "dsum", "rstd")


def is_raw(index: int) -> bool:
    """Return whether the program with this number calls the registered ops directly: every tenth does."""
    return index % 10 == 9


def raw(seed: int, index: int, device: str = "cpu") -> str:
    """Call an op with one operand of a wrong size. Return "" if the op raises, and a complaint if it does not."""
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
    return f"{wrong} has a wrong size, and the op did not raise"
