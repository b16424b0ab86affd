"""Loss spikes: losses that lie far above the recent ones, by a threshold that the spikes themselves hardly move."""

from __future__ import annotations

import bisect
import math
from collections import deque
from collections.abc import Sequence

WINDOW = 200
"""Losses that a new one is held against."""

_LEAST = 50  # fewer losses say too little of their spread: at the start a run is silent
_NORMAL = 1.4826  # standard deviations in a median absolute deviation, where noise is normal

# The spread is taken for at least so much, as a part of the median loss and in nats. Batches of millions of tokens have
# losses whose noise is in the third digit, a run that repeats its text has hardly any: there, many deviations are still
# nothing that a person would see in the curve. At the usual threshold of 8 this asks for a rise of 2%.
_LEAST_SPREAD = 0.0025
_LEAST_SPREAD_NATS = 1e-3

_LASTING = 20  # once most of so many losses are over half-way to the threshold, that is a new level and no spike


class Spikes:
    """A detector that is shown every loss in turn.

    A loss is a spike when it is over ``median + threshold * deviation`` of the finite losses before it, at most 200;
    the deviation is 1.4826 times the median absolute deviation, which is the standard deviation where noise is normal.
    Both medians hold while fewer than half of the losses are spikes, so that one spike does not hide the next. A level
    that lasts is told of as long as it is news, and is the usual one when most of the window is on it.

    Args:
        threshold: robust standard deviations; 0: nothing is a spike.
        losses: those seen before, the newest last, such as ``losses`` of another detector, which this one then equals.
    """

    def __init__(self, threshold: float, losses: Sequence[float] = ()):
        self._threshold = threshold
        self._recent: deque[float] = deque((float(x) for x in losses if math.isfinite(x)), maxlen=WINDOW)
        self._sorted = sorted(self._recent)

    @property
    def losses(self) -> list[float]:
        """The losses that the next one is held against, the newest last: all that the detector knows."""
        return list(self._recent)

    def push(self, loss: float) -> float | None:
        """Take note of the loss of a step; return the threshold where it is a spike, else ``None``.

        A loss that is not finite is passed over: it is told of as a skipped update.
        """
        if not math.isfinite(loss):
            return None
        is_spike = False
        if self._threshold > 0 and len(self._sorted) >= _LEAST:
            median, threshold = self._limit()
            is_spike = loss > threshold and not self._is_new_level((median + threshold) / 2)
        if len(self._recent) == WINDOW:
            del self._sorted[bisect.bisect_left(self._sorted, self._recent[0])]
        self._recent.append(loss)
        bisect.insort(self._sorted, loss)
        return threshold if is_spike else None

    def _limit(self) -> tuple[float, float]:
        """Return the median of the window, and the threshold."""
        median = _middle(self._sorted)
        deviation = _NORMAL * _middle(sorted([abs(loss - median) for loss in self._sorted]))
        return median, median + self._threshold * max(deviation, _LEAST_SPREAD * abs(median), _LEAST_SPREAD_NATS)

    def _is_new_level(self, half_way: float) -> bool:
        return 2 * sum(self._recent[-n] > half_way for n in range(1, _LASTING + 1)) > _LASTING


def _middle(ordered: Sequence[float]) -> float:
    """Return the median of numbers in order."""
    half = len(ordered) // 2
    return ordered[half] if len(ordered) % 2 else (ordered[half - 1] + ordered[half]) / 2
