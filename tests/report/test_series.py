import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rung.report.series import log_ticks, smooth, thin, ticks, wants_log

floats = st.floats(-1e6, 1e6) | st.sampled_from([math.nan, math.inf, -math.inf])


@given(st.lists(floats, max_size=60), st.integers(0, 20))
def test_smooth_equals_the_mean_of_each_window(values, half):
    smoothed = smooth(np.array(values), half)
    for i, got in enumerate(smoothed):
        reach = min(half, i)
        window = [v for v in values[i - reach : i + reach + 1] if math.isfinite(v)]
        if window:
            assert got == pytest.approx(np.mean(window), abs=1e-6)
        else:
            assert math.isnan(got)


def test_one_huge_value_does_not_drown_what_follows():
    values = np.ones(1000)
    values[100] = 1e30
    np.testing.assert_array_equal(smooth(values, 10)[200:], 1.0)


@given(st.lists(floats, max_size=400), st.integers(4, 50))
def test_thin_keeps_ends_and_extremes_in_order(values, limit):
    values = np.array(values, np.float64)
    kept = thin(values, limit)
    finite = np.flatnonzero(np.isfinite(values))
    assert len(kept) <= limit
    assert np.all(np.diff(kept) > 0)
    assert np.isfinite(values[kept]).all()
    if len(finite):
        assert kept[0] == finite[0]
        assert kept[-1] == finite[-1]
        assert values[kept].min() == values[finite].min()
        assert values[kept].max() == values[finite].max()
    if len(finite) <= limit:
        np.testing.assert_array_equal(kept, finite)


def test_thin_keeps_a_lone_spike_of_a_long_run():
    values = np.full(1_000_000, 2.0)
    values[777_777] = 9.0
    kept = thin(values)
    assert 777_777 in kept
    assert len(kept) <= 2000


@given(st.floats(-1e9, 1e9), st.floats(1e-6, 1e9))
def test_ticks_are_few_round_and_within(low, span):
    high = low + span
    if not high > low:
        return
    found = ticks(low, high)
    assert 1 <= len(found) <= 6
    slack = 1e-9 * max(abs(low), abs(high))
    assert all(low - slack <= tick <= high + slack for tick in found)


def test_ticks_by_hand():
    assert ticks(0, 10) == [0, 2, 4, 6, 8, 10]
    assert ticks(0, 2_400_000, 5) == [0, 500_000, 1_000_000, 1_500_000, 2_000_000]
    assert ticks(3, 3) == [3]
    assert log_ticks(1.2, 11) == [1.5, 2, 3, 5, 7, 10]
    assert log_ticks(1e-9, 1e9)[::2] == [1e-9, 1e-3, 1e3, 1e9]


@given(st.floats(1e-12, 1e12), st.floats(5, 1e20))
def test_log_ticks_are_few_and_within(low, ratio):
    found = log_ticks(low, low * ratio)
    assert 1 <= len(found) <= 7
    assert all(low * (1 - 1e-9) <= tick <= low * ratio * (1 + 1e-9) for tick in found)


def test_a_logarithmic_axis_is_for_positive_curves_that_span_much():
    assert wants_log(np.array([10.0, 1.5, math.nan]))
    assert not wants_log(np.array([10.0, 3.0]))
    assert not wants_log(np.array([10.0, 0.0]))
    assert not wants_log(np.array([]))
