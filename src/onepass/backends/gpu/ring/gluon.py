"""What this project uses of Gluon, Triton's experimental language for code closer to the hardware.

Gluon's names change between versions. Other files import them from here, as Triton 3.9 calls them, so that a new version
changes only this file.
"""

from typing import Any

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

__all__ = ["GluonASTSource", "TensorDescriptor", "async_load", "barrier", "fence_async_shared", "gl", "jit", "mbarrier", "shared_layout"]

_tma: Any = tma
_gl: Any = gl

jit = gluon.jit
async_load = _tma.async_load if hasattr(tma, "async_load") else _tma.async_copy_global_to_shared
barrier = _gl.barrier if hasattr(gl, "barrier") else _gl.thread_barrier


def shared_layout(block: tuple[int, int], dtype: torch.dtype) -> Any:
    """Return the layout in which the tensor memory accelerator (TMA) writes a block to shared memory."""
    return _gl.NVMMASharedLayout.get_default_for(list(block), getattr(gl, str(dtype).removeprefix("torch.")))
