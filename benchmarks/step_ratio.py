"""How much faster a model's step is after `onepass.patch`: the ratio before / after, its 95 % interval, and a verdict."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from onepass.bench.record import Record

LEAST_PAIRS = 6  # fewer samples have no 95 % interval of their median
LEAST_RATIO = 0.98  # a step is slower if the whole interval is below
LEAST_GAIN = 0.9  # of what the GPU saves, where the GPU limits the step
BUSY = 0.9  # the GPU limits a step if it works for more than this share of it
SAVES = 0.02  # a smaller saving of the GPU is not told from noise
OK, SLOWER, NOT_SETTLED, GAIN_MISSED = "ok", "slower", "not settled", "gain missed"


def median_interval(samples: Sequence[float]) -> tuple[float, float, float]:
    """Return (low, median, high) of at least LEAST_PAIRS samples. The median of the distribution is within the bounds with 95 %.

    low is the k-th smallest and high the k-th largest sample, with the largest k for which 2·P(B < k) ≤ 0.05. B is how many of
    n samples are below the median: a binomial variable with p = ½.

    Example: of 20 samples, the bounds are the 6th and the 15th.
    """
    n, k, below = len(samples), 0, 0.0
    if n < LEAST_PAIRS:
        raise ValueError(f"samples: {n} have no 95 % interval of the median; expected at least {LEAST_PAIRS}")
    while (below := below + math.comb(n, k) / 2**n) <= 0.025:
        k += 1
    ordered = sorted(samples)
    return ordered[k - 1], statistics.median(ordered), ordered[n - k]


def step_ratio(before: Sequence[float], after: Sequence[float]) -> Record:
    """Return the fields for pairs of times of a step: the median of the ratios before / after, and its interval."""
    low, ratio, high = (round(value, 4) for value in median_interval([b / a for b, a in zip(before, after, strict=True)]))
    return {"ratio": ratio, "ratio_low": low, "ratio_high": high, "pairs": len(before)}


def gpu_ratio(before: Record, after: Record) -> Record:
    """Return the fields that compare the step with the GPU's time, or {} without a GPU.

    `gpu_share` is the share of the step before `patch` in which the GPU works. `gain` is the time that the step saves,
    divided by the time that the GPU saves. It is left out if the host limits the step, or if the GPU saves less than 2 %.
    `gain_high` is the same for the upper bound of the step's ratio.
    """
    if not (before.get("gpu_ms") and after.get("gpu_ms")):
        return {}
    was, now = before["gpu_ms"], after["gpu_ms"]
    found: Record = {"gpu_ratio": round(was / now, 4), "gpu_share": round(was / before["ms"], 4)}
    if found["gpu_share"] > BUSY and was - now > SAVES * was:
        found["gain"] = round((before["ms"] - after["ms"]) / (was - now), 4)
        if "ratio_high" in after:
            found["gain_high"] = round(before["ms"] * (1 - 1 / after["ratio_high"]) / (was - now), 4)
    return found


def verdict(after: Record) -> str:
    """Return whether a step meets its targets: OK, SLOWER, GAIN_MISSED, or NOT_SETTLED if an interval contains its target."""
    if after["ratio_high"] < LEAST_RATIO:
        return SLOWER
    if after["ratio_low"] < LEAST_RATIO:
        return NOT_SETTLED
    if after.get("gain", LEAST_GAIN) >= LEAST_GAIN:
        return OK
    return GAIN_MISSED if after.get("gain_high", after["gain"]) < LEAST_GAIN else NOT_SETTLED
