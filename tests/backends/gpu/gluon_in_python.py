"""Runs the ring kernel in Python, on a CPU: Triton has an interpreter, but not for Gluon.

The files of the kernel are executed as they are, with other modules in place of `gl`, `tl` and `triton`. A block is a tensor. Each
group of warps is a thread, and each program has its own barriers, so that groups and programs wait for each other as on a GPU. Shared
memory is full of nan at first, and every load and store is checked: it must stay inside its tensor.

Not modelled: the threads of a group, so neither layouts nor barriers within a group; and memory that is not coherent, so no fences.
"""

from __future__ import annotations

import builtins
import functools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

import onepass.backends.gpu.ring.launch as ring_launch
import onepass.backends.gpu.ring.launch_backward as ring_launch_backward
from onepass.backends.gpu.launch.descriptor import Descriptor
from onepass.backends.gpu.launch.kernel import Kernel
from onepass.backends.gpu.launch.signature import filled

GPU = Path(ring_launch.__file__).parents[1]
PATIENCE = 60.0  # seconds until a wait counts as a deadlock


class DType:
    """A dtype of Gluon or Triton."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.torch, self.primitive_bitwidth = dtype, dtype.itemsize * 8

    def __eq__(self, other: object) -> bool:
        return (other.torch if isinstance(other, DType) else other) == self.torch

    __hash__ = None  # pyright: ignore[reportAssignmentType]


class Block(Tensor):
    """A block of values."""

    def to(self, dtype: Any) -> Block:  # pyright: ignore[reportIncompatibleMethodOverride]
        return super().to(dtype.torch if isinstance(dtype, DType) else dtype)

    def __iadd__(self, other: Any) -> Block:
        return self + other  # in a kernel, another name of the same block keeps its value


class Int(int):
    """An integer of a program."""

    def to(self, dtype: DType) -> Any:
        return float(self) if dtype.torch.is_floating_point else self


def _stays_int(name: str) -> Callable[..., Any]:
    def compute(self: Int, other: Any) -> Any:
        found = getattr(int, name)(self, other)
        return Int(found) if type(found) is int else found

    return compute


for _name in ("add", "radd", "sub", "rsub", "mul", "rmul", "floordiv", "rfloordiv", "mod", "rmod", "and", "rand", "xor", "rxor"):
    setattr(Int, f"__{_name}__", _stays_int(f"__{_name}__"))


def block(values: Any) -> Block:
    return torch.as_tensor(values).as_subclass(Block)


class Pointer:
    """An address in a tensor: its storage as one line of elements, and an offset or a block of offsets."""

    def __init__(self, memory: Tensor, offset: Any = 0) -> None:
        self.memory, self.offset = memory, offset
        self.dtype = SimpleNamespace(element_ty=DType(memory.dtype))

    def __add__(self, more: Any) -> Pointer:
        return Pointer(self.memory, self.offset + more)

    def places(self, mask: Any) -> tuple[Tensor, Tensor]:
        """Return the offsets, and which of them are used."""
        offset, mask = torch.broadcast_tensors(torch.as_tensor(self.offset), torch.as_tensor(True if mask is None else mask))
        used = offset[mask]
        assert used.numel() == 0 or (used.min() >= 0 and used.max() < self.memory.numel()), "an access beyond the end of a tensor"
        return offset, mask


def load(pointer: Pointer, mask: Any = None, other: float = 0.0, cache_modifier: str = "") -> Any:
    offset, mask = pointer.places(mask)
    return block(torch.where(mask, pointer.memory[torch.where(mask, offset, 0)], torch.as_tensor(other, dtype=pointer.memory.dtype)))


def store(pointer: Pointer, value: Any, mask: Any = None, cache_modifier: str = "") -> None:
    offset, mask = pointer.places(mask)
    offset, mask, value = torch.broadcast_tensors(offset, mask, torch.as_tensor(value).to(pointer.memory.dtype))
    pointer.memory[offset[mask]] = value[mask].as_subclass(Tensor)


class Barrier:
    """A barrier in shared memory. One arrival completes it, or copies of all bytes that it expects. Its phases, 0 and 1, take turns."""

    def __init__(self, changed: threading.Condition) -> None:
        self.phase, self.changed, self.expected = 0, changed, 0

    def expect(self, nbytes: int) -> None:
        self.expected = nbytes

    def copied(self, nbytes: int) -> None:
        self.expected -= nbytes
        assert self.expected >= 0, "more bytes were copied than expected"
        if not self.expected:
            self.arrive()

    def arrive(self) -> None:
        with self.changed:
            self.phase ^= 1
            self.changed.notify_all()

    def wait(self, phase: int) -> None:
        """Wait until a phase of this number is complete."""
        with self.changed:
            assert self.changed.wait_for(lambda: self.phase != phase, PATIENCE), "a deadlock"


class Shared:
    """Tensors in shared memory. The first axis numbers them."""

    def __init__(self, memory: Tensor) -> None:
        self.memory, self.dtype, self.shape = memory, DType(memory.dtype), tuple(memory.shape)

    def index(self, at: int) -> Shared:
        assert 0 <= at < self.shape[0], f"slot {at} of {self.shape[0]}"
        return Shared(self.memory[at])

    def slice(self, start: int, length: int) -> Shared:
        return Shared(self.memory[start : start + length])

    def load(self, layout: Any) -> Block:
        return block(self.memory.clone())

    def store(self, value: Tensor) -> None:
        assert value.shape == self.memory.shape, f"{value.shape} is stored to {self.memory.shape}"
        self.memory.copy_(value.as_subclass(Tensor))


class Barriers:
    def __init__(self, barriers: Sequence[Barrier]) -> None:
        self.barriers = barriers

    def index(self, at: int) -> Barrier:
        assert 0 <= at < len(self.barriers)
        return self.barriers[at]


class Matrix:
    """A descriptor with its tensor."""

    def __init__(self, descriptor: Descriptor, x: Tensor) -> None:
        self.of, self.x, self.dtype, self.layout = descriptor, x, DType(descriptor.dtype), None

    def copy(self, to: Shared, row: int, column: int) -> None:
        of = self.of
        assert column * of.dtype.itemsize % 16 == 0 and of.stride * of.dtype.itemsize % 16 == 0, "a copy that is not aligned"
        r, c = (torch.arange(start, start + n) for start, n in zip((row, column), of.block))
        inside = ((r >= 0) & (r < of.rows))[:, None] & ((c >= 0) & (c < of.columns))[None]
        at = torch.where(inside, r[:, None] * of.stride + c[None], 0)
        assert at.max() < self.x.numel(), "the descriptor reaches beyond x"
        to.memory.copy_(torch.where(inside, self.x[at], torch.zeros((), dtype=self.x.dtype)))


class Program(threading.local):
    """What a thread knows of the program that it works for."""

    number = 0
    changed = threading.Condition()


PROGRAM, ATOMIC = Program(), threading.Lock()


def _in_thread(run: Callable[[], None], errors: list[BaseException], number: int, changed: threading.Condition) -> threading.Thread:
    def work() -> None:
        PROGRAM.number, PROGRAM.changed = number, changed
        try:
            run()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


def _join(threads: Sequence[threading.Thread], errors: list[BaseException]) -> None:
    while any(thread.is_alive() for thread in threads) and not errors:
        time.sleep(0.001)
    if errors:
        raise errors[0]


def warp_specialize(groups: Sequence[tuple[Callable[..., None], Sequence[Any]]], warps: Any, registers: Any) -> None:
    errors: list[BaseException] = []
    runs = [functools.partial(function, *arguments) for function, arguments in groups]
    _join([_in_thread(run, errors, PROGRAM.number, PROGRAM.changed) for run in runs], errors)


def allocate_shared_memory(dtype: DType, shape: Sequence[int], layout: Any) -> Shared | Barriers:
    if layout == "barriers":
        return Barriers([Barrier(PROGRAM.changed) for _ in range(shape[0])])
    return Shared(torch.full(list(shape), torch.nan, dtype=dtype.torch))


def atomic_add(pointer: Pointer, more: int, sem: str, scope: str) -> Int:
    if not more:
        time.sleep(0.0002)  # somebody waits for a change
    pointer.places(None)
    with ATOMIC:
        before = Int(pointer.memory[pointer.offset])
        pointer.memory[pointer.offset] += more
    return before


def where(condition: Any, a: Any, b: Any) -> Any:
    if not isinstance(condition, Tensor):
        return a if condition else b
    kind = next((v.dtype for v in (a, b) if isinstance(v, Tensor)), torch.float32 if isinstance(a, float) else torch.int64)
    a, b = (v if isinstance(v, Tensor) else torch.as_tensor(v, dtype=kind) for v in (a, b))
    return block(torch.where(condition, a, b))


def _extreme(scalar: Callable[..., Any], of_tensors: Callable[..., Tensor]) -> Callable[[Any, Any], Any]:
    def compute(a: Any, b: Any) -> Any:
        if isinstance(a, Tensor) or isinstance(b, Tensor):
            a, b = (v if isinstance(v, Tensor) else torch.as_tensor(v) for v in (a, b))
            return block(of_tensors(a, b))
        found = scalar(a, b)
        return Int(found) if isinstance(found, int) else found

    return compute


def total(x: Any, axis: int | None = None, keep_dims: bool = False) -> Any:
    return block(x.sum() if axis is None else x.sum(axis, keepdim=keep_dims))


def inline_asm_elementwise(code: str, constraints: str, arguments: Sequence[Any], dtype: DType, is_pure: bool, pack: int) -> Any:
    *dy, z = arguments  # ring/elements.py has three such codes: SiLU, its gradient, and a conversion
    if dy:
        s = torch.sigmoid(z)
        return dy[0] * (s + s * (z - z * s))
    return block(torch.nn.functional.silu(z.float())) if "ex2" in code else z.to(dtype)


def _ints(*bounds: int) -> Iterator[Int]:
    return map(Int, builtins.range(*bounds))


def _same(x: Any, *_: Any, **__: Any) -> Any:
    return x


def _nothing(*_: Any, **__: Any) -> None:
    return None


_MATHS = {
    "constexpr": _same, "where": where, "sum": total, "maximum": _extreme(max, torch.maximum), "minimum": _extreme(min, torch.minimum),
    "load": load, "store": store, "float32": DType(torch.float32), "float16": DType(torch.float16), "bfloat16": DType(torch.bfloat16),
    "int32": DType(torch.int32), "int64": DType(torch.int64), "static_assert": _nothing,
    "rsqrt": lambda x: block(torch.as_tensor(x).rsqrt()), "div_rn": lambda a, b: a / b, "exp": torch.exp, "erf": torch.erf,
    "abs": torch.abs,
    "arange": lambda a, b, layout=None: block(torch.arange(a, b)),
}  # fmt: skip
tl = SimpleNamespace(**_MATHS, extra=SimpleNamespace(libdevice=None))
gl = SimpleNamespace(
    **_MATHS,
    BlockedLayout=_nothing, SliceLayout=_nothing, SwizzledSharedLayout=_nothing, NVMMASharedLayout=_nothing,
    zeros=lambda shape, dtype, layout: block(torch.zeros(shape, dtype=dtype.torch)),
    full=lambda shape, value, dtype, layout: block(torch.full(shape, value, dtype=dtype.torch)),
    expand_dims=lambda x, axis: x.unsqueeze(axis), reshape=lambda x, shape: x.reshape(shape), convert_layout=_same,
    gather=lambda x, at, axis: torch.gather(x, axis, at.long()), inline_asm_elementwise=inline_asm_elementwise,
    static_range=_ints, program_id=lambda axis: Int(PROGRAM.number), atomic_add=atomic_add,
    allocate_shared_memory=allocate_shared_memory, warp_specialize=warp_specialize,
)  # fmt: skip
mbarrier = SimpleNamespace(
    MBarrierLayout=lambda: "barriers", init=_nothing, expect=lambda barrier, nbytes: barrier.expect(nbytes),
    wait=lambda barrier, phase: barrier.wait(phase), arrive=lambda barrier, count: barrier.arrive(),
)  # fmt: skip


def _async_load(matrix: Matrix, at: Sequence[int], barrier: Barrier, to: Shared) -> None:
    matrix.copy(to, *at)
    barrier.copied(to.memory.nbytes)


_PLAIN = {"launch": ring_launch, "launch_backward": ring_launch_backward}  # modules that are not device code

_STANDS_FOR = {
    "gluon": SimpleNamespace(gl=gl, jit=_same, mbarrier=mbarrier, async_load=_async_load, barrier=_nothing, fence_async_shared=_nothing),
    "triton": SimpleNamespace(
        jit=_same, constexpr_function=_same, language=tl, knobs=SimpleNamespace(runtime=SimpleNamespace(interpret=True))
    ),
}


@functools.cache
def _module(path: Path) -> SimpleNamespace:
    """Execute a file of device code with our modules in place of Triton's."""

    def fake_import(name: str, of: Any = None, names: Any = None, wanted: Any = (), level: int = 0) -> Any:
        top = name.split(".")[0]
        if top in _STANDS_FOR:
            return tl.extra if name.endswith("extra") else _STANDS_FOR[top]
        if level == 1:
            return _PLAIN[name] if name in _PLAIN else _module(path.parent / f"{name}.py")
        if name.startswith("onepass.backends.gpu.device.") and not name.endswith("groups"):
            return _module(GPU / "device" / f"{name.rpartition('.')[2]}.py")
        return builtins.__import__(name, of, names, wanted, level)

    known = {"__name__": f"in_python.{path.stem}", "__builtins__": {**vars(builtins), "__import__": fake_import, "range": _ints}}
    exec(compile(path.read_text(), str(path), "exec"), known)
    return SimpleNamespace(**known)


def run(kernel: Kernel, operands: dict[str, Tensor]) -> None:
    """Run a kernel of ring on flat tensors, which are found by the names of the kernel's pointers and descriptors."""
    assert kernel.descriptors

    def prepared(value: Any) -> Any:
        if isinstance(value, Tensor):
            return Pointer(value)
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return type(value)(*map(prepared, value))  # pyright: ignore[reportArgumentType]
        return Int(value) if type(value) is int else value

    named = zip(kernel.function.arg_names, filled(kernel.arguments, operands, kernel.function.arg_names))
    *values, norm, mode = [
        Matrix(value, operands[name.removesuffix("_desc")]) if isinstance(value, Descriptor) else value for name, value in named
    ]
    values = [value if isinstance(value, Matrix) else prepared(value) for value in values]
    code, errors = kernel.function.fn.__code__, list[BaseException]()
    function = getattr(_module(Path(code.co_filename)), code.co_name)
    programs = [functools.partial(function, *values, norm, mode) for _ in range(kernel.programs)]
    _join([_in_thread(run, errors, number, threading.Condition()) for number, run in enumerate(programs)], errors)
