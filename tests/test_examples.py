"""The examples and the code in the documentation run as they are. The examples agree with torch."""

import importlib
import re
import runpy
import sys
from pathlib import Path

import pytest
import torch

import onepass

ROOT = Path(__file__).parents[1]
EXAMPLES = sorted(path for path in (ROOT / "examples").glob("*.py") if path.stem != "side_by_side")


@pytest.fixture
def as_script(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "examples")
    monkeypatch.setattr(sys, "argv", ["example"])


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_example(path, capsys, as_script):
    runpy.run_path(str(path), run_name="__main__")
    differences = re.findall(r"largest difference from torch: (\S+)", capsys.readouterr().out)
    assert differences and all(float(difference) < 1e-4 for difference in differences)


def test_an_example_fails_where_a_patched_model_is_off(as_script, monkeypatch):
    norm = torch.nn.LayerNorm(16)
    compare = importlib.import_module("side_by_side").compare
    compare(lambda norm, x: norm(x), norm, torch.randn(4, 16))
    monkeypatch.setattr(onepass, "patch", lambda model, **_: setattr(model, "eps", 2e-5))
    with pytest.raises(SystemExit, match="4 times"):
        compare(lambda norm, x: norm(x), norm, torch.randn(4, 16))


PAGES = ["README.md", *(f"docs/{name}.md" for name in (
    "adding-a-norm", "architecture", "compile-and-export", "first-call", "gpus-and-cpus", "index", "patching",
))]  # fmt: skip


@pytest.mark.parametrize("page", PAGES)
def test_code_on_a_page(page):
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)
    assert blocks
    for block in blocks:
        exec(block, {})


def test_there_are_examples():
    assert len(EXAMPLES) >= 9
