"""How torch.fx sees our modules: as torch.nn's, which it traces as one call of a module.

Tools of torch.fx look for the exact classes of torch.nn, for example to fold a BatchNorm into the convolution before it. So a
GraphModule gets a twin of a BatchNorm of ours: a module of torch's class that shares all attributes with it.
"""

from __future__ import annotations

import sys
from typing import Any

from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook

from onepass.check.arguments import require_tensor

_installed: list[Any] = []


def is_proxy(input: Any) -> bool:
    """Return whether `input` stands for a tensor in a trace of torch.fx. Raise TypeError if it is no kind of tensor."""
    fx = sys.modules.get("torch.fx.proxy")
    if fx is not None and isinstance(input, fx.Proxy):
        return True
    if not hasattr(type(input), "__torch_function__"):
        require_tensor(input)
    return False


def as_call_of_module(module: nn.Module, input: Any, modulate: Any, activation: str | None) -> Any:
    """Return what a traced call of the module returns, as for a module of torch.nn. `input` is a proxy."""
    use_twins()
    given = {"modulate": modulate, "activation": activation}
    keywords = {name: value for name, value in given.items() if value is not None}
    if keywords:
        module._twin_class = None  # pyright: ignore[reportArgumentType], torch's class does not take them
    return input.tracer.create_proxy("call_module", input.tracer.path_of_module(module), (input,), keywords)


def use_twins() -> None:
    """Give twins to all GraphModules from now on."""
    if not _installed:
        _installed.append(register_module_module_registration_hook(_twin_in_graph_module))  # pyright: ignore[reportArgumentType]


def _twin_in_graph_module(parent: nn.Module, name: str, child: nn.Module | None) -> nn.Module | None:
    """Return a twin if a GraphModule is being made, and `child` has one. Return None to leave the child as it is."""
    twin_class = getattr(child, "_twin_class", None)
    if twin_class is None or sys._getframe(2).f_code.co_name != "_copy_attr":  # a function of torch.fx
        return None
    if child.activation or child.channel_dim != 1:  # pyright: ignore[reportOptionalMemberAccess]
        return None
    twin = object.__new__(twin_class)
    twin.__dict__ = child.__dict__
    return twin
