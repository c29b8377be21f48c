"""A kernel whose arguments are all fixed except its pointers.

Triton's own launch inspects every argument of every call, which takes longer than a small norm. Here the plan has fixed
the numbers, and the kernel is compiled once for aligned pointers, and for others if they occur. `chain.py` launches it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from torch import Tensor

from onepass.backends.compilation import need
from onepass.core.memory import require_memory

from .descriptor import Descriptor
from .occupancy import require_coresident
from .signature import ALIGNMENT, filled, runtime_types, signature_of
from .source import Source, hash_in_order, loaded


class Kernel:
    """A Triton function with its arguments, on `programs` programs of `warps` warps.

    If the address of x is no multiple of 16 bytes, a program has `unaligned_warps` warps, if that is more. `pointers` has
    the dtype of each operand that the kernel reads or writes, in the order in which a launch passes them. Before them it passes the
    `descriptors`.
    """

    def __init__(
        self,
        function: Any,
        arguments: Sequence[Any],
        programs: int,
        warps: int,
        *,
        cooperative: bool = False,
        max_registers: int = 0,
        pdl: bool = False,
        unaligned_warps: int = 0,
    ) -> None:
        self.function, self.arguments, self.programs, self.cooperative = function, arguments, programs, cooperative
        named = zip(function.arg_names, arguments)
        self.descriptors = {name: value for name, value in named if isinstance(value, Descriptor)}
        self._signature = signature_of(function.arg_names, arguments)
        passed = [leaf.startswith("*") for leaf in runtime_types(tuple(kind for _, kind in self._signature.types))][len(self.descriptors) :]
        if passed != sorted(passed, reverse=True):
            raise TypeError(f"{function.__name__} takes a pointer after a number, but a launch passes all pointers first")
        self._warps = warps, max(warps, unaligned_warps)
        self._options = cooperative, max_registers, pdl
        self.pointers = {leaf.name: leaf.dtype for leaf in self._signature.pointers}
        self.numbers = self._signature.numbers

    def source(self, odd: Collection[str] = ()) -> Source:
        """What is compiled. `odd` names the pointers that are no multiples of 16 bytes. The others are loaded and stored in vectors.

        With x odd, 12686 rows of 5120 bfloat16 take 81 µs by `whole_set`, and 195 if all pointers count as odd (H200, 2026-11-18).
        """
        hash_in_order(self.function)
        types, constants, divisors, pointers, _ = self._signature
        divisors = *((leaf.path, ALIGNMENT) for leaf in pointers if leaf.name not in odd), *divisors
        return Source(self.function, types, constants, divisors, self._warps["x" in odd], *self._options)

    def load(self, device: int, odd: Collection[str] = ()) -> tuple[Any, Any, Any]:
        """Compile the kernel, unless that is done. Return Triton's launcher and the two objects that it takes first.

        Raises NotResident if the programs must run at the same time, and cannot on this device.
        """
        source = self.source(odd)
        need((source, device))
        kernel = loaded(source, device)
        if self.cooperative:
            require_coresident(kernel, self.programs, device)
        return kernel.run, kernel.function, kernel.packed_metadata

    def interpret(self, operands: Mapping[str, Tensor]) -> None:
        """Run in Triton's interpreter, on tensors that are found by the names of the pointers."""
        self.function[(self.programs,)](*filled(self.arguments, operands, self.function.arg_names))


def dense(param: Tensor | None) -> Any:
    """The parameter, contiguous as kernels need it."""
    if param is None or param.is_contiguous():
        return param
    require_memory(("parameter",), (param,))
    return param.contiguous()
