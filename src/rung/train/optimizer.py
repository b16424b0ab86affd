"""The optimizer: parameter groups, each with its update rule, its peak learning rate and its weight decay."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax

from rung.config import TrainConfig
from rung.errors import RungError
from rung.model.weights import Tree, Weight, WeightTable, flatten, parameter_count, unflatten
from rung.train import rules


@dataclass(frozen=True)
class GroupDefinition:
    """What makes a parameter group: its rule, which weights are in it, and which setting is its peak rate."""

    rule: rules.Rule
    includes: Callable[[Weight], bool]
    learning_rate: Callable[[TrainConfig], float] = lambda config: config.learning_rate


def _all(weight: Weight) -> bool:
    return True


def _hidden(weight: Weight) -> bool:
    return weight.hidden


def _not_hidden(weight: Weight) -> bool:
    return not weight.hidden


def _matrix_rate(config: TrainConfig) -> float:
    return config.muon_learning_rate


GROUPS: dict[str, dict[str, GroupDefinition]] = {
    "adamw": {"adamw": GroupDefinition(rules.adamw, _all)},
    "lion": {"lion": GroupDefinition(rules.lion, _all)},
    "adafactor": {"adafactor": GroupDefinition(rules.adafactor, _all)},
    "muon": {
        "muon": GroupDefinition(rules.muon, _hidden, _matrix_rate),
        "adamw": GroupDefinition(rules.adamw, _not_hidden),
    },
    "normuon": {
        "normuon": GroupDefinition(rules.normuon, _hidden, _matrix_rate),
        "adamw": GroupDefinition(rules.adamw, _not_hidden),
    },
}
"""For each ``train.optimizer`` its parameter groups by name, which is also where a checkpoint has their state."""


@dataclass(frozen=True)
class Group:
    """A parameter group: weights that share an update rule.

    Attributes:
        weights: those of the group.
        rule: what turns their gradients into directions, decay included.
        learning_rate: peak.
        weight_decay: of those that the weight table lets decay.
    """

    weights: tuple[Weight, ...]
    rule: optax.GradientTransformation
    learning_rate: float
    weight_decay: float

    @property
    def paths(self) -> tuple[str, ...]:
        """Paths of the group's weights."""
        return tuple(weight.path for weight in self.weights)


@dataclass(frozen=True)
class Optimizer:
    """Groups of weights by name; every weight of the table is in exactly one."""

    groups: dict[str, Group]

    def init(self, weights: Tree) -> dict[str, Any]:
        """Return the state before the first update: per group, the state of its rule."""
        flat = flatten(weights)
        return {name: group.rule.init(_of(group, flat)) for name, group in self.groups.items()}

    def update(
        self, gradients: Tree, state: dict[str, Any], weights: Tree, rate_factor: jax.Array
    ) -> tuple[Tree, dict[str, Any]]:
        """Return ``(weights, state)`` after one update at ``rate_factor`` times each group's peak learning rate."""
        flat_gradients, flat = flatten(gradients), flatten(weights)
        new_state = {}
        for name, group in self.groups.items():
            old = _of(group, flat)
            updates, new_state[name] = group.rule.update(_of(group, flat_gradients), state[name], old)
            rate = rate_factor * group.learning_rate
            flat.update({path: old[path] - rate * updates[path] for path in group.paths})
        return unflatten(flat), new_state


def make_optimizer(table: WeightTable, config: TrainConfig) -> Optimizer:
    """Return the optimizer that ``config`` names, for the weights of ``table``.

    ``rung.train.rules`` has the rules with their papers. Muon and NorMuon are for the hidden matrices; embeddings, the
    output layer, norms and biases stay with AdamW. Weight decay acts on the weights whose table entry says so.

    Raises:
        RungError: Muon for a model without hidden matrices.
    """
    groups = {}
    for name, group in GROUPS[config.optimizer].items():
        weights = tuple(weight for weight in table if group.includes(weight))
        if not weights and group.includes is _hidden:
            raise RungError(f"train.optimizer is {name}, and the model has no hidden matrices", "take adamw")
        groups[name] = Group(weights, group.rule(weights, config), group.learning_rate(config), config.weight_decay)
    return Optimizer(groups)


def group_rows(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Return the parameter groups for people: a row for what decays in each and one for what does not."""
    rows = []
    for name, group in optimizer.groups.items():
        for decays in (True, False):
            weights = [weight for weight in group.weights if weight.decay == decays]
            if weights:
                rows.append(
                    {
                        "rule": name,
                        "learning_rate": group.learning_rate,
                        "weight_decay": group.weight_decay if decays else 0.0,
                        "weights": len(weights),
                        "parameters": parameter_count(tuple(weights)),
                    }
                )
    return rows


def global_norm(tree: Tree) -> jax.Array:
    """Return the Euclidean norm of all leaves together, in float32."""
    return jnp.sqrt(sum(jnp.sum(jnp.square(leaf.astype(jnp.float32))) for leaf in jax.tree.leaves(tree)))


def _of(group: Group, flat: dict[str, Any]) -> dict[str, Any]:
    return {path: flat[path] for path in group.paths}
