"""The update rules: from gradients to directions, without a learning rate; optax's where it has them.

Each function takes the weights that a rule is for and the settings, and returns a transformation of ``{path: array}``.
Weight decay is part of a direction, and so is decoupled, scaled by the rate, and acts where the weight table says.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from rung.config import TrainConfig
from rung.model.weights import Weight

Rule = Callable[[Sequence[Weight], TrainConfig], optax.GradientTransformation]

_MUON_MOMENTUM = 0.95
_NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
_NEWTON_SCHULZ_STEPS = 5
_NORMUON_DECAY = 0.95  # of the mean of squares, as in the paper's experiments
_ADAFACTOR_DECAY = 0.8  # exponent of the decay of the means of squares (the paper's section 7.2)
_ADAFACTOR_CLIP = 1.0  # largest root mean square of an update (its section 6)
_ADAFACTOR_LEAST_SCALE = 1e-3  # of a weight that is still near 0 (its section 8)


def adamw(weights: Sequence[Weight], config: TrainConfig) -> optax.GradientTransformation:
    """AdamW: Loshchilov and Hutter 2019, arXiv:1711.05101."""
    return optax.chain(optax.scale_by_adam(config.beta1, config.beta2, config.epsilon), _decay(weights, config))


def lion(weights: Sequence[Weight], config: TrainConfig) -> optax.GradientTransformation:
    """Lion: Chen et al. 2023, arXiv:2302.06675. The sign of a mean; its state is one array a weight."""
    return optax.chain(optax.scale_by_lion(config.beta1, config.beta2), _decay(weights, config))


def adafactor(weights: Sequence[Weight], config: TrainConfig) -> optax.GradientTransformation:
    """Adafactor: Shazeer and Stern 2018, arXiv:1804.04235. Means of squares by row and by column, and no momentum.

    A matrix counts as such whatever axes its array has. The update is clipped by its root mean square and is relative
    to that of the weight. The schedule of the run takes the place of the paper's.
    """
    rule = optax.chain(
        optax.scale_by_factored_rms(decay_rate=_ADAFACTOR_DECAY),
        optax.clip_by_block_rms(_ADAFACTOR_CLIP),
        optax.scale_by_param_block_rms(_ADAFACTOR_LEAST_SCALE),
    )
    return optax.chain(_as_matrices(rule, weights), _decay(weights, config))


def muon(weights: Sequence[Weight], config: TrainConfig) -> optax.GradientTransformation:
    """Muon: Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/.

    Nesterov momentum brought to an orthogonal matrix, times sqrt(max(1, outputs / inputs)).
    """
    return optax.chain(
        optax.trace(_MUON_MOMENTUM, nesterov=True),
        optax.stateless(lambda updates, _: _orthogonal(updates, weights)),
        _scaled_by_shape(weights),
        _decay(weights, config),
    )


def normuon(weights: Sequence[Weight], config: TrainConfig) -> optax.GradientTransformation:
    """NorMuon: Li et al. 2025, arXiv:2510.05491. Muon whose rows, the neurons, are brought to like sizes.

    Where the paper's algorithm and its authors' published code (github.com/zichongli5/NorMuon) differ, this is the
    code: Nesterov momentum instead of a plain mean of gradients; a matrix keeps the norm that it had before its rows
    were scaled, instead of a fixed root mean square; and the factor sqrt(max(1, outputs / inputs)) of Muon. So both
    take the same learning rate.
    """
    return optax.chain(
        optax.trace(_MUON_MOMENTUM, nesterov=True),
        optax.stateless(lambda updates, _: _orthogonal(updates, weights)),
        _rows_normalised(weights),
        _scaled_by_shape(weights),
        _decay(weights, config),
    )


def newton_schulz(stack: jax.Array) -> jax.Array:
    """Return a stack of matrices [n, rows, columns] with singular values brought to about 1 (within 0.7 to 1.2).

    A quintic Newton-Schulz iteration whose coefficients favour a steep slope at 0 over convergence to exactly 1, as in
    Muon.
    """
    a, b, c = _NEWTON_SCHULZ
    wide = stack.shape[1] <= stack.shape[2]
    x = stack if wide else jnp.swapaxes(stack, 1, 2)
    x = x / (jnp.linalg.norm(x, axis=(1, 2), keepdims=True) + 1e-7)
    for _ in range(_NEWTON_SCHULZ_STEPS):
        square = jnp.einsum("nij,nkj->nik", x, x)
        x = a * x + (b * square + c * square @ square) @ x
    return x if wide else jnp.swapaxes(x, 1, 2)


def _orthogonal(updates: dict[str, jax.Array], weights: Sequence[Weight]) -> dict[str, jax.Array]:
    """Return each matrix with its singular values brought to about 1.

    Matrices of one shape are stacked and go through the iteration together: a few large products are faster than many
    small ones.
    """
    stacks: dict[tuple[int, int], list[Weight]] = {}
    for weight in weights:
        stacks.setdefault(_matrix_shape(weight), []).append(weight)
    result = {}
    for shape, members in stacks.items():
        stack = jnp.stack([updates[weight.path].reshape(shape) for weight in members])
        for weight, matrix in zip(members, newton_schulz(stack), strict=True):
            result[weight.path] = matrix.reshape(weight.shape)
    return result


class RowSquares(NamedTuple):
    """State of NorMuon beside the momentum: for each matrix the running mean of each row's mean square, [rows]."""

    mean: dict[str, jax.Array]


def _rows_normalised(weights: Sequence[Weight]) -> optax.GradientTransformation:
    shapes = {weight.path: _matrix_shape(weight) for weight in weights}

    def init(params: Any) -> RowSquares:
        return RowSquares({path: jnp.zeros(shapes[path][0], jnp.float32) for path in params})

    def update(updates: Any, state: RowSquares, params: Any = None) -> tuple[Any, RowSquares]:
        means, normalised = {}, {}
        for path, array in updates.items():
            matrix = array.reshape(shapes[path])
            squares = jnp.mean(jnp.square(matrix), 1)
            means[path] = _NORMUON_DECAY * state.mean[path] + (1 - _NORMUON_DECAY) * squares
            rows = matrix / (jnp.sqrt(means[path])[:, None] + 1e-8)
            norms = [jnp.sqrt(jnp.sum(jnp.square(one))) for one in (matrix, rows)]
            normalised[path] = (rows * (norms[0] / (norms[1] + 1e-30))).reshape(array.shape)
        return normalised, RowSquares(means)

    return optax.GradientTransformation(init, update)


def _as_matrices(rule: optax.GradientTransformation, weights: Sequence[Weight]) -> optax.GradientTransformation:
    """Return ``rule``, shown the weights of products as matrices [outputs, inputs] and the others as they are."""
    shapes = {weight.path: _matrix_shape(weight) if weight.n_inputs else weight.shape for weight in weights}

    def matrices(arrays: Any) -> Any:
        return {path: array.reshape(shapes[path]) for path, array in arrays.items()}

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        found, state = rule.update(matrices(updates), state, matrices(params))
        return {path: found[path].reshape(update.shape) for path, update in updates.items()}, state

    return optax.GradientTransformation(lambda params: rule.init(matrices(params)), update)


def _scaled_by_shape(weights: Sequence[Weight]) -> optax.GradientTransformation:
    scales = {weight.path: math.sqrt(max(1.0, weight.size / weight.fan_in**2)) for weight in weights}
    return optax.stateless(lambda updates, _: {path: scales[path] * update for path, update in updates.items()})


def _decay(weights: Sequence[Weight], config: TrainConfig) -> optax.GradientTransformation:
    return optax.add_decayed_weights(config.weight_decay, {weight.path: weight.decay for weight in weights})


def _matrix_shape(weight: Weight) -> tuple[int, int]:
    return weight.size // weight.fan_in, weight.fan_in
