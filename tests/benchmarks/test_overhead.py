"""The host time of small calls."""

import torch

from benchmarks import overhead


def test_overhead(capsys, monkeypatch):
    monkeypatch.setattr(torch, "set_num_threads", lambda n: None)  # the setting would outlive the test
    overhead.main([], seconds=0.01)
    lines = capsys.readouterr().out.splitlines()[1:]
    assert len(lines) == 2 * len(overhead.SMALL) and all("onepass" in line and "ratio" in line for line in lines)
