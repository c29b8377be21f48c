from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch
import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

INTERPRETED = bool(knobs.runtime.interpret)


ALIGNED = 16  # bytes of a vector load


# Every number that is compiled in, by its value or its divisor, is one more reason to compile again for another shape.
# Counts never are by their value; what decides how wide loads are is by its divisor.
COUNTS = {"total", "reps", "parts_r", "parts_t", "chunk_r", "chunk_t", "m2_at", "columns", "members", "kept", "reduced"}
COUNTS |= {"teams", "units", "each", "width", "spans"}


ALIGNING = {"reps", "run", "columns", "width", "x_o", "x_r", "x_s", "y_o", "y_r", "y_s", "p_s", "m_o", "m_s"}


TYPE_NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", torch.int32: "i32"}


class Source(NamedTuple):
    """What is compiled, the same for many problems: types of the arguments, values of the constant ones, known divisors of the others."""

    function: Any
    signature: tuple[tuple[str, str], ...]
    constants: tuple[tuple[str, Any], ...]
    divisors: tuple[tuple[int, int], ...]
    warps: int
    cooperative: bool = False  # all programs run at the same time
    registers: int = 0  # for a thread at most; 0: as many as it likes

    def _manner(self) -> dict[str, Any]:
        """What only some kernels ask for: to start while the last one runs (HIP cannot), to run all at once, to spare registers."""
        options: dict[str, Any] = {"launch_pdl": True} if dict(self.constants).get("FOLLOWS") else {}
        if self.cooperative:
            options["launch_cooperative_grid"] = True
        if self.registers:
            options["maxnreg"] = self.registers
        return options

    def compile(self, target: GPUTarget | None = None) -> Any:
        attributes = {(at,): [["tt.divisibility", divisor]] for at, divisor in self.divisors}
        language = ASTSource
        if self.function.is_gluon():
            from onepass.backends.gpu.ring.gluon import GluonASTSource as language
        # An argument with a default is a constant that calls do not hand over.
        defaults = {param.name: param.default for param in self.function.params if param.has_default}
        source = language(self.function, dict(self.signature), defaults | dict(self.constants), attributes)
        # The default of enable_fp_fusion depends on Triton's version.
        return triton.compile(source, target=target, options={"num_warps": self.warps, "enable_fp_fusion": True} | self._manner())


@cache
def loaded(source: Source, device: int) -> Any:
    """A compiled kernel with its handles, which belong to the device that is current."""
    kernel = source.compile()
    kernel._init_handles()
    return kernel
