"""`onepass precompile`, as a user types it."""

from __future__ import annotations

import sys

import pytest
import torch

from onepass.cli.main import main

MODULE = """
import torch

def net(width=64):
    return torch.nn.Sequential(torch.nn.Conv2d(3, width, 3), torch.nn.GroupNorm(32, width), torch.nn.SiLU())

def both(kind="tensor"):
    x = torch.randn(2, 3, 8, 8)
    return net(), {"tensor": x, "tuple": (x,), "dict": {"input": x}}[kind]

model = net()
"""


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield tmp_path
    sys.modules.pop("mine", None)


@pytest.mark.parametrize(
    "text",
    [
        "mine:net --shape 2,3,8,8",
        "mine:net width=96 --shape 2,3,8,8 --dtype bfloat16",
        "mine:model --shape 2,3,8,8 --channels-last",
        "mine:both",
        "mine:both tuple --channels-last --dtype float16",
        "mine:both kind=dict",
    ],
)
def test_evaluation(text, capsys):
    assert main(["precompile", *text.split()]) == 0
    out = capsys.readouterr().out
    assert "evaluation\n" in out and "1 kind of norm calls" in out and "training\n" not in out


def test_training_too(capsys):
    assert main(["precompile", "mine:both", "--training"]) == 0
    out = capsys.readouterr().out
    assert out.index("evaluation\n") < out.index("training\n") and out.count("1 kind of norm calls") == 2


@pytest.mark.parametrize(
    "text, message",
    [
        ("mine:net --shape 2,3,8,8 --no-patch", "call onepass.patch(model) first"),
        ("mine:net", "returned no example inputs"),
        ("mine:both --shape 2,3,8,8", "--shape was given too"),
        ("mine:torch.randn 3", "expected a torch.nn.Module"),
        ("mine", "has no factory; expected MODULE:FACTORY"),
        ("mine:missing", "was not found"),
        ("nowhere:net", "was not found"),
    ],
)
def test_errors(text, message, capsys):
    assert main(["precompile", *text.split()]) == 2
    assert message in capsys.readouterr().err


def test_a_failed_build_is_a_failure(tmp_path, monkeypatch, anew, capsys):
    """So that the build of an image stops."""
    monkeypatch.setenv("CC", "no-such-compiler")
    monkeypatch.setenv("ONEPASS_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("ONEPASS_CPU", raising=False)
    with pytest.warns(UserWarning, match="without its C kernels"):
        assert main(["precompile", "mine:both"]) == 1
    assert "FAILED: the CPU kernels cannot be used: there is no C compiler" in capsys.readouterr().out


def test_patch_takes_the_same_names(capsys):
    assert main(["patch", "mine:net", "width=96"]) == 0
    assert "1 norm: 1 replaced, 1 of them fused" in capsys.readouterr().out
    assert main(["patch", "mine"]) == 2
    assert torch.is_grad_enabled()
