"""Dropout: its rate and scale, masks that belong to rows, and bits that look independent."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rung.model.dropout import dropout, random_bits
from rung.train.step import row_keys


def kept(shape, keys_B, use, rate=0.5):
    return np.asarray(dropout(jnp.ones(shape), rate, keys_B, use) > 0)


@pytest.mark.parametrize("rate", [0.01, 0.1, 0.5, 0.9])
def test_rate_scale_and_mean(rate):
    x = jnp.float32(np.random.default_rng(0).normal(3, 1, (4, 50_000)))
    y = np.asarray(dropout(x, rate, row_keys(0, 0, 4), use=5))
    zeros = np.mean(y == 0)
    assert abs(zeros - rate) < 5 * np.sqrt(rate * (1 - rate) / y.size)
    np.testing.assert_allclose(y[y != 0], np.asarray(x)[y != 0] / (1 - rate), rtol=1e-6)
    # The expected value of an element is the element.
    assert abs(y.mean() - x.mean()) < 5 * np.sqrt(10 * rate / (1 - rate) / y.size)


def test_off_without_keys_or_rate():
    x = jnp.ones((2, 8))
    assert dropout(x, 0.5, None, 0) is x
    assert dropout(x, 0.0, row_keys(0, 0, 2), 0) is x


def test_dtype_is_kept():
    y = dropout(jnp.ones((2, 64), jnp.bfloat16), 0.5, row_keys(0, 0, 2), 0)
    assert y.dtype == jnp.bfloat16
    assert set(np.unique(y.astype(np.float32))) == {0.0, 2.0}


@settings(max_examples=20)
@given(rows=st.lists(st.integers(0, 7), min_size=3, max_size=3), use=st.integers(0, 2**20))
def test_mask_of_a_row_does_not_depend_on_the_batch(rows, use):
    keys_B = row_keys(3, 17, 8)
    whole = np.asarray(random_bits((8, 5, 6), keys_B, use))
    part = random_bits((3, 5, 6), keys_B[jnp.array(rows)], use)
    assert np.array_equal(whole[rows], part)


def test_split_over_devices_changes_no_mask():
    from rung.config import MeshConfig
    from rung.mesh import batch_sharding, make_mesh

    x = jnp.ones((8, 33))
    expected = dropout(x, 0.3, row_keys(1, 2, 8), 4)
    split = jax.device_put(x, batch_sharding(make_mesh(MeshConfig(data=4))))
    found = jax.jit(lambda x: dropout(x, 0.3, row_keys(1, 2, 8), 4))(split)
    assert np.array_equal(found, expected)


def correlation(one, other):
    return abs(np.corrcoef(one.ravel(), other.ravel())[0, 1])


def test_uses_rows_steps_and_seeds_have_masks_of_their_own():
    n = 20_000
    masks = [kept((1, n), row_keys(0, 0, 1), use)[0] for use in (0, 1, 2, 64, 66, 67, 128, 8 * 64 + 10)]
    masks += list(kept((6, n), row_keys(0, 0, 6), 0)[1:])
    masks += [kept((1, n), row_keys(0, step, 1), 0)[0] for step in (1, 2, 1000)]
    masks += [kept((1, n), row_keys(seed, 0, 1), 0)[0] for seed in (1, 2**32 - 1)]
    for one, other in itertools.combinations(masks, 2):
        assert correlation(one, other) < 5 / np.sqrt(n)


@pytest.mark.parametrize("rate", [0.1, 0.5])
def test_neighbours_within_a_mask_are_independent(rate):
    mask = kept((2, 128, 96), row_keys(9, 4, 2), 64, rate).astype(float)
    pairs = [(mask[..., lag:], mask[..., :-lag]) for lag in (1, 2, 3, 32, 95)]
    pairs += [(mask[:, lag:], mask[:, :-lag]) for lag in (1, 2, 64)]
    pairs += [(mask[0], mask[1])]
    for one, other in pairs:
        assert correlation(one, other) < 5 / np.sqrt(one.size)
    # Whole rows and columns are kept as often as chance has it: binomial variance, not more.
    for axis in (1, 2):
        counts = mask.sum(axis)
        expected = mask.shape[axis] * rate * (1 - rate)
        assert 0.7 < counts.var() / expected < 1.4


def test_bits_are_balanced_and_unrelated():
    bits = np.asarray(random_bits((4, 25_000), row_keys(0, 7, 4), 3))
    planes = (bits.ravel()[:, None] >> np.arange(32, dtype=np.uint32)) & 1
    n = len(planes)
    assert np.all(abs(planes.mean(0) - 0.5) < 5 * 0.5 / np.sqrt(n))
    correlations = np.corrcoef(planes.T) - np.eye(32)
    assert np.max(abs(correlations)) < 5 / np.sqrt(n)
    for shift in (0, 8, 16, 24):
        counts = np.bincount((bits.ravel() >> np.uint32(shift)) & 255, minlength=256)
        chi_square = np.sum((counts - n / 256) ** 2 / (n / 256))
        assert 255 - 5 * np.sqrt(510) < chi_square < 255 + 5 * np.sqrt(510)
    # As many repetitions as a birthday's draw has: 1.16 pairs are expected of 100,000 out of 2^32.
    assert n - len(np.unique(bits)) < 10
