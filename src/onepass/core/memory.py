"""Check that tensors have memory.

torch's elementwise operations crash the process if the storage of a tensor was freed. So every tensor is checked before such an
operation reads it. Most checks are in dispatch/. The fastest launchers of the C and GPU backends compare the addresses with
LOWEST themselves, since they read them anyway.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from torch.compiler import is_dynamo_compiling
from torch.nn import Parameter

LOWEST = 1 << 40  # a tensor without memory has an address below this, namely its storage offset in bytes


class NoMemory(RuntimeError):
    """Raised if a tensor has elements but no memory."""


class ZeroTensor(NoMemory):
    """Raised if a tensor is one of torch's zero tensors (`torch._efficientzerotensor`), which have no memory.

    Registered ops accept zero tensors, because torch's dispatcher allocates their memory before the call.
    """


def require_memory(names: Sequence[str], tensors: Sequence[Tensor | None]) -> None:
    """Raise `NoMemory` if a tensor has elements but no memory. torch's norms raise in this case, too.

    Example: `require_memory(("input", "weight"), (x, weight))`
    """
    for name, t in zip(names, tensors):
        if t is not None and t.data_ptr() < LOWEST:
            _require(name, t)


def _require(name: str, t: Tensor) -> None:
    if t.is_meta or not t.numel() or t.data_ptr() != t.storage_offset() * t.element_size():
        return
    if t._is_zerotensor():
        raise ZeroTensor(f"{name} is a zero tensor of torch's, which has no memory: pass torch.zeros_like({name})")
    raise NoMemory(
        f"The tensor has a non-zero number of elements, but its data is not allocated yet.; {name} of shape {list(t.shape)} on {t.device} "
        "has no memory behind it: its storage was freed, as FSDP frees parameters between uses"
    )


def require_memory_if_shown(names: Sequence[str], tensors: Sequence[Tensor | None]) -> None:
    """Raise `NoMemory` as `require_memory` does, but skip zero tensors, tensor subclasses and tensors without an address.

    Use it for tensors that only torch's own operations read: they accept the skipped ones.
    """
    if is_dynamo_compiling():
        return  # tensors have no memory while dynamo traces
    for name, t in zip(names, tensors):
        if type(t) not in (Tensor, Parameter):
            continue
        try:
            require_memory((name,), (t,))
        except ZeroTensor:
            pass
        except NoMemory:
            raise
        except RuntimeError:
            pass  # functorch's wrapper tensors have no address
