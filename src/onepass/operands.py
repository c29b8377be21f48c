"""Whether a kernel may be handed these tensors: it indexes memory by the problem's sizes, and trusts the addresses it gets.

What users pass to a function is checked in `check.py`, with better words. Here is what else reaches a kernel: the operands of a registered
op, tensors that changed between a call and its backward, and tensors without memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from .check import FLOATS, SCALAR
from .memory import require_memory_if_shown
from .problem import Extras, NormProblem, ParamMap, View
from .spec import NormSpec


def has_negative_bit(*operands: Tensor | None) -> bool:
    """Whether memory holds the negative of what one of these tensors shows."""
    return True in [t.is_neg() for t in operands if t is not None]


def check_forward(
    problem: NormProblem,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor | None,
    var: Tensor | None,
    extras: Extras,
) -> None:
    """Every operand of a forward against its problem."""
    _check_common(problem, x, weight, bias, extras)
    sets = prod(problem.stat_shape)
    _sized("mean", mean, sets, "one for each set")
    _sized("var", var, sets, "one for each set")
    if problem.given and problem.spec.centered and mean is None:
        raise ValueError("mean is None, expected the mean that belongs to var: pass both, or neither to compute them")
    if mean is not None and not problem.given:
        raise ValueError("var is None, expected the variance that belongs to mean: pass both, or neither to compute them")
    _shaped("residual", extras.residual, x)
    _on_device(x, {"mean": mean, "var": var})


def check_backward(
    problem: NormProblem,
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor | None,
    rstd: Tensor,
    extras: Extras,
    var: Tensor | None,
) -> None:
    """Every operand of a backward against its problem. In the place of the residual stands dsum, the gradient of the sum."""
    _check_common(problem, x, weight, bias, extras)
    sets = prod(problem.stat_shape)
    for name, t in {"mean": mean, "rstd": rstd, "var": var}.items():
        _sized(name, t, sets, "one for each set")
    if problem.spec.centered and not problem.from_y and mean is None:
        raise ValueError("mean is None, expected the mean of each set that the forward returned")
    if problem.spec.mix and var is None:
        raise ValueError("var is None, expected the variance of each set that the forward returned")
    _shaped("dy", dy, x)
    _shaped("dsum", extras.residual, x)
    if dy.dtype != x.dtype:
        raise RuntimeError(f"dy has dtype {dy.dtype}, expected {x.dtype}, that of x: convert it with dy.to({x.dtype})")
    _on_device(x, {"dy": dy, "mean": mean, "rstd": rstd, "var": var})


def check_sizes(spec: NormSpec) -> None:
    """The factors of a spec that came as plain numbers."""
    for name, size in spec.sizes:
        if size < 1:
            raise ValueError(f"sizes gives {name} = {size}, expected at least 1")


def _check_common(problem: NormProblem, x: Tensor, weight: Tensor | None, bias: Tensor | None, extras: Extras) -> None:
    _floating("x", x)
    _indexed("weight", weight, problem.param, problem.x, problem.param_size)
    _indexed("bias", bias, problem.param, problem.x, problem.param_size)
    _indexed("scale", extras.scale, problem.modulation, problem.x, problem.modulation_size)
    _indexed("shift", extras.shift, problem.modulation, problem.x, problem.modulation_size)
    norms = len(problem.spec.mix.split(",")) if problem.spec.mix else 0
    for name in ("mean_weight", "var_weight"):
        weights = getattr(extras, name)
        _sized(name, weights, norms, "one for each norm of the mix")
        if norms and weights is None:
            raise ValueError(f"{name} is None, expected {norms} elements, one for each norm of the mix")
    if (extras.running_mean is None) != (extras.running_var is None):
        raise ValueError("expected running_mean and running_var both or neither: one of them is None")
    _on_device(x, {"weight": weight, "bias": bias, **extras._asdict()})


def _indexed(name: str, t: Tensor | None, map_: ParamMap | None, view: View | None, size: int) -> None:
    """A parameter: it has as many elements as the spec says, and no index of the map passes its end."""
    _sized(name, t, size, "as the spec says")
    if t is None or map_ is None or view is None:
        return
    largest = map_.largest(view.reps, view.sets, view.run)
    if largest >= size:
        raise ValueError(f"{name} has {size} elements, and the spec indexes element {largest}: an axis stands twice in its words")


def _sized(name: str, t: Tensor | None, size: int, why: str) -> None:
    if t is None:
        return
    if t.numel() != size:
        raise ValueError(f"{name} has shape {list(t.shape)}, expected {size} elements, {why}")
    _floating(name, t)


def _shaped(name: str, t: Tensor | None, x: Tensor) -> None:
    if t is None:
        return
    if t.shape != x.shape:
        raise ValueError(f"{name} has shape {list(t.shape)}, expected {list(x.shape)}, the shape of x")
    _floating(name, t)


def _floating(name: str, t: Tensor) -> None:
    if t.layout != torch.strided or t.dtype not in FLOATS:
        raise NotImplementedError(
            f"{name} has layout {t.layout} and dtype {t.dtype}, expected a strided tensor of float64, float32, bfloat16 or float16"
        )


def _on_device(x: Tensor, operands: Mapping[str, Tensor | None]) -> None:
    for name, t in operands.items():
        if t is not None and t.device != x.device:
            raise RuntimeError(f"{name} is on {t.device}, expected {x.device}, where x is: move it with .to({str(x.device)!r})")


# A batch of gradients, as `is_grads_batched` makes of them by a vmap that is not functorch's.
batched: Callable[[Tensor], bool] = torch._C._functorch.is_legacy_batchedtensor  # pyright: ignore[reportAttributeAccessIssue]

Signature = tuple[torch.dtype, torch.Size, torch.device]

SAVED = ("input", "weight", "bias", "mean", "rstd", "var", "scale", "shift", "mean_weight", "var_weight", "running_mean", "running_var")
SAVED_BRIEFLY = ("input", "weight", "bias", "statistics")  # by calls with nothing else


def signatures(tensors: Sequence[Tensor | None]) -> list[Signature | None]:
    """What launchers rely on, beside the strides of x."""
    return [None if t is None else (t.dtype, t.shape, t.device) for t in tensors]


def as_saved(spec: NormSpec, saved: Sequence[Tensor | None], were: Sequence[Signature | None]) -> list[Any]:
    """What a backward unpacked, where that is not what was saved, as a kernel may take it; raises where none may.

    Module.half(), an assignment to .data and hooks on saved tensors all change tensors behind the graph's back.
    """
    found: list[Any] = []
    for name, t, was in zip(SAVED_BRIEFLY if len(saved) == len(SAVED_BRIEFLY) else SAVED, saved, were):
        now = None if t is None else (t.dtype, t.shape, t.device)
        if t is not None and now and was and now[1:] == was[1:] and not spec.centered and t.is_cpu:
            require_memory_if_shown((name,), (t,))
            t = t.to(was[0])  # as torch's backward of a norm without a mean does on a CPU; all others raise
        elif now != was:
            raise RuntimeError(
                f"{_converted(was, now)}{name} was {_in_words(was)} in the forward and is {_in_words(now)} in the backward: call "
                "backward() before you convert, move or replace it, and return from hooks on saved tensors what was saved"
            )
        found.append(t)
    return found


def check_gradient(name: str, gradient: Tensor | None, problem: NormProblem, device: torch.device) -> None:
    """torch's engine checks the gradients that arrive; a node that is called directly may be handed anything."""
    if gradient is None or (gradient.shape == problem.shape and gradient.dtype is problem.dtype and gradient.device == device):
        return
    if batched(gradient):
        return
    now, expected = (gradient.dtype, gradient.shape, gradient.device), (problem.dtype, torch.Size(problem.shape), device)
    raise RuntimeError(f"{name} is {_in_words(now)}, expected {_in_words(expected)}, as the output is")


def _converted(was: Signature | None, now: Signature | None) -> str:
    """torch's phrase, where the dtype has changed."""
    if was is None or now is None or was[0] == now[0]:
        return ""
    return f"expected scalar type {SCALAR[was[0]]} but found {SCALAR.get(now[0], now[0])}; "


def _in_words(signature: Signature | None) -> str:
    if signature is None:
        return "None"
    dtype, shape, device = signature
    return f"{dtype} of shape {list(shape)} on {device}"
