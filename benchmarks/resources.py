"""Compiles the kernels of the benchmark suites for each GPU, and records their registers, spills and shared memory.

`python -m benchmarks.resources` writes results/resources.jsonl. It needs Triton, but no GPU. Each record has a hash of the code
that was compiled. So the tests compile only kernels whose code changed.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import json
import re
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import triton
from triton.backends.compiler import GPUTarget
from triton.language import constexpr
from triton.runtime.jit import JITCallable

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
    code: str  # what `code_of` returns
    triton: str  # the version


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


def code_of(target: str, source: Source) -> str:
    """Return a hash of what is compiled: the kernel with all functions that it calls, its arguments and options.

    Lines, comments, the machine, and the version of Python do not change it. Triton's own hash depends on lines.
    """
    functions: dict[str, tuple[Any, ...]] = {}
    _add_code(source.function, functions)
    arguments = source.types, source.constants, source.divisors
    decides = TARGETS[target][0], sorted(functions.items()), arguments, sorted(source._options().items())
    return hashlib.sha256(repr(decides).encode()).hexdigest()[:16]


def _add_code(function: JITCallable, functions: dict[str, tuple[Any, ...]]) -> None:
    name = f"{function.__module__}.{function.__qualname__}"
    if name in functions or name.startswith("triton."):  # a record has the version of Triton
        return
    tree, called, values = _parsed(function)
    functions[name] = tree, getattr(function, "noinline", False), values
    for inner in called:
        _add_code(inner, functions)


@cache
def _parsed(function: JITCallable) -> tuple[Any, list[JITCallable], list[str]]:
    """Return the syntax tree of a function, the functions that it names, and what its other names are."""
    tree = ast.parse(function.src)
    scope = function.__globals__ | inspect.getclosurevars(function.fn).nonlocals
    named = {ast.unparse(node): _value(node, scope) for node in ast.walk(tree) if isinstance(node, (ast.Name, ast.Attribute))}
    values = [f"{name} = {_known(value)}" for name, value in named.items() if value is not None]
    return _plain(tree), [value for value in named.values() if isinstance(value, JITCallable)], sorted(values)


def _known(value: Any) -> str:
    """Return a constant, the fields of a NamedTuple, or the name of a function or class of Triton."""
    if isinstance(value, (constexpr, bool, int, float, str)):
        return repr(value)
    return str(getattr(value, "_fields", getattr(value, "__qualname__", "")))


def _value(node: ast.AST, scope: Mapping[str, Any]) -> Any:
    """Return what `name` or `module.name` is, or None."""
    if isinstance(node, ast.Attribute):
        return getattr(_value(node.value, scope), node.attr, None)
    return scope.get(node.id) if isinstance(node, ast.Name) else None


def _plain(node: Any) -> Any:
    """Return a syntax tree as tuples, without lines and docstrings. Empty fields are left out: they differ between versions of Python."""
    if isinstance(node, list):
        return [_plain(inner) for inner in node if not (isinstance(inner, ast.Expr) and isinstance(inner.value, ast.Constant))]
    if isinstance(node, ast.AST):
        return type(node).__name__, *((name, _plain(value)) for name, value in ast.iter_fields(node) if value not in (None, []))
    return node


def _measure(job: tuple[str, int]) -> Resources:
    target, at = job
    source, (kernel, row) = list(sources(target).items())[at]
    compiled = source.compile(TARGETS[target][0])
    usage = _amd(compiled.asm["amdgcn"]) if target.startswith("gfx") else _nvidia(compiled.asm["cubin"])
    return Resources(target, kernel, row, *usage, compiled.metadata.shared, code_of(target, source), triton.__version__)


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


def measure(known: Mapping[str, Resources] | None = None, every: int = 1, workers: int = 2) -> Iterator[Resources]:
    """Compile all kernels, and yield the resources of each.

    `known` has resources by the code. One of `every` kernels is compiled although it is known.

    Example: `all(resources.spilled == 0 for resources in measure())`
    """
    found: list[Resources | None] = []
    jobs: list[tuple[str, int]] = []
    for target in TARGETS:
        for at, (source, (kernel, row)) in enumerate(sources(target).items()):
            before = (known or {}).get(code_of(target, source))
            unchanged = before is not None and before.triton == triton.__version__ and len(found) % every > 0
            found.append(before._replace(target=target, kernel=kernel, row=row) if before and unchanged else None)
            jobs += [] if unchanged else [(target, at)]
    with ProcessPoolExecutor(workers) as pool:
        compiled = pool.map(_measure, jobs, chunksize=min(4, max(1, len(jobs) // workers)))
        yield from (next(compiled) if before is None else before for before in found)


def main() -> None:
    lines: list[dict[str, Any]] = [resources._asdict() for resources in measure()]
    RESULTS.write_text("".join(json.dumps(line) + "\n" for line in lines))
    print(f"{len(lines)} kernels, {sum(line['spilled'] > 0 for line in lines)} spill; {RESULTS}")


if __name__ == "__main__":
    main()
