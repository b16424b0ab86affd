"""Curves made fit to be looked at: smoothed, thinned, and given round ticks."""

from __future__ import annotations

import math

import numpy as np

MOST_POINTS = 2000  # of one curve in a report: more than a screen has columns
LOG_RATIO = 5.0  # a curve whose greatest value is this many times its least is drawn on a logarithmic axis


def smooth(values: np.ndarray, half_width: int | None = None) -> np.ndarray:
    """Return the mean of each value with its neighbours on both sides, float64, of the same length.

    The window is symmetric but at the end: towards the start it narrows to nothing, so that a steep start is not bent.
    Values that are not finite are left out of the mean; where a window has no other, the result is NaN.

    Args:
        values: [n].
        half_width: neighbours on each side; by default a hundredth of the curve.
    """
    values = np.asarray(values, np.float64)
    n = len(values)
    half = max(1, n // 100) if half_width is None else half_width
    at = np.arange(n)
    reach = np.minimum(half, at)
    finite = np.isfinite(values)
    low, length = at - reach, np.minimum(n, at + reach + 1) - (at - reach)
    sums, counts = _window_sums(np.where(finite, values, 0.0), low, length), _window_sums(finite * 1.0, low, length)
    return np.divide(sums, counts, out=np.full(n, np.nan), where=counts > 0)


def thin(values: np.ndarray, limit: int = MOST_POINTS) -> np.ndarray:
    """Return the indices, ascending, of at most ``limit`` values that keep a curve's looks.

    The first, the last, and the least and greatest of each stretch are among them, so no spike is lost; values that
    are not finite are not.

    Args:
        values: [n].
        limit: at least 4.
    """
    (finite,) = np.nonzero(np.isfinite(values))
    if len(finite) <= limit:
        return finite
    kept = {int(finite[0]), int(finite[-1])}
    for stretch in np.array_split(finite, (limit - 2) // 2):
        kept.add(int(stretch[np.argmin(values[stretch])]))
        kept.add(int(stretch[np.argmax(values[stretch])]))
    return np.array(sorted(kept))


def typical(values: np.ndarray) -> float | None:
    """Return the median of the finite values after the first, which waits for the compiler; ``None`` for none."""
    rest = values[1:] if len(values) > 1 else values
    rest = rest[np.isfinite(rest)]
    return float(np.median(rest)) if len(rest) else None


def ticks(low: float, high: float, most: int = 6) -> list[float]:
    """Return round numbers, a 1, 2 or 5 of some decade apart, within [low, high]; at most ``most``."""
    if not high > low:
        return [low]
    apart = 10.0 ** math.floor(math.log10((high - low) / most))
    while math.floor(high / apart) - math.ceil(low / apart) + 1 > most:
        # 1 -> 2 -> 5 -> 10 of the same decade
        leading = round(apart / 10.0 ** math.floor(math.log10(apart) + 1e-9))
        apart *= 2.5 if leading == 2 else 2
    return [n * apart for n in range(math.ceil(low / apart), math.floor(high / apart) + 1)]


def log_ticks(low: float, high: float, most: int = 7) -> list[float]:
    """Return the finest set of round numbers for a logarithmic axis within [low, high] that is at most ``most``."""
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for leading in ((1, 1.5, 2, 3, 4, 5, 6, 8), (1, 1.5, 2, 3, 5, 7), (1, 2, 5), (1, 3), (1,)):
        found = [float(f"{n}e{decade}") for decade in decades for n in leading if low <= n * 10.0**decade <= high]
        if len(found) <= most:
            return found
    return found[:: -(-len(found) // most)]


def wants_log(*curves: np.ndarray) -> bool:
    """Return whether the curves together span so much that a linear axis would hide most of them."""
    values = np.concatenate([np.asarray(curve, np.float64) for curve in curves])
    values = values[np.isfinite(values)]
    return bool(len(values)) and values.min() > 0 and values.max() > LOG_RATIO * values.min()


def _window_sums(values: np.ndarray, low: np.ndarray, length: np.ndarray) -> np.ndarray:
    """Return the sum of ``values[low:low + length]`` for each window, by sums over blocks of 1, 2, 4, ... values.

    Differences of one running sum would be quicker, but a single huge value would drown all that come after it.
    """
    total, blocks, size = np.zeros(len(low)), values, 1
    while size <= length.max(initial=0):
        taken = (length & size) > 0
        total[taken] += blocks[low[taken]]
        low = low + size * taken
        blocks = blocks[:-size] + blocks[size:]
        size *= 2
    return total
