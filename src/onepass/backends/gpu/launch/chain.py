"""Kernels that run one after another on the tensors of one call, launched with little host time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from onepass.core.memory import LOWEST, require_memory

from .kernel import Kernel
from .signature import ALIGNMENT
from .source import INTERPRETED
from .stream import allocate, current_raw_stream

# What users call these operands, for error messages.
USER_NAMES = {"x": "input", "mean": "running_mean", "var": "running_var"}

NONE: frozenset[str] = frozenset()

DESCRIPTOR = "_desc"  # the descriptor of an input has the name of that input, and this at the end


class Step(NamedTuple):
    """A kernel, and for each of its descriptors and pointers the name of what it gets."""

    kernel: Kernel
    operands: Sequence[str]


class Part(NamedTuple):
    """Elements `start` to `end` of a float32 tensor, which kernels see as a tensor of its own."""

    tensor: str
    start: int
    end: int


def pack(tensor: str, sizes: Mapping[str, int]) -> tuple[dict[str, Part], int]:
    """Return parts of these sizes, one after another and each aligned, and the size of the tensor that holds all of them."""
    parts, size = dict[str, Part](), 0
    for name, n in sizes.items():
        parts[name] = Part(tensor, size, size + n)
        size += -(-n // 4) * 4
    return parts, size


class Chain:
    """The kernels of a call, with the names of its tensors.

    The caller passes `inputs` and `outputs` to each launch. `parts` are pieces of outputs. `workspace` has the sizes of
    float32 tensors that only the kernels use: a launch allocates all of them at once.
    """

    def __init__(
        self,
        steps: Sequence[Step],
        inputs: Sequence[str],
        outputs: Sequence[str],
        workspace: Mapping[str, int] | None = None,
        parts: Mapping[str, Part] | None = None,
    ) -> None:
        own, self.workspace_size = pack("workspace", workspace or {})
        self.steps, self.inputs, self.parts = steps, tuple(inputs), {**(parts or {}), **own}
        self._names = *inputs, *outputs, *["workspace"] * bool(self.workspace_size)
        self.descriptors = {name: one for step in steps for name, one in step.kernel.descriptors.items()}
        self._described = [(one, self.inputs.index(name.removesuffix(DESCRIPTOR))) for name, one in self.descriptors.items()]
        places = {name: at for at, name in enumerate((*self._names, *self.parts, *self.descriptors))}
        self._offsets = [(places[part.tensor], 4 * part.start) for part in self.parts.values()]
        self._picks = [_pick([places[name] for name in step.operands]) for step in steps]
        self._loaded: dict[tuple[int, frozenset[str]], list[tuple[Any, ...]]] = {}  # by device and operands at odd addresses: the kernels

    def launch(self, device: int, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
        """Launch on tensors of this device, which must be the current one.

        Inputs come from users, so their device and memory are checked. Outputs are new.
        """
        if self.workspace_size:
            outputs = *outputs, allocate((self.workspace_size,), (1,), torch.float32)
        if INTERPRETED:
            self._interpret(dict(zip(self._names, (*inputs, *outputs))))
            return
        addresses: list[Any] = []
        low, lowest = 0, LOWEST
        for t in inputs:
            if t.get_device() != device:  # a kernel would read whatever lies at that address
                self._raise_other_device(device, inputs)
            at = t.data_ptr()
            if at < lowest:
                lowest = at
            low |= at
            addresses.append(at)
        if lowest < LOWEST:
            require_memory([USER_NAMES.get(name, name) for name in self.inputs], inputs)
        for t in outputs:
            at = t.data_ptr()
            low |= at
            addresses.append(at)
        for place, offset in self._offsets:
            addresses.append(addresses[place] + offset)
        for descriptor, at in self._described:
            addresses.append(descriptor.of(inputs[at]))
        stream, odd = current_raw_stream(device), self._odd(addresses) if low % ALIGNMENT else NONE
        for run, programs, function, metadata, pick, numbers in self._loaded.get((device, odd)) or self._load(device, odd):
            run(programs, 1, 1, stream, function, metadata, None, None, None, *pick(addresses), *numbers)

    def _odd(self, addresses: Sequence[Any]) -> frozenset[str]:
        """Return the names of the operands at odd addresses: in a backward all tensors, because no others were measured."""
        named = zip((*self._names, *self.parts), addresses)
        return frozenset(name for name, at in named if at % ALIGNMENT or ("dy" in self.inputs and name not in self.parts))

    def _load(self, device: int, odd: frozenset[str]) -> list[tuple[Any, ...]]:
        """Compile the kernels for these operands at odd addresses, and return what a launch of each needs."""
        loaded = []
        for (kernel, operands), pick in zip(self.steps, self._picks):
            named = zip(kernel.pointers, operands[len(kernel.descriptors) :])
            run, function, metadata = kernel.load(device, [pointer for pointer, name in named if name in odd])
            loaded.append((run, kernel.programs, function, metadata, pick, kernel.numbers))
        self._loaded[device, odd] = loaded
        return loaded

    def _interpret(self, tensors: dict[str, Tensor]) -> None:
        for name, (of, start, end) in self.parts.items():
            whole = tensors[of]
            tensors[name] = whole.as_strided((end - start,), (1,), whole.storage_offset() + start)
        for kernel, operands in self.steps:
            kernel.interpret({pointer: tensors[name] for pointer, name in zip(kernel.pointers, operands)})

    def _raise_other_device(self, device: int, inputs: Sequence[Tensor]) -> None:
        name, t = next((name, t) for name, t in zip(self.inputs, inputs) if t.get_device() != device)
        raise RuntimeError(f"{name} is on {t.device}, expected cuda:{device}, where x is")


def _pick(places: Sequence[int]) -> Callable[[Sequence[Any]], Sequence[Any]]:
    """Return a function that takes a list and returns its elements at these places."""
    if len(places) == 1:
        (only,) = places
        return lambda values: (values[only],)
    return itemgetter(*places)
