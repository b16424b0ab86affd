"""Cross-entropy of the output layer, in chunks, so that the logits of a whole batch never exist at once."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp

from rung.config import TrainConfig
from rung.model.layers import capped

IGNORED = -1
"""The target at a position that has none. (The batches of ``rung.tokens`` use the same number.)"""

_CPU_CHUNK_BYTES = 64 * 2**20  # larger ones fall out of every cache and only cost memory
_ACCELERATOR_CHUNKS = 32  # a chunk has at most this part of an accelerator's memory


@dataclass(frozen=True)
class Objective:
    """What training minimises beside the plain cross-entropy; ``TrainConfig`` says what the two are."""

    label_smoothing: float = 0.0
    z_loss: float = 0.0

    @classmethod
    def of(cls, config: TrainConfig) -> Objective:
        """Return the objective that settings ask for."""
        return cls(config.label_smoothing, config.z_loss)


def cross_entropy(
    x_BTD: jax.Array,
    head_VD: jax.Array,
    bias_V: jax.Array | None,
    targets_BT: jax.Array,
    *,
    soft_cap: float = 0.0,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    devices: int = 1,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return ``(sum of the objective, number of targets, sum of cross-entropies)`` of logits ``x . head + bias``.

    The sums are in nats. The gradient is that of the objective, computed with the loss, chunk by chunk, so each chunk's
    logits are made once and dropped; the plain cross-entropy has none.

    Args:
        x_BTD: final hidden states, any float dtype; logits, softmax and sum are float32.
        head_VD, bias_V: the output layer.
        targets_BT: int32 ids; ``IGNORED`` where a position has no target and so no loss.
        soft_cap: logits are ``soft_cap * tanh(logits / soft_cap)`` (Gemma 2, arXiv:2408.00118); 0: as they are.
        label_smoothing: part of a target's probability that is spread evenly over the whole vocabulary (Szegedy et al.
            2015, arXiv:1512.00567).
        z_loss: times the squared logarithm of the softmax's denominator, added (PaLM, arXiv:2204.02311).
        devices: that the rows are split over, each of which has its part of a chunk.
    """
    form = _Form(soft_cap, label_smoothing, z_loss, devices)
    objective, plain = _sums(x_BTD, head_VD, bias_V, targets_BT, form)
    return objective, jnp.sum(targets_BT != IGNORED), jax.lax.stop_gradient(plain)


def chunk_bytes(device: jax.Device) -> int:
    """Return how many bytes the float32 logits of one chunk may have on ``device``, which has a part of the rows.

    On a CPU it is a constant. An accelerator works best on large products: it is a share of all its memory, as a power
    of two. It does not depend on how much happens to be free, for it decides in which order the gradient is added up,
    and a resumed run has to add as the one before it did.
    """
    statistics = None if device.platform == "cpu" else device.memory_stats()
    if not statistics or "bytes_limit" not in statistics:
        return _CPU_CHUNK_BYTES
    return max(_CPU_CHUNK_BYTES, 2 ** int(math.log2(statistics["bytes_limit"] / _ACCELERATOR_CHUNKS)))


class _Form(NamedTuple):
    soft_cap: float
    label_smoothing: float
    z_loss: float
    devices: int

    @property
    def plain(self) -> bool:
        """Whether the objective is the cross-entropy itself."""
        return not (self.label_smoothing or self.z_loss)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _sums(x_BTD, head_VD, bias_V, targets_BT, form):
    def add(totals, chunk):
        logits, targets = _logits(chunk[0], head_VD, bias_V, form), chunk[1]
        return _added(totals, _losses(logits, targets, form)[0]), None

    totals, _ = _over_chunks(add, _zeros(form), x_BTD, targets_BT, head_VD.shape[0], form.devices)
    return totals[0], totals[-1]


def _sums_forward(x_BTD, head_VD, bias_V, targets_BT, form):
    head = head_VD.astype(x_BTD.dtype)

    def add(carry, chunk):
        totals, d_head, d_bias = carry
        x_BtD, targets_Bt = chunk
        logits_BtV = _logits(x_BtD, head_VD, bias_V, form)
        losses, log_sum_Bt1 = _losses(logits_BtV, targets_Bt, form)
        d_logits = _gradient(logits_BtV, targets_Bt, log_sum_Bt1, form)
        if bias_V is not None:
            d_bias = d_bias + jnp.sum(d_logits, (0, 1))
        d_logits = d_logits.astype(x_BtD.dtype)
        dx_BtD = jax.lax.dot_general(d_logits, head, (((2,), (0,)), ((), ())))
        d_head = d_head + jax.lax.dot_general(
            d_logits, x_BtD, (((0, 1), (0, 1)), ((), ())), preferred_element_type=jnp.float32
        )
        return (_added(totals, losses), d_head, d_bias), dx_BtD

    start = (_zeros(form), jnp.zeros(head_VD.shape, jnp.float32), None if bias_V is None else jnp.zeros_like(bias_V))
    (totals, d_head, d_bias), dx_BTD = _over_chunks(add, start, x_BTD, targets_BT, head_VD.shape[0], form.devices)
    return (totals[0], totals[-1]), (dx_BTD, d_head, d_bias)


def _sums_backward(form, saved, d_sums):
    dx_BTD, d_head, d_bias = saved
    d_total = d_sums[0]
    return (
        (dx_BTD * d_total).astype(dx_BTD.dtype),
        d_head * d_total,
        None if d_bias is None else d_bias * d_total,
        None,
    )


_sums.defvjp(_sums_forward, _sums_backward)


def _logits(x, head_VD, bias_V, form):
    logits = jax.lax.dot_general(
        x, head_VD.astype(x.dtype), (((2,), (1,)), ((), ())), preferred_element_type=jnp.float32
    )
    return capped(logits if bias_V is None else logits + bias_V, form.soft_cap)


def _losses(logits_BtV, targets_Bt, form):
    """Return ``(losses, log of the softmax's denominator [B, t, 1])``.

    The losses are those of the objective at each position, and of cross-entropy where that is another; 0 where ignored.
    """
    log_sum = jax.nn.logsumexp(logits_BtV, -1, keepdims=True)
    at_target = jnp.take_along_axis(logits_BtV, jnp.maximum(targets_Bt, 0)[..., None], -1)
    losses = [log_sum - at_target]
    if not form.plain:
        smooth = form.label_smoothing
        expected = (1 - smooth) * at_target + smooth * jnp.mean(logits_BtV, -1, keepdims=True)
        losses.insert(0, log_sum - expected + form.z_loss * jnp.square(log_sum))
    return tuple(jnp.where(targets_Bt != IGNORED, loss[..., 0], 0.0) for loss in losses), log_sum


def _gradient(logits_BtV, targets_Bt, log_sum_Bt1, form):
    """Return the gradient of the objective by the logits before the soft cap."""
    V = logits_BtV.shape[-1]
    has_target = (targets_Bt != IGNORED)[..., None]
    hit = targets_Bt[..., None] == jnp.arange(V)
    softmax = jnp.exp(logits_BtV - log_sum_Bt1)
    if form.plain:
        gradient = softmax - hit
    else:
        smooth = form.label_smoothing
        gradient = softmax * (1 + 2 * form.z_loss * log_sum_Bt1) - (1 - smooth) * hit - smooth / V
    if form.soft_cap:
        gradient = gradient * (1 - jnp.square(logits_BtV / form.soft_cap))
    return jnp.where(has_target, gradient, 0.0)


def _zeros(form):
    return (jnp.float32(0),) if form.plain else (jnp.float32(0), jnp.float32(0))


def _added(totals, losses):
    return tuple(total + jnp.sum(loss) for total, loss in zip(totals, losses, strict=True))


def _over_chunks(add, carry, x_BTD, targets_BT, vocab_size, devices):
    """Scan ``add`` over chunks of positions (the batch stays whole, and so stays split over devices)."""
    B, T, D = x_BTD.shape
    n_chunks = min(T, math.ceil(B * T * vocab_size * 4 / (devices * chunk_bytes(jax.local_devices()[0]))))
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
