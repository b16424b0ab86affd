"""Dropout whose mask depends on the row of the global batch alone, from a few integer operations an element.

The mask of a row is a hash of (the row's key, the use, the position of the element). It is therefore the same however
the batch is split over micro-batches, devices and processes. The hash is the finalizer of MurmurHash3 (Appleby, public
domain), applied to the element's counter under a 64-bit key: not a cryptographic generator, and not meant to be one.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

_GOLDEN = 0x9E3779B9  # 2^32 over the golden ratio: consecutive multiples are spread evenly over 32 bits


def dropout(x: jax.Array, rate: float, keys_B: jax.Array | None, use: jax.Array | int) -> jax.Array:
    """Zero each element with probability ``rate`` and scale the others by ``1 / (1 - rate)``.

    Args:
        x: [B, ...], any float dtype.
        rate: in [0, 1).
        keys_B: [B] typed PRNG keys, one a row of the batch; ``None`` turns dropout off.
        use: a number for the place in the model, from 0, so that no two places share a mask.
    """
    if keys_B is None or rate == 0:
        return x
    keep = keep_mask(x.shape, rate, keys_B, use)
    return jnp.where(keep, x * jnp.asarray(1 / (1 - rate), x.dtype), jnp.zeros((), x.dtype))


def keep_mask(shape: tuple[int, ...], rate: float, keys_B: jax.Array, use: jax.Array | int) -> jax.Array:
    """Return a bool mask of ``shape`` [B, ...], false with probability ``rate``; arguments as for ``dropout``."""
    return random_bits(shape, keys_B, use) >= jnp.uint32(round(rate * 2**32))


def random_bits(shape: tuple[int, ...], keys_B: jax.Array, use: jax.Array | int) -> jax.Array:
    """Return uint32 bits of ``shape`` [B, ...], a function of each row's key, ``use`` and the element's position."""
    words_B2 = jax.random.key_data(keys_B).astype(jnp.uint32)
    words_B2 = words_B2[:, -2:]
    low_B = _mix(words_B2[:, 0] ^ jnp.asarray(use, jnp.uint32) * jnp.uint32(_GOLDEN))
    high_B = _mix(words_B2[:, 1] + low_B)
    column = (shape[0],) + (1,) * (len(shape) - 1)
    counter = jax.lax.iota(jnp.uint32, math.prod(shape[1:])).reshape((1, *shape[1:]))
    return _mix(_mix(counter + low_B.reshape(column)) ^ high_B.reshape(column))


def _mix(x: jax.Array) -> jax.Array:
    """Return MurmurHash3's 32-bit finalizer: a bijection in which an input bit flips any output bit half the time."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> 16)
