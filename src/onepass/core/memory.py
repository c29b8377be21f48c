"""Whether there is memory behind a tensor.

torch's own elementwise operations crash the process if the storage of a tensor was freed. So every tensor is checked before it reaches
one. `dispatch` checks its operands. Minimal launchers need the addresses anyway, and compare them with LOWEST themselves.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from torch.compiler import is_dynamo_compiling
from torch.nn import Parameter

LOWEST = 1 << 40  # a lower address may be an offset into storage that does not exist; `require_memory` decides


class NoMemory(RuntimeError):
    """A tensor with elements has no memory."""


class ZeroTensor(NoMemory):
    """An operand is one of torch's zero tensors, which have no memory. The dispatcher allocates them for registered ops."""


def require_memory(names: Sequence[str], tensors: Sequence[Tensor | None]) -> None:
    """Raise if a tensor has elements but no memory, as torch's norms do.

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
    """As `require_memory`, for tensors that torch's own operations will read. Those accept zero tensors and subclasses."""
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
            pass  # a tensor of functorch or vmap has no address
