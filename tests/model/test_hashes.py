"""Hashes of arrays: the same however they lie, another for any bit that changes."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rung.config import MeshConfig
from rung.mesh import make_mesh
from rung.model.hashes import digest, tree_hashes


def reference(array: np.ndarray) -> str:
    """The same in plain numpy, written from the documentation."""

    def mixed(x):
        x = x.astype(np.uint32)
        x = (x ^ (x >> np.uint32(16))) * np.uint32(0x85EBCA6B)
        x = (x ^ (x >> np.uint32(13))) * np.uint32(0xC2B2AE35)
        return x ^ (x >> np.uint32(16))

    words = array.reshape(-1).view({2: np.uint16, 4: np.uint32}[array.itemsize]).astype(np.uint32)
    once = mixed(words ^ mixed(np.arange(len(words), dtype=np.uint32) + np.uint32(0x9E3779B9)))
    high, low = (int(x.astype(np.uint64).sum()) % 2**32 for x in (once, mixed(once)))
    return f"{high:08x}{low:08x}"


@pytest.mark.parametrize("dtype", ["float32", "int32", "bfloat16", "float16"])
@pytest.mark.parametrize("shape", [(), (1,), (7,), (3, 5), (2, 3, 4, 5)])
def test_it_is_what_the_documentation_says(dtype, shape):
    array = np.random.default_rng(1).normal(size=shape).astype(jnp.dtype(dtype)) * 100
    assert tree_hashes({"a": jnp.asarray(array)}) == {"a": reference(np.asarray(array, jnp.dtype(dtype)))}


@settings(deadline=None, max_examples=60)
@given(st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=40), st.data())
def test_any_bit_and_any_exchange_shows(words, data):
    array = np.array(words, np.uint32)
    before = tree_hashes([jnp.asarray(array)])
    flipped = array.copy()
    flipped[data.draw(st.integers(0, len(words) - 1))] ^= np.uint32(1 << data.draw(st.integers(0, 31)))
    assert tree_hashes([jnp.asarray(flipped)]) != before
    i, j = (data.draw(st.integers(0, len(words) - 1)) for _ in range(2))
    swapped = array.copy()
    swapped[[i, j]] = swapped[[j, i]]
    assert (tree_hashes([jnp.asarray(swapped)]) == before) == (array[i] == array[j])


def test_it_tells_zero_from_minus_zero_and_shapes_of_zeros_apart():
    zero, minus = (tree_hashes([jnp.full(3, x, jnp.float32)]) for x in (0.0, -0.0))
    assert zero != minus
    assert tree_hashes([jnp.zeros(3)]) != tree_hashes([jnp.zeros(4)])


def test_it_is_the_same_on_any_mesh():
    array = np.random.default_rng(2).normal(size=(8, 6)).astype(np.float32)
    mesh = make_mesh(MeshConfig(data=4))
    for spec in (("data",), (None,)):
        placed = jax.device_put(array, jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*spec)))
        assert tree_hashes({"x": placed}) == {"x": reference(array)}


def test_names_are_paths_and_a_digest_is_of_all():
    hashes = tree_hashes({"layers": [{"up": jnp.ones(2)}, {"up": jnp.ones(2)}]})
    assert list(hashes) == ["layers.0.up", "layers.1.up"]
    assert digest(hashes) == digest(dict(reversed(hashes.items())))
    assert digest(hashes) != digest({**hashes, "layers.1.up": "0" * 16})
