"""The schedule against its own words: warm-up, peak, last step, never negative, steps and tokens alike."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from rung.config import Config, TrainConfig, override, resolve
from rung.errors import RungError
from rung.train.schedule import rate_factor, steps_of

KINDS = ["cosine", "linear", "constant", "wsd"]


def rates(steps, tokens_per_step=100, up_to=None, **config):
    factor = rate_factor(TrainConfig(**config), steps, tokens_per_step)
    return np.array([factor(np.int32(step)) for step in range(up_to or steps)])


@pytest.mark.parametrize("kind", KINDS)
def test_first_step_end_of_warmup_and_last_step(kind):
    found = rates(50, schedule=kind, warmup_steps=10, final_learning_rate_ratio=0.1)
    np.testing.assert_allclose(found[:10], np.arange(1, 11) / 10, rtol=1e-6)
    assert found[9] == 1
    np.testing.assert_allclose(found[-1], 1 if kind == "constant" else 0.1, rtol=1e-6)
    assert np.all(np.diff(found[10:]) <= 0)


def test_cosine_is_the_published_formula():
    # Loshchilov and Hutter 2017 (SGDR), equation 5, from step 10 to the last, 60.
    found = rates(61, schedule="cosine", warmup_steps=10, final_learning_rate_ratio=0.2)
    expected = [0.2 + 0.8 / 2 * (1 + math.cos(math.pi * (step - 10) / 50)) for step in range(10, 61)]
    np.testing.assert_allclose(found[10:], expected, rtol=1e-5)


def test_cosine_agrees_with_optax():
    import optax

    ours = rates(61, schedule="cosine", warmup_steps=0, final_learning_rate_ratio=0.1)
    theirs = optax.cosine_decay_schedule(1.0, decay_steps=60, alpha=0.1)
    np.testing.assert_allclose(ours, [theirs(step) for step in range(61)], rtol=1e-5)


def test_linear_is_a_line():
    found = rates(41, schedule="linear", final_learning_rate_ratio=0.0)
    np.testing.assert_allclose(found, 1 - np.arange(41) / 40, atol=1e-6)


def test_wsd_is_stable_and_then_decays():
    found = rates(100, schedule="wsd", warmup_steps=5, decay_steps=30, final_learning_rate_ratio=0.0)
    assert np.all(found[4:70] == 1)
    np.testing.assert_allclose(found[69:], 1 - np.arange(31) / 30, atol=1e-6)
    fifth = rates(100, schedule="wsd", final_learning_rate_ratio=0.0)
    assert np.sum(fifth < 1) == 20


@given(
    kind=st.sampled_from(KINDS),
    steps=st.integers(1, 60),
    warmup=st.integers(0, 80),
    decay=st.integers(0, 80),
    final=st.floats(0, 1),
)
@example(kind="wsd", steps=1, warmup=0, decay=0, final=0.0)
@example(kind="cosine", steps=5, warmup=5, decay=0, final=0.0)
@example(kind="linear", steps=5, warmup=80, decay=0, final=0.0)
def test_it_is_never_negative_nor_over_its_peak(kind, steps, warmup, decay, final):
    factor = rate_factor(
        TrainConfig(schedule=kind, warmup_steps=warmup, decay_steps=decay, final_learning_rate_ratio=final), steps, 1
    )
    found = np.asarray(factor(np.arange(70, dtype=np.int32)))
    assert np.all((found >= 0) & (found <= 1) & np.isfinite(found))
    # Beyond the end the rate stays what it was at the last step, unless it was still warming up.
    if warmup <= steps:
        assert np.all(found[steps:] <= found[steps - 1] + 1e-6)
    # Warm-up, however long, is never skipped.
    np.testing.assert_array_less(found[: min(steps, warmup)], np.arange(1, min(steps, warmup) + 1) / warmup + 1e-6)


def test_warmup_of_none_starts_at_the_peak():
    assert rates(10, schedule="cosine", warmup_steps=0)[0] == 1


def test_warmup_longer_than_the_run_rises_to_its_end():
    np.testing.assert_allclose(rates(5, schedule="cosine", warmup_steps=20), np.arange(1, 6) / 20, rtol=1e-6)
    with pytest.raises(RungError, match=r"warmup_steps 20 is over train\.steps 5"):
        resolve(override(Config(), {"train.steps": 5, "train.warmup_steps": 20}))


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_are_steps(kind):
    # 1,000 and 2,950 tokens at 100 a step are 10 steps and, rounded up, 30.
    by_tokens = rates(80, schedule=kind, warmup_tokens=1000, decay_tokens=2950)
    by_steps = rates(80, schedule=kind, warmup_steps=10, decay_steps=30)
    np.testing.assert_array_equal(by_tokens, by_steps)


def test_a_fraction_is_steps():
    by_fraction = rates(80, schedule="cosine", warmup_fraction=0.125)
    np.testing.assert_array_equal(by_fraction, rates(80, schedule="cosine", warmup_steps=10))


@given(tokens=st.integers(0, 10**12), per_step=st.integers(1, 10**6))
def test_steps_of_tokens_are_just_enough(tokens, per_step):
    steps = steps_of(tokens, per_step)
    assert steps * per_step >= tokens > (steps - 1) * per_step
