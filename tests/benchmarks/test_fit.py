"""The fit of the cost models: it finds constants again from times that the model itself gives."""

import pytest

pytest.importorskip("triton")

from benchmarks import fit
from onepass.bench import record
from onepass.bench.suite import problem_of
from onepass.core.device import KNOWN_DEVICES

H200 = KNOWN_DEVICES["h200"]


@pytest.fixture(scope="module")
def records():
    """What `measure` would find if the GPU agreed with other constants than ours."""
    found = []
    other_constants = {
        "ring": {"RUN_BLOCK": 1.4, "RUN_UNIT": 2.0},
        "ring, columns": {"RING_BLOCK": 1.8, "RING_EXCHANGE": 4.0},
        "whole_set": {"WHOLE_ELEMENT": 0.05, "WHOLE_LAUNCH": 8.0},
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
        assert fit.NEAR <= len(picked) <= fit.NEAR + fit.FAR and len({fit.name_of(launch) for launch in picked}) == len(picked)


def test_the_command(records, tmp_path, capsys):
    file = tmp_path / "launches.jsonl"
    record.write(file, records)
    assert fit.main([str(file), "--family", "whole_set"]) == 0
    text = capsys.readouterr().out
    assert "WHOLE_ELEMENT" in text and "error of the model" in text and "0.0%" not in text.split("error of the model")[1].split("%")[0]
    with pytest.raises(SystemExit):
        fit.main([])
    assert "expected the name of a file" in capsys.readouterr().err
