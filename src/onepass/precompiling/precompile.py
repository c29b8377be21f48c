"""The function `precompile`. It runs the model once, and records the kernels that its norms need."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy

from onepass.backends.compilation import recorded
from onepass.dispatch import front_door, launchers
from onepass.patching.class_swap import Swapped
from onepass.patching.swapped_norm import ONEPASS_CLASSES

from .report import Report
from .untouched import untouched

NO_BACKWARD = "no backward ran, since no output of the model needs a gradient"


def precompile(model: nn.Module, *example_inputs: Any, training: bool | None = None, **example_kwargs: Any) -> Report:
    """Compile all kernels that `model(*example_inputs, **example_kwargs)` needs, and return a report.

    The kernels stay in the caches on disk, so that later processes compile nothing. The model runs once. Buffers, gradients, modes
    and random number generators stay as they were.

    With `training=True`, a forward and a backward run in training mode. With `training=False`, a forward runs in evaluation mode,
    under `no_grad`. None means the present mode of the model. To compile for both, call `precompile` twice. Shapes, strides, dtypes,
    devices, autocast and options must be the same as in later calls.

    Example: `print(onepass.precompile(model, x))`
    """
    while isinstance(model, DistributedDataParallel):  # it expects `backward`, and `_run` calls `autograd.grad`
        model = model.module
    _check(model, example_inputs, example_kwargs)
    started, training = perf_counter(), model.training if training is None else training
    tensors = [*model.parameters(), *model.buffers(), *tensors_in((example_inputs, example_kwargs))]
    launchers.forget_all()  # the run must load all kernels again, so that they are counted
    with recorded() as record, untouched(model, {t.device for t in tensors}):
        if model.training != training:
            model.train(training)
        closed = front_door.open_now()
        notes = _run(model, example_inputs, example_kwargs, training)
    calls = len(launchers.known())
    if closed:
        notes.append(f"the C++ front door stays closed, so small norms take more host time: {closed}")
    if not calls:
        notes.append(_why_no_call(model))
    cached = len(record.needed) - len(record.compiled)
    failure = launchers.why_no_library()
    return Report(calls, len(record.compiled), cached, perf_counter() - started, tuple(record.compiled), tuple(notes), failure)


def _check(model: Any, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if not isinstance(model, nn.Module):
        kind = "a class" if isinstance(model, type) else type(model).__name__
        raise TypeError(f"model must be a torch.nn.Module, not {kind}; got {model!r:.80}: pass the model itself")
    if not inputs and not kwargs:
        raise TypeError("example_inputs is empty; expected the arguments with which the model is called: onepass.precompile(model, x)")
    lazy = next((name for name, parameter in (*model.named_parameters(), *model.named_buffers()) if is_lazy(parameter)), None)
    if lazy is not None:
        raise ValueError(f"model has the parameter {lazy!r} without a shape yet; expected a complete model: call the model once before")


def _run(model: nn.Module, inputs: tuple[Any, ...], kwargs: dict[str, Any], training: bool) -> list[str]:
    """Run the model as `precompile` describes. Return notes for the report."""
    with torch.inference_mode(False), torch.set_grad_enabled(training):
        outputs = model(*inputs, **kwargs)
        if not training:
            return []
        results = [t for t in tensors_in(outputs) if t.requires_grad]
        leaves = [t for t in (*model.parameters(), *tensors_in((inputs, kwargs))) if t.requires_grad]
        if not results or not leaves:
            return [NO_BACKWARD]
        # Not `backward`: it would add to .grad, and run hooks that step an optimizer or wait for other processes. A sum of the
        # results would have a gradient with strides of 0, which no loss gives.
        torch.autograd.grad(results, leaves, [torch.ones_like(t) for t in results], allow_unused=True)
    return []


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in nested lists, tuples, dictionaries and dataclasses."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_in(item)
    elif is_dataclass(value):
        for field in fields(value):
            yield from tensors_in(getattr(value, field.name, None))


def _why_no_call(model: nn.Module) -> str:
    """Return a note on a model whose norms of onepass did not run. Raise an error if it has none."""
    norms = sum(isinstance(module, (Swapped, *ONEPASS_CLASSES)) for module in model.modules())
    if not norms:
        raise ValueError(
            "model has no norm of onepass, and its forward called none, so there is nothing to compile: call onepass.patch(model) first"
        )
    return "no norm of onepass ran; a patched norm runs its original forward for inputs for which that is faster"
