"""Norms of weights and of what a step changed in them, by group: whether the learning rate suits each part."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from rung.model.weights import Tree, WeightTable, flatten
from rung.train.optimizer import global_norm

Values = dict[str, jax.Array]
"""A scalar a group."""


def make_norms(table: WeightTable) -> Callable[[Tree, Tree], tuple[Values, Values]]:
    """Return the compiled ``(weights before, weights after) -> (norms of the weights after, norms of the change)``.

    A group is a kind of weight over all layers: ``layers.attention``, ``layers.mlp``, ``embedding``.
    """
    groups: dict[str, list[str]] = {}
    for weight in table:
        groups.setdefault(group_of(weight.path), []).append(weight.path)

    def norms(before: Tree, after: Tree) -> tuple[Values, Values]:
        old, new = flatten(before), flatten(after)
        change = {path: new[path] - old[path] for path in new}
        return _by_group(groups, new), _by_group(groups, change)

    return jax.jit(norms)


def group_of(path: str) -> str:
    """Return the group of a weight: its path without the numbers in it and without its last part."""
    parts = [part for part in path.split(".") if not part.isdecimal()]
    return ".".join(parts[:-1] or parts)


copy_of: Callable[[Tree], Tree] = jax.jit(lambda tree: jax.tree.map(jnp.copy, tree))
"""Return a copy of arrays on their devices, which outlives the step that takes the originals over."""


def _by_group(groups: dict[str, list[str]], flat: dict[str, Any]) -> Values:
    return {group: global_norm([flat[path] for path in paths]) for group, paths in groups.items()}
