"""What Triton compiles."""

from __future__ import annotations

from functools import cache
from types import SimpleNamespace
from typing import Any, NamedTuple

import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from .signature import Path, runtime_types

INTERPRETED = bool(knobs.runtime.interpret)


class Source(NamedTuple):
    """What Triton compiles. Many problems share one source."""

    function: Any
    types: tuple[tuple[str, Any], ...]  # for each argument, its type or a NamedTuple of types
    constants: tuple[tuple[Path, Any], ...]
    divisors: tuple[tuple[Path, int], ...]
    warps: int
    cooperative: bool = False  # all programs run at the same time
    max_registers: int = 0  # per thread; 0 means no limit
    pdl: bool = False  # the kernel starts while the one before it runs, and waits for its results

    def compile(self, target: GPUTarget | None = None) -> Any:
        """The compiled kernel. Its launcher takes the runtime leaves in one flat list, without constants."""
        attributes = {path: [["tt.divisibility", divisor]] for path, divisor in self.divisors}
        language = ASTSource
        if self.function.is_gluon():
            from onepass.backends.gpu.ring.gluon import GluonASTSource as language
        source = language(self.function, dict(self.types), dict(self.constants), attributes)
        kernel: Any = triton.compile(source, target=target, options=self._options())
        # Triton makes the launcher from kernel.src. A launcher of nested arguments takes 14 us, one of a flat list less
        # than 3 us.
        flat = [leaf for _, type_ in self.types for leaf in runtime_types(type_)]
        kernel.src = SimpleNamespace(signature={str(at): leaf for at, leaf in enumerate(flat)}, constants={}, fn=source.fn)
        return kernel

    def _options(self) -> dict[str, Any]:
        options: dict[str, Any] = {"num_warps": self.warps, "enable_fp_fusion": True}  # the default of fusion depends on the version
        if self.pdl:  # HIP does not know this option
            options["launch_pdl"] = True
        if self.cooperative:
            options["launch_cooperative_grid"] = True
        if self.max_registers:
            options["maxnreg"] = self.max_registers
        return options


@cache
def loaded(source: Source, device: int) -> Any:
    """A compiled kernel, loaded on the current device. `device` is its number: handles belong to one device."""
    kernel = source.compile()
    kernel._init_handles()
    return kernel
