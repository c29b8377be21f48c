"""A graph pass for torch.compile that merges the neighbours of a norm into it, before autograd sees the graph.

    add → norm → silu      becomes      norm, with a residual and an activation

`fuse_neighbours` changes only graphs with a norm of ours. In these, it also takes over torch's group_norm where an activation
follows. For inductor, inductor_pass.py calls it. Other compilers can call it, too.
"""

from __future__ import annotations

import inspect
import operator

import torch
import torch.nn.functional as F
from torch import fx

from .compiled_choice import strides_of, to_ours, under_autocast, without_memory
from .graph_nodes import ACTIVATION_CALLS, RESIDUAL, SUM, VAR, WORDS, Y, is_norm, results_at, value_of

# Operators that change their operand in place. Their functions and the methods of tensors have these names, such as `__iadd__`.
_IN_PLACE = {"iadd", "isub", "imul", "imatmul", "itruediv", "ifloordiv", "imod", "ipow", "ilshift", "irshift", "iand", "ixor", "ior"}
_IN_PLACE |= {"setitem", "delitem", "iconcat"}
_MODES = ("grad_enabled", "autocast", "inference_mode", "no_grad")


def fuse_neighbours(graph: fx.Graph) -> int:
    """Merge sums before our norms and activations after them into the norms. Return the number of changes."""
    merged = 0
    if not any(is_norm(node) for node in graph.nodes):
        return 0
    for node in [] if under_autocast(graph) else list(graph.nodes):
        if node.target is F.group_norm and len(node.users) == 1 and _activation(next(iter(node.users))):
            merged += to_ours(graph, node)
    for node in list(graph.nodes):
        if is_norm(node):
            merged += _take_activation(graph, node) + _take_sum(graph, node)
    return merged


def _activation(node: fx.Node) -> str:
    """Return the activation that a node computes, such as "silu", or "" if it is none of ACTIVATION_CALLS."""
    if node.op != "call_function" or len(node.args) != 1:
        return ""
    call = node.target, {key: value for key, value in node.kwargs.items() if key != "inplace"}
    return next((name for name, calls in ACTIVATION_CALLS.items() if call in calls), "")


def _take_activation(graph: fx.Graph, node: fx.Node) -> bool:
    outputs = results_at(node, Y)
    users = [user for y in outputs for user in y.users]
    name = _activation(users[0]) if len(users) == 1 else ""
    if not name or not _nothing_changes_between(node, users[0]):
        return False
    axes, reduced, params, names, modulated, mix, activation, *flags = [word.strip() for word in str(node.args[WORDS]).split("|")]
    if activation or "from_y" in flags:
        return False
    node.update_arg(WORDS, " | ".join([axes, reduced, params, names, modulated, mix, name, *flags]))
    users[0].replace_all_uses_with(outputs[0])
    graph.erase_node(users[0])
    return True


def _take_sum(graph: fx.Graph, node: fx.Node) -> bool:
    total, order = node.args[0], {other: i for i, other in enumerate(graph.nodes)}
    if not isinstance(total, fx.Node) or node.args[RESIDUAL] is not None or node.args[VAR] is not None or not _is_sum(total):
        return False
    others = [arg for arg in node.all_input_nodes if arg is not total]  # tensors and symbolic sizes
    if not _nothing_changes_between(total, node):
        return False
    if any(order[arg] > order[total] for arg in others) or any(is_norm(user) and order[user] < order[node] for user in total.users):
        return False  # an operand is computed after the sum, or an earlier norm uses the sum
    with graph.inserting_after(total):
        args = [total.args[0], *node.args[1:]]
        args[RESIDUAL] = total.args[1]
        norm = graph.call_function(node.target, tuple(args))  # pyright: ignore[reportArgumentType]
    with graph.inserting_after(norm):
        added = graph.call_function(operator.getitem, (norm, SUM))
    added.meta, norm.meta = dict(total.meta), dict(node.meta)
    node.replace_all_uses_with(norm)
    graph.erase_node(node)
    total.replace_all_uses_with(added, delete_user_cb=lambda user: user is not norm)
    graph.erase_node(total)
    return True


def _nothing_changes_between(first: fx.Node, last: fx.Node) -> bool:
    """Return whether no node between `first` and `last` can change a tensor in place, or the grad, inference or autocast mode."""
    node = first.next
    while node is not last:
        name = str(getattr(node.target, "__name__", node.target))
        if _may_change_a_tensor(node, name) or any(word in name for word in _MODES):
            return False
        node = node.next
    return True


def _may_change_a_tensor(node: fx.Node, name: str) -> bool:
    if node.op not in ("call_function", "call_method"):
        return node.op == "call_module"
    if (name.endswith("_") and not name.endswith("__")) or name.strip("_") in _IN_PLACE or "out" in node.kwargs:
        return True
    if isinstance(node.target, torch._ops.HigherOrderOperator):  # it calls a graph or a Triton kernel
        return True
    if isinstance(node.target, torch._ops.OpOverloadPacket):
        return any(getattr(node.target, overload)._schema.is_mutable for overload in node.target.overloads())
    schema = getattr(node.target, "_schema", None)
    return schema.is_mutable if schema else _asks_for_in_place(node)


def _asks_for_in_place(node: fx.Node) -> bool:
    """Return whether a call has a true argument `inplace`, as in `F.relu(x, True)`."""
    try:
        given = inspect.signature(node.target).bind(*node.args, **node.kwargs)  # pyright: ignore[reportArgumentType]
    except (TypeError, ValueError):  # a method, or a function of C++: these have no such argument
        return False
    return bool(given.arguments.get("inplace"))


def _is_sum(node: fx.Node) -> bool:
    """Return whether a node adds two tensors of equal shape and dtype, and the sum has the strides that our op would give it."""
    if node.op != "call_function" or node.target not in (operator.add, torch.add) or node.kwargs or len(node.args) != 2:
        return False
    a, b = (value_of(arg) for arg in node.args)
    if not (isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor) and (a.shape, a.dtype) == (b.shape, b.dtype)):
        return False
    total = value_of(node)
    return total is None or strides_of(total) == strides_of(torch.empty_like(without_memory(a)))
