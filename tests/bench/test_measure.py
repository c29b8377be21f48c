"""What a measurement writes down, and what it refuses to report."""

import json
from functools import partial
from math import prod

import pytest
import torch

from onepass.bench import measure, timing
from onepass.bench.providers import PROVIDERS
from onepass.bench.suite import Row
from onepass.planning.explain import explain
from onepass.verify import calls, tensors
from onepass.verify.cases import Case

TINY = Row(Case("layer_norm", (16, 64)), torch.bfloat16, 0.5)
EAGER = {name: PROVIDERS[name] for name in ("onepass", "torch")}


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(timing, "interleaved", partial(timing.interleaved, seconds=0.01))
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))


def test_a_record():
    ours, torchs = measure.measure(TINY, providers=EAGER)
    assert ours["row"] == "layer_norm 16x64 bfloat16" and ours["provider"] == "onepass" and ours["plan"] in ("c", "aten.rows")
    assert ours["bytes"] == 2 * 16 * 64 * 2 and ours["copies"] == 1 and ours["mode"] == "cpu"
    assert ours["low_us"] <= ours["us"] <= ours["high_us"] and ours["fraction"] == pytest.approx(ours["copy_us"] / ours["us"], abs=1e-3)
    assert ours["correct"] and ours["met"] == (ours["fraction"] >= 0.5) and torchs["plan"] is None
    assert {"name", "torch", "triton", "onepass", "commit", "date"} <= ours.keys()
    json.dumps(ours)


def test_a_residual_is_two_copies():
    (ours,) = measure.measure(Row(Case("rms_norm", (16, 64), residual=True), torch.float32), providers={"onepass": calls.onepass_call})
    assert ours["copies"] == 2 and ours["bytes"] == 4 * 16 * 64 * 4 and ours["correct"]


@pytest.mark.parametrize(
    ("case", "copies", "gradients"),
    [
        (TINY.case, 1.5, 16 * 64 + 2 * 64),
        (Case("rms_norm", (16, 64), residual=True), 2, 16 * 64 + 64),  # x and residual have one gradient
        (Case("layer_norm", (2, 8, 64), affine="none", modulate=True), 1.5, 2 * 8 * 64 + 2 * 2 * 64),
        (Case("group_norm", (2, 8, 4, 4), "channels_last", groups=2, activation="silu"), 1.5, 2 * 8 * 16 + 2 * 8),
        (Case("batch_norm", (4, 6, 5, 5), running=True), 1.5, 4 * 6 * 25 + 2 * 6),
        (Case("switchable_norm", (4, 6, 5, 5), running=True), 1.5, 4 * 6 * 25 + 2 * 6 + 2 * 3),
    ],
    ids=lambda value: getattr(value, "name", None),
)
def test_a_backward_record(case, copies, gradients):
    ours, torchs = measure.measure(Row(case, torch.bfloat16, 0.5, direction="backward"), providers=EAGER)
    assert ours["direction"] == "backward" and ours["row"].endswith("bfloat16 backward") and ours["correct"] and "error" not in torchs
    assert ours["copies"] == copies and ours["bytes"] == 2 * copies * 2 * ours["shape"][0] * prod(ours["shape"][1:])
    assert ours["fraction"] == pytest.approx(copies / (2 if case.residual else 1) * ours["copy_us"] / ours["us"], abs=1e-3)
    assert ours["gradient_bytes"] == 2 * gradients and ours["extra_bytes"] is None  # measured on a GPU
    operands = tensors.make(case, torch.bfloat16)
    assert ours["plan"] == str(explain(calls.by_onepass, case, operands).backward) and torchs["plan"] is None
    json.dumps(ours)


def test_memory_beside_the_gradients(monkeypatch):
    """With made-up numbers for the allocator. A gradient that two operands share is counted once."""
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: None)
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda: {"requested_bytes.all.current": 1000, "requested_bytes.all.peak": 1500})
    dx, dweight = torch.empty(4, 16), torch.empty(16)
    assert measure._memory(lambda: (dx, dweight, dx), on_cuda=True) == {"peak_bytes": 500, "gradient_bytes": 320, "extra_bytes": 180}


def test_a_compiled_backward_runs_again(monkeypatch):
    """AOTAutograd must not overwrite what the forward saved. (torch 2.13 notices that the graph is retained.)"""
    monkeypatch.setattr(torch, "compile", partial(torch.compile.func, backend="aot_eager"))  # pyright: ignore
    row = Row(Case("group_norm", (2, 8, 4, 4), groups=2, activation="silu"), torch.float32, direction="backward")
    (record,) = measure.measure(row, providers={"torch.compile": PROVIDERS["torch.compile"]})
    assert "error" not in record and record["us"] > 0


def test_wrong_results_have_no_time():
    """Wrong results of onepass have no time. A wrong peer keeps its time, with its error."""

    def wrong(case, operands):
        return lambda: calls.by_torch(case, operands) * 1.02

    ours, torchs = measure.measure(TINY, providers={"onepass": wrong, "torch": wrong})
    assert "wrong" in ours["error"] and not ours["correct"] and "us" not in ours
    assert torchs["us"] > 0 and torchs["budget"] > 1 and not torchs["correct"]


def test_what_raises_is_written_down():
    def broken(case, operands):
        raise NotImplementedError("no such kernel\nand more")

    ours, torchs = measure.measure(TINY, providers={"onepass": calls.onepass_call, "torch": broken})
    assert torchs["error"] == "NotImplementedError: no such kernel" and "us" not in torchs and ours["us"] > 0


def test_every_provider_updates_running_statistics():
    row = Row(Case("batch_norm", (4, 6, 5, 5), "channels_last", running=True, wide=True), torch.float16)
    for result in measure.measure(row):
        assert result["budget"] < 10, result  # the accuracy check sees the statistics, and stale ones are off by thousands
    stale = {"onepass": lambda case, operands: partial(calls.by_onepass, case, operands._replace(running_mean=None, running_var=None))}
    assert "error" in measure.measure(row, providers=stale)[0]
