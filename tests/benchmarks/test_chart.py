"""The chart of whole models, docs/models.svg."""

from pathlib import Path
from xml.etree import ElementTree

import pytest

from benchmarks import chart
from benchmarks.model_zoo import ENTRIES
from onepass.bench import record

ROOT = Path(__file__).parents[2]
NAME = "{http://www.w3.org/2000/svg}"


def made_up(ratio=2.0, row=ENTRIES[0].name):
    fields = {"ratio_low": ratio - 0.1, "ratio_high": ratio + 0.1, "name": "a GPU"}
    yield {"row": row, "provider": "before", "name": "a GPU"}
    yield {"row": row, "provider": "after", "ratio": ratio, **fields}
    yield {"row": row, "provider": "compiled after", "ratio": 0.8, "ratio_low": 0.78, "ratio_high": 0.9, "name": "a GPU"}


def bars(svg, mode):
    """The left and right end of each bar of a mode, without the square in the legend."""
    rects = ElementTree.fromstring(svg).findall(f"{NAME}rect[@class='{mode}']")[1:]
    return [(float(rect.get("x")), float(rect.get("x")) + float(rect.get("width"))) for rect in rects]


def test_a_gain_goes_to_the_right_and_a_loss_to_the_left():
    svg = chart.picture(list(made_up()))
    (start, end), (loss_start, loss_end) = bars(svg, "eager")[0], bars(svg, "compile")[0]
    assert loss_end == pytest.approx(start, abs=0.2) and (end - start) / (loss_end - loss_start) == pytest.approx(1 / 0.2, rel=0.02)
    assert bars(svg, "reduce-overhead") == []
    texts = [(text.text, text.get("class")) for text in ElementTree.fromstring(svg).iter(f"{NAME}text")]
    assert ("2.00×", "small") in texts and ("0.80×", "small loss") in texts and (ENTRIES[0].title, None) in texts
    assert len([text for text, _ in texts if text in {entry.title for entry in ENTRIES}]) == 1


def test_chart_command(tmp_path, capsys):
    results, out = tmp_path / "models.jsonl", tmp_path / "models.svg"
    record.write(results, list(made_up()))
    arguments = ["--results", str(results), "--out", str(out)]
    assert chart.main([*arguments, "--check"]) == 2  # there is no chart yet
    assert chart.main(arguments) == 0
    assert chart.main([*arguments, "--check"]) == 0
    record.write(results, list(made_up(3.0)))
    assert chart.main([*arguments, "--check"]) == 1
    record.write(results, [next(made_up())])
    capsys.readouterr()
    assert chart.main(arguments) == 2 and "no record has the field 'ratio'" in capsys.readouterr().err


@pytest.mark.skipif(not (ROOT / "results/models-h200.jsonl").exists(), reason="no results")
def test_the_chart_is_that_of_the_results(monkeypatch):
    monkeypatch.chdir(ROOT)
    assert chart.main(["--check"]) == 0
