"""Repeated launches of the backwards of ring and whole_set: which launches are listed, and what is noticed."""

import os
from functools import partial
from itertools import islice

import pytest
import torch

pytest.importorskip("triton")

from benchmarks import shared_backward
from onepass.bench.suite import problem_of
from onepass.core.device import KNOWN_DEVICES
from onepass.core.operands import Gradients


@pytest.mark.parametrize("kind", shared_backward.ROWS)
def test_each_row_has_launches_of_its_kind(kind):
    for row in shared_backward.ROWS[kind]:
        found = list(shared_backward.launches_of(problem_of(row), kind, KNOWN_DEVICES["h200"], 2))
        assert found and all(shared_backward.name_of(launch).startswith(f"{kind}, ") for launch, _ in found), row.name
        assert all(launches[0].programs == launch.programs for launch, launches in found)


def test_the_list_needs_no_gpu(capsys):
    assert shared_backward.main(["--list", "--kind", "set"]) == 0
    first, *launches = capsys.readouterr().out.splitlines()
    assert first.startswith("batch_norm 256x512x28x28") and launches
    assert all(line.startswith(("batch_norm", "  set, teams of")) for line in launches)


def test_faults_are_noticed(monkeypatch):
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    values, counters = iter([1.0, 1.0, 1.5]), [torch.zeros(4, dtype=torch.int32)]

    def run(_=None):
        counters[0][1] = 3
        return Gradients(torch.full((2,), next(values)))

    expected = Gradients(torch.full((2,), 2.0))
    words = shared_backward._faults(partial(run, None), expected, 2, counters)
    assert words == "1 of 2 runs with other bits; 2 with counters that are not 0; off by 0.5"
    assert shared_backward._faults(partial(lambda: Gradients(torch.ones(2))), Gradients(torch.ones(2)), 2, []) == ""


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter does not compile")
def test_it_compiles_launches(monkeypatch, tmp_path):
    monkeypatch.setattr("triton.knobs.cache.dir", str(tmp_path))
    rows = [(shared_backward.WHOLE_SET, shared_backward.ROWS[shared_backward.WHOLE_SET][1])]
    monkeypatch.setattr(shared_backward, "launches_of", lambda *args, of=shared_backward.launches_of: islice(of(*args), 1))
    assert shared_backward.compile_all(rows, 1) == 2  # the kernel, and the one that adds up its cells
