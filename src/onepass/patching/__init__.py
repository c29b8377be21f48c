"""Make onepass compute the norms of an existing model, in place.

- `patch`: the functions `patch` and `unpatch`; `report`: the report that `patch` returns
- `recognition/`: finds which norm of onepass a module computes, by comparing the two on random input
- `analysis/`: finds the conditions that a forward branches on, by reading its source
- `fusion/`: lets a norm also compute the activation after it, or the sum before it
- `class_swap`: replaces the class of a module; `swapped_norm`, `channels_last`: new classes of norms and convolutions
- `guards`: the checks that each call of a patched module makes; `under_compile`: runs original methods under torch.compile
- `function_source`: turns a function into its syntax tree, and a changed tree into a function
"""

from .patch import patch, unpatch
from .recognition.recognize import register
from .report import Report, Row

__all__ = ["Report", "Row", "patch", "register", "unpatch"]
