"""Cross-entropy in chunks, with its written-out gradient, against autodiff of a naive one in float64."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rung.model import losses
from rung.tokens import batches

D, V = 8, 11


def naive(x_BTD, head_VD, bias_V, targets_BT):
    logits = x_BTD @ head_VD.T + (0 if bias_V is None else bias_V)
    log_probabilities = logits - jnp.log(jnp.sum(jnp.exp(logits), -1, keepdims=True))
    at_target = jnp.take_along_axis(log_probabilities, jnp.where(targets_BT < 0, 0, targets_BT)[..., None], -1)[..., 0]
    return -jnp.sum(jnp.where(targets_BT < 0, 0, at_target))


def inputs(length, with_bias, seed=0, ignored=0.3):
    random = np.random.default_rng(seed)
    targets = random.integers(V, size=(3, length))
    targets[random.random(targets.shape) < ignored] = losses.IGNORED
    bias = jnp.float32(random.normal(size=V)) if with_bias else None
    x, head = jnp.float32(random.normal(size=(3, length, D))), jnp.float32(random.normal(size=(V, D)))
    return x, head, bias, jnp.int32(targets)


@pytest.mark.parametrize(
    ("length", "positions_at_once", "with_bias"),
    [(12, 12, True), (12, 12, False), (12, 4, True), (12, 5, False), (7, 3, True)],
)  # whole; a divisor; no divisor, so the next smaller one; a prime length, so one position at a time
def test_loss_and_gradient(monkeypatch, length, positions_at_once, with_bias):
    monkeypatch.setattr(losses, "chunk_bytes", lambda device: 3 * positions_at_once * V * 4)
    x, head, bias, targets = inputs(length, with_bias)
    weights = (0, 1, 2) if with_bias else (0, 1)

    def loss(x, head, bias):
        # A factor beside the sum, as when the mean is taken: it must reach every gradient.
        return 0.5 * losses.cross_entropy(x, head, bias, targets)[0]

    value, gradients = jax.jit(jax.value_and_grad(loss, weights))(x, head, bias)
    without_gradient = jax.jit(loss)(x, head, bias)
    with jax.enable_x64(True):
        wide = [None if a is None else jnp.asarray(np.asarray(a), jnp.float64) for a in (x, head, bias)]
        expected, expected_gradients = jax.jit(jax.value_and_grad(lambda *w: 0.5 * naive(*w, targets), weights))(*wide)
    np.testing.assert_allclose(value, expected, rtol=1e-6)
    np.testing.assert_allclose(without_gradient, expected, rtol=1e-6)
    assert losses.cross_entropy(x, head, bias, targets)[1] == np.sum(np.asarray(targets) >= 0)
    for found, other in zip(gradients, expected_gradients, strict=True):
        assert found.dtype == jnp.float32
        np.testing.assert_allclose(found, other, rtol=1e-5, atol=1e-6)


def test_chunks_are_really_made(monkeypatch):
    def largest(budget):
        monkeypatch.setattr(losses, "chunk_bytes", lambda device: budget)
        x, head, _, targets = inputs(24, False)
        jaxpr = jax.make_jaxpr(lambda x: losses.cross_entropy(x, head, None, targets)[0])(x)
        return "scan" in str(jaxpr)

    assert largest(3 * 8 * V * 4)
    assert not largest(3 * 24 * V * 4)


def test_no_target_at_all():
    x, head, bias, targets = inputs(5, True, ignored=1.1)

    def loss_of(x):
        loss, *rest = losses.cross_entropy(x, head, bias, targets)
        return loss, rest

    (loss, (count, plain)), gradient = jax.jit(jax.value_and_grad(loss_of, has_aux=True))(x)
    assert (loss, count, plain) == (0, 0, 0)
    assert not np.any(gradient)


def test_large_logits_stay_finite():
    x, head, bias, targets = inputs(5, True)
    loss, gradient = jax.jit(jax.value_and_grad(lambda x: losses.cross_entropy(x, head, bias, targets)[0]))(1e4 * x)
    assert np.isfinite(loss)
    assert np.all(np.isfinite(gradient))


def test_bfloat16_states_give_float32_losses():
    x, head, bias, targets = inputs(12, True)
    x16 = x.astype(jnp.bfloat16)
    of = [lambda *w: losses.cross_entropy(*w, targets)[0], lambda *w: naive(*w, targets)]
    ours, exactly = (jax.jit(jax.value_and_grad(f, (0, 1, 2))) for f in of)
    loss, gradients = ours(x16, head, bias)
    assert loss.dtype == jnp.float32
    assert [g.dtype for g in gradients] == [jnp.bfloat16, jnp.float32, jnp.float32]
    exact, exact_gradients = exactly(x, head, bias)
    np.testing.assert_allclose(loss, exact, rtol=2e-2)
    for found, other in zip(gradients, exact_gradients, strict=True):
        error = np.linalg.norm(np.asarray(found, np.float32) - other) / np.linalg.norm(other)
        assert error < 0.03


def test_the_batches_mean_the_same_by_ignored():
    assert losses.IGNORED == batches.IGNORED
