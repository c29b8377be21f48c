"""The sweep: which problems it draws, how it measures one, that it goes on where it stopped, and what it reports."""

from collections import Counter
from dataclasses import replace

import pytest
import torch

from benchmarks import precompile, sweep, sweep_problems
from benchmarks.sweep_problems import KINDS, draw, draw_backward
from onepass.backends.family import BACKWARD
from onepass.bench import record
from onepass.bench.suite import problem_of
from onepass.bench.timing import Timing
from onepass.core.device import KNOWN_DEVICES
from onepass.planning.choose import plan
from onepass.verify.cases import Case


def test_problems_are_drawn_from_seed_and_index():
    problems = [draw(3, index) for index in range(300)]
    assert problems == [draw(3, index) for index in range(300)] != [draw(4, index) for index in range(300)]
    assert Counter(problem.kind for problem in problems) == dict.fromkeys(KINDS, 100)
    assert len({problem.name for problem in problems}) > 250
    assert {problem.dtype for problem in problems} == {torch.float16, torch.bfloat16, torch.float32}
    assert {problem.case.layout for problem in problems} == {"contiguous", "channels_last"} and any(problem.shift for problem in problems)
    sizes = [problem.row.nbytes for problem in problems]
    assert all(sum(low <= size < high for size in sizes) > 15 for low, high in sweep.SIZES.values())


def test_the_planner_has_a_plan_for_all():
    for index in range(300):
        assert plan(problem_of(draw(0, index).row), KNOWN_DEVICES["h200"]).launches, draw(0, index).name


def test_kernels_are_compiled_ahead():
    pytest.importorskip("triton")
    device = KNOWN_DEVICES["h200"]
    needed = precompile.kernels_of(0, device, [None, "row_reread", "tile_reread"], 1, draw)
    kernel, job = next(iter(needed.items()))
    assert repr(precompile.sources(job.draw(job.seed, job.index), device, job.family)[job.number]) == kernel


def tiny(seed, index):
    cases = (
        Case("layer_norm", (7, 33)),
        Case("group_norm", (2, 8, 5, 3), "channels_last", groups=2),
        Case("batch_norm", (4, 6), running=True),
    )
    return replace(sweep_problems.draw(seed, index), case=cases[index % 3], dtype=torch.float32, shift=index)


def tiny_backward(seed, index):
    return replace(tiny(seed, index), direction=BACKWARD)


def test_it_goes_on_where_it_stopped(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(sweep, "draw", tiny)
    monkeypatch.setattr(sweep, "draw_backward", tiny_backward)
    out = tmp_path / "sweep.jsonl"
    assert sweep.main(["--count", "2", "--out", str(out)]) == 0
    first = record.read(out)
    assert [r["index"] for r in first] == [0, 1] and all(r["fraction"] > 0 and r["regret"] >= 1 and r["commit"] for r in first)
    assert {"onepass", "torch"} <= first[0]["us"].keys() and first[0]["failed"] == {}
    assert sweep.main(["--count", "3", "--out", str(out)]) == 0
    assert record.read(out)[:2] == first and len(record.read(out)) == 3
    assert sweep.main(["--count", "9", "--out", str(out), "--limit", "0"]) == 0
    assert "run the same command again to go on" in capsys.readouterr().err and len(record.read(out)) == 3
    assert sweep.main(["--out", str(out), "--summary"]) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("below 1 MB")]
    assert line.split()[3] == "3"
    assert sweep.main(["--count", "2", "--out", str(out), "--direction", "backward"]) == 0  # they do not replace the forwards
    assert [(r["direction"], r["index"]) for r in record.read(out)[3:]] == [("backward", 0), ("backward", 1)]
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("below 1 MB")]
    assert line.split()[3] == "2"


def test_compiling_for_a_gpu_that_is_not_here(monkeypatch, capsys):
    pytest.importorskip("triton")
    asked = []
    monkeypatch.setattr(precompile, "compile_ahead", lambda *args: asked.append(args) or "12 kernels")
    assert sweep.main(["--compile-for", "h200", "--seed", "7", "--count", "5"]) == 0 and "12 kernels" in capsys.readouterr().out
    ((_, seed, indices, device, families, target, _, seconds),) = asked
    assert (seed, len(indices), device.name, target.arch, seconds) == (7, 5, "H200", 90, None)
    assert None in families and "ring" in families and "reference" not in families


def test_the_planner_has_a_backward_for_all():
    for index in range(300):
        problem = draw_backward(0, index)
        assert plan(problem_of(problem.row), KNOWN_DEVICES["h200"], BACKWARD).launches, problem.name


def test_kernels_of_a_backward_are_compiled_ahead():
    pytest.importorskip("triton")
    names = [source.function.__name__ for source in precompile.sources(draw_backward(0, 3), KNOWN_DEVICES["h200"], None)]
    assert any(name.endswith("_forward") for name in names) and any(name.endswith("_backward") for name in names)


def test_a_backward_moves_the_gradients_of_parameters_too():
    problem = replace(draw_backward(0, 0), case=Case("layer_norm", (7, 33)), dtype=torch.float32)
    assert sweep.least_bytes(problem.bound, BACKWARD) == 4 * (3 * 7 * 33 + 4 * 33)
    problem = replace(problem, case=Case("layer_norm", (7, 33), residual=True))
    assert sweep.least_bytes(problem.bound, BACKWARD) == 4 * (4 * 7 * 33 + 4 * 33)


def test_wrong_gradients_are_not_timed(monkeypatch):
    monkeypatch.setitem(sweep.PROVIDERS, "onepass", lambda case, t: lambda: t.x * t.weight + t.bias)
    found = sweep.measure(tiny_backward(0, 0), "cpu")
    assert "wrong: the largest error is" in found["error"] and "us" not in found


def test_a_wrong_result_is_not_timed(monkeypatch):
    def wrong(case, operands):
        return lambda: operands.x * 1.5

    monkeypatch.setitem(sweep.PROVIDERS, "onepass", wrong)
    found = sweep.measure(tiny(0, 0), "cpu")
    assert "wrong: the largest error is" in found["error"] and "us" not in found
    assert "wrong" in sweep.summary([found])


def test_a_family_that_fails_is_named(monkeypatch):
    monkeypatch.setattr(sweep, "able", lambda bound, direction, device: iter(["whole_set"]))
    found = sweep.measure(tiny(0, 1), "cpu")
    assert "whole_set" in found["failed"] and "whole_set" not in found["us"]


def test_a_shifted_tensor():
    x = torch.randn(3, 4, 5).transpose(0, 1)
    y = sweep.shifted(x, 3)
    assert torch.equal(x, y) and y.stride() == x.stride() and y.storage_offset() == 3 and sweep.shifted(x, 0) is x


def test_regret():
    ours, near, far = Timing(10e-6, 9.8e-6, 10.2e-6), Timing(9.7e-6, 9.5e-6, 9.9e-6), Timing(5e-6, 4.9e-6, 5.1e-6)
    assert sweep.regret({"onepass": ours, "torch": far}) == 1
    assert sweep.regret({"onepass": ours, "torch": far, "row": near}) == 1  # within the spread
    assert sweep.regret({"onepass": ours, "row": far}) == 2


def test_the_summary_lists_losses():
    def made(index, fraction, regret, torch_us):
        times = {"onepass": [10.0, 9.0, 11.0], "torch": [torch_us, torch_us - 1, torch_us + 1]}
        common = {"row": f"0.{index} p", "index": index, "kind": KINDS[0], "bytes": 2**25, "chosen": "row", "us": times}
        return common | {"fraction": fraction, "regret": regret}

    text = sweep.summary([made(0, 0.9, 1.0, 50.0), made(1, 0.2, 1.0, 50.0), made(2, 0.4, 1.5, 50.0), made(3, 0.4, 1.0, 5.0)])
    assert "above 16 MB  4         0.41      0.20       75%            1.50          1" in text
    assert [line.split()[0] for line in text.splitlines()[-3:]] == ["0.1", "0.2", "0.3"] and "torch 2.00 times as fast" in text
