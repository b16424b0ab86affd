"""The layers but for attention: projections, normalisation, rotary positions and the activations of the MLP."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

PRODUCT = "product"
"""The name of the results of products with weights, for a policy of what the backward pass finds kept."""


def project(x: jax.Array, weight: jax.Array, bias: jax.Array | None = None, n_inputs: int = 1) -> jax.Array:
    """Return ``x`` [..., inputs] times ``weight`` [outputs..., inputs...], summed over their last ``n_inputs`` axes."""
    outputs, inputs = weight.shape[: weight.ndim - n_inputs], weight.shape[weight.ndim - n_inputs :]
    rows = x.shape[: x.ndim - n_inputs]
    weight_OI = weight.astype(x.dtype).reshape(-1, math.prod(inputs))
    y = _matmul(x.reshape(*rows, math.prod(inputs)), weight_OI, matmul_precision())
    y = checkpoint_name(y, PRODUCT).reshape(*rows, *outputs)
    return y if bias is None else y + bias.astype(x.dtype)


def capped(x: jax.Array, soft_cap: float) -> jax.Array:
    """Return ``x`` brought smoothly within ``soft_cap`` of 0 (Gemma 2, arXiv:2408.00118); as it is where that is 0."""
    return soft_cap * jnp.tanh(x / soft_cap) if soft_cap else x


def matmul_precision() -> str | None:
    """Return the precision of products that is set where this is called, for gradients that are written out.

    Where they are computed none may be set, so they are handed it.
    """
    return jax.config.jax_default_matmul_precision  # type: ignore[attr-defined]


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _matmul(x, weight_OI, precision):
    """Return ``x`` [..., I] times the transpose of ``weight_OI``."""
    return jax.lax.dot_general(x, weight_OI, (((x.ndim - 1,), (1,)), ((), ())), precision)


def _matmul_forward(x, weight_OI, precision):
    return _matmul(x, weight_OI, precision), (x, weight_OI)


def _matmul_backward(precision, saved, dy):
    x, weight_OI = saved
    rows = tuple(range(x.ndim - 1))
    dx = jax.lax.dot_general(dy, weight_OI, (((dy.ndim - 1,), (0,)), ((), ())), precision)
    # A product over rows transposes its left operand. Let that be the narrower one: on a CPU the transposition of a
    # wide activation, with the arithmetic that made it fused in, costs more than the product.
    if weight_OI.shape[0] <= weight_OI.shape[1]:
        return dx, jax.lax.dot_general(dy, x, ((rows, rows), ((), ())), precision)
    gradient_IO = jax.lax.dot_general(x, dy, ((rows, rows), ((), ())), precision)
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
