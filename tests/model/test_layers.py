"""Layers against plain versions of themselves: values in float64, and autodiff where we wrote the gradient."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from rung.model import layers

# Norms: ours in float32 (as it always computes) against a naive one in float64, both differentiated.


def naive_layer_norm(x, scale, bias, epsilon):
    mean = x.mean(-1, keepdims=True)
    variance = ((x - mean) ** 2).mean(-1, keepdims=True)
    y = (x - mean) / jnp.sqrt(variance + epsilon) * scale
    return y if bias is None else y + bias


def naive_rms_norm(x, scale, bias, epsilon):
    return x / jnp.sqrt((x**2).mean(-1, keepdims=True) + epsilon) * scale


def our_rms_norm(x, scale, bias, epsilon):
    return layers.rms_norm(x, scale, epsilon)


def value_and_gradients(norm, x, scale, bias, dy, epsilon):
    def weighted(x, scale, bias):
        y = norm(x, scale, bias, epsilon)
        return jnp.sum(y.astype(dy.dtype) * dy), y

    gradients, y = jax.jit(jax.grad(weighted, argnums=(0, 1, 2), has_aux=True))(x, scale, bias)
    return [y, *jax.tree.leaves(gradients)]


@pytest.mark.parametrize(
    ("ours", "naive", "with_bias"),
    [
        (layers.layer_norm, naive_layer_norm, True),
        (layers.layer_norm, naive_layer_norm, False),
        (our_rms_norm, naive_rms_norm, False),
    ],
)
@pytest.mark.parametrize(
    ("shape", "offset", "epsilon"), [((3, 5, 16), 0.3, 1e-5), ((7, 33), -5.0, 1e-6), ((2, 3, 2, 8), 0.0, 0.5)]
)
def test_norms_and_their_gradients(ours, naive, with_bias, shape, offset, epsilon):
    random = np.random.default_rng(0)
    x, dy = random.normal(offset, 2, shape), random.normal(size=shape)
    scale = random.normal(1, 0.3, shape[-1])
    bias = random.normal(size=shape[-1]) if with_bias else None
    narrow = [None if a is None else jnp.float32(a) for a in (x, scale, bias, dy)]
    found = value_and_gradients(ours, *narrow, epsilon)
    with jax.enable_x64(True):
        wide = [None if a is None else jnp.asarray(np.asarray(a), jnp.float64) for a in narrow]
        expected = value_and_gradients(naive, *wide, epsilon)
    assert len(found) == len(expected) == 3 + with_bias
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == jnp.float32
        assert other.dtype == jnp.float64
        np.testing.assert_allclose(one, other, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("norm", [layers.layer_norm, our_rms_norm])
def test_norms_of_bfloat16_compute_in_float32(norm):
    x = jnp.asarray(np.random.default_rng(0).normal(4, 1, (8, 256)), jnp.bfloat16)
    one, zero = jnp.ones(256), jnp.zeros(256)
    y = norm(x, one, zero, 1e-5)
    assert y.dtype == jnp.bfloat16
    # The only rounding is that of the result: 8 bits of mantissa.
    np.testing.assert_allclose(y.astype(np.float32), norm(x.astype(np.float32), one, zero, 1e-5), rtol=2**-8, atol=1e-6)
    assert jax.eval_shape(jax.grad(lambda x: jnp.sum(norm(x, one, zero, 1e-5))), x).dtype == jnp.bfloat16


def test_norm_of_equal_values_is_finite():
    x = jnp.full((2, 8), 1e4)
    loss, dx = jax.jit(jax.value_and_grad(lambda x: jnp.sum(layers.layer_norm(x, jnp.ones(8), None, 1e-5) ** 2)))(x)
    assert np.isfinite(loss)
    assert np.all(np.isfinite(dx))


# Positions


def test_rotary_is_a_turn_in_the_complex_plane():
    random = np.random.default_rng(1)
    x = random.normal(size=(2, 5, 3, 8)).astype(np.float32)
    positions = random.integers(0, 500, size=(2, 5))
    as_complex = x[..., :4] + 1j * x[..., 4:]
    angle = positions[:, :, None, None] * 10_000.0 ** (-np.arange(4) / 4)
    turned = as_complex * np.exp(1j * angle)
    expected = np.concatenate([turned.real, turned.imag], -1)
    np.testing.assert_allclose(layers.rotary(x, positions, 10_000.0), expected, atol=2e-4)


def test_rotary_products_depend_on_distance_alone():
    random = np.random.default_rng(2)
    q, k = random.normal(size=(2, 1, 1, 1, 16)).astype(np.float32)
    products = [
        float(jnp.sum(layers.rotary(q, jnp.array([[i]]), 1e4) * layers.rotary(k, jnp.array([[i - 9]]), 1e4)))
        for i in (9, 50, 200)
    ]
    np.testing.assert_allclose(products, products[0], rtol=1e-4)
    far = float(jnp.sum(layers.rotary(q, jnp.array([[9]]), 1e4) * layers.rotary(k, jnp.array([[4]]), 1e4)))
    assert abs(far - products[0]) > 1e-3


# Attention

causal_attention = jax.jit(layers.causal_attention)


def dense_attention(q_BTHK, k_BTGK, v_BTGK, segments_BT):
    """One query, one head at a time, in float64."""
    B, T, H, K = q_BTHK.shape
    repeat = H // k_BTGK.shape[2]
    q, k, v = (np.asarray(a, np.float64) for a in (q_BTHK, k_BTGK, v_BTGK))
    y = np.zeros((B, T, H, K))
    for b, t, h in np.ndindex(B, T, H):
        seen = np.flatnonzero(segments_BT[b, : t + 1] == segments_BT[b, t])
        scores = k[b, seen, h // repeat] @ q[b, t, h] / np.sqrt(K)
        weights = np.exp(scores - scores.max())
        y[b, t, h] = weights / weights.sum() @ v[b, seen, h // repeat]
    return y


@settings(max_examples=5)
@given(
    length=st.integers(1, 300),
    heads=st.sampled_from([(1, 1), (2, 1), (4, 2)]),
    cuts=st.lists(st.integers(0, 299), max_size=3),
    seed=st.integers(0, 1000),
)
@example(length=1, heads=(4, 2), cuts=[], seed=0)
@example(length=64, heads=(2, 1), cuts=[63], seed=0)
@example(length=65, heads=(2, 1), cuts=[64], seed=0)
@example(length=300, heads=(2, 1), cuts=[100, 128], seed=0)
def test_attention_in_blocks_is_dense_attention(length, heads, cuts, seed):
    random = np.random.default_rng(seed)
    H, G = heads
    q = random.normal(size=(1, length, H, 4)).astype(np.float32)
    k, v = random.normal(size=(2, 1, length, G, 4)).astype(np.float32)
    segments = np.zeros((1, length), np.int32)
    for cut in cuts:
        segments[:, cut:] += 1
    found = causal_attention(q, k, v, segments if cuts else None)
    np.testing.assert_allclose(found, dense_attention(q, k, v, segments), atol=3e-6)


def test_attention_of_rows_with_their_own_segments():
    random = np.random.default_rng(0)
    q = random.normal(size=(3, 70, 2, 4)).astype(np.float32)
    k, v = random.normal(size=(2, 3, 70, 2, 4)).astype(np.float32)
    segments = np.sort(random.integers(0, 4, size=(3, 70)), -1).astype(np.int32)
    found = causal_attention(q, k, v, segments)
    np.testing.assert_allclose(found, dense_attention(q, k, v, segments), atol=3e-6)


@pytest.mark.parametrize("rate", [0.0, 0.4])
def test_gradient_of_attention(rate):
    random = np.random.default_rng(3)
    T, H, G, K = 130, 4, 2, 8
    q, dy = random.normal(size=(2, 2, T, H, K)).astype(np.float32)
    k, v = random.normal(size=(2, 2, T, G, K)).astype(np.float32)
    segments = np.repeat([[0, 1, 2], [0, 0, 1]], [50, 30, 50], axis=1).astype(np.int32)
    kept_BHTT = random.random((2, H, T, T)) >= rate

    def keep(block, shape):
        B, groups, repeat, t, S = shape
        start = S - t  # the queries of a block are the last of the keys it may see
        return kept_BHTT.reshape(B, groups, repeat, T, T)[:, :, :, start : start + t, :S]

    def ours(q, k, v):
        return layers.causal_attention(q, k, v, segments, keep if rate else None, rate)

    def naive(q, k, v):
        k, v = jnp.repeat(k, H // G, 2), jnp.repeat(v, H // G, 2)
        scores = jnp.einsum("BTHK,BSHK->BHTS", q, k) / K**0.5
        seen = np.tri(T, dtype=bool) & (segments[:, None, :, None] == segments[:, None, None, :])
        weights = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf), -1) * kept_BHTT / (1 - rate)
        return jnp.einsum("BHTS,BSHK->BTHK", weights, v)

    def value_and_gradients(attention, q, k, v, dy):
        def weighted(q, k, v):
            y = attention(q, k, v)
            return jnp.sum(y * dy), y

        gradients, y = jax.jit(jax.grad(weighted, (0, 1, 2), has_aux=True))(q, k, v)
        return y, *gradients

    found = value_and_gradients(ours, q, k, v, dy)
    with jax.enable_x64(True):
        expected = value_and_gradients(naive, *(jnp.asarray(a, jnp.float64) for a in (q, k, v, dy)))
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, atol=3e-5)


def test_attention_of_large_scores_is_finite():
    q = jnp.full((1, 5, 1, 4), 1e4)
    y, gradient = jax.jit(jax.value_and_grad(lambda q: jnp.sum(layers.causal_attention(q, q, q / 1e4))))(q)
    np.testing.assert_allclose(y, q.size, rtol=1e-5)
    assert np.all(np.isfinite(gradient))


def test_cached_attention_sees_up_to_its_position():
    random = np.random.default_rng(5)
    q = random.normal(size=(2, 40, 4, 8)).astype(np.float32)
    k, v = random.normal(size=(2, 2, 40, 2, 8)).astype(np.float32)
    positions = np.array([[7], [31]])
    found = layers.cached_attention(np.take_along_axis(q, positions[:, :, None, None], 1), k, v, positions)
    expected = dense_attention(q, k, v, np.zeros((2, 40)))
    np.testing.assert_allclose(found, np.take_along_axis(expected, positions[:, :, None, None], 1), atol=3e-6)


# The rest


@pytest.mark.parametrize("outputs", [(6, 7), (3, 2)])  # more than the 20 inputs, and fewer
def test_project_sums_over_the_last_axes(outputs):
    random = np.random.default_rng(6)
    x, weight = random.normal(size=(2, 3, 4, 5)), random.normal(size=(*outputs, 4, 5))
    bias, dy = random.normal(size=outputs), random.normal(size=(2, 3, *outputs))

    def weighted(x, weight, bias):
        y = layers.project(x, weight, bias, n_inputs=2)
        return jnp.sum(y * jnp.float32(dy)), y

    (_, y), gradients = jax.jit(jax.value_and_grad(weighted, (0, 1, 2), has_aux=True))(
        *map(jnp.float32, (x, weight, bias))
    )
    np.testing.assert_allclose(y, np.einsum("abij,cdij->abcd", x, weight) + bias, rtol=1e-4, atol=1e-5)
    expected = (np.einsum("abcd,cdij->abij", dy, weight), np.einsum("abcd,abij->cdij", dy, x), dy.sum((0, 1)))
    for one, other in zip(gradients, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "at_minus_one", "at_two"),
    [
        ("relu", 0.0, 2.0),
        ("relu_squared", 0.0, 4.0),
        ("gelu", -0.15865525, 1.95449974),  # x times the normal distribution function at x
        ("gelu_tanh", -0.15880801, 1.95459769),  # Hendrycks and Gimpel 2016, section 2
        ("swiglu", -0.26894142, 1.76159416),  # x times the logistic function
    ],
)
def test_activations(name, at_minus_one, at_two):
    np.testing.assert_allclose(
        layers.ACTIVATIONS[name](jnp.float32([-1, 2])), [at_minus_one, at_two], rtol=1e-5, atol=1e-7
    )


@pytest.mark.parametrize("name", sorted(layers.ACTIVATIONS))
def test_gradients_of_activations_are_their_slopes(name):
    x, step = np.linspace(-6, 6, 101), 1e-3  # no point is at the kink of ReLU, 0, to either side of which it is smooth
    x = x[np.abs(x) > 2 * step]
    activation = jax.jit(layers.ACTIVATIONS[name])
    slopes = jax.jit(jax.vmap(jax.grad(activation)))(jnp.float32(x))
    above, below = (np.asarray(activation(jnp.float32(x + sign * step)), np.float64) for sign in (1, -1))
    np.testing.assert_allclose(slopes, (above - below) / (2 * step), atol=2e-3)
    assert jax.eval_shape(activation, jnp.bfloat16(0.5)).dtype == jnp.bfloat16
