"""Hashes of arrays, computed where the arrays are: 64 bits each, the same on any mesh and in any layout."""

from __future__ import annotations

import hashlib
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

_SEED = 0x9E3779B9  # fractional bits of the golden ratio, as good as any


def tree_hashes(tree: Any) -> dict[str, str]:
    """Return ``{path: 16 hexadecimal digits}`` of every array in a tree.

    An element's bits and its place in the array are mixed, and the mixtures added modulo 2^32; mixed once more, and
    added, they make the other half. Addition has no order, so shards are hashed where they lie and only their sums
    travel. It finds damage, of one bit or of much; it is no defence against someone who means to forge.
    """
    hashed = np.asarray(_hash_leaves(jax.tree.leaves(tree)))
    paths = [path_of(path) for path, _ in jax.tree_util.tree_leaves_with_path(tree)]
    return {path: f"{high:08x}{low:08x}" for path, (high, low) in zip(paths, hashed.tolist(), strict=True)}


def digest(hashes: dict[str, str]) -> str:
    """Return one hash of many, by path: 16 hexadecimal digits."""
    lines = "".join(f"{path} {hashes[path]}\n" for path in sorted(hashes))
    return hashlib.blake2b(lines.encode(), digest_size=8).hexdigest()


def path_of(path: Any) -> str:
    """Return a leaf's path in a tree as its keys joined by dots."""
    return jax.tree_util.keystr(path, simple=True, separator=".")


@jax.jit
def _hash_leaves(leaves: list[jax.Array]) -> jax.Array:
    return jnp.stack([_hash(leaf) for leaf in leaves])


def _hash(x: jax.Array) -> jax.Array:
    words = _words(x)
    place = jnp.uint32(0)
    for axis, length in enumerate(words.shape):
        step = math.prod(words.shape[axis + 1 :]) % 2**32
        place = place + jax.lax.broadcasted_iota(jnp.uint32, words.shape, axis) * jnp.uint32(step)
        assert length < 2**32
    mixed = _mixed(words ^ _mixed(place + jnp.uint32(_SEED)))
    # Both sums in one reduction: two of them would have the mixtures of a whole array written out in between.
    zero = jnp.uint32(0)
    axes = tuple(range(words.ndim))
    return jnp.stack(jax.lax.reduce((mixed, _mixed(mixed)), (zero, zero), _added, axes))


def _added(one: tuple[jax.Array, jax.Array], two: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
    return one[0] + two[0], one[1] + two[1]


def _words(x: jax.Array) -> jax.Array:
    """Return the bits of an array as uint32, two to an element of 64 bits."""
    if x.dtype == jnp.bool_:
        return x.astype(jnp.uint32)
    size = x.dtype.itemsize
    if size == 8:
        return jax.lax.bitcast_convert_type(x, jnp.uint32)
    return jax.lax.bitcast_convert_type(x, {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}[size]).astype(jnp.uint32)


def _mixed(x: jax.Array) -> jax.Array:
    """Return uint32 whose every bit depends on every bit of ``x`` (the finaliser of MurmurHash3, Appleby 2011)."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> 16)
