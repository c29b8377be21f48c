"""Ahead-of-time compilation of the suite's kernels for GPUs that are not here: none spills, and the committed table is what they take."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

COMMITTED = Path(__file__).parents[2] / "results" / "resources.jsonl"


def test_the_committed_table(tmp_path):
    """Compiled in a process of its own: under TRITON_INTERPRET there is nothing to compile."""
    found = tmp_path / "resources.jsonl"
    code = f"import pathlib; from benchmarks import resources; resources.RESULTS = pathlib.Path({str(found)!r}); resources.main()"
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    here, committed = ([json.loads(line) for line in path.read_text().splitlines()] for path in (found, COMMITTED))
    assert [line for line in here if line["spilled"]] == []
    for line, known in zip(here, committed, strict=True):
        assert {key: line[key] for key in ("target", "kernel", "row")} == {key: known[key] for key in ("target", "kernel", "row")}
        assert known["triton"] != line["triton"] or abs(line["registers"] - known["registers"]) <= 8, (
            "run `python -m benchmarks.resources` and look at the difference"
        )
