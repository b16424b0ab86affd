"""The layers: normalisation, projections, rotary positions, attention and the activations of the MLP."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp

MASKED = -1e30
"""The score of a key that a query may not see: finite, so that a row without any key stays finite too."""

_MIN_QUERY_BLOCK = 64  # shorter blocks skip more masked keys but make matrix products too small to be fast
_MAX_QUERY_BLOCKS = 8  # more blocks skip little more, and each is compiled on its own


def project(x: jax.Array, weight: jax.Array, bias: jax.Array | None = None, n_inputs: int = 1) -> jax.Array:
    """Return ``x`` [..., inputs] times ``weight`` [outputs..., inputs...], summed over their last ``n_inputs`` axes."""
    inputs_x = tuple(range(x.ndim - n_inputs, x.ndim))
    inputs_w = tuple(range(weight.ndim - n_inputs, weight.ndim))
    y = jax.lax.dot_general(x, weight.astype(x.dtype), ((inputs_x, inputs_w), ((), ())))
    return y if bias is None else y + bias.astype(x.dtype)


# Normalisation. Each has its gradient written out: left to itself the compiler fuses the residual gradients of many
# layers into kernels that read their inputs again and again.


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def layer_norm(x: jax.Array, scale: jax.Array, bias: jax.Array | None, epsilon: float) -> jax.Array:
    """Return LayerNorm over the last axis (Ba et al. 2016, arXiv:1607.06450), computed in float32.

    Args:
        x: [..., D], any float dtype; the result has it too.
        scale: [D]. bias: [D] or ``None``.
        epsilon: added to the variance.
    """
    return _layer_norm_forward(x, scale, bias, epsilon)[0]


def _layer_norm_forward(x, scale, bias, epsilon):
    wide = x.astype(jnp.float32)
    mean = jnp.mean(wide, -1, keepdims=True)
    variance = jnp.mean(wide * wide, -1, keepdims=True) - mean * mean
    inverse = jax.lax.rsqrt(jnp.maximum(variance, 0.0) + epsilon)
    y = (wide - mean) * inverse * scale
    if bias is not None:
        y = y + bias
    return y.astype(x.dtype), (x, scale, bias, mean, inverse)


def _layer_norm_backward(epsilon, saved, dy):
    x, scale, bias, mean, inverse = saved
    dy = dy.astype(jnp.float32)
    normed = (x.astype(jnp.float32) - mean) * inverse
    rows = tuple(range(x.ndim - 1))
    d_normed = dy * scale
    centred = d_normed - jnp.mean(d_normed, -1, keepdims=True)
    dx = inverse * (centred - normed * jnp.mean(d_normed * normed, -1, keepdims=True))
    d_bias = None if bias is None else jnp.sum(dy, rows)
    return dx.astype(x.dtype), jnp.sum(dy * normed, rows), d_bias


layer_norm.defvjp(_layer_norm_forward, _layer_norm_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def rms_norm(x: jax.Array, scale: jax.Array, epsilon: float) -> jax.Array:
    """Return RMSNorm over the last axis (Zhang and Sennrich 2019, arXiv:1910.07467), computed in float32.

    Args:
        x: [..., D], any float dtype; the result has it too.
        scale: [D].
        epsilon: added to the mean square.
    """
    return _rms_norm_forward(x, scale, epsilon)[0]


def _rms_norm_forward(x, scale, epsilon):
    wide = x.astype(jnp.float32)
    inverse = jax.lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + epsilon)
    return (wide * inverse * scale).astype(x.dtype), (x, scale, inverse)


def _rms_norm_backward(epsilon, saved, dy):
    x, scale, inverse = saved
    dy = dy.astype(jnp.float32)
    normed = x.astype(jnp.float32) * inverse
    d_normed = dy * scale
    dx = inverse * (d_normed - normed * jnp.mean(d_normed * normed, -1, keepdims=True))
    return dx.astype(x.dtype), jnp.sum(dy * normed, tuple(range(x.ndim - 1)))


rms_norm.defvjp(_rms_norm_forward, _rms_norm_backward)


# Positions


def rotary(x_BTHK: jax.Array, positions_BT: jax.Array, base: float) -> jax.Array:
    """Return queries or keys turned by their positions (RoPE, Su et al. 2021, arXiv:2104.09864, equation 34).

    Dimension ``i`` is paired with ``i + K / 2``, the convention of Llama's weights as ``transformers`` stores them.
    """
    half = x_BTHK.shape[-1] // 2
    frequency = base ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angle_BT1k = positions_BT[:, :, None, None].astype(jnp.float32) * frequency
    sin, cos = jnp.sin(angle_BT1k).astype(x_BTHK.dtype), jnp.cos(angle_BT1k).astype(x_BTHK.dtype)
    first, second = x_BTHK[..., :half], x_BTHK[..., half:]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], -1)


# Attention


def causal_attention(
    q_BTHK: jax.Array,
    k_BTGK: jax.Array,
    v_BTGK: jax.Array,
    segments_BT: jax.Array | None = None,
    drop: Callable[[int, jax.Array], jax.Array] | None = None,
) -> jax.Array:
    """Return softmax attention in which a query sees the keys at its own and earlier positions (Vaswani et al. 2017).

    Queries are taken in blocks, each with only the keys up to its end, so that about half of the products that the mask
    would throw away are never computed.

    Args:
        q_BTHK: queries. k_BTGK, v_BTGK: keys and values, G dividing H; head h uses key head ``h // (H / G)``.
        segments_BT: int32; a query sees keys of its own segment only. ``None``: one segment.
        drop: dropout of the attention weights, called with (number of the block, weights [B, G, R, t, s]).

    Returns:
        [B, T, H, K] in the dtype of the queries.
    """
    length = q_BTHK.shape[1]
    block = max(_MIN_QUERY_BLOCK, -(-length // _MAX_QUERY_BLOCKS))
    k_BGTK, v_BGTK = jnp.swapaxes(k_BTGK, 1, 2), jnp.swapaxes(v_BTGK, 1, 2)
    q_BGRTK = _grouped(q_BTHK, k_BTGK.shape[2])
    outputs = []
    for number, start in enumerate(range(0, length, block)):
        stop = min(start + block, length)
        seen_ts = jnp.arange(start, stop)[:, None] >= jnp.arange(stop)[None, :]
        if segments_BT is not None:
            same_Bts = segments_BT[:, start:stop, None] == segments_BT[:, None, :stop]
            seen_ts = (seen_ts & same_Bts)[:, None, None]
        drop_block = None if drop is None else functools.partial(drop, number)
        outputs.append(
            _attend(q_BGRTK[:, :, :, start:stop], k_BGTK[:, :, :stop], v_BGTK[:, :, :stop], seen_ts, drop_block)
        )
    return _ungrouped(jnp.concatenate(outputs, 3) if len(outputs) > 1 else outputs[0])


def cached_attention(q_BTHK: jax.Array, k_BSGK: jax.Array, v_BSGK: jax.Array, positions_BT: jax.Array) -> jax.Array:
    """Return attention of queries at ``positions_BT`` over a cache, of which each sees positions up to its own.

    Args:
        q_BTHK: queries. k_BSGK, v_BSGK: the cache, whose row s is position s.

    Returns:
        [B, T, H, K].
    """
    seen_BTS = positions_BT[:, :, None] >= jnp.arange(k_BSGK.shape[1])
    q_BGRTK = _grouped(q_BTHK, k_BSGK.shape[2])
    y_BGRTK = _attend(q_BGRTK, jnp.swapaxes(k_BSGK, 1, 2), jnp.swapaxes(v_BSGK, 1, 2), seen_BTS[:, None, None], None)
    return _ungrouped(y_BGRTK)


def _attend(q_BGRTK, k_BGSK, v_BGSK, seen, drop):
    scores_BGRTS = jnp.einsum("BGRTK,BGSK->BGRTS", q_BGRTK, k_BGSK, preferred_element_type=jnp.float32)
    scores_BGRTS = jnp.where(seen, scores_BGRTS / math.sqrt(q_BGRTK.shape[-1]), MASKED)
    weights_BGRTS = jax.nn.softmax(scores_BGRTS, -1).astype(v_BGSK.dtype)
    if drop is not None:
        weights_BGRTS = drop(weights_BGRTS)
    return jnp.einsum("BGRTS,BGSK->BGRTK", weights_BGRTS, v_BGSK)


def _grouped(q_BTHK: jax.Array, n_groups: int) -> jax.Array:
    B, T, H, K = q_BTHK.shape
    return jnp.moveaxis(q_BTHK.reshape(B, T, n_groups, H // n_groups, K), 1, 3)


def _ungrouped(y_BGRTK: jax.Array) -> jax.Array:
    B, G, R, T, K = y_BGRTK.shape
    return jnp.moveaxis(y_BGRTK, 3, 1).reshape(B, T, G * R, K)


# Activations of the MLP

ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "relu": jax.nn.relu,
    "gelu": functools.partial(jax.nn.gelu, approximate=False),
    "gelu_tanh": functools.partial(jax.nn.gelu, approximate=True),
    "swiglu": jax.nn.silu,  # of the gate
    "relu_squared": lambda x: jnp.square(jax.nn.relu(x)),
}
"""Activation by its name in the config.

Hendrycks and Gimpel 2016 (GELU), Shazeer 2020 (SwiGLU), So et al. 2021 (squared ReLU).
"""
