"""Let onepass compute the norms of an existing model, in place.

- `patch`: the functions `patch` and `unpatch`; `report`: what `patch` returns and prints
- `recognition/`: finds which norm of onepass a module computes, by comparing the two on random input
- `analysis/`: finds the conditions that a forward branches on, by reading its source
- `fusion/`: finds activations and sums that a norm can compute as well, and defines the modules that call it
- `class_swap`: gives a module another class; `swapped_norm` and `channels_last` define such classes
- `guards`: what each call of a patched module checks; `function_source`: from a function to its syntax tree and back
"""

from .patch import patch, unpatch
from .recognition.recognize import register
from .report import Report, Row

__all__ = ["Report", "Row", "patch", "register", "unpatch"]
