"""Compiles the kernels of the benchmark suites for each GPU, and records their registers, spills and shared memory.

`python -m benchmarks.resources` writes results/resources.jsonl. It needs Triton, but no GPU.
"""

from __future__ import annotations

import json
import re
import subprocess
import tempfile
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import triton
from triton.backends.compiler import GPUTarget

from onepass.backends.family import FORWARD
from onepass.backends.gpu import backward, forward
from onepass.backends.gpu.launch.source import Source
from onepass.backends.gpu.partials.sums import SumsLaunch
from onepass.backends.gpu.ring.launch import RingLaunch
from onepass.backends.gpu.row.launch_backward import RowBackwardLaunch
from onepass.backends.gpu.whole_set.launch import WholeSetLaunch
from onepass.bench.suite import BACKWARD_SUITE, SUITE, Row, problem_of
from onepass.core.device import KNOWN_DEVICES
from onepass.core.operands import Needs
from onepass.planning.choose import plan

RESULTS = Path("results/resources.jsonl")

TARGETS = {
    "sm_80": (GPUTarget("cuda", 80, 32), KNOWN_DEVICES["a100"]),
    "sm_90": (GPUTarget("cuda", 90, 32), KNOWN_DEVICES["h200"]),
    "sm_100": (GPUTarget("cuda", 100, 32), KNOWN_DEVICES["b200"]),
    "gfx942": (GPUTarget("hip", "gfx942", 64), KNOWN_DEVICES["mi300x"]),
    "gfx1100": (GPUTarget("hip", "gfx1100", 32), KNOWN_DEVICES["rx7900"]),
}

BACKWARD_TARGETS = ("sm_80", "sm_90", "gfx942")  # kernels of a backward are compiled only for these, to save time


class Resources(NamedTuple):
    target: str
    kernel: str
    row: str  # the first row of the suites that runs this kernel
    registers: int
    spilled: int  # bytes on NVIDIA, registers on AMD
    shared: int  # bytes of shared memory


def rows() -> list[Row]:
    """Return one row of the suites for each kind of problem and launch. Compiling all rows would take too long."""
    kinds: dict[tuple[Any, ...], Row] = {}
    for row in (*SUITE, *BACKWARD_SUITE):
        case, chosen = row.case, plan(problem_of(row), TARGETS["sm_90"][1], row.direction)
        shapes = tuple(_shape(launch) for launch in chosen.launches if not isinstance(launch, SumsLaunch))
        kinds.setdefault((row.direction, case.op, case.layout, case.modulate, case.residual, case.evaluate, chosen.family, shapes), row)
    return list(kinds.values())


def _shape(launch: Any) -> tuple[Any, ...]:
    """Return the properties of a launch that, besides its problem, decide which code is compiled."""
    stages = launch.slots if isinstance(launch, RingLaunch) else getattr(launch, "stages", 1)
    split_row = isinstance(launch, RowBackwardLaunch) and launch.segments is not None and launch.split.parts_t == 2
    resident = isinstance(launch, WholeSetLaunch) or getattr(launch, "resident", False)
    return launch.name, resident, getattr(launch, "remainder", 0) > 0, stages, launch.block_i > 1, split_row


@cache
def sources(target: str) -> dict[Source, tuple[str, str]]:
    """Return every kernel that the planner chooses for `rows()` on a target, with (description, name of a row that runs it)."""
    found: dict[Source, tuple[str, str]] = {}
    for row in rows():
        problem = problem_of(row)
        chosen = plan(problem, TARGETS[target][1], row.direction)
        if row.direction == FORWARD:
            made = zip(chosen.launches, forward.kernels(problem, chosen.launches, residual=True))
        elif target in BACKWARD_TARGETS:
            made = backward.kernels(problem, chosen.launches, Needs(*[True] * 7), dsum=row.case.residual)
        else:
            continue
        for step, kernel in made:
            found.setdefault(kernel.source(), (re.sub(r", \d+ programs?$", "", str(step)), row.name))
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
    """Compile all kernels, and yield the resources of each.

    Example: `all(resources.spilled == 0 for resources in measure())`
    """
    jobs = [(target, at) for target in TARGETS for at in range(len(sources(target)))]
    with ProcessPoolExecutor(workers) as pool:
        yield from pool.map(_measure, jobs, chunksize=4)


def main() -> None:
    lines: list[dict[str, Any]] = [{**resources._asdict(), "triton": triton.__version__} for resources in measure()]
    RESULTS.write_text("".join(json.dumps(line) + "\n" for line in lines))
    print(f"{len(lines)} kernels, {sum(line['spilled'] > 0 for line in lines)} spill; {RESULTS}")


if __name__ == "__main__":
    main()
