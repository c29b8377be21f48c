"""The benchmark of whole models, on small models and a CPU."""

import importlib
import json
import os
import time
from pathlib import Path

import pytest
import torch

from benchmarks import model_table, model_variant, model_zoo, models, report, report_models
from benchmarks.model_variant import MODES, SharedMemory, Step, Variant, _kernel_names, error_ratio
from benchmarks.model_zoo import ENTRIES, Entry
from benchmarks.models import PROVIDERS, Failed, measure
from benchmarks.variant_process import BeforeInOneProcess
from onepass.bench import record

ROOT = Path(__file__).parents[2]


class Toy(torch.nn.Module):
    """A model that needs neither diffusers nor transformers."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm, self.act = torch.nn.Conv2d(3, 8, 3), torch.nn.GroupNorm(2, 8), torch.nn.SiLU()

    def forward(self, x):
        return self.act(self.norm(self.conv(x))).square().mean()


def toy(training: bool) -> Entry:
    def inputs(model, small):
        return (model_zoo._random(model, 2, 3, 8, 8),)

    return Entry("toy", "a toy", "json", lambda small: Toy(), inputs, forward, 1, training, channels_last=True)


def forward(model, x):
    return model(x)


class Here:
    """A variant in this process. `VariantProcess` runs one in another process."""

    def __init__(self, entry: Entry, patched: bool):
        self.variant = Variant(entry, patched, True, "cpu", "aot_eager", SharedMemory(2))

    def call(self, method, *args):
        try:
            return getattr(self.variant, method)(*args)
        except RuntimeError as error:
            raise Failed(str(error)) from error


def records(entry: Entry, modes=MODES, here=Here):
    pair = [here(entry, patched) for patched in (False, True)]
    lost = record.origin("cpu") | {"small": True}
    return [found for mode in modes for found in measure(entry, mode, pair, [child.call("ready", mode) for child in pair], lost, 6)]


@pytest.fixture(autouse=True)
def fresh():
    yield
    torch.compiler.reset()


def complete(found: list, entry: Entry, modes=MODES) -> None:
    assert [r["provider"] for r in found] == [name for mode in modes for name in PROVIDERS[mode]]
    for r in found:
        json.dumps(r)
        assert "error" not in r and r["row"] == entry.name and r["small"] and r["commit"] and r["training"] == entry.training, r
        assert 0 < r["low_ms"] <= r["ms"] <= r["high_ms"] and 0 < r["relative_error"] < 0.1 and r["peak_bytes"] is None
        assert (r["norms"] is None) == r["provider"].endswith("before")
        assert r["samples"] == 6
        if r["provider"] not in PROVIDERS["eager"]:
            assert r["graphs"] == 1 and r["graph_breaks"] == 0 and r["break_reasons"] == [] and r["compile_s"] > 0
    for after in found[1::2]:
        assert after["of_allowed"] <= 1 and after["pairs"] == 6 and after["ratio_low"] <= after["ratio"] <= after["ratio_high"]
        assert after["verdict"] in ("ok", "slower", "not settled")


@pytest.mark.parametrize("training", [False, True])
def test_records(training, monkeypatch):
    monkeypatch.setattr(json, "__version__", "2", raising=False)
    entry = toy(training)
    found = records(entry)
    complete(found, entry)
    assert found[1]["norms"]["fused"] == 1 and found[1]["layout"] == "channels_last" and found[1]["library"] == "json 2"


# Ten seconds or more. Other twins, and the models in tests/patching, have the same modules.
SLOW_TWINS = "vae-train", "vae-decode", "unet2d-train", "sdxl-b2", "sd15-b2", "convnext-train"
TWINS = [
    pytest.param(entry, id=entry.name, marks=[pytest.mark.slow] * (entry.name in SLOW_TWINS))
    for entry in ENTRIES
    if entry.name not in ("sd15-b16", "llama-train")
]


@pytest.mark.parametrize("entry", TWINS)
def test_small_twins(entry, monkeypatch):
    pytest.importorskip(entry.library)
    pytest.importorskip("transformers")
    monkeypatch.setattr(models, "STEPS", (1, 1))  # a step in bfloat16 takes a second on some CPUs
    complete(records(entry, MODES[:1]), entry, MODES[:1])


def test_wrong_results_have_no_time(monkeypatch):
    def here(entry, patched):
        child = Here(entry, patched)
        if patched:
            child.variant.model.norm.eps = 0.05
        return child

    monkeypatch.setattr(json, "__version__", "2", raising=False)
    before, after = records(toy(False), ["eager"], here)
    assert "wrong: the error of output is" in after["error"] and "ms" not in after and before["ms"] > 0


def test_what_is_allowed():
    before = {"a": (0.0, 1.0), "b": (0.02, 2.0), "c": (0.01, 1.0)}
    assert error_ratio(before, before)[0] == pytest.approx(0.01 / (0.02 + 2**-8))
    assert error_ratio(before, before | {"a": (0.02, 1.0)}) == (pytest.approx(0.02 / (0.02 + 2**-8)), "a")  # was right by chance before
    assert error_ratio(before, before | {"b": (0.2, 2.0)}) == (pytest.approx(0.1 / (0.02 + 2**-8)), "b")


def test_noise_may_differ_more():
    """The exact gradient of a key's bias is 0, so all of it is noise."""
    before = {"a": (0.01, 1.0), "k.bias": (1e-5, 1e-9)}
    assert error_ratio(before, before | {"k.bias": (1e-4, 1e-9)}) == (pytest.approx(10 / 16), "k.bias")
    assert error_ratio(before, before | {"k.bias": (3e-4, 1e-9)})[0] > 1


def test_errors_are_written_down():
    ready = ["timed out", {"errors": {"output": (0.0, 1.0)}, "norms": None}]
    lost = record.origin("cpu") | {"small": True}
    before, after = measure(toy(False), "eager", [None, None], ready, lost, 6)
    assert before["error"] == "timed out" and after["error"] == "the model before gave no results to compare with" and before["date"]


def test_steps_of_a_cache():
    """The cache is rewound before it is full, and before results are taken."""
    rewound = []
    entry = Entry("e", "e", "json", Toy, lambda model, small: (), lambda model: torch.zeros(()), 1, rewind=lambda: rewound.append(1))
    step = Step(entry, torch.nn.Identity(), (), entry.forward)
    for _ in range(model_zoo.AHEAD + 1):
        step()
    assert len(rewound) == 2
    step.results()
    assert len(rewound) == 3


def test_processes(tmp_path, capsys):
    """The records hold the results of a process, its errors, and timeouts."""
    pytest.importorskip("transformers")
    out = tmp_path / "models.jsonl"
    arguments = ["--small", "--only", "llama-train", "--pairs", "6", "--out", str(out), "--logs", str(tmp_path)]
    assert models.main([*arguments, "--backend", "none"]) == 1
    assert "FAILED llama-train compiled after: " in capsys.readouterr().out
    found = record.read(out)
    complete(found[:2], next(entry for entry in ENTRIES if entry.name == "llama-train"), MODES[:1])
    assert all("none" in r["error"] and "ms" not in r and r["commit"] for r in found[2:]) and len(found) == 6
    start = time.monotonic()
    assert models.main([*arguments, "--modes", "eager", "--limit", "0.1"]) == 1
    assert [r["error"] for r in record.read(out)[:2]] == ["timed out"] * 2 and time.monotonic() - start < 20


def test_a_run_that_is_ended_while_it_writes_keeps_its_results(tmp_path, monkeypatch):
    def ended(path, text):
        with path.open("w") as file:
            file.write(text[:5])
        raise SystemExit

    out = tmp_path / "models.jsonl"
    record.write(out, [{"row": "a"}])
    monkeypatch.setattr(Path, "write_text", ended)
    with pytest.raises(SystemExit):
        record.write(out, [{"row": "b"}])
    assert record.read(out) == [{"row": "a"}]


def test_options(capsys):
    parse = models._parser().parse_args
    assert parse(["--only", "bert,vae-train", "--modes", "compile"]).only == ["vae-train", "bert"]
    with pytest.raises(SystemExit):
        parse(["--modes", "eager,fast"])
    assert "fast is unknown; choose from eager, compile, reduce-overhead" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="--pairs 5: too few for a 95 % interval; use 6 or more"):
        models.main(["--pairs", "5"])


class Asked:
    """A variant that only notes what it is asked for. A step takes `seconds`."""

    def __init__(self, seconds: float, order: list):
        self.taken, self.order = seconds, order

    def call(self, method, mode=None, steps=0, warm=False):
        self.order.append((method, self.taken, steps, warm))
        return self.taken if method == "seconds" else None


def test_pairs_take_turns():
    order = []
    ready = [{"errors": {"output": (0.01, 1.0)}}] * 2
    before, after = measure(toy(False), "eager", [Asked(0.015, order), Asked(0.01, order)], ready, {}, 6)
    assert after["ratio"] == 1.5 and after["pairs"] == 6 and after["verdict"] == "ok" and before["ms"] == 15 and "ratio" not in before
    samples = [entry for entry in order if entry[0] == "seconds"][2:]
    assert [seconds for _, seconds, _, _ in samples[:4]] == [0.015, 0.01, 0.01, 0.015]
    assert {(steps, warm) for _, _, steps, warm in samples} == {(4, True)}  # 60 ms of the slower one
    order.clear()
    measure(toy(False), "eager", [Asked(0.2, order)] * 2, ready, {}, 6)
    assert order[-3][2:] == (2, False)  # long steps have no warm-up


def test_steps_are_timed_in_one_process():
    order = []
    before, after = Asked(0.015, order), Asked(0.01, order)
    after.call = lambda method, *args: order.append(method) or 0.02
    both = BeforeInOneProcess(before, after)
    assert both.call("seconds", "eager", 2, True) == 0.02 and both.call("rest") is None
    assert [entry if isinstance(entry, str) else entry[0] for entry in order] == ["plain_seconds", "rest"]


def test_the_process_of_the_patched_model_has_the_other_one(monkeypatch):
    monkeypatch.setattr(json, "__version__", "2", raising=False)
    variant = Variant(toy(True), True, True, "cpu", "inductor", SharedMemory(2))
    variant.ready("eager")
    variant.ready_before("eager")
    plain = variant.plain_steps["eager"]
    assert variant.plain_seconds("eager", 2, True) > 0 and plain.model is variant.plain
    assert plain.taken == 4 and variant.steps["eager"].taken == 1
    kinds = [{type(module) for module in model.modules()} for model in (variant.plain, variant.model)]
    assert kinds[0] != kinds[1]


def test_a_dropped_graph_is_compiled_again_beside_the_other_one(monkeypatch):
    monkeypatch.setattr(json, "__version__", "2", raising=False)
    variant = Variant(toy(True), True, True, "cpu", "aot_eager", SharedMemory(2))
    variant.ready("reduce-overhead")
    variant.ready_before("reduce-overhead")
    assert variant.seconds("reduce-overhead", 1, False) > 0 and variant.plain_seconds("reduce-overhead", 1, False) > 0
    variant.drop("reduce-overhead")
    assert "reduce-overhead" not in variant.steps and variant.peak("reduce-overhead") is None
    variant.ready("reduce-overhead")
    assert variant.seconds("reduce-overhead", 1, False) > 0


def test_graphs_of_each_mode(monkeypatch):
    """Each mode compiles for itself, and inductor gets the mode."""
    asked, compiled = [], torch.compile
    monkeypatch.setattr(
        torch, "compile", lambda f, mode, backend, **options: asked.append(mode) or compiled(f, backend="aot_eager", **options)
    )
    monkeypatch.setattr(json, "__version__", "2", raising=False)
    variant = Variant(toy(True), True, True, "cpu", "inductor", SharedMemory(2))
    found = [variant.ready(mode) for mode in MODES]
    assert asked == [None, "reduce-overhead"] and [r.get("graphs") for r in found] == [None, 1, 1]
    assert "cudagraph_skips" in found[2] and "cudagraph_skips" not in found[1]


def test_names_of_kernels():
    pytest.importorskip("triton")
    importlib.import_module("onepass.backends.gpu.row.kernel")
    assert "row_forward" in _kernel_names()


def test_results_survive_the_next_step():
    """The next step may overwrite the memory of its output."""
    shared = torch.zeros(3)
    entry = Entry("e", "e", "json", Toy, lambda model, small: (), lambda model: shared, 1)
    step = Step(entry, torch.nn.Identity(), (), entry.forward)
    taken = step.results()["output"]
    shared.fill_(1)
    assert taken.tolist() == [0, 0, 0]


def test_what_is_printed():
    common = {"row": "toy", "peak_bytes": 2e6, "graph_breaks": 0}
    after = {"ms": 2.0, "ratio": 1.5, "ratio_low": 1.4, "ratio_high": 1.6, "verdict": "ok", "gpu_ratio": 1.8, "our_kernels": 7}
    found = [common | {"provider": "compiled before", "ms": 3.0}, common | {"provider": "compiled after"} | after]
    line = model_table.text([*found, *(common | {"provider": name, "error": "lost"} for name in PROVIDERS["eager"])]).splitlines()
    assert line[2].split()[:4] == ["toy", "eager", "FAILED", "FAILED"]
    assert line[3].split()[:7] == ["toy", "compile", "3.000", "2.000", "1.500", "1.400-1.600", "ok"] and " 1.80 " in line[3]
    assert line[-1] == "FAILED toy after: lost"


def made_up():
    """Made-up results: one patched model failed to compile, and one has one more graph break."""
    origin = {"name": "GPU", "torch": "2", "triton": "3", "onepass": "0", "commit": "c", "date": "d", "library": "l 1", "small": False}
    for entry in ENTRIES:
        for mode in MODES:
            for name, ms in zip(PROVIDERS[mode], (30.0, 2.0)):
                common = {"row": entry.name, "provider": name, **origin}
                breaks = {"graph_breaks": int(name == "compiled after" and entry is ENTRIES[1])} if mode == "compile" else {}
                breaks |= {"ratio": 12.0, "verdict": "slower" if entry is ENTRIES[2] else "ok"} if name == "reduce-overhead after" else {}
                if entry is ENTRIES[0] and name == "compiled after":
                    yield common | {"error": "timed out"}
                else:
                    yield common | {"ms": ms, "peak_bytes": 1.5e9} | breaks


def test_the_table():
    text = report_models.updated(f"before\n{report_models.BEGIN}\nstale\n{report_models.END}\nafter", list(made_up()))
    assert (
        text.startswith(f"before\n{report_models.BEGIN}\n| one step")
        and text.endswith(f"{report_models.END}\nafter")
        and "stale" not in text
    )
    assert f"| {ENTRIES[0].title} | 30.0 | 2.00 | 15.00× | 30.0 | failed | – | 30.0 | 2.00 | 12.00× | 1.50, 1.50; 1.50, – |" in text
    assert "- vae-decode, compiled after: timed out" in text
    assert f"Graph breaks added: none in 9 of 11 models, some in {ENTRIES[1].name}." in text and "GPU, torch 2, triton 3" in text
    assert f"Slower: {ENTRIES[2].name} (reduce-overhead after). Not settled: none." in text and "Not measured" not in text


def test_the_table_of_some_models_and_modes():
    """It has the modes of the results, and names the models without results."""
    some = [r for r in made_up() if r["row"] != "bert" and not r["provider"].startswith("reduce")]
    text = report_models.table(some)
    assert text.startswith("| one step, bfloat16 | eager: before | after | ratio | torch.compile: before | after | ratio | peak")
    assert text.splitlines()[len(ENTRIES) + 2].endswith("Graph breaks added: none in 8 of 10 models, some in sd15-b2. Not measured: bert.")


def test_the_table_fails_on_a_missing_row():
    results = [r for r in made_up() if (r["row"], r["provider"]) != (ENTRIES[3].name, "after")]
    with pytest.raises(ValueError, match=f"1 results are missing: {ENTRIES[3].name} after"):
        report_models.table(results)
    with pytest.raises(ValueError, match="several machines"):
        report_models.table([r | {"name": r["provider"]} for r in made_up()])
    with pytest.raises(ValueError, match="small"):
        report_models.table([r | {"small": True} for r in made_up()])


def test_report_command(tmp_path, capsys):
    docs, results = tmp_path / "benchmarks.md", tmp_path / "models.jsonl"
    docs.write_text(f"{report_models.BEGIN}\n{report_models.END}")
    record.write(results, made_up())
    arguments = ["--models", "--results", str(results), "--docs", str(docs)]
    assert report.main([*arguments, "--check"]) == 1
    assert report.main(arguments) == 0
    assert report.main([*arguments, "--check"]) == 0
    record.write(results, record.read(results)[:-1])
    assert report.main([*arguments, "--check"]) == 2
    assert "llama-decode reduce-overhead after" in capsys.readouterr().err


@pytest.mark.skipif(not (ROOT / "results/models-h200.jsonl").exists(), reason="no results")
def test_the_page_is_that_of_the_results(monkeypatch):
    monkeypatch.chdir(ROOT)
    assert report.main(["--models", "--check"]) == 0


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="only Linux pins threads")
def test_steps_before_and_after_run_on_the_same_cores(monkeypatch):
    monkeypatch.setattr(model_variant, "CORES", 1)
    all_cores = os.sched_getaffinity(0)
    with model_variant.same_cores():
        assert os.sched_getaffinity(0) == {min(all_cores)}
    assert os.sched_getaffinity(0) == all_cores
