"""The benchmark harness: what it refuses to report, what it writes, and how the documentation is made from it."""

import json
import time
from dataclasses import replace
from functools import partial
from math import prod
from pathlib import Path

import pytest
import torch

import onepass.functional as O
from benchmarks import overhead, precompile, report, report_suite, stress, stress_problems
from onepass.bench import accuracy, measure, record, timing
from onepass.bench.providers import PROVIDERS
from onepass.bench.suite import BACKWARD_SUITE, SUITE, Row, problem_of
from onepass.cli import bench
from onepass.cli.main import main
from onepass.planning.explain import explain
from onepass.verify import calls, cases, oracle, tensors
from onepass.verify.cases import Case

ROOT = Path(__file__).parents[2]
TINY = Row(Case("layer_norm", (16, 64)), torch.bfloat16, 0.5)
TINY_BACKWARD = replace(TINY, direction="backward")
EAGER = {name: PROVIDERS[name] for name in ("onepass", "torch")}


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(timing, "interleaved", partial(timing.interleaved, seconds=0.01))
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))


def test_names_are_unique():
    assert len({row.name for row in (*SUITE, *BACKWARD_SUITE)}) == len(SUITE) + len(BACKWARD_SUITE)
    assert {row.direction for row in SUITE} == {"forward"} and {row.direction for row in BACKWARD_SUITE} == {"backward"}


def test_copies_are_the_least_traffic():
    for row in (*SUITE, *BACKWARD_SUITE):
        problem = replace(problem_of(row), weight=None, bias=None, scale=None, shift=None)
        assert problem.min_bytes(row.direction) == 2 * row.copies * row.nbytes, row.name


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
    """With made-up numbers in the place of an allocator's. A gradient that two operands share is counted once."""
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: None)
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda: {"requested_bytes.all.current": 1000, "requested_bytes.all.peak": 1500})
    dx, dweight = torch.empty(4, 16), torch.empty(16)
    assert measure._memory(lambda: (dx, dweight, dx), on_cuda=True) == {"peak_bytes": 500, "gradient_bytes": 320, "extra_bytes": 180}


class Off(torch.autograd.Function):
    """Passes a tensor on, and its gradient with one element off by a factor."""

    @staticmethod
    def forward(ctx, t, factor):
        ctx.factor = factor
        return t.clone()

    @staticmethod
    def backward(ctx, grad):  # pyright: ignore[reportIncompatibleMethodOverride]
        wrong = grad.clone()
        wrong.view(-1)[-1] *= ctx.factor
        return wrong, None


@pytest.mark.parametrize(
    ("case", "wrong", "factor"),
    [
        *((TINY.case, name, 1.02) for name in ("x", "weight", "bias")),
        *((Case("layer_norm", (4, 8, 64), modulate=True), name, 1.02) for name in ("scale", "shift")),
        (Case("rms_norm", (16, 64), residual=True), "residual", 1.02),
        *((Case("switchable_norm", (4, 6, 5, 5)), name, 1.5) for name in ("mean_weight", "var_weight")),  # their budget is generous
    ],
    ids=lambda value: getattr(value, "op", None),
)
def test_the_gate_finds_every_wrong_gradient(case, wrong, factor, monkeypatch):
    def provider(case, operands):
        return calls.onepass_call(case, operands._replace(**{wrong: Off.apply(getattr(operands, wrong), factor)}))

    monkeypatch.setattr(accuracy, "SLICE", 100)
    row = Row(case, torch.float32, direction="backward")
    ours, torchs = measure.measure(row, providers={"onepass": provider, "torch": calls.onepass_call})
    assert "wrong" in ours["error"] and not ours["correct"] and "us" not in ours
    assert torchs["correct"] and torchs["us"] > 0


def test_a_compiled_backward_runs_again(monkeypatch):
    """By AOTAutograd, which may else reuse the memory of what it saved. (torch 2.13 sees for itself that the graph is kept.)"""
    monkeypatch.setattr(torch, "compile", partial(torch.compile.func, backend="aot_eager"))  # pyright: ignore
    row = Row(Case("group_norm", (2, 8, 4, 4), groups=2, activation="silu"), torch.float32, direction="backward")
    (record,) = measure.measure(row, providers={"torch.compile": PROVIDERS["torch.compile"]})
    assert "error" not in record and record["us"] > 0


def test_wrong_results_have_no_time():
    """Of ours; a peer's time stands, with its error."""

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


@pytest.mark.parametrize("case", [case for case in cases.CASES if case.init != "inf" and case.shape[0]][::4], ids=lambda case: case.name)
def test_the_gate_is_the_oracle_in_slices(case, monkeypatch):
    monkeypatch.setattr(accuracy, "SLICE", 50)
    operands = tensors.make(case, torch.bfloat16)
    dy = tensors.make_dy(operands)
    exact = oracle.exact(case, operands, dy)
    outcomes = {run.__name__: oracle.evaluate(case, operands, dy, run) for run in (calls.by_onepass, calls.by_torch)}
    worst = {name: oracle.worst(outcome, exact.value, exact.allowed) for name, outcome in outcomes.items()}
    for name, error in accuracy.worst(case, operands, outcomes).items():
        assert error == pytest.approx(worst[name].forward, rel=1e-3)
    for name, error in accuracy.worst(case, operands, outcomes, dy).items():
        assert error == pytest.approx(worst[name].backward, rel=1e-3)


def test_big_operands_are_drawn_in_their_dtype():
    x = tensors.make(Case("group_norm", (4, 8, 16, 16), "channels_last", groups=2), torch.float16, on_device=True).x
    dy = tensors.make_dy(tensors.Operands(x), on_device=True)
    for t in (x, dy):
        assert t.dtype == torch.float16 and t.stride() == (2048, 1, 128, 8) and 0.9 < t.float().std() < 1.1
    assert not torch.equal(x, dy)


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


def made_up(suite=SUITE):
    """Results in which torch.compile wins and torch raises on the last row, which is also too slow."""
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
    """Between its own marks, where they are."""
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


def test_overhead(capsys, monkeypatch):
    monkeypatch.setattr(torch, "set_num_threads", lambda n: None)  # would outlive the test
    overhead.main([], seconds=0.01)
    lines = capsys.readouterr().out.splitlines()[1:]
    assert len(lines) == 2 * len(overhead.SMALL) and all("onepass" in line and "ratio" in line for line in lines)


@pytest.mark.skipif(not (ROOT / "results/bench-h200.jsonl").exists(), reason="no results")
def test_the_documentation_is_that_of_the_results(monkeypatch):
    monkeypatch.chdir(ROOT)
    assert report.main(["--check"]) == 0


def test_problems_are_drawn_from_seed_and_index():
    problems = [stress_problems.draw(3, index) for index in range(300)]
    assert problems == [stress_problems.draw(3, index) for index in range(300)] and problems[:9] != [
        stress_problems.draw(4, index) for index in range(9)
    ]
    assert len({problem.name for problem in problems}) > 250
    sizes = sorted(prod(problem.case.shape) * problem.dtype.itemsize for problem in problems)
    assert sizes[0] < 2**12 and sizes[len(sizes) * 3 // 4] < stress_problems.SMALL and sizes[-1] <= 1.2 * stress_problems.LARGE
    assert {problem.dtype for problem in problems} == {torch.float16, torch.bfloat16, torch.float32}
    assert {problem.case.shape[0] == 1 for problem in problems} == {problem.stats for problem in problems} == {True, False}
    first, again = (stress_problems.make(problems[0], "cpu") for _ in range(2))
    assert all(a is b is None or torch.equal(a, b) for a, b in zip(first, again))


def test_few_kinds_of_kernels():
    """Kernels past the number that is allowed are not compiled, and few problems are lost by that."""
    pytest.importorskip("triton")
    from benchmarks.resources import TARGETS

    device = TARGETS["sm_90"][1]
    known = set()
    needed = [precompile.needs(0, device, [None, "aten"], index) for index in range(300)]
    admitted = [job for job in (precompile.admit(known, kernels, 100) for kernels in needed) if job is not None]
    assert len(known) == sum(map(len, admitted)) <= 100 and len(admitted) > 150
    assert not any(job.family == "aten" for jobs in admitted for job in jobs)
    job = admitted[0][0]
    assert repr(precompile.sources(stress_problems.draw(0, job.index), device, job.family)[job.at]) in known


SMALL = [problem for problem in map(partial(stress_problems.draw, 0), range(200)) if prod(problem.case.shape) < 2**14]


@pytest.mark.parametrize("problem", SMALL[:24], ids=lambda problem: problem.name)
def test_stress_holds_what_is_right(problem):
    found = stress.verdicts(problem, "cpu", ["row", "blockwise", None])
    assert found["row"].skipped and found["blockwise"].ok and found["planner"].ok, found


@pytest.mark.parametrize("part", ["output", "mean", "rstd"])
def test_stress_finds_what_is_wrong(part, monkeypatch):
    """One element off by 1 %, once; and bits that are not the same twice."""
    group_norm, calls = O.group_norm, []

    def off(*args, **kwargs):
        result, spoilt = group_norm(*args, **kwargs), len(calls) in when
        calls.append(spoilt)
        if spoilt:
            getattr(result, part).view(-1)[-1:] *= 1.01
        return result

    monkeypatch.setattr(O, "group_norm", off)
    case = Case("group_norm", (2, 3, 5, 12), groups=4, last=True)
    problem = stress_problems.Problem(0, case, torch.float32, stats=True)
    when = (0, 1)
    both = stress.verdicts(problem, "cpu", ["blockwise"])["blockwise"]
    assert not both.ok and not both.fault and both.error is not None and both.error > 10
    calls.clear()
    when = (1,)
    second = stress.verdicts(problem, "cpu", ["blockwise"])["blockwise"]
    assert not second.ok and "different bits" in second.fault and second.error is not None and second.error <= 1


def test_stress_finds_what_nobody_wrote(monkeypatch):
    monkeypatch.setattr(O, "group_norm", lambda x, *args, **kwargs: torch.empty_like(x))
    problem = stress_problems.Problem(0, Case("group_norm", (2, 3, 5, 12), groups=4, last=True), torch.float32, stats=False)
    assert stress.verdicts(problem, "cpu", [None])["planner"].error == float("inf")


def test_stress_command(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(stress_problems, "SMALL", 2**12)
    monkeypatch.setattr(stress_problems, "LARGE", 2**13)
    monkeypatch.setattr(stress, "EVERY", 2)
    log = tmp_path / "results" / "stress.log"
    arguments = ["--device", "cpu", "--seed", "1", "--out", str(log)]
    assert stress.main([*arguments, "--count", "4"]) == 0
    assert "2/4 problems" in log.read_text() and "0 failures" in log.read_text() and capsys.readouterr().out == log.read_text()
    wrong = stress_problems.draw(1, 3)

    def verdicts(problem, device, families, *_):
        right = stress.Verdict(0.5)
        return {"blockwise": right, "planner": stress.Verdict(2.0) if problem == wrong else right}

    monkeypatch.setattr(stress, "verdicts", verdicts)
    assert stress.main([*arguments, "--only", "2"]) == 0
    assert stress.main([*arguments, "--only", "3"]) == 1
    assert f"FAILED 3: {wrong.name} by planner: the largest error is 2 of the budget; repeat it with --seed 1 --only 3" in log.read_text()
    assert stress.main([*arguments, "--count", "4", "--minutes", "0"]) == 0 and "1/4 problems" in log.read_text()


def test_the_watch_ends_what_hangs():
    said, left = [], []
    watch = stress.Watch(said.append, 0.05, left.append)
    watch.begin("a problem")
    for _ in range(100):
        time.sleep(0.01 if not left else 0)
    assert left == [3] and "a problem" in said[0]
