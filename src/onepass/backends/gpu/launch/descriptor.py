"""Descriptors: how a kernel copies a matrix with the tensor memory accelerator (TMA) of the GPU."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

ALIGNMENT = 16  # the largest divisor of a number or address that the compiler uses. A vector load is 16 bytes wide


@dataclass(frozen=True)
class Descriptor:
    """A matrix, without its address, that a kernel copies block by block into shared memory.

    `of` adds the address. It must be a multiple of 16 bytes, so the descriptor of an x at another address begins before x, and its rows
    are that much longer. The kernel then adds this shift to every column.
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

        below = x.data_ptr() % ALIGNMENT
        base: Any = _Base(self.dtype, x.data_ptr() - below) if below else x
        columns = self.columns + below // self.dtype.itemsize
        return TensorDescriptor(base, [self.rows, columns], [self.stride, 1], list(self.block), self.layout)


class _Base(NamedTuple):
    """An address in place of a tensor: what Triton reads of a descriptor's tensor."""

    dtype: torch.dtype
    address: int

    def data_ptr(self) -> int:
        return self.address
