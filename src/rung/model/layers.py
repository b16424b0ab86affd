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
    outputs, inputs = weight.shape[: weight.ndim - n_inputs], weight.shape[weight.ndim - n_inputs :]
    rows = x.shape[: x.ndim - n_inputs]
    y = _matmul(x.reshape(*rows, math.prod(inputs)), weight.astype(x.dtype).reshape(-1, math.prod(inputs)))
    y = y.reshape(*rows, *outputs)
    return y if bias is None else y + bias.astype(x.dtype)


@jax.custom_vjp
def _matmul(x: jax.Array, weight_OI: jax.Array) -> jax.Array:
    """Return ``x`` [..., I] times the transpose of ``weight_OI``."""
    return jax.lax.dot_general(x, weight_OI, (((x.ndim - 1,), (1,)), ((), ())))


def _matmul_forward(x, weight_OI):
    return _matmul(x, weight_OI), (x, weight_OI)


def _matmul_backward(saved, dy):
    x, weight_OI = saved
    rows = tuple(range(x.ndim - 1))
    dx = jax.lax.dot_general(dy, weight_OI, (((dy.ndim - 1,), (0,)), ((), ())))
    # A product over rows transposes its left operand. Let that be the narrower one: on a CPU the transposition of a
    # wide activation, with the arithmetic that made it fused in, costs more than the product.
    if weight_OI.shape[0] <= weight_OI.shape[1]:
        return dx, jax.lax.dot_general(dy, x, ((rows, rows), ((), ())))
    gradient_IO = jax.lax.dot_general(x, dy, ((rows, rows), ((), ())))
    # To float32's own precision: it changes no bit, and keeps the compiler from turning the product round again.
    return dx, jax.lax.reduce_precision(gradient_IO, exponent_bits=8, mantissa_bits=23).T


_matmul.defvjp(_matmul_forward, _matmul_backward)


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
    keep: Callable[[int, tuple[int, ...]], jax.Array] | None = None,
    dropout_rate: float = 0.0,
) -> jax.Array:
    """Return softmax attention in which a query sees the keys at its own and earlier positions (Vaswani et al. 2017).

    Queries are taken in blocks, each with only the keys up to its end, so that about half of the products that the mask
    would throw away are never computed.

    Args:
        q_BTHK: queries. k_BTGK, v_BTGK: keys and values, G dividing H; head h uses key head ``h // (H / G)``.
        segments_BT: int32; a query sees keys of its own segment only. ``None``: one segment.
        keep: dropout of the attention weights: called with (number of the block, shape [B, G, R, t, s]), gives a bool
            array, false where a weight is dropped. ``None``: no dropout.
        dropout_rate: what part ``keep`` drops; the other weights are scaled by ``1 / (1 - dropout_rate)``.

    Returns:
        [B, T, H, K] in the dtype of the queries.
    """
    length = q_BTHK.shape[1]
    block = max(_MIN_QUERY_BLOCK, -(-length // _MAX_QUERY_BLOCKS))
    k_BGTK, v_BGTK = jnp.swapaxes(k_BTGK, 1, 2), jnp.swapaxes(v_BTGK, 1, 2)
    q_BGRTK = _grouped(q_BTHK, k_BGTK.shape[1])
    outputs = []
    for number, start in enumerate(range(0, length, block)):
        stop = min(start + block, length)
        seen = jnp.arange(start, stop)[:, None] >= jnp.arange(stop)[None, :]
        if segments_BT is not None:
            same_Bts = segments_BT[:, start:stop, None] == segments_BT[:, None, :stop]
            seen = (seen & same_Bts)[:, None, None]
        q_BGRtK = q_BGRTK[:, :, :, start:stop]
        keep_BGRts = None if keep is None else keep(number, (*q_BGRtK.shape[:4], stop))
        outputs.append(_attend(q_BGRtK, k_BGTK[:, :, :stop], v_BGTK[:, :, :stop], seen, keep_BGRts, dropout_rate))
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
    k_BGSK, v_BGSK = jnp.swapaxes(k_BSGK, 1, 2), jnp.swapaxes(v_BSGK, 1, 2)
    return _ungrouped(_attend(q_BGRTK, k_BGSK, v_BGSK, seen_BTS[:, None, None], None, 0.0))


@functools.partial(jax.custom_vjp, nondiff_argnums=(5,))
def _attend(q_BGRTK, k_BGSK, v_BGSK, seen, keep_BGRTS, rate):
    """Return attention [B, G, R, T, K] of queries that are scaled already.

    Its gradient is written out, because the normalised weights need not be made: their sum is divided out of the
    narrower output instead. The row sums of weights times their gradients equal those of output times its gradient
    (Dao et al. 2022, arXiv:2205.14135, appendix B), which are shorter; but XLA on a CPU then computes each of them anew
    for every key.
    """
    return _attend_forward(q_BGRTK, k_BGSK, v_BGSK, seen, keep_BGRTS, rate)[0]


def _attend_forward(q_BGRTK, k_BGSK, v_BGSK, seen, keep_BGRTS, rate):
    scores = jnp.einsum("BGRTK,BGSK->BGRTS", q_BGRTK, k_BGSK, preferred_element_type=jnp.float32)
    scores = jnp.where(seen, scores, MASKED)
    exps = jnp.exp(scores - jnp.max(scores, -1, keepdims=True))
    inverse_sum = 1 / jnp.sum(exps, -1, keepdims=True)
    exps = exps.astype(v_BGSK.dtype)
    y = jnp.einsum("BGRTS,BGSK->BGRTK", _kept(exps, keep_BGRTS, rate), v_BGSK, preferred_element_type=jnp.float32)
    y = (y * inverse_sum).astype(v_BGSK.dtype)
    return y, (q_BGRTK, k_BGSK, v_BGSK, keep_BGRTS, exps, inverse_sum)


def _attend_backward(rate, saved, dy):
    q_BGRTK, k_BGSK, v_BGSK, keep_BGRTS, exps, inverse_sum = saved
    dy = (dy * inverse_sum).astype(v_BGSK.dtype)
    dv_BGSK = jnp.einsum("BGRTS,BGRTK->BGSK", _kept(exps, keep_BGRTS, rate), dy)
    d_exps = jnp.einsum("BGRTK,BGSK->BGRTS", dy, v_BGSK, preferred_element_type=jnp.float32)
    weighted = exps * _kept(d_exps, keep_BGRTS, rate)
    row_sums = jnp.sum(weighted.astype(jnp.float32), -1, keepdims=True)
    d_scores = (weighted - exps * (row_sums * inverse_sum)).astype(q_BGRTK.dtype)
    dq_BGRTK = jnp.einsum("BGRTS,BGSK->BGRTK", d_scores, k_BGSK)
    dk_BGSK = jnp.einsum("BGRTS,BGRTK->BGSK", d_scores, q_BGRTK)
    return dq_BGRTK, dk_BGSK, dv_BGSK, None, None


_attend.defvjp(_attend_forward, _attend_backward)


def _kept(x, keep, rate):
    """Return ``x`` after dropout: zero where ``keep`` is false, else scaled up."""
    return x if keep is None else jnp.where(keep, x * (1 / (1 - rate)), 0).astype(x.dtype)


def _grouped(q_BTHK: jax.Array, n_groups: int) -> jax.Array:
    """Return queries by key head, scaled for the product with keys: [B, G, R, T, K]."""
    B, T, H, K = q_BTHK.shape
    return jnp.moveaxis(q_BTHK.reshape(B, T, n_groups, H // n_groups, K), 1, 3) * (1 / math.sqrt(K))


def _ungrouped(y_BGRTK: jax.Array) -> jax.Array:
    B, G, R, T, K = y_BGRTK.shape
    return jnp.moveaxis(y_BGRTK, 3, 1).reshape(B, T, G * R, K)


# Activations of the MLP


@jax.custom_vjp
def gelu(x: jax.Array) -> jax.Array:
    """Return ``x`` times the normal distribution function at ``x`` (Hendrycks and Gimpel 2016, arXiv:1606.08415).

    The gradient computes the distribution function again: that is cheaper than to write it out and read it back.
    """
    return x * (0.5 + 0.5 * jax.lax.erf(x * math.sqrt(0.5)))


def _gelu_forward(x):
    return gelu(x), x


def _gelu_backward(x, dy):
    density = jnp.exp(-0.5 * x * x) * (1 / math.sqrt(2 * math.pi))
    # Of -x, so that the compiler does not find it computed already, and keep it.
    cdf = 0.5 - 0.5 * jax.lax.erf(x * -math.sqrt(0.5))
    return (dy * (cdf + x * density),)


gelu.defvjp(_gelu_forward, _gelu_backward)


ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "relu": jax.nn.relu,
    "gelu": gelu,
    "gelu_tanh": functools.partial(jax.nn.gelu, approximate=True),
    "swiglu": jax.nn.silu,  # of the gate
    "relu_squared": lambda x: jnp.square(jax.nn.relu(x)),
}
"""Activation by its name in the config.

Hendrycks and Gimpel 2016 (GELU), Shazeer 2020 (SwiGLU), So et al. 2021 (squared ReLU).
"""
