"""Compile the kernels of a model before it is used.

- `precompile`: the function `precompile`, which runs the model once; `report`: the report that it returns
- `untouched`: restores the state of the model and of the random number generators after that run
"""

from .precompile import precompile
from .report import Report

__all__ = ["Report", "precompile"]
