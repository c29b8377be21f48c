"""The benchmark harness: what it refuses to report, what it writes, and how the documentation is made from it."""

import json
from functools import partial
from pathlib import Path

import pytest
import torch

from onepass import cli
from onepass.bench import bench, cases, command, gate, oracle, record, report, timing
from onepass.bench.cases import Case
from onepass.bench.providers import PROVIDERS
from onepass.bench.suite import SUITE, Row

ROOT = Path(__file__).parent.parent
TINY = Row(Case("layer_norm", (16, 64)), torch.bfloat16, 0.5)
EAGER = {name: PROVIDERS[name] for name in ("onepass", "torch")}


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(timing, "interleaved", partial(timing.interleaved, seconds=0.01))
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))


def test_names_are_unique():
    assert len({row.name for row in SUITE}) == len(SUITE)


def test_a_record():
    ours, torchs = bench.measure(TINY, providers=EAGER)
    assert ours["row"] == "layer_norm 16x64 bfloat16" and ours["provider"] == "onepass" and ours["plan"] == "aten.rows"
    assert ours["bytes"] == 2 * 16 * 64 * 2 and ours["copies"] == 1 and ours["mode"] == "cpu"
    assert ours["low_us"] <= ours["us"] <= ours["high_us"] and ours["fraction"] == pytest.approx(ours["copy_us"] / ours["us"], abs=1e-3)
    assert ours["correct"] and ours["met"] == (ours["fraction"] >= 0.5) and torchs["plan"] is None
    assert {"name", "torch", "triton", "onepass", "commit", "date"} <= ours.keys()
    json.dumps(ours)


def test_a_residual_is_two_copies():
    (ours,) = bench.measure(Row(Case("rms_norm", (16, 64), residual=True), torch.float32), providers={"onepass": cases.bound})
    assert ours["copies"] == 2 and ours["bytes"] == 4 * 16 * 64 * 4 and ours["correct"]


def test_wrong_results_have_no_time():
    """Of ours; a peer's time stands, with its error."""

    def wrong(case, operands):
        return lambda: cases.by_torch(case, operands) * 1.02

    ours, torchs = bench.measure(TINY, providers={"onepass": wrong, "torch": wrong})
    assert "wrong" in ours["error"] and not ours["correct"] and "us" not in ours
    assert torchs["us"] > 0 and torchs["budget"] > 1 and not torchs["correct"]


def test_what_raises_is_written_down():
    def broken(case, operands):
        raise NotImplementedError("no such kernel\nand more")

    ours, torchs = bench.measure(TINY, providers={"onepass": cases.bound, "torch": broken})
    assert torchs["error"] == "NotImplementedError: no such kernel" and "us" not in torchs and ours["us"] > 0


def test_every_provider_updates_running_statistics():
    row = Row(Case("batch_norm", (4, 6, 5, 5), "channels_last", running=True, wide=True), torch.float16)
    for result in bench.measure(row):
        assert result["budget"] < 10, result  # the gate sees the statistics, and stale ones are off by thousands
    stale = {"onepass": lambda case, operands: partial(cases.by_onepass, case, operands._replace(running_mean=None, running_var=None))}
    assert "error" in bench.measure(row, providers=stale)[0]


@pytest.mark.parametrize("case", [case for case in cases.CASES if case.init != "inf"][::4], ids=lambda case: case.name)
def test_the_gate_is_the_oracle_in_slices(case, monkeypatch):
    monkeypatch.setattr(gate, "SLICE", 50)
    operands = cases.make(case, torch.bfloat16)
    exact = oracle.exact(case, operands, cases.make_dy(operands))
    outcomes = {run.__name__: oracle.evaluate(case, operands, None, run) for run in (cases.by_onepass, cases.by_torch)}
    for name, error in gate.worst(case, operands, outcomes).items():
        assert error == pytest.approx(oracle.worst(outcomes[name], exact.value, exact.allowed).forward, rel=1e-3)


def test_big_operands_are_drawn_in_their_dtype():
    x = cases.make(Case("group_norm", (4, 8, 16, 16), "channels_last", groups=2), torch.float16, there=True).x
    assert x.dtype == torch.float16 and x.stride() == (2048, 1, 128, 8) and 0.9 < x.float().std() < 1.1


def test_cuda_times(monkeypatch):
    """The sampling, with a clock in the place of a GPU: slow variants are sampled less, and the L2 is flushed before every sample."""
    clock, flushed = [0.0], []

    class Event:
        def __init__(self, enable_timing):
            self.at = 0.0

        def record(self):
            self.at = clock[0]

        def elapsed_time(self, other):
            return other.at - self.at

    def takes(milliseconds, calls):
        def run():
            assert len(flushed) == sum(map(len, every)) + 1
            clock[0] += milliseconds
            calls.append(milliseconds)

        return run

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(timing, "_flush", lambda: lambda: flushed.append(1))
    every = [], [], []
    times = timing.device_times([takes(ms, calls) for ms, calls in zip((0.1, 4, 100), every)])
    assert [t.median for t in times] == pytest.approx([1e-4, 4e-3, 0.1]) and list(map(len, every)) == [21, 11, 6]
    assert all(0 < t.low <= t.median for t in timing.host_times([lambda: sum(range(100)), lambda: None]))


def test_merging_replaces_the_same_measurement_only():
    old = [{"row": row, "provider": "torch", "name": name, "us": 1} for row in "ab" for name in ("H200", "B200")]
    new = [{"row": "a", "provider": "torch", "name": "H200", "us": 2}, {"row": "a", "provider": "onepass", "name": "H200", "us": 3}]
    merged = record.merge(old, new)
    assert len(merged) == 5 and merged[0]["us"] == 2 and [r["us"] for r in merged[1:4]] == [1, 1, 1]


def test_bench_command(tmp_path, capsys, monkeypatch):
    out = tmp_path / "results" / "bench.jsonl"
    other = Row(Case("rms_norm", (8, 32)), torch.float32)
    monkeypatch.setattr(command, "SUITE", (TINY, other, Row(Case("layer_norm", (2**14, 2**12)), torch.float32)))
    assert cli.main(["bench", "--device", "cpu", "--out", str(out), "--provider", "onepass", "--provider", "torch"]) == 0
    first = capsys.readouterr()
    assert "1 rows over 64 MB are skipped" in first.out and "≥ 0.50" in first.out and "2/2 rms_norm 8x32 float32" in first.err
    assert [(r["row"], r["provider"]) for r in record.read(out)] == [(row.name, name) for row in (TINY, other) for name in EAGER]
    kept = record.read(out)[:2]
    assert cli.main(["bench", "--only", "rms_norm", "--out", str(out)]) == 0
    assert record.read(out)[:2] == kept and len(record.read(out)) == 5
    assert cli.main(["bench", "--op", "layer_norm", "--list"]) == 0
    assert "268" in capsys.readouterr().out
    assert cli.main(["bench", "--only", "nothing"]) == 2


def test_bench_command_fails_on_wrong_results(capsys, monkeypatch):
    monkeypatch.setattr(command, "SUITE", (TINY,))
    monkeypatch.setattr(command, "PROVIDERS", {"onepass": lambda case, t: lambda: t.x})
    assert cli.main(["bench"]) == 1
    assert "FAILED layer_norm 16x64 bfloat16 by onepass: wrong" in capsys.readouterr().out


def made_up(suite=SUITE):
    """Results in which torch.compile wins and torch raises on the last row, which is also too slow."""
    origin = {"name": "GPU", "torch": "2", "triton": "3", "onepass": "0", "commit": "c", "date": "d", "mode": "graph"}
    for row in suite:
        common = {"row": row.name, "copy_us": 9.0, "target": row.target, "plan": None, "host_us": 7.0, **origin}
        last = row is suite[-1]
        us, fraction = (100.0, 0.09) if last else (10.0, 0.9)
        yield common | {"provider": "onepass", "us": us, "fraction": fraction, "met": not last, "plan": "team"}
        yield common | {"provider": "torch"} | ({"error": "OutOfMemoryError: CUDA"} if last else {"us": 123.4})
        yield common | {"provider": "torch.compile", "us": 50.0}


def test_report():
    suite = (Row(Case("layer_norm", (4, 64)), torch.float16, 14, "us"), TINY)
    text = report.updated(f"before\n{report.BEGIN}\nstale\n{report.END}\nafter", made_up(suite), suite)
    assert text.startswith(f"before\n{report.BEGIN}\nGPU, torch 2, triton 3, onepass 0, commit c, d.")
    assert text.endswith(f"{report.END}\nafter")
    assert "| layer_norm 4x64 float16 | 9.0 | 10.0 (0.90; ≤ 14 µs ✓) | 123 | 50.0 | 7.0 / 7.0 | team |" in text
    assert "| 100 (0.09; ≥ 0.50, misses it by 0.41) | failed | **50.0** |" in text
    assert "Of 2 targets 1 are met; on 1 of 2 rows a peer is faster" in text
    assert f"- {TINY.name} by torch: OutOfMemoryError: CUDA" in text and "stale" not in text


def test_report_fails_on_a_missing_row():
    results = [r for r in made_up() if (r["row"], r["provider"]) != (SUITE[3].name, "torch.compile")]
    with pytest.raises(ValueError, match=f"1 results are missing: {SUITE[3].name} by torch.compile"):
        report.table(results)
    with pytest.raises(ValueError, match="several machines"):
        report.table([r | {"name": r["provider"]} for r in made_up()])
    with pytest.raises(ValueError, match="bench:begin"):
        report.updated("no marks", made_up())


def test_report_command(tmp_path, capsys):
    docs, results = tmp_path / "measured.md", tmp_path / "bench.jsonl"
    docs.write_text((ROOT / "docs/measured.md").read_text())
    record.write(results, made_up())
    arguments = ["report", "--results", str(results), "--docs", str(docs)]
    assert cli.main([*arguments, "--check"]) == 1
    assert cli.main(arguments) == 0
    assert cli.main([*arguments, "--check"]) == 0
    record.write(results, record.read(results)[:-1])
    assert cli.main([*arguments, "--check"]) == 2
    assert SUITE[-1].name in capsys.readouterr().err


@pytest.mark.skipif(not (ROOT / "results/bench-h200.jsonl").exists(), reason="no results")
def test_the_documentation_is_that_of_the_results(monkeypatch):
    monkeypatch.chdir(ROOT)
    assert cli.main(["report", "--check"]) == 0
