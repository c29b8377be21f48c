"""Each activation as three torch functions: the plain function, the function with `out=`, and its gradient."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

_aten = torch.ops.aten


def _silu_gradient(dy: Tensor, z: Tensor) -> Tensor:
    if not torch.is_grad_enabled():
        return _aten.silu_backward(dy, z)  # one kernel instead of several, but autograd cannot differentiate it
    sigmoid = torch.sigmoid(z)
    return dy * sigmoid * (1 + z * (1 - sigmoid))


class Activation(NamedTuple):
    apply: Callable[[Tensor], Tensor]
    into: Callable[..., Tensor]  # as `apply`, but writes to the tensor `out`
    gradient: Callable[[Tensor, Tensor], Tensor]  # (dy, z) -> dz, for y = apply(z)


_TANH: Any = {"approximate": "tanh"}


ACTIVATION_FUNCTIONS = {
    "silu": Activation(F.silu, _aten.silu.out, _silu_gradient),
    "relu": Activation(F.relu, _aten.relu.out, lambda dy, z: _aten.threshold_backward(dy, z, 0)),
    "gelu": Activation(F.gelu, _aten.gelu.out, _aten.gelu_backward),
    "gelu_tanh": Activation(partial(F.gelu, **_TANH), partial(_aten.gelu.out, **_TANH), partial(_aten.gelu_backward, **_TANH)),
}
