"""Help and errors of the command line: at once, in one sentence, without a traceback."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from onepass.bench.providers import PROVIDERS
from onepass.bench.record import dtype_name
from onepass.cli import arguments
from onepass.cli.main import main
from onepass.planning.registry import FAMILIES
from onepass.verify import calls, matrix

COMMANDS = ("demo", "doctor", "verify", "run", "patch", "precompile", "bench")
RUN = """
import sys
from onepass.cli.main import main
try:
    status = main({argv!r})
except SystemExit as end:
    status = end.code
print("status", status, sorted(sys.modules.keys() & {{"torch", "numpy", "matplotlib", "rich"}}))
"""


def failed(text: str, capsys: pytest.CaptureFixture[str]) -> str:
    """Run a command that must exit with 2. Return the sentence that it prints."""
    try:
        status = main(text.split())
    except SystemExit as end:
        status = end.code
    captured = capsys.readouterr()
    assert status == 2 and "Traceback" not in captured.err
    assert len(captured.err.splitlines()) == 1, captured.err
    return captured.err


def test_names_are_those_of_the_library():
    assert tuple(calls.OPS) == arguments.OPS
    assert tuple(map(dtype_name, matrix.DTYPES)) == arguments.DTYPES
    assert tuple(family.name for family in FAMILIES) == arguments.FAMILIES
    assert tuple(PROVIDERS) == arguments.PROVIDERS


@pytest.mark.parametrize(
    "text, status",
    [
        ("--help", 0),
        ("--version", 0),
        *((f"{command} --help", 0) for command in COMMANDS),
        ("", 2),
        ("run nothing", 2),
        ("bench --op x", 2),
    ],
)
def test_help_and_usage_errors_import_no_torch(text, status):
    done = subprocess.run([sys.executable, "-c", RUN.format(argv=text.split())], capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == f"status {status} []", done.stderr


def test_python_m_onepass():
    names = ("onepass", "onepass.cli")
    runs = [subprocess.run([sys.executable, "-m", name, "--help"], capture_output=True, text=True) for name in names]
    assert runs[0].stdout == runs[1].stdout and runs[0].stdout.startswith("usage: onepass ")
    done = subprocess.run([sys.executable, "-m", "onepass", "run", "layer_norm", "--shape", "4,8"], capture_output=True, text=True)
    assert done.returncode == 0 and "layer_norm 4x8" in done.stdout


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("command", ["run layer_norm --shape 2,8", "verify", "bench", "precompile torch.nn:Linear 2 2 --shape 1,2"])
def test_no_gpu(command, capsys):
    for name in ("cuda", "cuda:1"):
        assert f"--device {name}: there is no GPU here" in failed(f"{command} --device {name}", capsys)


@pytest.mark.parametrize(
    "text, message",
    [
        ("run layer_norm --shape 2,a", "'2,a' is not a shape"),
        ("run layer_norm --shape 2,-3", "'2,-3' is not a shape"),
        ("run layer_norm --shape", "--shape: expected one argument"),
        ("run group_norm --shape 2,320,4 --groups 48", "nearest divisors of 320: 40, 64"),
        ("run batch_norm --shape 7", "--shape 7: batch_norm needs at least two dimensions"),
        ("run layer_norm --shape 7 --rank 2", "--rank 2: expected 1 to 1"),
        ("run batch_norm --shape 4,6 --residual", "--residual is not for batch_norm; expected layer_norm, rms_norm, group_norm"),
        ("run layer_norm --shape 4,6 --last", "--last is not for layer_norm"),
        ("run layernorm --shape 2,3", "invalid choice: 'layernorm'"),
        ("run layer_norm --shape 2,3 --dtype float8", "invalid choice: 'float8'"),
        ("run layer_norm --shape 2,3 --device gpu", "--device gpu: torch knows no such device"),
        ("run layer_norm --shape 2,3 --device meta", "--device meta: torch cannot use it here"),
        ("run layer_norm --shape 2,8 --family row", "'row' cannot run the forward of this problem"),
        ("verify --only nothing-like-this", "no case matches"),
        ("patch nowhere:model", "was not found: No module named 'nowhere'"),
        ("patch torch.nn:Nothing", "was not found"),
        ("patch torch.nn", "has no factory"),
        ("patch :x", "has no factory"),
        ("patch torch.nn:Linear 3", "torch.nn:Linear raised TypeError"),
        ("patch torch:pi", "expected a function that makes a model"),
        ("patch os:getcwd", "expected a torch.nn.Module"),
        ("demo --picture no/such/folder/x.png", "does not exist"),
        ("nothing", "invalid choice: 'nothing'"),
        ("doctor --loud", "unrecognized arguments: --loud"),
    ],
)
def test_errors_are_one_sentence(text, message, capsys):
    assert message in failed(text, capsys)


@pytest.mark.parametrize(
    "code, message",
    [
        (None, "install it with `pip install torchvision`"),
        ("raise RuntimeError('operator torchvision::nms does not exist')", "this torchvision may be built for another torch"),
    ],
)
def test_a_missing_or_foreign_torchvision(code, message, tmp_path, monkeypatch, capsys):
    for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
        monkeypatch.delitem(sys.modules, name)
    if code is None:
        monkeypatch.setattr(sys, "meta_path", [_Without(), *sys.meta_path])
    else:
        (tmp_path / "torchvision.py").write_text(code)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    assert message in failed("patch torchvision.models:resnet50", capsys)


class _Without:
    """Finds no torchvision, even if it is installed."""

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "torchvision":
            raise ModuleNotFoundError("No module named 'torchvision'", name="torchvision")


def test_examples_of_the_help_work(capsys):
    example = next(line for line in arguments.MODELS.splitlines() if "torch.nn:" in line)
    assert main(["patch", *example.split()[:2]]) == 0
    assert "32 replaced" in capsys.readouterr().out
