"""The keyed permutation and draw: bijective, uniform, and functions of nothing but their arguments."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rung.tokens.permutation import draw, key_of, mix, permute


@given(st.integers(1, 9000), st.integers(0, 2**64 - 1))
def test_it_is_a_bijection(size, key):
    assert np.array_equal(np.sort(permute(np.arange(size), size, key)), np.arange(size))


@pytest.mark.parametrize("size", [1 << 16, (1 << 16) + 1, 300_007])
def test_it_is_a_bijection_of_many(size):
    assert np.bincount(permute(np.arange(size), size, 7), minlength=size).max() == 1


@given(st.integers(1, 2**62), st.integers(0, 2**64 - 1), st.data())
def test_each_index_is_sent_alone_as_among_others(size, key, data):
    indices = data.draw(st.lists(st.integers(0, size - 1), min_size=1, max_size=20))
    together = permute(np.array(indices), size, key)
    assert (together >= 0).all()
    assert (together < size).all()
    assert together.tolist() == [int(permute(np.array(i), size, key)) for i in indices]


def test_every_order_of_few_is_about_equally_likely():
    for size in (2, 3, 5):
        orders = [tuple(permute(np.arange(size), size, key_of(3, key)).tolist()) for key in range(2000)]
        counts = np.array([orders.count(order) for order in itertools.permutations(range(size))])
        expected = 2000 / len(counts)
        # Chi-square, six standard deviations off.
        assert ((counts - expected) ** 2 / expected).sum() < len(counts) + 6 * np.sqrt(2 * len(counts)), size


def test_neighbours_are_scattered_and_keys_differ():
    size = 100_000
    one, two = (permute(np.arange(size), size, key_of(seed, 0)) for seed in (1, 2))
    assert abs(np.corrcoef(one, np.arange(size))[0, 1]) < 0.02
    assert abs(np.corrcoef(one, two)[0, 1]) < 0.02
    gaps = np.abs(np.diff(one))
    assert abs(gaps.mean() / size - 1 / 3) < 0.01  # the mean distance of two uniform draws


def test_draws_are_uniform_and_repeat():
    draws = draw(np.arange(200_000), 1000, 5)
    counts = np.bincount(draws, minlength=1000)
    assert len(counts) == 1000
    assert abs(((counts - 200) ** 2 / 200).sum() - 999) < 6 * np.sqrt(2 * 999)  # chi-square
    assert np.array_equal(draw(np.array([17, 3]), 1000, 5), draws[[17, 3]])


def test_mix_is_splitmix64():
    # The first outputs of splitmix64 seeded with 1234567, as in its reference implementation's test vectors.
    state = np.uint64(1234567) + np.arange(1, 4, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    assert mix(state).tolist() == [6457827717110365317, 3203168211198807973, 9817491932198370423]
