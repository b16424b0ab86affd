from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from rung.config import GenerateConfig
from rung.decode import sampling
from rung.decode.sampling import Filters
from rung.errors import RungError

V = 12
# Multiples of a quarter, so that ties occur.
logit_rows = arrays(np.float32, (3, V), elements=st.integers(-16, 16).map(lambda n: n / 4))


def softmax(x):
    e = np.exp(x.astype(np.float64) - np.max(x))
    return e / e.sum()


def kept(logits_BV):
    return [set(np.flatnonzero(row > -np.inf)) for row in np.asarray(logits_BV)]


def best_first(row):
    return sorted(range(len(row)), key=lambda i: (-row[i], i))


@given(logit_rows, st.integers(1, V + 3))
def test_top_k_keeps_exactly_the_k_best(logits, k):
    assert kept(sampling.keep_top_k(jnp.asarray(logits), k)) == [set(best_first(row)[:k]) for row in logits]


@given(logit_rows, st.floats(0.01, 0.99))
def test_top_p_keeps_the_fewest_that_have_p(logits, p):
    expected = []
    for row in logits:
        probability, order = softmax(row), best_first(row)
        together = np.cumsum(probability[order])
        assume(np.min(np.abs(together - p)) > 1e-5)  # either side is right there
        expected.append(set(order[: int(np.argmax(together >= p)) + 1]))
    assert kept(sampling.keep_top_p(jnp.asarray(logits), p)) == expected


@given(logit_rows, st.floats(0.001, 1.0))
def test_min_p_keeps_those_near_the_best(logits, p):
    expected = []
    for row in logits:
        ratio = softmax(row) / softmax(row).max()
        assume(p == 1 or np.min(np.abs(ratio - p)) > 1e-5)
        expected.append(set(np.flatnonzero(ratio >= p)))
    assert kept(sampling.keep_min_p(jnp.asarray(logits), np.float32(p))) == expected


@given(logit_rows, arrays(bool, (3, V)), st.floats(0.125, 8))
def test_repetition_penalty(logits, seen, penalty):
    expected = logits.copy()
    for b in range(3):
        for v in range(V):
            if seen[b, v]:
                expected[b, v] = logits[b, v] / penalty if logits[b, v] > 0 else logits[b, v] * penalty
    np.testing.assert_allclose(sampling.penalize(jnp.asarray(logits), jnp.asarray(seen), penalty), expected, rtol=1e-6)


@given(logit_rows, st.integers(1, V), st.floats(0.3, 0.9), st.floats(0.01, 0.5), st.floats(0.25, 4))
def test_all_filters_in_their_order(logits, k, p, min_p, temperature):
    settings = GenerateConfig(temperature=temperature, top_k=k, top_p=p, min_p=min_p, repetition_penalty=1.5)
    seen = np.arange(V) % 2 == 0
    actual = sampling.filtered(jnp.asarray(logits), Filters.of(settings), jnp.tile(seen, (3, 1)))
    for row, actual_row in zip(logits, np.asarray(actual), strict=True):
        row = np.where(seen, np.where(row > 0, row / 1.5, row * 1.5), row) / temperature
        alive = best_first(row)[:k]
        probability = softmax(row[alive])
        together = np.cumsum(probability)
        alive = alive[: int(np.argmax(together >= p)) + 1]
        ratio = softmax(row[alive]) / softmax(row[alive]).max()
        assume(np.min(np.abs(together - p)) > 1e-4)
        assume(np.min(np.abs(ratio - min_p)) > 1e-4)
        assume(np.min(np.abs(np.diff(sorted(row)))[np.diff(sorted(row)) > 0], initial=1) > 1e-5)
        alive = [token for token, r in zip(alive, ratio, strict=True) if r >= min_p]
        expected = np.zeros(V)
        expected[alive] = softmax(row[alive])
        np.testing.assert_allclose(softmax(actual_row), expected, atol=1e-5)


def drawn(logits_V, settings, count=1, seen=None):
    logits_BV = jnp.tile(jnp.asarray(logits_V, jnp.float32), (count, 1))
    seen_BV = None if seen is None else jnp.tile(jnp.asarray(seen), (count, 1))
    keys_B = sampling.keys(settings.seed, count)
    return np.asarray(jax.jit(sampling.draw)(logits_BV, keys_B, Filters.of(settings), seen_BV))


LOGITS = np.random.default_rng(0).normal(size=V).astype(np.float32)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_draws_follow_the_softmax(temperature):
    count = 20_000
    observed = np.bincount(drawn(LOGITS, GenerateConfig(temperature=temperature, seed=3), count), minlength=V)
    expected = softmax(LOGITS / temperature) * count
    chi_square = np.sum((observed - expected) ** 2 / expected)
    assert chi_square < 31.26  # 0.999 quantile, 11 degrees of freedom


def test_draws_after_a_filter_follow_what_is_left():
    count = 20_000
    observed = np.bincount(drawn(LOGITS, GenerateConfig(temperature=1.0, top_k=4), count), minlength=V)
    best = best_first(LOGITS)[:4]
    assert observed.sum() == observed[best].sum()
    expected = softmax(LOGITS[best]) * count
    assert np.sum((observed[best] - expected) ** 2 / expected) < 16.27  # 0.999 quantile, 3 degrees of freedom


@given(logit_rows)
def test_temperature_0_is_argmax_and_top_k_1_the_same(logits):
    greedy = np.argmax(logits, -1)
    key = sampling.keys(0, 3)
    for settings in (GenerateConfig(temperature=0.0), GenerateConfig(temperature=1.7, top_k=1)):
        np.testing.assert_array_equal(sampling.draw(jnp.asarray(logits), key, Filters.of(settings)), greedy)


def test_filters_that_remove_nothing_change_no_draw():
    plain = drawn(LOGITS, GenerateConfig(temperature=1.0), 200)
    for settings in (
        GenerateConfig(temperature=1.0, top_p=1.0),
        GenerateConfig(temperature=1.0, top_k=V),
        GenerateConfig(temperature=1.0, top_k=10**12),
        GenerateConfig(temperature=1.0, min_p=1e-12),
    ):
        np.testing.assert_array_equal(drawn(LOGITS, settings, 200), plain)


@pytest.mark.parametrize("temperature", [1e-45, 1e-30, 1e-3])
def test_a_temperature_near_0_is_greedy_not_nan(temperature):
    assert set(drawn(LOGITS, GenerateConfig(temperature=temperature), 20)) == {int(np.argmax(LOGITS))}


@pytest.mark.parametrize("penalty", [1e-45, 1e-30, 1e30, 1e300])
def test_an_extreme_penalty_is_no_nan(penalty):
    seen = np.zeros(V, bool)
    seen[[3, int(np.argmax(LOGITS))]] = True
    out = sampling.filtered(
        jnp.asarray(LOGITS)[None], Filters.of(GenerateConfig(repetition_penalty=penalty)), jnp.asarray(seen)[None]
    )
    assert not np.isnan(np.asarray(out)).any()
    assert np.isfinite(np.max(np.asarray(out)))


def test_masked_ids_stay_masked_under_every_filter():
    logits = jnp.asarray([[1.0, 2.0, 50.0, 60.0], [-5.0, -6.0, 50.0, 60.0]])
    masked = sampling.mask_outside(logits, 2)
    seen = jnp.ones((2, 4), bool)
    for changes in (
        {"temperature": 0.0}, {"temperature": 100.0}, {"top_k": 3}, {"top_p": 0.999}, {"min_p": 1e-30},
        {"repetition_penalty": 1e30}, {"temperature": 0.0, "repetition_penalty": 0.01},
    ):  # fmt: skip
        filters = Filters.of(GenerateConfig(**changes))
        assert np.asarray(sampling.draw(masked, sampling.keys(1, 2), filters, seen)).max() < 2


def test_a_key_does_not_depend_on_the_number_of_samples():
    few, many = (jax.random.key_data(sampling.keys(7, n)) for n in (2, 5))
    np.testing.assert_array_equal(few, many[:2])
    assert len({tuple(row) for row in np.asarray(many)}) == 5


@pytest.mark.parametrize(
    "bad",
    [
        {"temperature": -0.1}, {"temperature": float("nan")}, {"temperature": float("inf")}, {"top_k": -1},
        {"top_p": 0.0}, {"top_p": 1.5}, {"min_p": -0.1}, {"min_p": 1.1}, {"repetition_penalty": 0.0},
        {"max_tokens": -1}, {"samples": 0},
        {"seed": -1}, {"seed": 2**32}, {"stop": ("",)}, {"top_k": 1.5}, {"temperature": "hot"},
    ],
)  # fmt: skip
def test_bad_values_are_refused_by_name(bad):
    with pytest.raises(RungError) as error:
        sampling.check(GenerateConfig(**bad))
    assert next(iter(bad)) in error.value.problem
    assert error.value.hint


def test_good_values_are_not_refused():
    sampling.check(GenerateConfig())
    sampling.check(
        GenerateConfig(temperature=0.0, top_k=10**9, top_p=1.0, min_p=1.0, stop=("\n", "end"), seed=2**32 - 1)
    )
