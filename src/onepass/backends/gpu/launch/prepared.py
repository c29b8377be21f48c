"""Writes a Python function that launches a chain of kernels on the tensors of a call.

A small norm takes less time on the GPU than Python needs for a loop over its tensors. So the function is written for one chain and
one device, without loops: it reads addresses, allocates outputs, and calls Triton's launchers. It only handles the usual case.
Whatever is unusual goes to `careful`, which computes the same: another device, an address that is no multiple of 16 or has no memory
behind it, other strides.

The function for 4 rows of 1024 elements looks like this:

    def launch(x, weight, bias, mean, var):
        if current_device() != 0 or x.get_device() != 0 or weight.get_device() != 0 or ...:
            return careful(x, weight, bias, mean, var)
        x_at = x.data_ptr()
        ...
        if x_at < LOWEST or weight_at < LOWEST or bias_at < LOWEST: return careful(x, weight, bias, mean, var)
        stream, allocate = current_raw_stream(0), filled if fills_memory() else unfilled
        y = allocate((4, 1024), (1024, 1), torch.bfloat16)
        y_at = y.data_ptr()
        if (x_at | weight_at | bias_at | y_at) % 16: return careful(x, weight, bias, mean, var)
        launch_kernel(4, 1, 1, stream, ..., x_at, y_at, weight_at, bias_at, 1e-05, 1024)
        return y
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from typing import Any, NamedTuple

import torch

from onepass.core.allocate import fills_memory, on_current_gpu, on_current_gpu_unfilled
from onepass.core.memory import LOWEST

from . import stream
from .chain import DESCRIPTOR, Chain
from .kernel import Kernel
from .signature import ALIGNMENT
from .source import INTERPRETED

PARAMETERS = {"weight", "bias", "scale", "shift"}


class New(NamedTuple):
    """An output, which each call allocates."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


class Layout(NamedTuple):
    """What an input must have. None means anything."""

    stride: tuple[int, ...]
    shape: tuple[int, ...] | None = None
    dtype: torch.dtype | None = None


class Code(str):
    """Python code that stands for an argument of a call."""


def prepared(
    chain: Chain,
    arguments: Sequence[str],
    outputs: Mapping[str, New],
    returned: str,
    careful: Callable[..., Any],
    layouts: Mapping[str, Layout] | None = None,
    counters: Callable[[int, int], Any] | None = None,
) -> Callable[..., Any]:
    """Return a function of the `arguments`, among them the chain's inputs. It returns `returned`, such as "y, sum".

    Inputs named in `layouts` must have that layout, or the call goes to `careful`. Parameters must be contiguous.
    `counters(device, stream)` returns the chain's counters. The kernels are compiled for the current device.
    """
    if INTERPRETED:
        return careful
    written = _Written(chain, stream.current_device(), f"return careful({', '.join(arguments)})")
    written.values |= {"careful": careful, "counters_of": counters}
    lines = [*written.inputs(layouts or {}), *written.outputs(outputs, counters is not None), *written.launches(), f"return {returned}"]
    body = "".join(f"    {line}\n" for line in lines)
    exec(f"def launch({', '.join(arguments)}):\n{body}", written.values)
    return written.values["launch"]


class _Written:
    """The lines of a function, and the values that they name. `otherwise` is the line for unusual calls."""

    def __init__(self, chain: Chain, device: int, otherwise: str) -> None:
        self.chain, self.device, self.otherwise, self.tensors = chain, device, otherwise, list(chain.inputs)
        self.values: dict[str, Any] = {
            "current_device": stream.current_device,
            "current_raw_stream": stream.current_raw_stream,
            "fills_memory": fills_memory,
            "filled": on_current_gpu,
            "unfilled": on_current_gpu_unfilled(),
            "descriptor_of": chain.descriptor_of,
        }

    def inputs(self, layouts: Mapping[str, Layout]) -> Iterator[str]:
        """Yield the lines that check the inputs and read their addresses."""
        names, device = self.chain.inputs, self.device
        unusual = [f"current_device() != {device}", *(f"{name}.get_device() != {device}" for name in names)]
        unusual += [f"not {name}.is_contiguous()" for name in names if name in PARAMETERS]
        for name, layout in layouts.items():
            fields = zip(("stride()", "shape", "dtype"), layout)
            unusual += [f"{name}.{field} != {self.code(value)}" for field, value in fields if name in names and value is not None]
        yield f"if {' or '.join(unusual)}: {self.otherwise}"
        yield from (f"{name}_at = {name}.data_ptr()" for name in names)
        yield f"if {' or '.join(f'{name}_at < {LOWEST}' for name in names)}: {self.otherwise}"

    def outputs(self, outputs: Mapping[str, New], counters: bool) -> Iterator[str]:
        """Yield the lines that allocate what the kernels write."""
        yield f"stream, allocate = current_raw_stream({self.device}), filled if fills_memory() else unfilled"
        size = self.chain.workspace_size
        made = {**outputs, **({"workspace": New((size,), (1,), torch.float32)} if size else {})}
        calls = {name: f"allocate({', '.join(map(self.code, new))})" for name, new in made.items()}
        for name, call in (calls | ({"counters": f"counters_of({self.device}, stream)"} if counters else {})).items():
            self.tensors.append(name)
            yield f"{name} = {call}"
            yield f"{name}_at = {name}.data_ptr()"
        yield f"if ({' | '.join(f'{name}_at' for name in self.tensors)}) % {ALIGNMENT}: {self.otherwise}"

    def launches(self) -> Iterator[str]:
        """Yield the lines that launch the kernels."""
        if self.chain.descriptor:
            yield f"{DESCRIPTOR}_at = descriptor_of({self.chain.inputs[0]})"
        for kernel, operands in self.chain.steps:
            launch, arguments = launcher_of(kernel, self.device, [self.address(name) for name in operands])
            yield f"{self.code(launch)}({', '.join(map(self.code, arguments))})"

    def address(self, name: str) -> Code:
        """Return the code for the address of an operand."""
        part = self.chain.parts.get(name)
        return Code(f"{name}_at" if part is None else f"{part.tensor}_at + {4 * part.start}")

    def code(self, value: Any) -> str:
        """Return the code for a value. A value without a literal gets a name."""
        if isinstance(value, Code):
            return value
        if value is None or type(value) in (int, bool):
            return repr(value)
        if type(value) is tuple and (all(type(part) is int for part in value) or any(isinstance(part, Code) for part in value)):
            return f"({''.join(f'{self.code(part)}, ' for part in value)})"
        name = f"value_{len(self.values)}"
        self.values[name] = value
        return name


def launcher_of(kernel: Kernel, device: int, pointers: Sequence[Any]) -> tuple[Callable[..., Any], Sequence[Any]]:
    """Return the function that launches a kernel, and its arguments, with Code("stream") for the stream.

    Triton's launcher is a Python function that calls a compiled one. It takes 1.5 µs, mostly for scratch memory, which our kernels do
    not use. So call the compiled function. Its arguments depend on the version of Triton. A copy of the launcher shows them.
    """
    run, function, metadata = kernel.load(device)
    arguments = (kernel.programs, 1, 1, Code("stream"), function, metadata, None, None, None, *pointers, *kernel.numbers)
    needs_scratch = [getattr(run, name, 1) for name in ("global_scratch_size", "profile_scratch_size")]
    if any(needs_scratch) or getattr(run, "gsan_enabled", False) or not callable(getattr(run, "launch", None)):
        return run, arguments
    passed: list[tuple[Any, ...]] = []
    shown = copy(run)
    shown.launch = lambda *args: passed.append(args)
    shown(*arguments)
    return run.launch, passed[0]
