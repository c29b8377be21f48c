"""The command line, as a user types it."""

import itertools
import json
import re
import subprocess
import sys

import pytest

from onepass.cli import demo, doctor
from onepass.cli.main import main
from onepass.core import device
from onepass.planning.registry import FAMILIES
from onepass.verify import calls, cases


def run(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "onepass.cli", *args], capture_output=True, text=True)


def test_run_of_the_readme():
    text = "run group_norm --shape 4,64,8,8 --groups 32 --layout nhwc --dtype float16 --init normal --seed 0 --verify --time"
    result = run(*text.split())
    assert result.returncode == 0, result.stderr
    for part in ("outer 4, reps 64, sets 32, run 2", "fraction of the budget", "milliseconds"):
        assert part in result.stdout
    assert "forward   c" in result.stdout or "forward   blockwise" in result.stdout  # where there is no C compiler


@pytest.mark.parametrize("op", calls.OPS)
def test_run_every_norm(op, capsys):
    for extra in ([], ["--evaluate"] if op in ("batch_norm", "instance_norm") else ["--affine", "none"]):
        assert main(["run", op, "--shape", "3,8,4,5", "--groups", "4", "--verify", "--wide", "--dtype", "bfloat16", *extra]) == 0
    assert "dx" in capsys.readouterr().out


@pytest.mark.parametrize(
    "text",
    [
        "group_norm --shape 3,4,5,8 --groups 4 --last --modulate --activation silu",
        "layer_norm --shape 3,8,4,5 --rank 3 --granularity channel --activation gelu_tanh",
        "rms_norm --shape 3,4,8 --residual --offset 1 --modulate",
        "switchable_norm --shape 3,8,4 --no-bn",
    ],
)
def test_run_with_extras(text, capsys):
    assert main(["run", *text.split(), "--verify"]) == 0
    assert "y = " in capsys.readouterr().out


def test_run_reports_bad_arguments(capsys):
    assert main(["run", "group_norm", "--shape", "2,320,8,8", "--groups", "48"]) == 2
    assert "nearest divisors of 320: 40, 64" in capsys.readouterr().err


def test_run_fails_when_the_budget_is_broken(monkeypatch, capsys):
    monkeypatch.setattr("onepass.verify.oracle.half_ulp", lambda x, dtype: x * 0)
    assert main(["run", "layer_norm", "--shape", "3,64", "--dtype", "bfloat16", "--verify"]) == 1


def test_doctor(capsys):
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert "All well" in out and re.search(r"^group_norm +(c|aten|blockwise) ", out, re.MULTILINE)
    assert len(out.splitlines()) <= 24 and max(map(len, out.splitlines())) <= 100


def test_doctor_verbose(capsys):
    assert main(["doctor", "--verbose"]) == 0
    out = capsys.readouterr().out
    assert "All well." in out and "route direct" in out and "not aten" in out


def test_doctor_with_many_gpus_fits_a_screen(monkeypatch, capsys):
    """Eight equal GPUs share columns. Their plans are those of a GPU, and the CPU runs the checks."""
    describe, check = device.describe, doctor._check

    def check_and_plan(case, name):
        done = check(case, "cpu")
        return done if name == "cpu" else done._replace(plans=done.plans.on("h200"))

    monkeypatch.setattr("torch.cuda.device_count", lambda: 8)
    monkeypatch.setattr(device, "describe", lambda place: device.KNOWN_DEVICES["h200"] if place.type == "cuda" else describe(place))
    monkeypatch.setattr(doctor, "_check", check_and_plan)
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert "cuda:0 to cuda:7  H200" in out and len(out.splitlines()) <= 24 and max(map(len, out.splitlines())) <= 100


def test_doctor_sees_a_broken_norm(monkeypatch, capsys):
    monkeypatch.setattr("onepass.verify.calls.functional.rms_norm", lambda x, *args: x)
    assert main(["doctor"]) == 1
    assert "BROKEN" in capsys.readouterr().out


def test_verify_prints_a_matrix(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(cases, "CASES", cases.CASES[:3])
    assert main(["verify", "--dtype", "float16", "--matrix", "--reasons", "--out", str(tmp_path / "results" / "cells.jsonl")]) == 0
    out = capsys.readouterr().out
    assert "layer_norm 64x257" in out and f"{3 * len(FAMILIES)} cells" in out and "0 failed" in out
    records = [json.loads(line) for line in (tmp_path / "results" / "cells.jsonl").read_text().splitlines()]
    assert len(records) == 3 * len(FAMILIES) and all(record["ok"] and record["torch"] for record in records)


def test_verify_prints_a_summary(monkeypatch, capsys):
    monkeypatch.setattr(cases, "CASES", cases.CASES[:2])
    assert main(["verify", "--dtype", "float32"]) == 0
    out = capsys.readouterr().out
    assert "layer_norm 64x257" not in out and "within the budget" in out and len(out.splitlines()) <= 24


def test_verify_prints_the_failures(monkeypatch, capsys):
    monkeypatch.setattr(cases, "CASES", cases.CASES[:2])
    monkeypatch.setattr("onepass.verify.oracle.half_ulp", lambda x, dtype: x * 0)
    assert main(["verify", "--dtype", "bfloat16"]) == 1
    out = capsys.readouterr().out
    assert "FAILED layer_norm 64x257" in out and "All well" not in out


def test_times_are_the_least_disturbed(monkeypatch):
    """Nine of ten samples are slow, in turn for both calls. The times are those of the tenth."""
    durations = {"ours": 1.0, "torchs": 2.0}
    counts = dict.fromkeys(durations, 0)

    def once(call, n):
        name = call()
        counts[name] += 1
        return durations[name] * (1 if counts[name] % 10 == 0 else 7)

    monkeypatch.setattr(demo.timing, "once", once)
    assert demo.fastest([lambda: "ours", lambda: "torchs"], least=0.01) == ([1.0, 2.0], True)


def test_times_of_a_busy_machine_are_marked(monkeypatch):
    samples = itertools.count(1)
    monkeypatch.setattr(demo.timing, "once", lambda call, n: float(next(samples)))
    times = demo.fastest([lambda: None, lambda: None], least=0.01, most=0.02)
    assert times == ([1.0, 2.0], False)


def test_demo(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(demo, "DEMO", [case for case in demo.DEMO if case.op in ("rms_norm", "layer_norm2d")])
    assert main(["demo", "--picture", str(tmp_path / "norms.png")]) == 0
    out = capsys.readouterr().out
    assert "layer_norm2d" in out and "add_rms_norm" in out and "within the budget" in out
    lines = out.splitlines()
    head = next(i for i, line in enumerate(lines) if "speed-up" in line)
    row = re.compile(r"(\w+)  +[0-9×]+ +([0-9.]+) +([0-9.]+) +([0-9.]+)x(?: \?)?")  # "?" where the machine was busy
    found = [match.groups() for match in map(row.fullmatch, lines[head + 2 : lines.index("", head)]) if match]
    assert [name for name, *_ in found] == ["rms_norm", "layer_norm2d", "add_rms_norm"]
    for _, ours, torchs, speed in found:
        assert float(speed) == pytest.approx(float(torchs) / float(ours), rel=0.05, abs=0.1)
    assert "10,000 times its standard deviation" in out and "Try next:" in out
    assert (tmp_path / "norms.png").read_bytes().startswith(b"\x89PNG")
