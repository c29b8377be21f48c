"""What the graph passes share: nodes of our op `onepass::norm`, and torch's calls of activations."""

from __future__ import annotations

import operator
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

from onepass.core.operands import OptionalOperands

OP_FIELDS = ("x", "weight", "bias", "mean", "var", "words", "sizes", "eps", "weight_offset", "track", *OptionalOperands._fields)
WORDS, VAR, RESIDUAL = (OP_FIELDS.index(name) for name in ("words", "var", "residual"))  # places of arguments
Y, SUM = 0, 4  # places of results

# For each activation, the calls that compute it: a function and its arguments besides the tensor.
ACTIVATION_CALLS: dict[str, list[tuple[Any, dict[str, Any]]]] = {
    "silu": [(F.silu, {})],
    "relu": [(F.relu, {}), (torch.relu, {})],
    "gelu": [(F.gelu, {}), (F.gelu, {"approximate": "none"})],
    "gelu_tanh": [(F.gelu, {"approximate": "tanh"})],
}


def is_norm(node: fx.Node) -> bool:
    """Return whether a node calls our op."""
    return node.op == "call_function" and node.target in (torch.ops.onepass.norm, torch.ops.onepass.norm.default)


def results_at(node: fx.Node, place: int) -> list[fx.Node]:
    """Return the nodes that take the result at this place."""
    return [user for user in node.users if user.target is operator.getitem and user.args[1] == place]


def value_of(argument: Any) -> Any:
    """Return the fake tensor that dynamo computed for a node, or None for a missing operand."""
    return argument.meta.get("example_value") if isinstance(argument, fx.Node) else None
