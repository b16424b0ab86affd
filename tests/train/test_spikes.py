"""Loss spikes: all that stand out are found, noise and falling losses are not, and the state is the losses."""

from __future__ import annotations

import json
import math
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rung.train.spikes import WINDOW, Spikes

# Of 600 steps of a small decoder on the bytes of Shakespeare (8 x 64 tokens a step, the rate 3e-3): nats x 1000.
SHAKESPEARE = [int(word) / 1000 for word in Path(__file__).with_name("shakespeare_losses.txt").read_text().split()]


def marked(losses, threshold=8.0) -> list[int]:
    detector = Spikes(threshold)
    return [step for step, loss in enumerate(losses) if detector.push(loss) is not None]


def noise(n: int, seed: int = 0, mean: float = 3.0, deviation: float = 0.1) -> list[float]:
    return (mean + deviation * np.random.default_rng(seed).standard_normal(n)).tolist()


def test_a_real_run_has_no_spikes_from_its_first_step_on():
    assert len(SHAKESPEARE) == 600
    assert SHAKESPEARE[0] > 5.5
    assert marked(SHAKESPEARE) == []


@pytest.mark.parametrize("step", [60, 150, 151, 400, 599])
def test_a_spike_in_a_real_run_is_found(step):
    losses = list(SHAKESPEARE)
    losses[step] += 2.5 if step < 200 else 1.0
    assert marked(losses) == [step]


def test_spikes_one_after_the_other_are_all_found():
    losses = noise(2000)
    steps = [300, 301, 302, 340, 380, 700, 701, 1500, 1999]
    for step in steps:
        losses[step] += 1.5
    assert marked(losses) == steps


def test_the_threshold_is_the_median_and_so_many_deviations_of_the_window():
    losses, detector = noise(500), Spikes(4.0)
    for loss in losses:
        detector.push(loss)
    window = np.array(losses[-WINDOW:])
    median = np.median(window)
    expected = median + 4 * 1.4826 * np.median(np.abs(window - median))
    again = Spikes(4.0, losses)
    assert detector.push(expected - 1e-6) is None
    assert again.push(expected + 1e-6) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(("threshold", "low", "high"), [(3.0, 1.35e-3, 2 * 1.35e-3), (4.0, 0, 1e-4), (6.0, 0, 0)])
def test_of_normal_noise_few_are_false(threshold, low, high):
    # A normal deviate is over 3 deviations in 0.135% of cases; that the deviation is estimated makes them more.
    n = 30_000
    assert low <= len(marked(noise(n), threshold)) / n <= high


def test_a_constant_or_smoothly_falling_loss_has_no_spikes():
    steps = np.arange(3000)
    assert marked(np.full(300, 2.5).tolist()) == []
    assert marked((2.5 + 1e-4 * (steps % 7 == 0)).tolist()) == []
    assert marked((1.5 + 9 * np.exp(-steps / 40)).tolist()) == []
    # A ripple on it, which after a smooth fall is many deviations of next to nothing.
    assert marked((1.5 + 3 / (1 + steps / 100) + 0.01 * (steps % 50 == 49)).tolist()) == []
    assert marked(np.zeros(300).tolist()) == []


def test_a_level_that_lasts_is_told_of_for_a_while_and_then_is_the_usual_one():
    losses = noise(400) + noise(600, seed=1, mean=5.0)
    steps = marked(losses)
    assert steps[0] == 400
    assert len(steps) <= 20
    assert max(steps) < 420
    losses[900] = 7.0
    assert marked(losses) == [*steps, 900]


def test_a_fall_is_no_spike_and_the_first_losses_are_not_judged():
    assert marked([*noise(300), 0.5, *noise(50, seed=3)]) == []
    assert marked([*noise(49), 9.0]) == []
    assert marked([*noise(50), 9.0]) == [50]


def test_what_is_not_finite_is_passed_over():
    detector = Spikes(8.0, noise(100))
    before = detector.losses
    assert [detector.push(loss) for loss in (math.nan, math.inf, -math.inf)] == [None] * 3
    assert detector.losses == before
    assert Spikes(8.0, [math.nan, *before, math.inf]).losses == before


def test_a_threshold_of_0_marks_nothing():
    assert marked([*noise(100), 1e9], threshold=0.0) == []


@given(
    st.lists(st.floats(-10, 1e6) | st.sampled_from([2.0, 2.5, 3.0, math.nan, math.inf]), max_size=450),
    st.integers(0, 450),
    st.floats(0.5, 10),
)
def test_a_detector_made_of_anothers_losses_goes_on_as_it_does(losses, cut, threshold):
    losses = losses * 3  # longer than the window
    detector = Spikes(threshold)
    for loss in losses[:cut]:
        detector.push(loss)
    again = Spikes(threshold, json.loads(json.dumps(detector.losses)))
    for loss in losses[cut:]:
        assert again.push(loss) == detector.push(loss)
    assert again.losses == detector.losses
    assert len(detector.losses) <= WINDOW


def test_a_push_takes_microseconds():
    losses, detector = noise(2000), Spikes(8.0)
    begun = time.process_time()
    for loss in losses:
        detector.push(loss)
    assert (time.process_time() - begun) / len(losses) < 200e-6  # some 12 on an idle core
