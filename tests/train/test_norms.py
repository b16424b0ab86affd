"""Norms by group, against numpy."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from rung.config import preset, resolve
from rung.model import Decoder
from rung.model.decoder import with_vocabulary
from rung.model.weights import flatten, initialize
from rung.train.norms import copy_of, group_of, make_norms


@pytest.mark.parametrize(
    ("path", "group"),
    [
        ("embedding.tokens", "embedding"),
        ("layers.11.attention.query", "layers.attention"),
        ("layers.0.mlp_norm.scale", "layers.mlp_norm"),
        ("head.weight", "head"),
        ("table", "table"),
    ],
)
def test_groups_are_kinds_of_weights(path, group):
    assert group_of(path) == group


def test_norms_of_every_weight_and_of_its_change():
    table = Decoder(with_vocabulary(resolve(preset("shakespeare-char-classic")).model, 65)).weights()
    before, after = initialize(table, 1), initialize(table, 2)
    weights, updates = make_norms(table)(before, after)
    old, new = ({k: np.asarray(v, np.float64) for k, v in flatten(tree).items()} for tree in (before, after))
    groups = {group_of(path) for path in new}
    assert weights.keys() == updates.keys() == groups
    for group in groups:
        members = [path for path in new if group_of(path) == group]
        expected = np.sqrt(sum((new[path] ** 2).sum() for path in members))
        changed = np.sqrt(sum(((new[path] - old[path]) ** 2).sum() for path in members))
        assert weights[group] == pytest.approx(expected, rel=1e-5)
        assert updates[group] == pytest.approx(changed, rel=1e-5)


def test_a_copy_outlives_the_original():
    step = jax.jit(lambda x: x + 1, donate_argnums=0)
    original = jax.numpy.arange(4.0)
    kept = copy_of({"a": original})
    step(original).block_until_ready()
    np.testing.assert_array_equal(kept["a"], np.arange(4.0))
