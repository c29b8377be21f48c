"""The launches that `benchmarks.variants` tries: each covers its problem, and none occurs twice."""

import pytest

pytest.importorskip("triton")

from benchmarks import variants
from onepass.bench.suite import problem_of
from onepass.core.device import KNOWN_DEVICES

H200 = KNOWN_DEVICES["h200"]


@pytest.mark.parametrize("row", variants.ROWS, ids=lambda row: row.name)
def test_launches_cover_the_problem(row):
    found = variants.variants(problem_of(row), H200)
    assert next(iter(found)) == "planned" and len(found) > variants.SHOWN - 2
    for name, launches in found.items():
        for launch in launches:
            assert launch.warps * H200.warp <= 1024 and launch.programs > 0
        if name.startswith(("row ", "tile ")):
            (launch,) = launches
            w, length = launch.walk, launch.block_j if launch.name == "row" else launch.block_i
            assert length + launch.remainder >= (w.run if launch.name == "row" else w.reps)
        else:
            assert name == "planned" or sum(launch.reads for launch in launches) == 2


def test_without_a_gpu(monkeypatch, capsys):
    monkeypatch.setattr(variants.torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit):
        variants.main([])
    assert "no GPU" in capsys.readouterr().err
