"""Normalization layers for PyTorch: one implementation of all norms, for every memory layout."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from onepass import functional, nn
    from onepass.core.spec import NormSpec
    from onepass.functional.custom import custom_norm
    from onepass.patching import patch, register, unpatch
    from onepass.planning.explain import explain
    from onepass.planning.options import CannotForce, batch_invariant, force
    from onepass.precompiling import precompile

__version__ = "0.1.0"
__all__ = [
    "CannotForce", "NormSpec", "__version__", "batch_invariant", "custom_norm", "explain", "force", "functional", "nn", "patch",
    "precompile", "register", "unpatch",
]  # fmt: skip

# For each public name, the module from which it is imported when it is first used.
_HOME = {
    "functional": "onepass.functional",
    "nn": "onepass.nn",
    "NormSpec": "onepass.core.spec",
    "custom_norm": "onepass.functional.custom",
    "explain": "onepass.planning.explain",
    "CannotForce": "onepass.planning.options",
    "batch_invariant": "onepass.planning.options",
    "force": "onepass.planning.options",
    "patch": "onepass.patching",
    "precompile": "onepass.precompiling",
    "register": "onepass.patching",
    "unpatch": "onepass.patching",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = import_module(_HOME[name])
    value = module if module.__name__ == f"{__name__}.{name}" else getattr(module, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
