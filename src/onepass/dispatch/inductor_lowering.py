"""Tells inductor how to compile our registered ops: each becomes one call of a prepared norm (prepared.py).

Otherwise inductor would call the ops through torch's dispatcher, which takes more host time than the launch. It still does so in
two cases: the generated code is not Python (AOTInductor), or a size in the norm's description is symbolic.

This is a file of its own, because it imports inductor. The graph pass (inductor_pass.py) registers these lowerings.
"""

from __future__ import annotations

import operator
from typing import Any, NamedTuple

import torch
from torch._inductor import ir
from torch._inductor.codegen.wrapper import PythonWrapperCodegen, SubgraphPythonWrapperCodegen
from torch._inductor.lowering import lowerings, register_lowering
from torch._inductor.virtualized import V
from torch.utils import _pytree as pytree

from onepass.core.operands import OptionalOperands

from . import library  # noqa: F401, registers the ops
from .graph_nodes import SUM, Y

IMPORT = "from onepass.dispatch import prepared as onepass_prepared"

_EXTRAS = ("residual", "scale", "shift")
_OPERANDS = ("x", "weight", "bias", "mean", "var")
_SAVED = ("dy", "x", "weight", "bias", "mean", "rstd", "var", "dsum", *OptionalOperands._fields[1:])


class _Line(NamedTuple):
    """What `PreparedNorm` writes: a function of prepared.py, its fixed arguments, and the names of the tensors in each step."""

    function: str
    fixed: list[Any]
    tensors: list[str | None]


class PreparedNorm(ir.FallbackKernel):
    """A norm as a node of inductor's graph. `codegen` writes the line that prepares it and the line that calls it."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        users: Any = V.graph.current_node.users
        self.used = {user.args[1] if user.target is operator.getitem else None for user in users}  # None: the whole tuple is used

    def codegen(self, wrapper: PythonWrapperCodegen) -> None:
        line = self._line() if type(wrapper) in (PythonWrapperCodegen, SubgraphPythonWrapperCodegen) and not V.graph.cpp_wrapper else None
        if line is None:
            super().codegen(wrapper)
            return
        tensors = [str(name) for name in line.tensors]
        while tensors[-1] == "None":
            tensors.pop()
        self.codegen_comment(wrapper)
        root = wrapper.get_root_graph() if isinstance(wrapper, SubgraphPythonWrapperCodegen) else wrapper
        prepared = f"norm_{self.get_name()}"
        root.add_import_once(IMPORT)
        root.header.writeline(f"{prepared} = onepass_prepared.{line.function}({', '.join(map(repr, line.fixed))})")
        wrapper.writeline(f"{self.get_name()} = {prepared}({', '.join(tensors)})")

    def _line(self) -> _Line | None:
        """Return the call, or None if an argument that must be fixed is symbolic."""
        args, _ = self.unflatten_args([t.codegen_reference() for t in self.inputs], self.constant_args)  # pyright: ignore
        assert isinstance(self.op_overload, torch._ops.OpOverload)
        given = {argument.name: value for argument, value in zip(self.op_overload._schema.arguments, args)}
        sizes = [_number(size) for size in given["sizes"]]
        fixed = [given["words"], sizes, given["eps"], given["weight_offset"]]
        if None in sizes or not all(isinstance(value, float) for value in fixed[2:]):
            return None
        if self.op_overload is torch.ops.onepass.norm_backward.default:
            needs = given["needs"]
            if not all(at is not None and needs[at] for at in self.used):  # for such a gradient, only the op returns a tensor
                return None
            return _Line("backward", [*fixed, given["given"], list(given["needs"])], [given[name] for name in _SAVED])
        present = {name for name in (*_OPERANDS, *OptionalOperands._fields) if given[name] is not None}
        if self.used <= {Y} and present <= {*_OPERANDS}:
            return _Line("infer", fixed, [given[name] for name in _OPERANDS])
        if self.used <= {Y, SUM} and present <= {*_OPERANDS[:3], *_EXTRAS}:
            return _Line("infer_extras", fixed, [given[name] for name in (*_OPERANDS[:3], *_EXTRAS)])
        return _Line("forward", [*fixed, given["track"]], [given[name] for name in (*_OPERANDS, *OptionalOperands._fields)])


def _number(size: Any) -> int | None:
    """Return a size as an int, or None if it is symbolic. Inductor has its own class for integers."""
    try:
        return int(size)
    except TypeError:
        return None


def register() -> None:
    """Register the lowerings of our ops, once."""
    for op in (torch.ops.onepass.norm.default, torch.ops.onepass.norm_backward.default):
        if op not in lowerings or getattr(lowerings[op], "_is_fallback_handler", False):
            register_lowering(op, type_promotion_kind=None)(_lowering_of(op))


def _lowering_of(op: torch._ops.OpOverload) -> Any:
    def lower(*args: Any, **kwargs: Any) -> Any:
        results = PreparedNorm.create(op, *args, **kwargs)
        return pytree.tree_map(lambda t: ir.TensorBox.create(t) if isinstance(t, ir.IRNode) else t, results)

    return lower
