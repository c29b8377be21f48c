"""The report that `precompile` returns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Report:
    """The result of `precompile`: how many kernels were compiled, and how many the caches had. The C kernels count as one.

    Example: `print(onepass.precompile(model, x))`
    """

    calls: int  # how many kinds of norm calls the model made; calls of one kind have the same shapes, strides and dtypes
    compiled: int  # kernels that this call compiled
    cached: int  # kernels that were already compiled
    seconds: float  # the time that `precompile` took, with the run of the model
    kernels: Sequence[tuple[str, float]] = ()  # the name of each compiled kernel, and the seconds that it took
    notes: Sequence[str] = ()
    failure: str = ""  # why the C kernels could not be compiled, or ""

    def __str__(self) -> str:
        lines = [f"compiled {name} in {seconds:.1f} s" for name, seconds in self.kernels]
        if self.failure:
            lines.append(f"FAILED: the CPU kernels cannot be used: {self.failure}")
        kinds = f"{self.calls} kind{'s' * (self.calls != 1)} of norm calls"
        counts = f"{self.compiled} kernel{'s' * (self.compiled != 1)} compiled, {self.cached} already compiled"
        return "\n".join([*lines, *self.notes, f"{kinds}: {counts}; {self.seconds:.1f} s"])
