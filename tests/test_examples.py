"""The examples, and the code on the pages, run as they stand; the examples agree with torch."""

import re
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_example(path, capsys):
    runpy.run_path(str(path), run_name="__main__")
    (difference,) = re.findall(r"largest difference from torch: (\S+)", capsys.readouterr().out)
    assert float(difference) < 1e-4


@pytest.mark.parametrize("page", ["README.md", "docs/adding-a-norm.md"])
def test_code_on_a_page(page):
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)
    assert blocks
    for block in blocks:
        exec(block, {})


def test_there_are_examples():
    assert len(EXAMPLES) >= 4
