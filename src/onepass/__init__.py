"""Normalization layers for PyTorch, as one core in every memory layout."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from . import functional, nn
from .plan import CannotForce, batch_invariant, explain, force

if TYPE_CHECKING:
    from .patching import patch, register, unpatch

__version__ = "0.1.0"
__all__ = ["CannotForce", "__version__", "batch_invariant", "explain", "force", "functional", "nn", "patch", "register", "unpatch"]


def __getattr__(name: str) -> Any:
    """patch, register and unpatch come from a package that is imported on first use: reading other people's code takes much of ours."""
    if name in ("patch", "register", "unpatch"):
        return getattr(import_module(".patching", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
