"""Descriptors: how a kernel copies a matrix with the tensor memory accelerator (TMA) of the GPU."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Descriptor:
    """A matrix, without its address, that a kernel copies block by block into shared memory.

    `of` adds the address, which must be a multiple of 16 bytes.
    """

    dtype: torch.dtype
    rows: int
    columns: int
    stride: int  # elements between rows
    block: tuple[int, int]

    @cached_property
    def layout(self) -> Any:
        from onepass.backends.gpu.ring.gluon import shared_layout

        return shared_layout(self.block, self.dtype)

    @property
    def type_name(self) -> str:
        from .signature import TYPE_NAMES

        return f"tensordesc<{TYPE_NAMES[self.dtype]}[{self.block[0]},{self.block[1]}],{self.layout!r}>"

    def of(self, x: Tensor) -> Any:
        from onepass.backends.gpu.ring.gluon import TensorDescriptor

        return TensorDescriptor(x, [self.rows, self.columns], [self.stride, 1], list(self.block), self.layout)
