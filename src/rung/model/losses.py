"""Cross-entropy of the output layer, in chunks, so that the logits of a whole batch never exist at once."""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp

IGNORED = -1
"""The target at a position that has none. (The batches of ``rung.tokens`` use the same number.)"""

_CHUNK_BYTES = 64 * 2**20  # float32 logits at once: larger ones fall out of every cache and only cost memory


def cross_entropy(
    x_BTD: jax.Array, head_VD: jax.Array, bias_V: jax.Array | None, targets_BT: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Return ``(sum of losses, number of targets)``, in nats, of logits ``x . head + bias``.

    The gradient is computed with the loss, chunk by chunk, so each chunk's logits are made once and dropped.

    Args:
        x_BTD: final hidden states, any float dtype; logits, softmax and sum are float32.
        head_VD, bias_V: the output layer.
        targets_BT: int32 ids; ``IGNORED`` where a position has no target and so no loss.
    """
    loss_sum = _loss_sum(x_BTD, head_VD, bias_V, targets_BT)
    return loss_sum, jnp.sum(targets_BT != IGNORED)


@functools.partial(jax.custom_vjp)
def _loss_sum(x_BTD, head_VD, bias_V, targets_BT):
    def add(total, chunk):
        logits, targets = _logits(chunk[0], head_VD, bias_V), chunk[1]
        return total + jnp.sum(_losses(logits, targets)[0]), None

    return _over_chunks(add, jnp.float32(0), x_BTD, targets_BT, head_VD.shape[0])[0]


def _loss_sum_forward(x_BTD, head_VD, bias_V, targets_BT):
    head = head_VD.astype(x_BTD.dtype)

    def add(carry, chunk):
        total, d_head, d_bias = carry
        x_BtD, targets_Bt = chunk
        logits_BtV = _logits(x_BtD, head_VD, bias_V)
        losses_Bt, log_sum_Bt1 = _losses(logits_BtV, targets_Bt)
        has_target = (targets_Bt != IGNORED)[..., None]
        hit = targets_Bt[..., None] == jnp.arange(head_VD.shape[0])
        d_logits = jnp.where(has_target, jnp.exp(logits_BtV - log_sum_Bt1) - hit, 0.0)
        if bias_V is not None:
            d_bias = d_bias + jnp.sum(d_logits, (0, 1))
        d_logits = d_logits.astype(x_BtD.dtype)
        dx_BtD = jax.lax.dot_general(d_logits, head, (((2,), (0,)), ((), ())))
        d_head = d_head + jax.lax.dot_general(
            d_logits, x_BtD, (((0, 1), (0, 1)), ((), ())), preferred_element_type=jnp.float32
        )
        return (total + jnp.sum(losses_Bt), d_head, d_bias), dx_BtD

    start = (jnp.float32(0), jnp.zeros(head_VD.shape, jnp.float32), None if bias_V is None else jnp.zeros_like(bias_V))
    (total, d_head, d_bias), dx_BTD = _over_chunks(add, start, x_BTD, targets_BT, head_VD.shape[0])
    return total, (dx_BTD, d_head, d_bias)


def _loss_sum_backward(saved, d_total):
    dx_BTD, d_head, d_bias = saved
    return (
        (dx_BTD * d_total).astype(dx_BTD.dtype),
        d_head * d_total,
        None if d_bias is None else d_bias * d_total,
        None,
    )


_loss_sum.defvjp(_loss_sum_forward, _loss_sum_backward)


def _logits(x, head_VD, bias_V):
    logits = jax.lax.dot_general(
        x, head_VD.astype(x.dtype), (((2,), (1,)), ((), ())), preferred_element_type=jnp.float32
    )
    return logits if bias_V is None else logits + bias_V


def _losses(logits_BtV, targets_Bt):
    """Return the loss at each position, 0 where ignored, and the log of the softmax's denominator [B, t, 1]."""
    log_sum = jax.nn.logsumexp(logits_BtV, -1, keepdims=True)
    at_target = jnp.take_along_axis(logits_BtV, jnp.maximum(targets_Bt, 0)[..., None], -1)
    return jnp.where(targets_Bt != IGNORED, (log_sum - at_target)[..., 0], 0.0), log_sum


def _over_chunks(add, carry, x_BTD, targets_BT, vocab_size):
    """Scan ``add`` over chunks of positions (the batch stays whole, and so stays split over devices)."""
    B, T, D = x_BTD.shape
    n_chunks = min(T, math.ceil(B * T * vocab_size * 4 / _CHUNK_BYTES))
    if n_chunks <= 1:
        return add(carry, (x_BTD, targets_BT))
    size = -(-T // n_chunks)
    n_chunks = -(-T // size)
    padding = n_chunks * size - T
    x_BTD = jnp.pad(x_BTD, ((0, 0), (0, padding), (0, 0)))
    targets_BT = jnp.pad(targets_BT, ((0, 0), (0, padding)), constant_values=IGNORED)
    x_CBtD = jnp.moveaxis(x_BTD.reshape(B, n_chunks, size, D), 1, 0)
    targets_CBt = jnp.moveaxis(targets_BT.reshape(B, n_chunks, size), 1, 0)
    carry, outputs = jax.lax.scan(add, carry, (x_CBtD, targets_CBt))
    if outputs is not None:
        outputs = jnp.moveaxis(outputs, 0, 1).reshape(x_BTD.shape)[:, :T]
    return carry, outputs
