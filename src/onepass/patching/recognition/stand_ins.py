"""Stand-ins: copies of a module with random tensors on the CPU. Trials (trials.py) run on stand-ins.

Trials never read or change the tensors of the module itself. So the module may be on the meta device, or sharded.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from onepass.patching.guards import COMMON_ATTRIBUTES, is_plain


def own_parameters(module: nn.Module) -> dict[str, Tensor]:
    return {name: param for name, param in module._parameters.items() if param is not None}


def trial_key(module: nn.Module) -> Any:
    """Return the key under which the result of a trial is cached. Modules with equal keys share one trial.

    The key holds the class of a module, the shapes of its tensors, its attributes, and the keys of its children.
    """
    tensors = [(name, None if t is None else tuple(t.shape)) for name, t in (*module._parameters.items(), *module._buffers.items())]
    return (
        type(module),
        type(module).forward,
        tuple(tensors),
        tuple(_attribute_keys(module)),
        tuple(trial_key(child) for child in module.children()),
    )


def _attribute_keys(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield (name, key) for the attributes that a module has in addition to those of nn.Module.

    Keys of plain values, such as numbers and strings, compare by value; all others compare by identity.
    """
    for name, value in sorted(module.__dict__.items()):
        if name not in COMMON_ATTRIBUTES:
            yield name, repr(value) if is_plain(value) else _ByIdentity(value)


def plain_attributes(module: nn.Module) -> list[tuple[str, Any]]:
    return [(name, value) for name, value in module.__dict__.items() if name not in COMMON_ATTRIBUTES and is_plain(value)]


class _ByIdentity:
    """A key for an object, compared by identity. The key keeps the object alive, so that no other object gets its id."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _ByIdentity) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)


def stand_in(module: nn.Module, cls: type[nn.Module], dtype: torch.dtype = torch.float32, scale: float = 1.0) -> nn.Module:
    """Return a module of class `cls` with copies of the attributes of `module`, and with random parameters and buffers."""
    twin = object.__new__(cls)
    twin.__dict__.update({name: _try_copy(value) if name not in COMMON_ATTRIBUTES else value for name, value in module.__dict__.items()})
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


def _try_copy(value: Any) -> Any:
    try:
        return copy.deepcopy(value)
    except Exception:
        return value


def isolated() -> Any:
    """Return a context for trials. In it the user's torch settings do not affect trials, and trials do not change them."""
    stack = ExitStack()
    stack.enter_context(warnings.catch_warnings())
    warnings.simplefilter("ignore")  # the model itself would not cause these warnings
    contexts = [torch.random.fork_rng(devices=[]), torch.autocast("cpu", enabled=False), torch.inference_mode(False), torch.enable_grad()]
    if torch.get_default_device().type != "cpu":
        contexts.append(torch.device("cpu"))
    for context in contexts:
        stack.enter_context(context)
    return stack
