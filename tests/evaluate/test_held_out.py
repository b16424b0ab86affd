"""Held-out loss: sums over sums, the last batch and all, in nats and bits per byte."""

from __future__ import annotations

import math

import jax.numpy as jnp
import numpy as np
import pytest

from rung.config import Config, override, resolve
from rung.evaluate.held_out import HeldOut, compiled_loss, held_out_loss
from rung.model import Decoder
from rung.model.weights import initialize


def told(weights, batch):
    """A loss that the batch itself tells: ``per_target`` for each target."""
    has_target = batch["targets"] >= 0
    return jnp.sum(jnp.where(has_target, batch["per_target"], 0.0)), jnp.sum(has_target)


def batch(loss_sum, n_targets, slots=12):
    targets = np.full((1, slots), -1, np.int32)
    targets[0, :n_targets] = 1
    return {"targets": targets, "per_target": np.full((1, slots), loss_sum / n_targets, np.float32)}


def test_mean_over_targets_is_not_the_mean_of_means():
    # Loss 2 over 1 target, and 90 over 9: 92 / 10, where the mean of means is 6.
    result = held_out_loss(told, None, [batch(2, 1), batch(90, 9)])
    assert result.loss == pytest.approx(9.2)
    assert result.targets == 10
    assert result.perplexity == pytest.approx(math.exp(9.2))


@pytest.mark.parametrize("n_batches", [1, 2, 3, 7])
def test_the_last_batch_counts(n_batches):
    sums = [3.0 * n for n in range(1, n_batches + 1)]
    result = held_out_loss(told, None, [batch(s, n + 1) for n, s in enumerate(sums)])
    assert result.loss_sum == pytest.approx(sum(sums))
    assert result.targets == n_batches * (n_batches + 1) / 2


def test_bits_per_byte_are_of_the_targets_bytes():
    # Three targets of 1, 4 and 0 bytes (the last is a special token), at 2 nats each.
    targets = np.array([[1, 2, 0, -1]], np.int32)
    one = {"targets": targets, "per_target": np.full((1, 4), 2.0, np.float32)}
    result = held_out_loss(told, None, [one, one], token_bytes=np.array([0, 1, 4], np.int32))
    assert result.text_bytes == 10
    assert result.bits_per_byte == pytest.approx(12 / math.log(2) / 10)
    assert held_out_loss(told, None, [one]).bits_per_byte is None


def test_no_targets_and_huge_losses_are_not_errors():
    assert math.isnan(HeldOut(0.0, 0, 0).loss)
    assert HeldOut(1e6, 1, 1).perplexity == math.inf


def test_many_small_sums_keep_their_digits():
    # The running total is a Python float: float32 would lose the ones beside the first.
    batches = [batch(2.0**25, 1), *[batch(1.0, 1)] * 40]
    assert held_out_loss(told, None, batches).loss_sum == 2.0**25 + 40


def test_batch_size_does_not_matter_to_a_model():
    config = {"vocab_size": 17, "context_length": 8, "n_layers": 1, "n_heads": 2, "d_model": 8, "dropout": 0.5}
    model = Decoder(resolve(override(Config(), {f"model.{name}": value for name, value in config.items()})).model)
    weights = initialize(model.weights(), 0)
    random = np.random.default_rng(0)
    tokens, targets = random.integers(17, size=(2, 6, 8)).astype(np.int32)
    targets[2, 3:] = targets[5, 1:] = -1

    def in_batches_of(size):
        return [{"tokens": tokens[i : i + size], "targets": targets[i : i + size]} for i in range(0, 6, size)]

    results = [held_out_loss(compiled_loss(model), weights, in_batches_of(size)) for size in (6, 3, 2)]
    assert {result.targets for result in results} == {48 - 5 - 7}
    for result in results:  # and dropout is off: the rate of 0.5 would show
        assert result.loss == pytest.approx(results[0].loss, rel=1e-6)
