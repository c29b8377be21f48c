"""The ratio of steps, its interval and its verdict."""

import random
import statistics

import pytest

from benchmarks.step_ratio import gpu_ratio, median_interval, step_ratio, verdict


def test_the_interval_of_a_median():
    assert median_interval(range(1, 21)) == (6, 10.5, 15)
    assert median_interval(range(6)) == (0, 2.5, 5)
    with pytest.raises(ValueError, match="samples: 5 have no 95 % interval of the median; expected at least 6"):
        median_interval(range(5))


def test_the_interval_contains_the_median():
    """In 95 of 100 experiments or more."""
    draw = random.Random(0)
    intervals = [median_interval([draw.gauss(1, 0.1) for _ in range(20)]) for _ in range(2000)]
    assert statistics.mean(low <= 1 <= high for low, _, high in intervals) == pytest.approx(0.96, abs=0.015)


def test_the_ratio_of_pairs():
    found = step_ratio([2.0, 4.0, 8.0] * 4, [1.0, 2.0, 4.0] * 4)
    assert found == {"ratio": 2, "ratio_low": 2, "ratio_high": 2, "pairs": 12}


@pytest.mark.parametrize(
    ("low", "high", "gain", "expected"),
    [
        (0.99, 1.01, None, "ok"),
        (0.95, 0.979, None, "slower"),
        (0.95, 0.99, None, "not settled"),
        (1.2, 1.3, 0.95, "ok"),
        (1.2, 1.3, 0.85, "gain missed"),
        (0.9, 0.95, 0.5, "slower"),
    ],
)
def test_verdicts(low, high, gain, expected):
    assert verdict({"ratio_low": low, "ratio_high": high} | ({} if gain is None else {"gain": gain})) == expected


def test_the_gain_where_the_gpu_limits_the_step():
    found = gpu_ratio({"ms": 100.0, "gpu_ms": 95.0}, {"ms": 60.0, "gpu_ms": 45.0})
    assert found == {"gpu_ratio": round(95 / 45, 4), "gpu_share": 0.95, "gain": 0.8}
    assert "gain" not in gpu_ratio({"ms": 100.0, "gpu_ms": 80.0}, {"ms": 60.0, "gpu_ms": 45.0})  # the host limits it
    assert "gain" not in gpu_ratio({"ms": 100.0, "gpu_ms": 95.0}, {"ms": 99.0, "gpu_ms": 94.0})  # too small to tell
    assert gpu_ratio({"ms": 100.0}, {"ms": 99.0, "gpu_ms": 94.0}) == {}


def test_a_gain_is_missed_only_if_its_whole_interval_is_below():
    before, after = {"ms": 100.0, "gpu_ms": 95.0}, {"ms": 97.0, "gpu_ms": 90.0, "ratio_low": 1.01}
    likely = after | {"ratio_high": 1.06}
    assert gpu_ratio(before, likely)["gain_high"] == round(100 * (1 - 1 / 1.06) / 5, 4)
    assert verdict(likely | gpu_ratio(before, likely)) == "not settled"
    missed = after | {"ratio_high": 1.04}
    assert verdict(missed | gpu_ratio(before, missed)) == "gain missed"
