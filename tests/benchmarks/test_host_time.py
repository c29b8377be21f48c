"""The table of host times."""

import json

from benchmarks import host_time


def test_every_row(capsys, tmp_path):
    out = tmp_path / "host.jsonl"
    host_time.main(["--device", "cpu", "--out", str(out)], batches=3)
    found, printed = [json.loads(line) for line in out.read_text().splitlines()], capsys.readouterr().out
    assert len(found) == 11  # without torch.compile
    assert all(row["ratio"] > 0 and row["row"] in printed for row in found)
