"""Normalization layers for PyTorch whose kernels read every tensor once."""

from . import functional, nn
from .plan import CannotForce, explain, families, force

__version__ = "0.1.0"
__all__ = ["CannotForce", "__version__", "explain", "families", "force", "functional", "nn"]
