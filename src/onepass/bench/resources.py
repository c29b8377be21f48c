"""What the kernels of the suite take on each GPU, compiled ahead of time: registers, spills and shared memory. Needs Triton, but no GPU.

Run it with `python -m onepass.bench.resources`, which writes results/resources.jsonl.
"""

from __future__ import annotations

import json
import re
import subprocess
import tempfile
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
from triton.backends.compiler import GPUTarget

from ..device import Device
from ..kernels import forward
from ..kernels.launch import Source
from ..plan import plan
from ..problem import Extras, NormProblem, bind
from . import cases
from .cases import lay_out
from .suite import SUITE, Row

RESULTS = Path("results/resources.jsonl")

TARGETS = {
    "sm_80": (GPUTarget("cuda", 80, 32), Device("cuda", "A100", 108, 32, 166912, False, "")),
    "sm_90": (GPUTarget("cuda", 90, 32), Device("cuda", "H200", 132, 32, 232448, True, "")),
    "sm_100": (GPUTarget("cuda", 100, 32), Device("cuda", "B200", 148, 32, 232448, True, "")),
    "gfx942": (GPUTarget("hip", "gfx942", 64), Device("cuda", "MI300X", 304, 64, 65536, False, "")),
    "gfx1100": (GPUTarget("hip", "gfx1100", 32), Device("cuda", "RX 7900", 96, 32, 65536, False, "")),
}


class Resources(NamedTuple):
    target: str
    kernel: str
    row: str  # the first of the suite's that runs it
    registers: int
    spilled: int  # bytes, or registers on AMD
    shared: int  # bytes


def problem_of(row: Row) -> NormProblem:
    """The row's problem, without its tensors."""
    case, op = row.case, cases.OPS[row.case.op]
    x = lay_out(torch.empty(case.shape, dtype=row.dtype, device="meta"), case.layout, "meta")
    param = torch.empty(1, dtype=torch.float32 if case.wide else row.dtype, device="meta")
    weight, bias = param if case.affine in ("both", "weight") else None, param if case.affine in ("both", "bias") and op.has_bias else None
    per_sample = param if case.modulate else None
    given = case.evaluate and not cases.spec_of(case).mix
    extras = Extras(x if case.residual else None, per_sample, per_sample)
    return bind(cases.spec_of(case), x, weight, bias, given, case.running and not given, extras)


def sources(target: str) -> dict[Source, tuple[str, str]]:
    """Every kernel that the planner picks for the suite on a target, what it is, and a row that runs it."""
    found: dict[Source, tuple[str, str]] = {}
    for row in SUITE:
        problem = problem_of(row)
        chosen = plan(problem, TARGETS[target][1])
        for step, kernel in zip(chosen.passes, forward.kernels(chosen, problem, residual=True)):
            found.setdefault(kernel.source(), (re.sub(r"\d+x\[", "[", str(step)), row.name))
    return found


def _measure(job: tuple[str, int]) -> Resources:
    target, at = job
    source, (kernel, row) = list(sources(target).items())[at]
    compiled = source.compile(TARGETS[target][0])
    usage = _amd(compiled.asm["amdgcn"]) if target.startswith("gfx") else _nvidia(compiled.asm["cubin"])
    return Resources(target, kernel, row, *usage, compiled.metadata.shared)


def _nvidia(cubin: bytes) -> tuple[int, int]:
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    registers, stack, local = (int(re.findall(rf"{name}:(\d+)", text)[0]) for name in ("REG", "STACK", "LOCAL"))
    return registers, stack + local


def _amd(assembly: str) -> tuple[int, int]:
    registers, vector, scalar = (
        int(re.findall(rf"\.{name}:\s+(\d+)", assembly)[0]) for name in ("vgpr_count", "vgpr_spill_count", "sgpr_spill_count")
    )
    return registers, vector + scalar


def measure(workers: int = 2) -> Iterator[Resources]:
    """Compile everything; the slow part is the compilers'.

    Example: `all(resources.spilled == 0 for resources in measure())`
    """
    jobs = [(target, at) for target in TARGETS for at in range(len(sources(target)))]
    with ProcessPoolExecutor(workers) as pool:
        yield from pool.map(_measure, jobs, chunksize=4)


def main() -> None:
    lines: list[dict[str, Any]] = [resources._asdict() for resources in measure()]
    RESULTS.write_text("".join(json.dumps(line) + "\n" for line in lines))
    print(f"{len(lines)} kernels, {sum(line['spilled'] > 0 for line in lines)} spill; {RESULTS}")


if __name__ == "__main__":
    main()
