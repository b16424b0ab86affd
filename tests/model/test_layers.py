"""Layers against plain versions of themselves in float64; gradients we wrote out against theirs and against slopes."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

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
def test_gradients_of_norms_are_slopes(norm):
    random = np.random.default_rng(1)
    x, dy, towards_x = random.normal(0.5, 2, (3, 3, 16))
    scale, bias, towards_scale, towards_bias = random.normal(1, 0.3, (4, 16))
    point, towards = (x, scale, bias), (towards_x, towards_scale, towards_bias)
    value = jax.jit(lambda x, scale, bias: jnp.sum(norm(x, scale, bias, 1e-5) * jnp.float32(dy)))
    gradients = jax.jit(jax.grad(value, (0, 1, 2)))(*map(jnp.float32, point))
    step = 1e-2
    above, below = (
        value(*(jnp.float32(p + sign * step * d) for p, d in zip(point, towards, strict=True))) for sign in (1, -1)
    )
    slope = sum(np.sum(np.asarray(g, np.float64) * d) for g, d in zip(gradients, towards, strict=True))
    np.testing.assert_allclose((above - below) / (2 * step), slope, rtol=2e-3)


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


def test_gradient_of_gelu_is_that_of_its_definition():
    x = np.linspace(-6, 6, 101)
    slopes = jax.jit(jax.vmap(jax.grad(layers.gelu)))(jnp.float32(x))
    with jax.enable_x64(True):
        expected = jax.vmap(jax.grad(lambda x: x * jax.scipy.stats.norm.cdf(x)))(jnp.float64(jnp.float32(x)))
    np.testing.assert_allclose(slopes, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", sorted(layers.ACTIVATIONS))
def test_gradients_of_activations_are_their_slopes(name):
    x, step = np.linspace(-6, 6, 101), 1e-3  # no point is at the kink of ReLU, 0, to either side of which it is smooth
    x = x[np.abs(x) > 2 * step]
    activation = jax.jit(layers.ACTIVATIONS[name])
    slopes = jax.jit(jax.vmap(jax.grad(activation)))(jnp.float32(x))
    above, below = (np.asarray(activation(jnp.float32(x + sign * step)), np.float64) for sign in (1, -1))
    np.testing.assert_allclose(slopes, (above - below) / (2 * step), atol=2e-3)
    assert jax.eval_shape(activation, jnp.bfloat16(0.5)).dtype == jnp.bfloat16
