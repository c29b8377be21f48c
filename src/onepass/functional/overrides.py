"""How torch changes a call before it runs: types with their own `__torch_function__`, and CUDA autocast."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

from onepass.check.arguments import require_tensor


def has_override(input: Any) -> bool:
    """Whether the type of input handles calls itself, as a proxy of torch.fx does."""
    if has_torch_function((input,)):
        return True
    require_tensor(input)
    return False


def call_override(function: Callable[..., Any], arguments: dict[str, Any]) -> Any:
    return handle_torch_function(function, (arguments["input"],), **arguments)


def autocasts_to_float32(x: Tensor) -> bool:
    """Whether torch would run layer_norm and group_norm in float32 now: under CUDA autocast.

    Autocast does not affect torch's other norms, nor any norm on a CPU.
    """
    return x.is_cuda and torch.is_autocast_enabled("cuda") and x.dtype != torch.float64


def autocast(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """The tensors, converted to float32 where torch's layer_norm and group_norm would convert them."""
    if not autocasts_to_float32(x):
        return x, weight, bias
    return x.float(), None if weight is None else weight.float(), None if bias is None else bias.float()
