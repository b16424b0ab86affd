"""The optimizer: which weights each update rule owns, and the rules, which are optax's."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax

from rung.config import TrainConfig
from rung.errors import RungError
from rung.model.weights import Tree, Weight, WeightTable, flatten, unflatten

_MUON_MOMENTUM = 0.95
_NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
_NEWTON_SCHULZ_STEPS = 5


@dataclass(frozen=True)
class Group:
    """Weights that share an update rule: their paths, the rule without its learning rate, and the peak rate."""

    paths: tuple[str, ...]
    rule: optax.GradientTransformation
    learning_rate: float


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

    AdamW: Loshchilov and Hutter 2019, arXiv:1711.05101. Muon: Jordan et al. 2024, for the hidden matrices, scaled by
    sqrt(max(1, outputs / inputs)); embeddings, the output layer, norms and biases stay with AdamW. Weight decay acts on
    the weights whose table entry says so.

    Raises:
        RungError: Muon for a model without hidden matrices.
    """
    if config.optimizer == "muon" and not any(weight.hidden for weight in table):
        raise RungError("train.optimizer is muon, and the model has no hidden matrices", "take adamw")
    hidden = [weight for weight in table if weight.hidden and config.optimizer == "muon"]
    rest = [weight for weight in table if weight not in hidden]
    groups = {"adamw": Group(_paths(rest), _adamw(rest, config), config.learning_rate)}
    if hidden:
        groups["muon"] = Group(_paths(hidden), _muon(hidden, config), config.muon_learning_rate)
    return Optimizer(groups)


def _adamw(weights: list[Weight], config: TrainConfig) -> optax.GradientTransformation:
    return optax.chain(
        optax.scale_by_adam(config.beta1, config.beta2, config.epsilon),
        _decay(weights, config),
    )


def _muon(weights: list[Weight], config: TrainConfig) -> optax.GradientTransformation:
    return optax.chain(
        optax.trace(_MUON_MOMENTUM, nesterov=True),
        optax.stateless(lambda updates, _: _orthogonal(updates, weights)),
        _scaled_by_shape(weights),
        _decay(weights, config),
    )


def _orthogonal(updates: dict[str, jax.Array], weights: list[Weight]) -> dict[str, jax.Array]:
    """Return each matrix with its singular values brought to about 1.

    Matrices of one shape are stacked and go through the iteration together: a few large products are faster than many
    small ones.
    """
    stacks: dict[tuple[int, int], list[Weight]] = {}
    for weight in weights:
        stacks.setdefault((weight.size // weight.fan_in, weight.fan_in), []).append(weight)
    result = {}
    for shape, members in stacks.items():
        stack = jnp.stack([updates[weight.path].reshape(shape) for weight in members])
        for weight, matrix in zip(members, newton_schulz(stack), strict=True):
            result[weight.path] = matrix.reshape(weight.shape)
    return result


def newton_schulz(stack: jax.Array) -> jax.Array:
    """Return a stack of matrices [n, rows, columns] with singular values brought to about 1 (within 0.7 to 1.2).

    A quintic Newton-Schulz iteration whose coefficients favour a steep slope at 0 over convergence to exactly 1, as in
    Muon (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/).
    """
    a, b, c = _NEWTON_SCHULZ
    wide = stack.shape[1] <= stack.shape[2]
    x = stack if wide else jnp.swapaxes(stack, 1, 2)
    x = x / (jnp.linalg.norm(x, axis=(1, 2), keepdims=True) + 1e-7)
    for _ in range(_NEWTON_SCHULZ_STEPS):
        square = jnp.einsum("nij,nkj->nik", x, x)
        x = a * x + (b * square + c * square @ square) @ x
    return x if wide else jnp.swapaxes(x, 1, 2)


def _scaled_by_shape(weights: list[Weight]) -> optax.GradientTransformation:
    scales = {weight.path: math.sqrt(max(1.0, weight.size / weight.fan_in**2)) for weight in weights}
    return optax.stateless(lambda updates, _: {path: scales[path] * update for path, update in updates.items()})


def _decay(weights: list[Weight], config: TrainConfig) -> optax.GradientTransformation:
    return optax.add_decayed_weights(config.weight_decay, {weight.path: weight.decay for weight in weights})


def _paths(weights: list[Weight]) -> tuple[str, ...]:
    return tuple(weight.path for weight in weights)


def _of(group: Group, flat: dict[str, Any]) -> dict[str, Any]:
    return {path: flat[path] for path in group.paths}


def global_norm(tree: Tree) -> jax.Array:
    """Return the Euclidean norm of all leaves together, in float32."""
    return jnp.sqrt(sum(jnp.sum(jnp.square(leaf.astype(jnp.float32))) for leaf in jax.tree.leaves(tree)))
