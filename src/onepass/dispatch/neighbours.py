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
CONVOLUTIONS = _words("conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d")
OWN_LAYOUT = CONVOLUTIONS | _words("linear matmul mm bmm addmm baddbmm einsum scaled_dot_product_attention reshape contiguous")
PERMUTATIONS = _words("permute transpose movedim")
VIEWS = PERMUTATIONS | _words("view reshape flatten unflatten unsqueeze squeeze expand chunk split getitem contiguous unbind t")


def moves_saved_by_fusion(node: fx.Node) -> int:
    """Return how many reads and writes of a tensor as large as x fusion by inductor would save.

    If an elementwise operation makes x, fusion saves reading x. If only the norm uses x, it also saves writing x. The same holds for y
    and the elementwise operations that use it.
    """
    before = sum(_saved_before(node, operand) for operand in (node.args[0], node.args[RESIDUAL]) if isinstance(operand, fx.Node))
    users = [user for y in results_at(node, Y) for user in _users(y)]
    fused = [user for user in users if _name(user) in ELEMENTWISE]
    return before + (0 if not fused else 2 if len(fused) == len(users) else 1)


def bias_is_added_before(node: fx.Node) -> bool:
    """Return whether x comes from a convolution whose bias inductor would add inside the norm's kernel.

    On a CPU, the convolution adds it.
    """
    operand = node.args[0]
    if not isinstance(operand, fx.Node):
        return False
    source, value = _source(operand), value_of(operand)
    bias = source.args[2] if len(source.args) > 2 else source.kwargs.get("bias")
    return _name(source) in CONVOLUTIONS and bias is not None and value is not None and value.device.type != "cpu"


def would_be_copied(node: fx.Node) -> bool:
    """Return whether inductor would copy x before and after this norm if onepass computed it in training.

    Then x is saved for the backward. In a graph with convolutions, inductor saves tensors with four dimensions as channels-last. It goes
    by their own dimensions, also if x is a permuted view whose last dimension has the channels.
    """
    operand = node.args[0]
    if not isinstance(operand, fx.Node) or _name(operand) not in PERMUTATIONS or getattr(value_of(operand), "ndim", 0) != 4:
        return False
    return any(_name(other) in CONVOLUTIONS for other in node.graph.nodes)


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
    source = _source(operand)
    if _name(source) not in ELEMENTWISE or _size(source) != _size(operand):
        return 0
    return 2 if all(user is norm for user in _users(source)) else 1


def _source(node: fx.Node) -> fx.Node:
    """If this node is a view, return the node that computes its values. Otherwise, return the node itself."""
    while _name(node) in VIEWS and node.all_input_nodes:
        node = node.all_input_nodes[0]
    return node


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
