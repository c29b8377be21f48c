"""Kernels of the suites, compiled for several GPUs: none spills, and registers agree with results/resources.jsonl."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

COMMITTED = Path(__file__).parents[2] / "results" / "resources.jsonl"
WHAT = ("target", "kernel", "row")
SLACK = 8  # registers
# Bytes that the backward of `ring` may spill with some versions of Triton. Its groups of warps begin in a loop that has 24 registers.
# Values that all groups need and that do not fit there are stored once, and loaded once by each group: outside all other loops.
SPILLED_ONCE = 16
ADVICE = "run `python -m benchmarks.resources` and look at the difference"


def _differences(here: list[dict], committed: list[dict]) -> list[str]:
    """What differs from the committed records.

    With the Triton version of the records, a kernel may take SLACK registers more or less. Another version allocates
    registers in its own way, so there a kernel may take up to a quarter more, and SLACK.
    """
    versions = {line["triton"] for line in committed}
    if len(versions) != 1:
        return [f"the records are of several Triton versions: {sorted(versions)}"]
    same_version = versions == {line["triton"] for line in here}
    names = [[tuple(line[key] for key in WHAT) for line in lines] for lines in (here, committed)]
    found = [f"{name} is in one of the lists only" for name in sorted(set(names[0]) ^ set(names[1]))]
    found += ["the kernels are in another order"] if not found and names[0] != names[1] else []
    known = {tuple(line[key] for key in WHAT): line for line in committed}
    for name, line in zip(names[0], here):
        ring_backward = line["kernel"].startswith("ring") and line["row"].endswith("backward")
        found += [f"{name} spills {line['spilled']}"] if line["spilled"] > (SPILLED_ONCE if ring_backward else 0) else []
        if name in known:
            now, before = line["registers"], known[name]["registers"]
            wrong = abs(now - before) > SLACK if same_version else now > 1.25 * before + SLACK
            found += [f"{name} takes {now} registers, and took {before}"] if wrong else []
    return found


MEASURE = """
import json, sys
from benchmarks.resources import Resources, measure
known = {line["code"]: Resources(**line) for line in json.load(sys.stdin)}
print(json.dumps([resources._asdict() for resources in measure(known, int(sys.argv[1]))]))
"""


@pytest.mark.parametrize("every", [25, pytest.param(1, marks=pytest.mark.slow)])
def test_the_committed_table(every):
    """Kernels whose code is not that of a record are compiled, and one of `every` others. A last one is given as changed.

    The process does not get the registers of what it must compile. It is separate: under TRITON_INTERPRET there is nothing to compile.
    """
    pytest.importorskip("triton")
    committed = [json.loads(line) for line in COMMITTED.read_text().splitlines()]
    known = [line | {"registers": 0, "spilled": 1} if at % every == 0 else line for at, line in enumerate(committed)]
    known[-1] = committed[-1] | {"registers": 0, "spilled": 1, "code": "changed"}
    command = [sys.executable, "-c", MEASURE, str(every)]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(command, input=json.dumps(known), capture_output=True, text=True, cwd=COMMITTED.parents[1], env=environment)
    assert done.returncode == 0, done.stderr
    here = json.loads(done.stdout)
    assert len(here) > 300
    assert _differences(here, committed) == [], ADVICE


KERNELS = """
from triton import jit
from triton.language import constexpr

SCALE = constexpr(2)

@jit
def scaled(x):
    return x * SCALE

@jit
def kernel(x):
    return scaled(x) if x is not None else 0
"""


@pytest.mark.skipif(bool(os.environ.get("TRITON_INTERPRET")), reason="interpreted functions are not compiled")
def test_what_the_code_depends_on(tmp_path):
    pytest.importorskip("triton")
    from benchmarks.resources import code_of
    from onepass.backends.gpu.launch.source import Source

    def code(before="", after="", target="sm_90", **arguments):
        assert before in KERNELS
        path = tmp_path / f"{len(list(tmp_path.iterdir()))}.py"
        path.write_text(KERNELS.replace(before, after))
        spec = importlib.util.spec_from_file_location("kernels", path)
        spec.loader.exec_module(module := importlib.util.module_from_spec(spec))
        source = Source(module.kernel, **{"types": (("x", "fp32"),), "constants": (), "divisors": (), "warps": 4} | arguments)
        return code_of(target, source)

    lines = {code(), code("\n@jit", "\n\n@jit"), code("    return x", '    "A text."\n    # a comment\n    return  x')}
    assert len(lines) == 1
    changes = {"x * SCALE": "SCALE * x", "constexpr(2)": "constexpr(3)", "else 0": "else 1", "is not None": "is None"}
    others = [code(before, after) for before, after in changes.items()]
    others += [code(warps=8), code(types=(("x", "fp16"),)), code(constants=(((0,), 1),)), code(divisors=(((0,), 16),))]
    others += [code(target="sm_80")]
    assert len({*lines, *others}) == 10


def _records(registers=(40, 80), triton="3.9.0", spilled=0):
    return [
        {"target": "sm_90", "kernel": f"row {r}", "row": f"{i}", "registers": r, "spilled": spilled, "triton": triton}
        for i, r in enumerate(registers)
    ]


@pytest.mark.parametrize("triton", ["3.9.0", "4.0.0"])
def test_every_difference_is_seen(triton):
    """Differences are seen, also if the records are of another Triton version than the installed one."""
    committed = _records()
    here = _records(triton=triton)
    assert _differences(here, committed) == []
    assert _differences(_records(triton=triton, spilled=4), committed)
    assert _differences(here[:1], committed) and _differences([*here, here[0] | {"row": "other"}], committed)
    assert _differences(here[::-1], committed) == ["the kernels are in another order"]
    assert _differences([here[0], here[1] | {"registers": 109}], committed)
    assert bool(_differences([here[0], here[1] | {"registers": 89}], committed)) == (triton == "3.9.0")
    assert _differences(here, [committed[0], committed[1] | {"triton": "3.8.0"}])
