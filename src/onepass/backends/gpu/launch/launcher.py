"""The door to the GPU: a kernel with all but its pointers fixed, compiled on first use and launched at little cost.

Triton's own entry looks at every argument of every call, which takes longer than a small norm. Here the plan has fixed the numbers, so a
call hands over pointers, and decides one thing: whether they are aligned for 16-byte loads.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from onepass.core.allocate import on_current_gpu
from onepass.core.memory import LOWEST, require_memory

from .occupancy import require_coresident
from .source import ALIGNED, ALIGNING, COUNTS, INTERPRETED, TYPE_NAMES, Source, loaded
from .stream import Stream, current_device, current_raw_stream, stream_of


class Kernel:
    """A Triton function on `programs` programs, with its scalars and constants.

    `pointers` gives the dtypes of the leading arguments, None where an operand is missing; `scalars` the numbers that follow. Strides and
    the like which are 0 or 1 are compiled in: most indices then cost nothing. Those named in `wide` have 64 bits, as their products need.
    """

    def __init__(
        self,
        function: Any,
        programs: int,
        warps: int,
        pointers: Mapping[str, torch.dtype | None],
        scalars: Mapping[str, int | float],
        constants: Mapping[str, Any],
        wide: Collection[str] = (),
        cooperative: bool = False,
        registers: int = 0,
    ) -> None:
        self.function, self.programs, self.warps, self.wide, self.cooperative = function, programs, warps, wide, cooperative
        self.registers = registers
        self.pointers, self.scalars, self.constants = dict(pointers), dict(scalars), dict(constants)
        self._fixed = *self.scalars.values(), *self.constants.values()
        self._others = (None,) * (len(self.pointers) - len(("x", "residual", "sum", "y", "weight", "bias")))
        self._ready: dict[tuple[int, bool], tuple[Any, Any, Any]] = {}
        self.output: tuple[tuple[int, ...], tuple[int, ...], torch.dtype] = (), (), torch.float32  # shape, strides and dtype, for `quick`

    def source(self, aligned: bool = True) -> Source:
        types: dict[str, str] = {}
        constants: dict[str, Any] = dict(self.constants)
        divisors: list[tuple[int, int]] = []
        for at, (name, dtype) in enumerate(self.pointers.items()):
            if dtype is None:
                types[f"{name}_ptr"], constants[f"{name}_ptr"] = "constexpr", None
                continue
            types[f"{name}_ptr"] = f"*{TYPE_NAMES[dtype]}"
            divisors += [(at, ALIGNED)] if aligned else []
        for at, (name, value) in enumerate(self.scalars.items(), len(self.pointers)):
            if isinstance(value, float):
                types[name] = "fp32"
            elif value in (0, 1) and name not in COUNTS:
                types[name], constants[name] = "constexpr", value
            else:
                types[name] = "i32" if value < 2**31 and name not in self.wide else "i64"
                divisor = min(value & -value, ALIGNED) if name in ALIGNING else 1
                divisors += [(at, divisor)] if divisor > 1 else []
        types |= dict.fromkeys(self.constants, "constexpr")
        arguments = tuple(types.items()), tuple(constants.items()), tuple(divisors)
        return Source(self.function, *arguments, self.warps, self.cooperative, self.registers)

    def __call__(self, stream: Stream, operands: Mapping[str, Tensor | None]) -> None:
        if INTERPRETED:
            tensors = [operands[name] if dtype else None for name, dtype in self.pointers.items()]
            self.function[(self.programs,)](*tensors, *self._fixed)
            return
        self.at(stream, *self._addresses(stream, operands))

    def _addresses(self, stream: Stream, operands: Mapping[str, Tensor | None]) -> tuple[list[int | None], bool]:
        """Of the operands, which must be on the device, and whether all are aligned."""
        tensors = [operands[name] if dtype else None for name, dtype in self.pointers.items()]
        for name, t in zip(self.pointers, tensors):
            if t is not None and t.get_device() != stream.device:  # a kernel would read whatever lies at that address
                raise RuntimeError(f"{name} is on {t.device}, expected cuda:{stream.device}, where x is")
        pointers = [None if t is None else t.data_ptr() for t in tensors]
        low = 0
        for at in pointers:
            low |= at or 0
        return pointers, low % ALIGNED == 0

    def at(self, stream: Stream, pointers: Sequence[int | None], aligned: bool) -> None:
        """As a call, on addresses that are known to be on the device."""
        run, function, metadata = self._ready.get((stream.device, aligned)) or self._load(stream.device, aligned)
        run(self.programs, 1, 1, stream.handle, function, metadata, None, None, None, *pointers, *self._fixed)

    def quick(self, x: Tensor, weight: Tensor | None, bias: Tensor | None, *_: None) -> Tensor:
        """y, of a kernel that takes no more than x, weight and bias, and stores nothing else."""
        weight, bias, device = dense(weight), dense(bias), x.get_device()
        there = (weight is None or weight.get_device() == device) and (bias is None or bias.get_device() == device)
        if INTERPRETED or device != current_device() or not there:
            y = torch.empty_strided(*self.output[:2], dtype=self.output[2], device=x.device)
            with stream_of(x.device) as stream:
                self(stream, {"x": x, "y": y, "weight": weight, "bias": bias})
            return y
        y = on_current_gpu(*self.output)
        x_at, y_at = x.data_ptr(), y.data_ptr()
        weight_at, bias_at = None if weight is None else weight.data_ptr(), None if bias is None else bias.data_ptr()
        if x_at < LOWEST or (weight_at is not None and weight_at < LOWEST) or (bias_at is not None and bias_at < LOWEST):
            require_memory(("input", "weight", "bias"), (x, weight, bias))
        aligned = not (x_at | (weight_at or 0) | (bias_at or 0)) % ALIGNED
        run, function, metadata = self._ready.get((device, aligned)) or self._load(device, aligned)
        run(
            self.programs, 1, 1, current_raw_stream(device), function, metadata, None, None, None,
            x_at, None, None, y_at, weight_at, bias_at, *self._others, *self._fixed,
        )  # fmt: skip
        return y

    def load(self, device: int) -> None:
        """Compile for aligned pointers, unless that is done; raises NotResident where that shows that it cannot be launched."""
        if (device, True) not in self._ready:
            self._load(device, True)

    def _load(self, device: int, aligned: bool) -> tuple[Any, Any, Any]:
        kernel = loaded(self.source(aligned), device)
        if self.cooperative:
            require_coresident(kernel, self.programs, device)
        self._ready[device, aligned] = ready = kernel.run, kernel.function, kernel.packed_metadata
        return ready


class Described(Kernel):
    """A kernel in Gluon whose first argument is x by a descriptor: rows that are `stride` apart, in blocks that are clipped at the ends.

    x must be aligned.
    """

    def __init__(self, dtype: torch.dtype, rows: int, columns: int, stride: int, block: tuple[int, int], *args: Any) -> None:
        from onepass.backends.gpu.ring.gluon import TensorDescriptor, shared_layout

        super().__init__(*args)
        layout = shared_layout(block, dtype)
        self._describe = lambda x: TensorDescriptor(x, [rows, columns], [stride, 1], list(block), layout)
        self._type = f"tensordesc<{TYPE_NAMES[dtype]}[{block[0]},{block[1]}],{layout!r}>"

    def source(self, aligned: bool = True) -> Source:
        rest = super().source(aligned)
        signature = (("x_desc", self._type), *rest.signature)
        return rest._replace(signature=signature, divisors=tuple((at + 1, divisor) for at, divisor in rest.divisors))

    def __call__(self, stream: Stream, operands: Mapping[str, Tensor | None]) -> None:
        pointers, aligned = self._addresses(stream, operands)
        run, function, metadata = self._ready.get((stream.device, aligned)) or self._load(stream.device, aligned)
        x = self._describe(operands["x"])
        run(self.programs, 1, 1, stream.handle, function, metadata, None, None, None, x, *pointers, *self._fixed)


def dense(param: Tensor | None) -> Any:
    """A parameter as kernels index it."""
    if param is None or param.is_contiguous():
        return param
    require_memory(("parameter",), (param,))
    return param.contiguous()
