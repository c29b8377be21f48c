"""The structures of the C sources are what Python packs: a small C program prints every field."""

from __future__ import annotations

import re
import shutil
import subprocess
from math import prod
from pathlib import Path

import pytest
import torch

from onepass.backends.c import build, problem
from onepass.core import norms
from onepass.core.operands import OptionalOperands
from onepass.core.problem import bind

COMPILER = next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None)
pytestmark = pytest.mark.skipif(COMPILER is None, reason="there is no C compiler")

CODES = {"int64_t": "q", "double": "d"}  # C types, as `struct` spells them
PRINT = {"q": ("%lld", "long long"), "d": ("%.17g", "double"), "P": ("%p", "void *")}
CONSTANTS = ("F32", "BF16", "F16", "IDENTITY", "SILU", "RELU", "GELU", "GELU_TANH")


def _structures() -> dict[str, list[tuple[str, str]]]:
    """The structures of problem.h: for each, the type and the name of every field, in order."""
    text = re.sub(r"/\*.*?\*/", "", (build.SOURCES / "problem.h").read_text(), flags=re.DOTALL)
    found = {}
    for body, name in re.findall(r"typedef struct \{(.*?)\} (\w+);", text, re.DOTALL):
        fields = []
        for declaration in filter(str.strip, body.split(";")):
            kind, names = re.fullmatch(r"\s*(?:const )?(\w+)\s+(.*)", declaration, re.DOTALL).groups()
            fields += [("P" if "*" in word else CODES.get(kind, kind), word.strip(" *\n")) for word in names.split(",")]
        found[name] = fields
    return found


def _leaves(structures: dict[str, list[tuple[str, str]]], name: str) -> list[tuple[str, str]]:
    """The code and the name of every number and pointer. Structures inside structures are taken apart."""
    found = []
    for kind, field in structures[name]:
        found += [(code, f"{field}.{inner}") for code, inner in _leaves(structures, kind)] if kind in structures else [(kind, field)]
    return found


@pytest.fixture(scope="module")
def program(tmp_path_factory) -> Path:
    """A C program that prints sizes, offsets and constants, then the values of a Problem that it reads from a file."""
    structures, lines = _structures(), []
    for name in ("Problem", "Tensors"):
        lines.append(f'printf("{name} sizeof %zu\\n", sizeof({name}));')
        for _, field in _leaves(structures, name):
            lines.append(f'printf("{name} {field} %zu %zu\\n", offsetof({name}, {field}), sizeof((({name} *)0)->{field}));')
    lines += [f'printf("constant {name} %d\\n", (int){name});' for name in CONSTANTS]
    lines.append('Problem p; FILE *file = fopen(argv[1], "rb"); if (!file || fread(&p, sizeof p, 1, file) != 1) return 1;')
    for code, field in _leaves(structures, "Problem"):
        form, cast = PRINT[code]
        lines.append(f'printf("value {field} {form}\\n", ({cast})p.{field});')
    folder = tmp_path_factory.mktemp("structures")
    source = "\n".join(
        ["#include <stddef.h>", "#include <stdio.h>", '#include "problem.h"', "int main(int argc, char **argv) {", *lines, "}"]
    )
    (folder / "print.c").write_text(source)
    command = [COMPILER, "-std=gnu11", "-w", f"-I{build.SOURCES}", str(folder / "print.c"), "-o", str(folder / "print"), "-lm"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder / "print"


def _printed(program: Path, packed: bytes) -> list[list[str]]:
    data = program.with_name("problem.bin")
    data.write_bytes(packed)
    done = subprocess.run([program, data], capture_output=True, text=True)
    assert done.returncode == 0, f"C reads more bytes than Python packs: {done.stdout}"
    return [line.split() for line in done.stdout.splitlines()]


def _call() -> problem.Call:
    """A problem in which as many fields as possible have different values."""
    x = torch.randn(4, 12, 5, 7).to(torch.bfloat16).to(memory_format=torch.channels_last)
    weight, bias, scale = torch.randn(12), torch.randn(12).half(), torch.randn(4, 12)
    spec = norms.group_norm(3, 0.25, modulated=True, activation="gelu_tanh")
    return problem.Call(bind(spec, x, weight, bias, optional=OptionalOperands(residual=x.float(), scale=scale)))


@pytest.mark.parametrize(("name", "pack"), [("Problem", problem.pack_problem), ("Tensors", problem.pack_tensors)])
def test_sizes_and_offsets(program, name, pack):
    lines = [line[1:] for line in _printed(program, _call().packed(False, True)) if line[0] == name]
    packing = pack.__self__
    codes = re.sub(r"(\d+)(\w)", lambda found: int(found[1]) * found[2], packing.format.lstrip("@"))
    leaves = _leaves(_structures(), name)
    assert "".join(code for code, _ in leaves) == codes
    assert lines == [["sizeof", str(packing.size)], *([field, str(8 * i), "8"] for i, (_, field) in enumerate(leaves))]


def test_c_reads_what_python_packs(program):
    call = _call()
    found = {line[1]: float(line[2]) for line in _printed(program, call.packed(False, True)) if line[0] == "value"}
    walk, values = call.walk, list(found.values())
    assert [found[name] for name in ("outer", "reps", "sets", "run")] == [*walk.sizes] and prod(walk.sizes) * walk.fold == 4 * 12 * 5 * 7
    assert values[4:7] == [*walk.strides]
    assert values[7:14] == [2, 1, 1, 1, 3, 1, 0]  # bfloat16 x, float32 residual, sum and weight, float16 bias, float32 scale, no shift
    assert [found[name] for name in ("activation", "centered", "from_y", "tile", "fold")] == [4, 1, 0, walk.tile, walk.fold]
    assert found["eps"] == 0.25
    for position, map_ in ((22, walk.param), (30, walk.modulation)):
        inside = {name.partition(".")[2]: value for name, value in list(found.items())[position : position + 8]}
        assert inside == map_._asdict() and len(set(map_)) > 3
    assert walk.param != walk.modulation


def test_constants(program):
    found = {line[1]: int(line[2]) for line in _printed(program, _call().packed(False, True)) if line[0] == "constant"}
    types = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
    assert {name: found.pop(name) for name in types} == {name: problem.TYPES[dtype] for name, dtype in types.items()}
    assert {name.lower().replace("identity", ""): code for name, code in found.items()} == problem.ACTIVATION_CODES
