"""The arguments of GPU kernels: which are compiled in, which a launch passes, and that kernels use all of them."""

import inspect
import re
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch

pytest.importorskip("triton")

from onepass.backends.family import FORWARD
from onepass.backends.gpu import backward, forward
from onepass.backends.gpu.launch.fields import Count, Index, Length, Pointer, Real, Stride, Wide, kinds
from onepass.backends.gpu.launch.kernel import Kernel
from onepass.backends.gpu.launch.signature import filled, runtime_types, signature_of
from onepass.bench.suite import BACKWARD_SUITE, SUITE, problem_of
from onepass.core.device import Device
from onepass.core.operands import Needs
from onepass.planning.choose import plan

H200 = Device("cuda", "H200", 132, 32, 232448, True, True, "", "", 60 * 2**20, "")
GPU = Path(inspect.getfile(forward)).parent


class Numbers(NamedTuple):
    count: Count
    length: Length
    index: Index
    stride: Stride


class Operands(NamedTuple):
    x_ptr: Pointer
    bias_ptr: Pointer
    eps: Real


class Mode(NamedTuple):
    block: int
    activation: str
    stress: str | None


NAMES = ("operands", "numbers", "mode", "y_ptr", "count", "total")


def _signature(*numbers: int):
    arguments = Operands(torch.float16, None, 1e-5), Numbers(*numbers), Mode(64, "silu", None), torch.float32, 2.0, 7
    return signature_of(NAMES, arguments)


def test_what_is_compiled_in():
    types, constants, divisors, pointers, numbers = _signature(1, 48, 1, 0)
    assert dict(constants) == {(0, 1): None, (1, 2): 1, (1, 3): 0, (2, 0): 64, (2, 1): "silu", (2, 2): None}
    assert dict(divisors) == {(1, 1): 16}
    assert dict(types)["numbers"] == Numbers("i32", "i32", "constexpr", "constexpr")
    assert [(leaf.path, leaf.name, leaf.dtype) for leaf in pointers] == [((0, 0), "x", torch.float16), ((3,), "y", torch.float32)]
    assert numbers == (1e-5, 1, 48, 2.0, 7)
    assert [leaf for _, type_ in types for leaf in runtime_types(type_)] == ["*fp16", "fp32", "i32", "i32", "*fp32", "fp32", "i32"]


def test_counts_and_lengths_are_never_compiled_in_by_value():
    assert dict(_signature(0, 1, 2, 6).types)["numbers"] == Numbers("i32", "i32", "i32", "i32")
    assert dict(_signature(0, 1, 2, 6).divisors) == {(1, 3): 2}


def test_wide_numbers():
    types = dict(_signature(2**31, 4, Wide(5), Wide(1)).types)
    assert types["numbers"] == Numbers("i64", "i32", "i64", "constexpr")


def test_the_interpreter_gets_tensors():
    x, y = torch.ones(1), torch.ones(2)
    arguments = Operands(torch.float32, None, 1e-5), Numbers(1, 2, 3, 4), Mode(64, "silu", None), torch.float32, 2.0, 7
    found = filled(arguments, {"x": x, "y": y}, NAMES)
    assert found[0].x_ptr is x and found[0].bias_ptr is None and found[3] is y and found[1:3] == list(arguments[1:3])


def test_a_group_has_values_or_groups():
    class Mixed(NamedTuple):
        count: Count
        numbers: Numbers

    Mixed.__annotations__ = {"count": Count, "numbers": Numbers}
    with pytest.raises(TypeError, match="mixes values and groups"):
        kinds(Mixed)


def test_pointers_come_before_numbers():
    with pytest.raises(TypeError, match="takes a pointer after a number"):
        Kernel(SimpleNamespace(arg_names=("eps", "y_ptr"), __name__="kernel"), (1e-5, torch.float32), 1, 1)


def _kernels():
    """The kernels of the suites on a Hopper, by name."""
    found = {}
    for row in (*SUITE, *BACKWARD_SUITE):
        problem = problem_of(row)
        chosen = plan(problem, H200, row.direction)
        if row.direction == FORWARD:
            made = forward.kernels(problem, chosen.launches)
        else:
            made = [kernel for _, kernel in backward.kernels(problem, chosen.launches, Needs(*[True] * 7))]
        found |= {kernel.function.fn.__name__: kernel for kernel in made}
    return found


def test_kernels_use_every_argument():
    """Searches the source: the kernel's file, or the device code that it may call, names every field."""
    own_device_code = {
        "ring_forward": ("apply.py", "work.py", "parameters.py", "runs.py", "elements.py"),
        "ring_backward": (
            *("apply_backward.py", "reduce_backward.py", "exchange_backward.py"),
            *("known.py", "work.py", "parameters.py", "elements.py"),
        ),
        "merge_gradients": ("kernel.py",),
        "mix_gradients": ("kernel.py",),
        "mix_weights": ("kernel.py",),
    }
    shared = "".join(path.read_text() for path in [*(GPU / "device").glob("*.py"), *GPU.glob("*/exchange.py")])
    kernels = _kernels()
    assert len(kernels) == 17
    for name, kernel in kernels.items():
        file = Path(inspect.getfile(kernel.function.fn))
        text = file.read_text() + shared + "".join((file.parent / other).read_text() for other in own_device_code.get(name, ()))
        assert len(kernel.arguments) <= 13, name
        for parameter, value in zip(kernel.function.arg_names, kernel.arguments):
            for field in getattr(value, "_fields", ()):
                known_as = parameter.removeprefix("second_")  # where a function does the same for two arguments
                assert re.search(rf"\b{known_as}\.{field}\b", text), f"{name}: {parameter}.{field}"
