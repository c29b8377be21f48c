"""Kernels of the suites, compiled for several GPUs: none spills, and registers agree with results/resources.jsonl."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

COMMITTED = Path(__file__).parents[2] / "results" / "resources.jsonl"
WHAT = ("target", "kernel", "row")
SLACK = 8  # registers
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
        found += [f"{name} spills {line['spilled']}"] if line["spilled"] else []
        if name in known:
            now, before = line["registers"], known[name]["registers"]
            wrong = abs(now - before) > SLACK if same_version else now > 1.25 * before + SLACK
            found += [f"{name} takes {now} registers, and took {before}"] if wrong else []
    return found


def test_the_committed_table(tmp_path):
    """A separate process compiles: under TRITON_INTERPRET there is nothing to compile."""
    pytest.importorskip("triton")
    found = tmp_path / "resources.jsonl"
    code = f"import pathlib; from benchmarks import resources; resources.RESULTS = pathlib.Path({str(found)!r}); resources.main()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=COMMITTED.parents[1])
    assert done.returncode == 0, done.stderr
    here, committed = ([json.loads(line) for line in path.read_text().splitlines()] for path in (found, COMMITTED))
    assert len(here) > 300
    assert _differences(here, committed) == [], ADVICE


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
