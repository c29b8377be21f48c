"""Repeated launches of the backward of ring: which launches it lists, and what it notices."""

from functools import partial

import pytest
import torch

pytest.importorskip("triton")

from benchmarks import ring_backward
from onepass.backends.gpu.ring.launch_backward import KINDS
from onepass.bench.suite import problem_of
from onepass.core.device import KNOWN_DEVICES
from onepass.core.operands import Gradients


@pytest.mark.parametrize("kind", KINDS)
def test_each_row_has_launches_of_its_kind(kind):
    for row in ring_backward.ROWS[kind]:
        found = list(ring_backward.launches_of(problem_of(row), KNOWN_DEVICES["h200"], 2))
        assert found and all(launch.kind == kind and launches[0] is launch for launch, launches in found), row.name


def test_the_list_needs_no_gpu(capsys):
    assert ring_backward.main(["--list", "--kind", "set"]) == 0
    first, *launches = capsys.readouterr().out.splitlines()
    assert first.startswith("batch_norm 256x512x28x28") and launches and all("set, teams of" in line for line in launches)


def test_faults_are_noticed(monkeypatch):
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    values, counters = iter([1.0, 1.0, 1.5]), [torch.zeros(4, dtype=torch.int32)]

    def run(_=None):
        counters[0][1] = 3
        return Gradients(torch.full((2,), next(values)))

    expected = Gradients(torch.full((2,), 2.0))
    words = ring_backward._faults(partial(run, None), expected, 2, counters)
    assert words == "1 of 2 runs with other bits; 2 with counters that are not 0; off by 0.5"
    assert ring_backward._faults(partial(lambda: Gradients(torch.ones(2))), Gradients(torch.ones(2)), 2, []) == ""
