"""Normalization layers for PyTorch, as one core in every memory layout."""

from . import functional, nn
from .patching import patch, register, unpatch
from .plan import CannotForce, batch_invariant, explain, force

__version__ = "0.1.0"
__all__ = ["CannotForce", "__version__", "batch_invariant", "explain", "force", "functional", "nn", "patch", "register", "unpatch"]
