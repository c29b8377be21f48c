"""The current device and stream, and memory on it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from onepass.core.allocate import on_current_gpu

from .source import INTERPRETED

current_device: Any = getattr(torch._C, "_cuda_getDevice", None)  # not in builds for the CPU


current_raw_stream: Any = getattr(torch._C, "_cuda_getCurrentRawStream", None)


def _interpreted(shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.empty_strided(shape, stride, dtype=dtype, device=device)


allocate = _interpreted if INTERPRETED else on_current_gpu  # an uninitialised tensor on the current device


class Stream(NamedTuple):
    device: int
    handle: int


@contextmanager
def _switched(device: torch.device) -> Iterator[Stream]:
    with torch.cuda.device(device):
        yield Stream(device.index, current_raw_stream(device.index))


def stream_of(device: torch.device) -> AbstractContextManager[Stream]:
    """The current stream of a device. Inside the context, the device is the current one."""
    if INTERPRETED:
        return nullcontext(Stream(-1, 0))
    if device.index == current_device():
        return nullcontext(Stream(device.index, current_raw_stream(device.index)))
    return _switched(device)
