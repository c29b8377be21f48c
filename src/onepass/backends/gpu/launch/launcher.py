"""A kernel whose arguments are all fixed except its pointers.

It is compiled on first use and launched with little host time.

Triton's own launch inspects every argument of every call, which takes longer than a small norm. Here the plan has fixed
the numbers. A call passes pointers, and checks one thing: whether all of them are aligned for 16-byte loads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from onepass.core.allocate import on_current_gpu
from onepass.core.memory import LOWEST, require_memory

from .descriptor import Descriptor
from .occupancy import require_coresident
from .signature import ALIGNMENT, filled, signature_of
from .source import INTERPRETED, Source, loaded
from .stream import Stream, current_device, current_raw_stream, stream_of


class Kernel:
    """A Triton function with its arguments, on `programs` programs of `warps` warps.

    `pointers` has the dtype of each operand that the kernel reads or writes, in the order in which a launch passes
    them.
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
    ) -> None:
        self.function, self.arguments, self.programs, self.cooperative = function, arguments, programs, cooperative
        self.descriptor = next((value for value in arguments if isinstance(value, Descriptor)), None)
        self._signature = signature_of(function.arg_names, arguments)
        self._options = warps, cooperative, max_registers, pdl
        self.pointers = {leaf.name: leaf.dtype for leaf in self._signature.pointers}
        self.numbers = self._signature.numbers
        self._ready: dict[tuple[int, bool], tuple[Any, Any, Any]] = {}
        # The shape, strides and dtype of y, for `launch_minimal`.
        self.output: tuple[tuple[int, ...], tuple[int, ...], torch.dtype] = (), (), torch.float32

    def source(self, aligned: bool = True) -> Source:
        """What is compiled; with `aligned`, for pointers that are multiples of 16 bytes."""
        types, constants, divisors, pointers, _ = self._signature
        if aligned:
            divisors = *((leaf.path, ALIGNMENT) for leaf in pointers), *divisors
        return Source(self.function, types, constants, divisors, *self._options)

    def __call__(self, stream: Stream, operands: Mapping[str, Tensor | None]) -> None:
        """Launch on tensors, found by the names of the pointers."""
        if INTERPRETED:
            self.function[(self.programs,)](*filled(self.arguments, operands, self.function.arg_names))
            return
        tensors = [operands[name] for name in self.pointers]
        low = 0
        pointers: list[Any] = []
        for name, t in zip(self.pointers, tensors):
            assert t is not None, name
            if t.get_device() != stream.device:  # a kernel would read whatever lies at that address
                raise RuntimeError(f"{name} is on {t.device}, expected cuda:{stream.device}, where x is")
            pointers.append(t.data_ptr())
            low |= pointers[-1]
        if self.descriptor is not None:
            x = operands["x"]
            assert x is not None
            pointers.insert(0, self.descriptor.of(x))
        self.launch(stream, pointers, low % ALIGNMENT == 0)

    def launch(self, stream: Stream, pointers: Sequence[Any], aligned: bool) -> None:
        """Launch on addresses that are on the stream's device."""
        run, function, metadata = self._ready.get((stream.device, aligned)) or self._load(stream.device, aligned)
        run(self.programs, 1, 1, stream.handle, function, metadata, None, None, None, *pointers, *self.numbers)

    def launch_minimal(self, x: Tensor, weight: Tensor | None, bias: Tensor | None, *_: None) -> Tensor:
        """y, from a kernel whose only operands are x, weight, bias and y."""
        weight, bias, device = dense(weight), dense(bias), x.get_device()
        there = (weight is None or weight.get_device() == device) and (bias is None or bias.get_device() == device)
        if INTERPRETED or device != current_device() or not there:
            y = torch.empty_strided(*self.output[:2], dtype=self.output[2], device=x.device)
            with stream_of(x.device) as stream:
                self(stream, {"x": x, "y": y, "weight": weight, "bias": bias})
            return y
        y = on_current_gpu(*self.output)
        addresses = x_at, y_at = x.data_ptr(), y.data_ptr()
        low, lowest = x_at | y_at, x_at
        if weight is not None:
            at = weight.data_ptr()
            addresses, low, lowest = (*addresses, at), low | at, min(lowest, at)
        if bias is not None:
            at = bias.data_ptr()
            addresses, low, lowest = (*addresses, at), low | at, min(lowest, at)
        if lowest < LOWEST:
            require_memory(("input", "weight", "bias"), (x, weight, bias))
        aligned = not low % ALIGNMENT
        run, function, metadata = self._ready.get((device, aligned)) or self._load(device, aligned)
        run(self.programs, 1, 1, current_raw_stream(device), function, metadata, None, None, None, *addresses, *self.numbers)
        return y

    def load(self, device: int) -> None:
        """Compile for aligned pointers, if that is not done yet.

        Raises NotResident if the kernel cannot be launched here.
        """
        if (device, True) not in self._ready:
            self._load(device, True)

    def _load(self, device: int, aligned: bool) -> tuple[Any, Any, Any]:
        kernel = loaded(self.source(aligned), device)
        if self.cooperative:
            require_coresident(kernel, self.programs, device)
        self._ready[device, aligned] = ready = kernel.run, kernel.function, kernel.packed_metadata
        return ready


def dense(param: Tensor | None) -> Any:
    """The parameter, contiguous as kernels need it."""
    if param is None or param.is_contiguous():
        return param
    require_memory(("parameter",), (param,))
    return param.contiguous()
