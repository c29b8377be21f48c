"""The first random programs agree with torch, and the comparison finds differences."""

import pytest
import torch

from benchmarks.random_programs import calls, changes
from benchmarks.random_programs.compare import judge
from benchmarks.random_programs.program import Outcome, Program, draw
from benchmarks.random_programs.run import run

COUNT = 400


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("start", range(0, COUNT, 100))
def test_programs_do_as_torch_does(start):
    torch.use_deterministic_algorithms(False)  # some operations of torch have no deterministic version
    found = {index: run(0, index) for index in range(start, start + 100)}
    assert not {f"{index} {draw(0, index).name}": wrong for index, wrong in found.items() if wrong}


def _outcome(error: Exception | None = None, **values: float) -> Outcome:
    found = Outcome()
    found.error = error
    found.values = {name: torch.full((3,), value) for name, value in values.items()}
    return found


PLAIN = Program("layer_norm", (2, 4), torch.float32, False, "both", "contiguous", (True, True, True), "", "", "", "", "plain", "")


def test_judge():
    exact = Outcome
    same, other, refused, broken = _outcome(y=1.0), _outcome(y=1.1), _outcome(RuntimeError("no")), _outcome(KeyError("no"))
    assert not judge(PLAIN, same, same, exact) and not judge(PLAIN, refused, refused, exact)
    for torchs, ours in ((same, other), (same, refused), (refused, same), (refused, broken), (same, _outcome(z=1.0)), (None, broken)):
        assert judge(PLAIN, torchs, ours, exact), (torchs, ours)


def test_programs_reach_everything():
    """Programs use every kind of change, and a seed and an index always give the same program."""
    programs = [draw(0, index) for index in range(5000)]
    assert {p.op for p in programs} == set(calls.OPS)
    assert {p.before for p in programs} == {"", *changes.BEFORE}
    assert {p.gradient for p in programs} == set(changes.GRADIENTS)
    assert {p.hook for p in programs} == {"", *changes.HOOKS}
    assert {p.between for p in programs} == {"", *changes.BETWEEN} - {"x.data other values"}
    assert draw(0, 17).name == draw(0, 17).name != draw(1, 17).name
