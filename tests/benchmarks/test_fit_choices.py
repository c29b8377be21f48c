"""The fit of the factors that decide between families: it finds a planted error, and leaves the constants as they are."""

import pytest

from benchmarks import fit_choices, named_constants
from benchmarks.fit_choices import Measured
from benchmarks.sweep_problems import draw
from onepass.backends.gpu import constants
from onepass.bench import record
from onepass.core.device import KNOWN_DEVICES

H200 = KNOWN_DEVICES["h200"]
FAMILIES = ("row", "row_reread")


@pytest.fixture(scope="module")
def measured():
    """What a sweep would find if the costs were right."""
    found = []
    for index in range(1, 90, 3):  # norms of language and vision models
        problem = draw(0, index).bound
        if problem.x is not None and problem.x.reps == 1 and not problem.given:
            costs = fit_choices.costs_of(problem, H200, FAMILIES)
            found.append(Measured(str(index), problem, {name: (cost, cost, cost) for name, cost in costs.items()}))
    return found


def test_a_planted_error_is_found(measured, monkeypatch):
    assert len(measured) > 10 and fit_choices.regrets(measured, H200) == [1.0] * len(measured)
    monkeypatch.setitem(constants.SPEED, "row", constants.SPEED["row"] / 2)
    wrong, before = fit_choices.regrets(measured, H200), dict(constants.SPEED)
    assert sum(r > 1.05 for r in wrong) > 5
    changed = fit_choices.fit(measured, H200)
    assert before == constants.SPEED
    assert changed["SPEED.row"] > before["row"]
    for name, value in changed.items():
        holder, key = named_constants.holder(name)
        monkeypatch.setitem(holder, key, value)
    assert fit_choices.loss(fit_choices.regrets(measured, H200)) < 0.3 * fit_choices.loss(wrong)


def test_every_factor_is_a_constant():
    for name, families in fit_choices.FACTORS.items():
        assert named_constants.get(name) > 0 and families
    assert named_constants.holder("ODD_SPEED.tile.2") == (constants.ODD_SPEED["tile"], 2)


def test_overlapping_spreads_are_no_regret():
    assert fit_choices.regret({"a": (10, 9, 11), "b": (8, 7, 9)}, {"a": 1, "b": 2}) == 1
    assert fit_choices.regret({"a": (10, 9.5, 11), "b": (8, 7, 9)}, {"a": 1, "b": 2}) == 1.25


def test_the_command(tmp_path, capsys):
    times = {"onepass": [10.0, 10.0, 10.0], "ring": [9.0, 9.0, 9.0], "torch": [5.0, 5.0, 5.0]}
    record.write(tmp_path / "sweep.jsonl", [{"row": "0.1", "provider": "sweep", "seed": 0, "index": 1, "chosen": "row", "us": times}])
    assert fit_choices.main([str(tmp_path / "sweep.jsonl"), "--rounds", "0"]) == 0
    assert capsys.readouterr().out.startswith("1 problems: regret ≤ 1.05 on ")
    with pytest.raises(SystemExit):
        fit_choices.main([str(tmp_path / "sweep.jsonl"), "--seeds", "9"])
    assert "no problem of the seeds [9]" in capsys.readouterr().err
