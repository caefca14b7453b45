"""Medians, and how sure we are of them. Plain Python: Fusewire does not need NumPy."""

from __future__ import annotations

import random
from collections.abc import Sequence
from statistics import median


def quantile(values: Sequence[float], q: float) -> float:
    """The ``q`` quantile (0 to 1) with linear interpolation between neighbours."""
    ordered = sorted(values)
    position = q * (len(ordered) - 1)
    low = int(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


def median_interval(values: Sequence[float], confidence: float = 0.95, resamples: int = 2000) -> tuple[float, float]:
    """A bootstrap percentile interval of the median. The resampling is seeded: the same values, the same interval."""
    chooser = random.Random(len(values))
    medians = [median(chooser.choices(values, k=len(values))) for _ in range(resamples)]
    tail = (1 - confidence) / 2
    return quantile(medians, tail), quantile(medians, 1 - tail)
