"""Decide for each norm in a graph of torch.compile whether onepass or inductor computes it. planning/compiled.py has the costs.

1. `adopt` turns torch's norms in patched modules into calls of our op.
2. `fuse_neighbours` (compiled.py) merges sums and activations into these calls.
3. `give_back` turns a call of our op into torch's calls again, if inductor would be faster.
"""

from __future__ import annotations

import logging
import operator
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch._subclasses import FakeTensorMode

from onepass.core import norms
from onepass.core.device import describe
from onepass.core.operands import OptionalOperands
from onepass.core.problem import NormProblem, bind
from onepass.core.spec import NormSpec
from onepass.planning.compiled import Choice, choose
from onepass.planning.options import current_options

from .graph_nodes import ACTIVATION_CALLS, OP_FIELDS, SUM, Y, is_norm, results_at, value_of
from .neighbours import a_view_follows, bias_is_added_before, moves_saved_by_fusion, would_be_copied
from .torch_calls import torch_call

log = logging.getLogger("onepass")

PATCHED = "_is_patched_norm"  # an attribute of the classes that `onepass.patch` gives to norms

_HALF_OR_FULL = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def adopt(graph: fx.Graph) -> int:
    """Turn torch's norms in patched modules into calls of our op. Return how many were replaced."""
    if under_autocast(graph):  # then torch casts to float32 inside its norms, and the graph does not show it
        return 0
    adopted = 0
    for node in list(graph.nodes):
        classes = [cls for _, cls in node.meta.get("nn_module_stack", {}).values()]
        if node.target in _SPECS and any(getattr(cls, PATCHED, False) for cls in classes):
            adopted += to_ours(graph, node)
    return adopted


def under_autocast(graph: fx.Graph) -> bool:
    enabled = any(torch.is_autocast_enabled(kind) for kind in ("cuda", "cpu"))
    return enabled or any("autocast" in str(node.target) for node in graph.nodes)


def to_ours(graph: fx.Graph, node: fx.Node) -> bool:
    """Turn a call of torch's norm into a call of our op, if that supports its operands. Return whether it was replaced."""
    names, spec_of = _SPECS[node.target]
    given = {**_DEFAULTS, **dict(zip(names, node.args)), **node.kwargs}
    x, weight, bias = (value_of(given[name]) for name in ("input", "weight", "bias"))
    if type(x) is not torch._subclasses.FakeTensor or x.dtype not in _HALF_OR_FULL or x.is_nested:
        return False
    if any(t is not None and t.dtype != x.dtype for t in (weight, bias)):
        return False
    spec, y = spec_of(x, given), value_of(node)
    if spec is None:
        return False
    keeps_layout = y is None or strides_of(y) == strides_of(torch.empty_like(without_memory(x)))
    if not keeps_layout and a_view_follows(node):  # our y has the strides of x
        return False
    operands = given["input"], given["weight"], given["bias"], None, None
    with graph.inserting_before(node):
        norm = graph.call_function(torch.ops.onepass.norm.default, (*operands, *spec.pack(), False, *[None] * 7))
        y = graph.call_function(operator.getitem, (norm, Y))
    y.meta = dict(node.meta)
    node.replace_all_uses_with(y)
    graph.erase_node(node)
    return True


def give_back(graph: fx.Graph) -> int:
    """Turn calls of our op into torch's calls where inductor is faster. Return how many were replaced."""
    if current_options().family or current_options().invariant:  # the user has asked for our kernels
        return 0
    given_back = 0
    for node in list(graph.nodes):
        if is_norm(node):
            _drop_unusedresults_at(graph, node)
            given_back += _give_back(graph, node)
    return given_back


def _drop_unusedresults_at(graph: fx.Graph, node: fx.Node) -> None:
    """Remove results that nobody uses. Our functions detach all statistics, even those that they do not return."""
    for result in [user for user in node.users if user.target is operator.getitem]:
        for user in [user for user in result.users if user.target == "detach" and not user.users]:
            graph.erase_node(user)
        if not result.users:
            graph.erase_node(result)


def _give_back(graph: fx.Graph, node: fx.Node) -> bool:
    fields = dict(zip(OP_FIELDS, node.args))
    spec = NormSpec.unpack(fields["words"], [_hint(size) for size in fields["sizes"]], fields["eps"], fields["weight_offset"])  # pyright: ignore
    torchs = None if spec.from_y else torch_call(spec)
    if torchs is None or not _can_give_back(node, fields):
        return False
    values = [value_of(fields[name]) for name in ("x", "weight", "bias", "residual")]
    training = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in values)
    choice, copied = _choose(spec, node, values, training), training and would_be_copied(node)
    reason = "inductor: it would copy x, a permuted view, before and after a norm of onepass" if copied else choice
    log.debug("torch.compile: %s of %s: %s", torchs[0].__name__, list(values[0].shape), reason)  # pyright: ignore
    if (choice.ours and not copied) or not _keeps_layouts(node, torchs, fields, spec):
        return False
    function, arguments = torchs
    with graph.inserting_before(node):
        total: Any = fields["x"]
        if fields["residual"] is not None:
            total = graph.call_function(operator.add, (fields["x"], fields["residual"]))
            total.meta = _meta_of(node, SUM)
        y = graph.call_function(function, (total, *arguments(values[0], fields)))
        y.meta = _meta_of(node, Y)
        if spec.activation:
            call, keywords = ACTIVATION_CALLS[spec.activation][0]
            y = graph.call_function(call, (y,), keywords)
            y.meta = _meta_of(node, Y)
    for user in list(node.users):
        user.replace_all_uses_with(y if user.args[1] == Y else total)
        graph.erase_node(user)
    graph.erase_node(node)
    return True


def _can_give_back(node: fx.Node, fields: dict[str, Any]) -> bool:
    """Return whether torch's calls can take all operands of a norm, and return all its results that are used."""
    others = ("mean", "var", "scale", "shift", "mean_weight", "var_weight", "running_mean", "running_var")
    if fields["track"] or any(fields[name] is not None for name in others):
        return False
    if not all(user.target is operator.getitem and user.args[1] in (Y, SUM) for user in node.users):
        return False
    x, residual, *params = (value_of(fields[name]) for name in ("x", "residual", "weight", "bias"))
    if type(x) is not torch._subclasses.FakeTensor or x.numel() == 0:
        return False
    same = [t for t in (residual, *params) if t is not None]
    return all(t.dtype == x.dtype for t in same)


def _keeps_layouts(node: fx.Node, torchs: Any, fields: dict[str, Any], spec: NormSpec) -> bool:
    """Return whether torch's results have the strides that were traced. Later nodes may be views that need these."""
    function, arguments = torchs
    with FakeTensorMode():
        x, residual = (without_memory(value_of(fields[name]), None) for name in ("x", "residual"))
        total = x if residual is None else x + residual
        known = {"weight": None, "bias": None, "sizes": [size for _, size in spec.sizes], "eps": 1.0}  # eps may be a node
        y = function(total, *arguments(x, known))
    traced = [(_meta_of(node, at).get("example_value"), result) for at, result in ((Y, y), (SUM, total))]
    return all(before is None or strides_of(before) == strides_of(after) for before, after in traced)


def strides_of(t: Tensor) -> list[int]:
    """Return the strides of the dimensions that have several elements. The others do not matter."""
    return [_hint(stride) for stride, size in zip(t.stride(), t.shape) if _hint(size) != 1]


def _choose(spec: NormSpec, node: fx.Node, values: list[Any], training: bool) -> Choice:
    x, weight, bias, residual = (without_memory(t) for t in values)
    problem: NormProblem = bind(spec, x, weight, bias, optional=OptionalOperands(residual))  # pyright: ignore[reportArgumentType]
    moved, bias_before = moves_saved_by_fusion(node), bias_is_added_before(node)
    return choose(problem, describe(values[0].device), current_options(), training, moved, bias_before)


def _group_norm(x: Tensor, given: dict[str, Any]) -> NormSpec | None:
    return norms.group_norm(given["num_groups"], given["eps"])


def _instance_norm(x: Tensor, given: dict[str, Any]) -> NormSpec | None:
    own_statistics = given["running_mean"] is None and given["running_var"] is None and given["use_input_stats"] is True
    return norms.instance_norm(given["eps"]) if own_statistics and x.dim() > 2 else None


def _layer_norm(x: Tensor, given: dict[str, Any]) -> NormSpec | None:
    return norms.layer_norm(len(given["normalized_shape"]), given["eps"])


def _rms_norm(x: Tensor, given: dict[str, Any]) -> NormSpec | None:
    eps = torch.finfo(torch.promote_types(x.dtype, torch.float32)).eps if given["eps"] is None else given["eps"]
    return norms.rms_norm(len(given["normalized_shape"]), eps)


_DEFAULTS = {"weight": None, "bias": None, "eps": 1e-5, "running_mean": None, "running_var": None, "use_input_stats": True}

# Torch's norms: the names of their arguments, and a function that returns our spec, or None if onepass has no such norm.
_SPECS: dict[Any, tuple[tuple[str, ...], Callable[[Tensor, dict[str, Any]], NormSpec | None]]] = {
    F.group_norm: (("input", "num_groups", "weight", "bias", "eps"), _group_norm),
    F.layer_norm: (("input", "normalized_shape", "weight", "bias", "eps"), _layer_norm),
    F.instance_norm: (
        ("input", "running_mean", "running_var", "weight", "bias", "use_input_stats", "momentum", "eps"),
        _instance_norm,
    ),
    torch.rms_norm: (("input", "normalized_shape", "weight", "eps"), _rms_norm),  # F.rms_norm calls it
}


def without_memory(t: Tensor | None, device: str | None = "meta") -> Any:
    """Return a tensor without memory, with the sizes and strides that a fake tensor had when it was traced."""
    if t is None:
        return None
    sizes, strides = [_hint(n) for n in t.shape], [_hint(n) for n in t.stride()]
    return torch.empty_strided(sizes, strides, dtype=t.dtype, device=device or t.device)


def _hint(size: Any) -> int:
    """Return the size that a symbolic size, or the node that computes it, had when it was traced."""
    size = value_of(size) if isinstance(size, fx.Node) else size
    return int(size.node.hint) if isinstance(size, torch.SymInt) else int(size)


def _meta_of(node: fx.Node, at: int) -> dict[str, Any]:
    return next((dict(user.meta) for user in results_at(node, at)), {})
