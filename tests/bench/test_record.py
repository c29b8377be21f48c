"""Files of records."""

from onepass.bench import record


def test_merging_replaces_the_same_measurement_only():
    old = [{"row": row, "provider": "torch", "name": name, "us": 1} for row in "ab" for name in ("H200", "B200")]
    new = [{"row": "a", "provider": "torch", "name": "H200", "us": 2}, {"row": "a", "provider": "onepass", "name": "H200", "us": 3}]
    merged = record.merge(old, new)
    assert len(merged) == 5 and merged[0]["us"] == 2 and [r["us"] for r in merged[1:4]] == [1, 1, 1]
