"""`onepass bench`."""

from dataclasses import replace
from functools import partial

import pytest
import torch

from onepass.bench import record, timing
from onepass.bench.providers import PROVIDERS
from onepass.bench.suite import Row
from onepass.cli import bench
from onepass.cli.main import main
from onepass.verify.cases import Case

TINY = Row(Case("layer_norm", (16, 64)), torch.bfloat16, 0.5)
TINY_BACKWARD = replace(TINY, direction="backward")
EAGER = {name: PROVIDERS[name] for name in ("onepass", "torch")}


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(timing, "interleaved", partial(timing.interleaved, seconds=0.01))
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))


def test_bench_command(tmp_path, capsys, monkeypatch):
    out = tmp_path / "results" / "bench.jsonl"
    other = Row(Case("rms_norm", (8, 32)), torch.float32)
    monkeypatch.setattr(bench, "SUITE", (TINY, other, Row(Case("layer_norm", (2**14, 2**12)), torch.float32)))
    monkeypatch.setattr(bench, "BACKWARD_SUITE", ())
    assert main(["bench", "--device", "cpu", "--out", str(out), "--provider", "onepass", "--provider", "torch"]) == 0
    first = capsys.readouterr()
    assert "1 rows over 64 MB are skipped" in first.out and "≥ 0.50" in first.out and "2/2 rms_norm 8x32 float32" in first.err
    assert [(r["row"], r["provider"]) for r in record.read(out)] == [(row.name, name) for row in (TINY, other) for name in EAGER]
    kept = record.read(out)[:2]
    assert main(["bench", "--only", "rms_norm", "--out", str(out)]) == 0
    assert record.read(out)[:2] == kept and len(record.read(out)) == 5
    assert main(["bench", "--op", "layer_norm", "--list"]) == 0
    assert "268" in capsys.readouterr().out
    assert main(["bench", "--only", "nothing"]) == 2


def test_bench_command_by_direction(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(bench, "SUITE", (TINY,))
    monkeypatch.setattr(bench, "BACKWARD_SUITE", (TINY_BACKWARD,))
    out = tmp_path / "bench.jsonl"
    for directions in (["--direction", "backward"], ["--direction", "forward"], []):
        assert main(["bench", "--provider", "onepass", "--out", str(out), *directions]) == 0
    assert [r["row"] for r in record.read(out)] == [TINY_BACKWARD.name, TINY.name]
    assert "2/2 layer_norm 16x64 bfloat16 backward" in capsys.readouterr().err


def test_bench_command_fails_on_wrong_results(capsys, monkeypatch):
    monkeypatch.setattr(bench, "SUITE", (TINY,))
    monkeypatch.setattr(bench, "BACKWARD_SUITE", ())
    monkeypatch.setattr(bench, "PROVIDERS", {"onepass": lambda case, t: lambda: t.x})
    assert main(["bench"]) == 1
    assert "FAILED layer_norm 16x64 bfloat16 by onepass: wrong" in capsys.readouterr().out
