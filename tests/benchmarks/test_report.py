"""The tables of docs/measured.md, made from the results."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks import report, report_suite
from onepass.bench import record
from onepass.bench.suite import BACKWARD_SUITE, SUITE, Row
from onepass.verify.cases import Case

ROOT = Path(__file__).parents[2]
TINY = Row(Case("layer_norm", (16, 64)), torch.bfloat16, 0.5)
TINY_BACKWARD = replace(TINY, direction="backward")


def made_up(suite=SUITE):
    """Made-up results: on the last row onepass is too slow, torch.compile is faster, and torch raises."""
    origin = {"name": "GPU", "torch": "2", "triton": "3", "onepass": "0", "commit": "c", "date": "d", "mode": "graph"}
    for row in suite:
        common = {"row": row.name, "copy_us": 9.0, "target": row.target, "plan": None, "host_us": 7.0, "extra_bytes": 2.5e6, **origin}
        last = row is suite[-1]
        us, fraction = (100.0, 0.09) if last else (10.0, 0.9)
        yield common | {"provider": "onepass", "us": us, "fraction": fraction, "met": not last, "plan": "team"}
        yield common | {"provider": "torch"} | ({"error": "OutOfMemoryError: CUDA"} if last else {"us": 123.4})
        yield common | {"provider": "torch.compile", "us": 50.0}


def test_report():
    suite = (Row(Case("layer_norm", (4, 64)), torch.float16, 14, "us"), TINY)
    text = report_suite.updated(f"before\n{report_suite.BEGIN}\nstale\n{report_suite.END}\nafter", list(made_up(suite)), suite)
    assert text.startswith(f"before\n{report_suite.BEGIN}\nGPU, torch 2, triton 3, onepass 0, commit c, d.")
    assert text.endswith(f"{report_suite.END}\nafter")
    assert "| layer_norm 4x64 float16 | 9.0 | 10.0 (0.90; ≤ 14 µs ✓) | 123 | 50.0 | 7.0 / 7.0 | team |" in text
    assert "| 100 (0.09; ≥ 0.50, misses it by 0.41) | failed | **50.0** |" in text
    assert "Of 2 targets 1 are met; on 1 of 2 rows a peer is faster" in text
    assert f"- {TINY.name} by torch: OutOfMemoryError: CUDA" in text and "stale" not in text


def test_report_of_the_backward():
    """The table of the backward is between its own marks, if the text has them."""
    results = list(made_up((TINY, TINY_BACKWARD)))
    without = f"{report_suite.BEGIN}\n{report_suite.END}"
    text = f"{without}\nbetween\n{report_suite.BACKWARD_BEGIN}\nstale\n{report_suite.BACKWARD_END}\nafter"
    updated = report_suite.updated(text, results, (TINY,), (TINY_BACKWARD,))
    forward, between, backward = updated.partition("\nbetween\n")
    assert between and forward == report_suite.updated(without, results, (TINY,)) and "2.5" not in forward and "stale" not in updated
    assert "| MB beside the gradients, onepass / torch / torch.compile |" in backward
    assert f"| {TINY_BACKWARD.name} |" in backward and "| team | 2.5 / 2.5 / 2.5 |" in backward
    with pytest.raises(ValueError, match=f"missing: {TINY_BACKWARD.name} by onepass"):
        report_suite.updated(text, list(made_up((TINY,))), (TINY,), (TINY_BACKWARD,))
    with pytest.raises(ValueError, match="bench-backward:end"):
        report_suite.updated(text.replace(report_suite.BACKWARD_END, ""), results, (TINY,), (TINY_BACKWARD,))


def test_report_fails_on_a_missing_row():
    results = [r for r in made_up() if (r["row"], r["provider"]) != (SUITE[3].name, "torch.compile")]
    with pytest.raises(ValueError, match=f"1 results are missing: {SUITE[3].name} by torch.compile"):
        report_suite.table(results)
    with pytest.raises(ValueError, match="several machines"):
        report_suite.table([r | {"name": r["provider"]} for r in made_up()])
    with pytest.raises(ValueError, match="bench:begin"):
        report_suite.updated("no marks", list(made_up()))


def test_report_command(tmp_path, capsys):
    docs, results = tmp_path / "measured.md", tmp_path / "bench.jsonl"
    docs.write_text((ROOT / "docs/measured.md").read_text())
    record.write(results, made_up((*BACKWARD_SUITE, *SUITE)))
    arguments = ["--results", str(results), "--docs", str(docs)]
    assert report.main([*arguments, "--check"]) == 1
    assert report.main(arguments) == 0
    assert report.main([*arguments, "--check"]) == 0
    record.write(results, record.read(results)[:-1])
    assert report.main([*arguments, "--check"]) == 2
    assert SUITE[-1].name in capsys.readouterr().err


@pytest.mark.skipif(not (ROOT / "results/bench-h200.jsonl").exists(), reason="no results")
def test_the_documentation_is_that_of_the_results(monkeypatch):
    monkeypatch.chdir(ROOT)
    assert report.main(["--check"]) == 0
