"""The fit of the cost models: it finds constants again from times that the model itself gives. And the measured backwards."""

import math
from pathlib import Path
from statistics import geometric_mean

import pytest

pytest.importorskip("triton")

from benchmarks import fit
from onepass.bench import record
from onepass.bench.suite import problem_of
from onepass.core.device import KNOWN_DEVICES

H200 = KNOWN_DEVICES["h200"]
RESULTS = Path(__file__).parents[2] / "results" / "launches-backward-h200.jsonl"


@pytest.fixture(scope="module")
def records():
    """What `measure` would find if the GPU agreed with other constants than ours."""
    found = []
    other_constants = {
        "ring": {"RUN_BLOCK": 1.4, "RUN_UNIT": 2.0},
        "ring, columns": {"RING_BLOCK": 1.8, "RING_EXCHANGE": 4.0},
        "whole_set": {"WHOLE_ELEMENT": 0.05, "WHOLE_LAUNCH": 8.0},
        "ring, backward": {"BACK_BYTES.columns": 2.2, "BACK_FIRST.columns": 8.0},
        "whole_set, backward": {"WHOLE_BACK_BANDWIDTH": 3e6, "WHOLE_BACK_STALL": 5.0},
    }
    for family, changed in other_constants.items():
        model = fit.MODELS[family]
        for row in fit.PROBLEMS[family][:4]:
            for launch in fit.picked_launches(family, row, H200):
                with fit.using(model, changed):
                    us = model.time(problem_of(row), H200, launch)
                found.append({"row": f"{family} {row.name}", "provider": fit.name_of(launch), "us": us})
    return found


@pytest.mark.parametrize("family", fit.MODELS)
def test_constants_are_found_again(family, records):
    model = fit.MODELS[family]
    before, points = model.values(), list(fit.points_of(family, records, H200))
    assert len(points) >= 16
    with fit.using(model, fit.fit(model, points, H200)):
        after = fit.error_of(model, points, H200)
    assert after < 0.02 < 0.1 < fit.error_of(model, points, H200)
    assert model.values() == before


@pytest.mark.parametrize("family", fit.MODELS)
def test_launches_to_measure(family):
    for row in fit.PROBLEMS[family]:
        picked = fit.picked_launches(family, row, H200)
        known = len(fit.MODELS[family].launches(problem_of(row), H200))
        assert 0 < min(fit.NEAR, known) <= len(picked) <= fit.NEAR + fit.FAR, row.name
        assert len({fit.name_of(launch) for launch in picked}) == len(picked)


@pytest.mark.parametrize("family", [name for name, model in fit.MODELS.items() if model.direction == "backward"])
def test_kernels_of_a_backward(family):
    row = fit.PROBLEMS[family][1]
    names = {source.function.__name__ for source in fit._sources(family, row, H200)}
    assert f"{family.removesuffix(', backward')}_backward" in names and names & {"add_up", "add_up_both"}
    assert any("backward" not in name and "add_up" not in name for name in names)  # the planner's forward, which saves the statistics


def test_the_measured_backwards():
    family = "ring, backward"
    model, records = fit.MODELS[family], record.read(RESULTS)
    points = list(fit.points_of(family, records, H200))
    assert len(points) == len(records) > 300  # each is still a launch of its problem
    assert {point.launch.kind for point in points} == {"columns", "blocks", "set", "elements"}
    errors = [abs(math.log(model.time(point.problem, H200, point.launch) / point.us)) for point in points]
    assert sum(errors) / len(errors) < 0.08 and fit.error_of(model, points, H200) < 0.09
    losses = fit._losses(model, points, H200).values()
    assert geometric_mean(losses) < 1.02 and max(losses) < 1.1


def test_the_command_fits_backwards(capsys):
    assert fit.main([str(RESULTS), "--direction", "backward"]) == 0
    text = capsys.readouterr().out
    assert "BACK_FIRST.columns" in text and "error of the model" in text and "RUN_UNIT" not in text


def test_the_command(records, tmp_path, capsys):
    file = tmp_path / "launches.jsonl"
    record.write(file, records)
    assert fit.main([str(file), "--family", "whole_set"]) == 0
    text = capsys.readouterr().out
    assert "WHOLE_ELEMENT" in text and "error of the model" in text and "0.0%" not in text.split("error of the model")[1].split("%")[0]
    with pytest.raises(SystemExit):
        fit.main([])
    assert "expected the name of a file" in capsys.readouterr().err
