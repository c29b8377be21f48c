"""The current device and stream, and new tensors on that device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from onepass.core.allocate import on_current_gpu

from .source import INTERPRETED


class Stream(NamedTuple):
    device: int
    handle: int


def _new_on_cpu(shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.empty_strided(shape, stride, dtype=dtype)


# Triton's interpreter runs on tensors of the CPU, whose device number is -1. Builds of torch for the CPU lack the functions of torch._C.
current_device: Callable[[], int] = (lambda: -1) if INTERPRETED else getattr(torch._C, "_cuda_getDevice", lambda: -1)
current_raw_stream: Any = getattr(torch._C, "_cuda_getCurrentRawStream", None)
allocate = _new_on_cpu if INTERPRETED else on_current_gpu  # an uninitialized tensor on the current device
