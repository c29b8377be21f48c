"""Run a model without leaving a trace: its state and the random number generators are restored."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor, nn


@contextmanager
def untouched(model: nn.Module, devices: Iterable[torch.device]) -> Iterator[None]:
    """Restore buffers, modes, counters and random number generators at the end of the block, also after an error.

    Counters and modes are the attributes of modules that are numbers, strings or None. Parameters are not copied, and the content
    of lists and dictionaries is not restored.
    """
    attributes = [(vars(module), _simple(vars(module))) for module in model.modules()]
    buffers = [
        (module._buffers, name, buffer, buffer.detach().clone())
        for module in model.modules()
        for name, buffer in module._buffers.items()
        if buffer is not None
    ]
    with _random_state(devices):
        try:
            yield
        finally:
            for now, before in attributes:
                now.update(before)
            for owner, name, buffer, copy in buffers:
                owner[name] = buffer  # the forward may have put another tensor in its place
                _restore(buffer, copy)


def _simple(attributes: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in attributes.items() if value is None or isinstance(value, (bool, int, float, str))}


def _restore(buffer: Tensor, copy: Tensor) -> None:
    with suppress(RuntimeError):  # not every dtype can be compared
        if torch.equal(buffer, copy):
            return  # an unnecessary change in place could make a pending backward fail
    with torch.inference_mode(buffer.is_inference()), torch.no_grad():
        buffer.copy_(copy)


@contextmanager
def _random_state(devices: Iterable[torch.device]) -> Iterator[None]:
    """Restore the generators of torch, Python and numpy at the end of the block."""
    numpy, python = sys.modules.get("numpy"), random.getstate()
    legacy = numpy.random.get_state() if numpy else None
    with torch.random.fork_rng({device for device in devices if device.type == "cuda"}):
        try:
            yield
        finally:
            random.setstate(python)
            if numpy:
                numpy.random.set_state(legacy)
