"""Every combination of soft cap, label smoothing, z-loss, bias, masks, chunks and dtype, against float64 autodiff."""

from __future__ import annotations

import functools

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rung.model import losses


def naive(x_BTD, head_VD, bias_V, targets_BT, soft_cap, smoothing, z_loss):
    """Return the sums of the objective and of the plain cross-entropy, as their papers write them."""
    logits = x_BTD @ head_VD.T + (0 if bias_V is None else bias_V)
    if soft_cap:
        logits = soft_cap * jnp.tanh(logits / soft_cap)
    V = head_VD.shape[0]
    log_z = jnp.log(jnp.sum(jnp.exp(logits), -1, keepdims=True))
    log_p = logits - log_z
    one_hot = jax.nn.one_hot(targets_BT, V, dtype=logits.dtype)  # all 0 where the target is -1
    wanted = (1 - smoothing) * one_hot + smoothing / V  # Szegedy et al. 2015, equation 7 with a uniform u
    has_target = targets_BT >= 0
    plain = -jnp.sum(one_hot * log_p, -1)
    objective = -jnp.sum(wanted * log_p, -1) + z_loss * log_z[..., 0] ** 2
    return jnp.sum(jnp.where(has_target, objective, 0)), jnp.sum(plain)


B, T, V, D = 3, 7, 64, 5
OPTIONS = {"soft_cap": 3.0, "label_smoothing": 0.1, "z_loss": 0.05}
QUICKLY = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}  # there are many programs
FACTOR = 0.7  # beside the sum, as when a mean is taken: it reaches every gradient


@functools.cache
def ours(chosen, positions):
    """Return the compiled ``(weights, targets) -> ((value, (count, plain)), gradients, value without a gradient)``."""

    def sums(weights, targets):
        objective, count, plain = losses.cross_entropy(*weights, targets, **{name: OPTIONS[name] for name in chosen})
        return FACTOR * objective, (count, plain)

    def both(weights, targets):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(losses, "chunk_bytes", lambda device: positions * B * V * 4)
            return *jax.value_and_grad(sums, has_aux=True)(weights, targets), sums(weights, targets)[0]

    return jax.jit(both, compiler_options=QUICKLY)


@functools.cache
def exact(chosen):
    """Return the compiled ``(weights, targets) -> ((value, plain), gradients)`` of the naive sums."""

    def sums(weights, targets):
        objective, plain = naive(*weights, targets, *(OPTIONS[name] if name in chosen else 0 for name in OPTIONS))
        return FACTOR * objective, plain

    return jax.jit(jax.value_and_grad(sums, has_aux=True), compiler_options=QUICKLY)


def wide(tree):
    return jax.tree.map(lambda a: jnp.asarray(np.asarray(a, np.float64)), tree)


CHOSEN = st.sets(st.sampled_from(list(OPTIONS))).map(lambda names: tuple(sorted(names)))


@hypothesis.settings(max_examples=15)
@given(
    chosen=CHOSEN,
    positions=st.sampled_from([2, T]),  # chunks of which the last is not full; all at once
    with_bias=st.booleans(),
    dtype=st.sampled_from(["float32", "bfloat16"]),
    ignored=st.sampled_from([0.0, 0.4, 1.0]),
    seed=st.integers(0, 2**32 - 1),
)
def test_sums_and_gradients(chosen, positions, with_bias, dtype, ignored, seed):
    random = np.random.default_rng(seed)
    # Numbers that bfloat16 holds, and float32 their products: what is left of the dtype is how gradients are rounded.
    x, head, bias = (jnp.float32(random.integers(-8, 9, size=size) / 8) for size in ((B, T, D), (V, D), (V,)))
    weights = (x.astype(dtype), head, bias if with_bias else None)
    targets = random.integers(V, size=(B, T)).astype(np.int32)
    targets[random.random((B, T)) < ignored] = losses.IGNORED

    (value, (count, plain)), gradients, without = ours(chosen, positions)(weights, targets)
    with jax.enable_x64(True):
        (expected, expected_plain), expected_gradients = exact(chosen)(wide(weights), targets)

    assert count == np.sum(targets >= 0)
    for found, other in ((value, expected), (without, expected), (plain, expected_plain)):
        assert found.dtype == jnp.float32
        np.testing.assert_allclose(found, other, rtol=1e-5)
    for found, other, of in zip(gradients, expected_gradients, weights, strict=True):
        if of is not None:
            assert found.dtype == of.dtype
            # In bfloat16 the gradient of the logits is rounded to 8 bits before its two products.
            tolerance = 1e-5 if dtype == "float32" or of is bias else 2**-6
            error = np.linalg.norm(np.asarray(found, np.float64) - np.asarray(other))
            assert error <= tolerance * np.linalg.norm(other) + 1e-9


@given(chosen=CHOSEN, seed=st.integers(0, 2**32 - 1))
def test_the_gradient_is_the_slope(chosen, seed):
    """Central differences in float64 along a random line, in which no derivative has a part."""
    random, step = np.random.default_rng(seed), 1e-5
    weights, line = (tuple(random.normal(size=size) for size in ((B, T, D), (V, D), (V,))) for _ in range(2))
    targets = random.integers(-1, V, size=(B, T)).astype(np.int32)

    def along(s):
        at = tuple(a + s * d for a, d in zip(weights, line, strict=True))
        return float(exact(chosen)(wide(at), targets)[0][0])

    with jax.enable_x64(True):
        slope = (along(step) - along(-step)) / (2 * step)
    _, gradients, _ = ours(chosen, 2)(jax.tree.map(jnp.float32, weights), targets)
    found = sum(np.sum(np.asarray(g, np.float64) * d) for g, d in zip(gradients, line, strict=True))
    size = np.sqrt(sum(np.sum(np.square(g)) for g in gradients) * sum(np.sum(np.square(d)) for d in line))
    assert abs(found - slope) <= 1e-5 * size


def test_the_plain_sum_has_no_gradient():
    x, head, targets = jnp.ones((1, 3, 4)), jnp.ones((5, 4)), jnp.zeros((1, 3), jnp.int32)
    gradient = jax.grad(lambda x: losses.cross_entropy(x, head, None, targets, z_loss=0.1)[2])(x)
    assert not np.any(gradient)


class Accelerator:
    platform = "gpu"

    def __init__(self, statistics):
        self._statistics = statistics

    def memory_stats(self):
        return self._statistics


@pytest.mark.parametrize("gibibytes", [8, 15.7, 16.3, 79, 139])
def test_a_chunk_is_a_share_of_an_accelerator_whatever_is_in_use(gibibytes):
    limit = int(gibibytes * 2**30)
    sizes = {
        losses.chunk_bytes(Accelerator({"bytes_limit": limit, "bytes_in_use": used})) for used in (0, limit // 2, limit)
    }
    assert len(sizes) == 1
    assert limit / 64 < sizes.pop() <= limit / 32


def test_a_chunk_where_nothing_is_known_of_memory_is_that_of_a_cpu():
    on_cpu = losses.chunk_bytes(jax.local_devices()[0])
    assert on_cpu == losses.chunk_bytes(Accelerator(None)) == losses.chunk_bytes(Accelerator({}))
    # Of GPT-2's vocabulary a batch of eight takes a few dozen positions at a time, so that products stay large.
    assert 16 < on_cpu / (8 * 50257 * 4) < 128
