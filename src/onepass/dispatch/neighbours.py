"""Find the neighbours that inductor would fuse with a norm, and count the memory traffic that this would save."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import fx

from .graph_nodes import RESIDUAL, Y, results_at, value_of


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Names of functions, methods and operators that compute each element on its own. Their in-place forms count, too: `_name` removes
# the "_" of `add_`, and operators such as `iadd` are listed.
ELEMENTWISE = _words(
    "add sub rsub mul div truediv neg pow square sqrt rsqrt exp log abs clamp where maximum minimum sigmoid tanh erf sin cos addcmul "
    "lerp relu relu6 silu gelu elu selu celu leaky_relu mish softplus hardswish hardsigmoid hardtanh logsigmoid dropout alpha_dropout "
    "to type type_as float half bfloat16 double iadd isub imul itruediv"
)
NEED_STRIDES = _words("view view_as as_strided")
OWN_LAYOUT = _words(
    "conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d linear matmul mm bmm addmm baddbmm einsum "
    "scaled_dot_product_attention reshape contiguous"
)
VIEWS = _words("view reshape permute transpose movedim flatten unflatten unsqueeze squeeze expand chunk split getitem contiguous unbind t")


def moves_saved_by_fusion(node: fx.Node) -> int:
    """Return how many reads and writes of a tensor as large as x fusion by inductor would save.

    If an elementwise operation makes x, fusion saves reading x. If only the norm uses x, it also saves writing x. The same holds for y
    and the elementwise operations that use it.
    """
    before = sum(_saved_before(node, operand) for operand in (node.args[0], node.args[RESIDUAL]) if isinstance(operand, fx.Node))
    users = [user for y in results_at(node, Y) for user in _users(y)]
    fused = [user for user in users if _name(user) in ELEMENTWISE]
    return before + (0 if not fused else 2 if len(fused) == len(users) else 1)


def a_view_follows(node: fx.Node) -> bool:
    """Return whether a later node may be a view that needs the strides of this node's result.

    Convolutions, matrix products and copies make layouts of their own. Other operations pass the layout on.
    """
    waiting, seen = list(node.users), set[fx.Node]()
    while waiting:
        user = waiting.pop()
        if _name(user) in NEED_STRIDES:
            return True
        if user not in seen and _name(user) not in OWN_LAYOUT:
            seen.add(user)
            waiting += user.users
    return False


def _saved_before(norm: fx.Node, operand: fx.Node) -> int:
    source = operand
    while _name(source) in VIEWS and source.all_input_nodes:
        source = source.all_input_nodes[0]
    if _name(source) not in ELEMENTWISE or _size(source) != _size(operand):
        return 0
    return 2 if all(user is norm for user in _users(source)) else 1


def _users(node: fx.Node) -> Iterator[fx.Node]:
    """Yield the nodes that use the result of a node, or a view of it."""
    for user in node.users:
        if _name(user) in VIEWS:
            yield from _users(user)
        else:
            yield user


def _name(node: fx.Node) -> str:
    """Return the name of the operation without a trailing "_", or "" for a node that is no operation."""
    if node.op not in ("call_function", "call_method"):
        return ""
    return str(getattr(node.target, "__name__", node.target)).rstrip("_")


def _size(node: fx.Node) -> Any:
    value = value_of(node)
    return None if value is None else value.numel()
