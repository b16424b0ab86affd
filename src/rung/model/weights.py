"""The table of weights: each weight declared once, and everything that follows from the declaration.

From a table come the initial values, the parameter count, the optimizer's groups, the sharding over a mesh and the
names in files. Weights themselves are nested dicts of arrays, with a list where the path has a number: the path
``layers.3.attention.query`` is ``weights["layers"][3]["attention"]["query"]``.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

Tree = Any
"""Nested dicts and lists of arrays, in the shape of a weight table's paths."""


@dataclass(frozen=True)
class Weight:
    """One weight.

    Attributes:
        path: its place in the nested dict and its name in files, parts joined by dots.
        shape: of the array. Matrices are stored output first, so that a product is a dot over the last axes.
        axes: a logical name per dimension (``vocab``, ``embed``, ``heads``, ``mlp``, ...), which rules turn into a
            sharding over the mesh.
        n_inputs: how many of the last dimensions a product sums over; 0 for a vector or a table that is only looked up.
        std: standard deviation of the initial normal values; 0 for a constant.
        constant: the initial value where ``std`` is 0.
        decay: whether weight decay applies.
        hidden: whether it is a matrix between hidden layers, which Muon may orthogonalise.
    """

    path: str
    shape: tuple[int, ...]
    axes: tuple[str, ...]
    n_inputs: int = 0
    std: float = 0.0
    constant: float = 0.0
    decay: bool = False
    hidden: bool = False

    def __post_init__(self) -> None:
        assert len(self.shape) == len(self.axes), f"{self.path}: a logical name for each dimension"

    @property
    def size(self) -> int:
        """Number of parameters."""
        return math.prod(self.shape)

    @property
    def fan_in(self) -> int:
        """Number of inputs that one output sums over."""
        return math.prod(self.shape[len(self.shape) - self.n_inputs :])


WeightTable = tuple[Weight, ...]


def parameter_count(table: WeightTable) -> int:
    """Return the number of parameters; a tied matrix stands in the table once and counts once."""
    return sum(weight.size for weight in table)


def initialize(table: WeightTable, seed: int) -> Tree:
    """Return initial float32 weights.

    The key of each weight is folded from ``seed`` and the hash of its path, so its values depend neither on the order
    of the table, nor on the number of layers, nor on the devices.
    """
    return unflatten({weight.path: _initial(weight, seed) for weight in table})


def abstract(table: WeightTable) -> Tree:
    """Return the shapes and dtypes of the weights, without values."""
    return unflatten({weight.path: jax.ShapeDtypeStruct(weight.shape, jnp.float32) for weight in table})


def map_table(function: Callable[[Weight], Any], table: WeightTable) -> Tree:
    """Return a tree in the shape of the weights with ``function(weight)`` at each place."""
    return unflatten({weight.path: function(weight) for weight in table})


def flatten(tree: Tree) -> dict[str, Any]:
    """Return ``{path: leaf}`` of a nested tree of dicts and lists."""
    flat = {}
    items = tree.items() if isinstance(tree, Mapping) else enumerate(tree)
    for name, value in items:
        if isinstance(value, Mapping | list | tuple):
            flat.update({f"{name}.{path}": leaf for path, leaf in flatten(value).items()})
        else:
            flat[str(name)] = value
    return flat


def unflatten(flat: Mapping[str, Any]) -> Tree:
    """Return the nested tree of ``{path: leaf}``; a level whose names are 0, 1, 2, ... becomes a list."""
    children: dict[str, dict[str, Any]] = {}
    tree: dict[str, Any] = {}
    for path, leaf in flat.items():
        name, _, rest = path.partition(".")
        if rest:
            children.setdefault(name, {})[rest] = leaf
        else:
            tree[name] = leaf
    tree.update({name: unflatten(below) for name, below in children.items()})
    numbers = [str(index) for index in range(len(tree))]
    if tree and tree.keys() == set(numbers):
        return [tree[number] for number in numbers]
    return tree


def _initial(weight: Weight, seed: int) -> jax.Array:
    if weight.std == 0:
        return jnp.full(weight.shape, weight.constant, jnp.float32)
    path_hash = int.from_bytes(hashlib.sha256(weight.path.encode()).digest()[:4], "little")
    key = jax.random.fold_in(jax.random.key(seed, impl="threefry2x32"), path_hash)
    return weight.std * jax.random.normal(key, weight.shape, jnp.float32)
