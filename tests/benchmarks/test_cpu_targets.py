"""The three targets on a CPU."""

import json
import os
import subprocess

import pytest
import torch

from benchmarks import cpu_targets
from benchmarks.cpu_targets import BUSY_STEP, FORWARD, STEP, busy_process, busy_rows, losses, measure, pairs_of, small_rows, summary


def record(target, ratio, row="layer_norm"):
    return {"target": target, "ratio": ratio, "gate": cpu_targets.TARGETS[target].gate, "row": row, "ours_us": 2.0, "torch_us": 1.0}


def test_losses_are_below_their_gate_and_sorted():
    records = [record(FORWARD, 0.94), record(FORWARD, 0.96), record(STEP, 0.86), record(STEP, 0.4), record(BUSY_STEP, 0.99)]
    assert [r["ratio"] for r in losses(records)] == [0.4, 0.94, 0.99]


def test_the_summary_shows_the_worst_row_and_every_loss():
    text = summary([record(FORWARD, 1.2), record(FORWARD, 0.5, "slow"), record(FORWARD, 0.6, "slow too"), record(STEP, 1.1)])
    table, lost = text.split("Below the gate:")
    assert "0.50" in table and "slow" in table and STEP in table and BUSY_STEP not in table
    assert lost.count(FORWARD) == 2 and "slow too" in lost and STEP not in lost
    assert "Below the gate" not in summary([record(STEP, 1.1)]).split("slowest case")[1]


def test_pairs_alternate():
    order = []
    pairs = pairs_of(lambda: order.append("ours"), lambda: order.append("torch"), 5)
    assert len(pairs) == 5 and all(ours > 0 and torchs > 0 for ours, torchs in pairs)
    repeat = (len(order) - 6 - 3) // 10  # warm-up, then the calls that choose the length of a turn
    assert order[9:] == (["ours"] * repeat + ["torch"] * repeat) * 5


def test_a_training_step_computes_every_gradient(monkeypatch):
    asked = []
    grad = torch.autograd.grad

    def spy(output, leaves, dy):
        asked.append(grad(output, leaves, dy))
        return asked[-1]

    monkeypatch.setattr(torch.autograd, "grad", spy)
    row = next(row for row in small_rows([torch.float32]) if row.target == STEP)
    for run in cpu_targets.variants(row):
        run()
    (ours, torchs), names = asked, ("dx", "dweight", "dbias")
    for name, a, b in zip(names, ours, torchs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4, msg=name)


def test_the_busy_process_runs_and_ends(monkeypatch):
    started = []
    popen = subprocess.Popen
    monkeypatch.setattr(cpu_targets.subprocess, "Popen", lambda *args: started.append(popen(*args)) or started[-1])
    with pytest.raises(ZeroDivisionError), busy_process():
        assert started[0].poll() is None
        os.kill(started[0].pid, 0)
        raise ZeroDivisionError
    assert started[0].poll() is not None


def test_rows_name_their_target_and_threads():
    assert {row.threads for row in small_rows([torch.float32])} == {1} and {row.threads for row in busy_rows()} == {2}
    assert len({(row.target, row.name) for row in small_rows([torch.float32, torch.bfloat16])}) == 128
    row = next(small_rows([torch.float32]))
    found = measure(row, 2)
    assert found["row"] == "layer_norm 4×256 float32" and found["ratio"] > 0 and found["pairs"] == 2


def test_the_command_writes_every_row(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(cpu_targets, "IMAGES", ((2, 32, 8, 8),))
    out, threads = tmp_path / "targets.jsonl", torch.get_num_threads()
    assert cpu_targets.main(["--pairs", "2", "--dtypes", "float32", "--out", str(out)]) == 0
    found, printed = [json.loads(line) for line in out.read_text().splitlines()], capsys.readouterr().out
    assert len(found) == 64 + 2 and {row["target"] for row in found} == set(cpu_targets.TARGETS)
    assert all(name in printed for name in cpu_targets.TARGETS) and torch.get_num_threads() == threads
