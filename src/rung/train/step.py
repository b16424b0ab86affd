"""The training step: a pure function of (state, batch), where the batch is a pure function of the step's number."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import jax
import jax.numpy as jnp

from rung.config import TrainConfig
from rung.errors import RungError
from rung.mesh import batch_sharding, replicated
from rung.model.losses import Objective
from rung.model.weights import Tree, WeightTable, initialize
from rung.train.optimizer import Optimizer, global_norm

State = dict[str, Any]
"""``weights``; ``optimizer``: its state; ``step``: int32, steps done; ``skipped_in_a_row``: int32."""

Batch = dict[str, jax.Array]
"""Arrays [B, ...] of which each row is one example."""

_DATA_KEY = 1  # folded into the seed for the keys of rows, which initialisation (keys by path) never uses


class Model(Protocol):
    """What the harness asks of a model. ``rung.model.Decoder`` is one, and so is a Flax module in its adapter.

    A model whose initial values its table does not tell has ``initialize(seed) -> Tree`` besides; one that minimises
    more than cross-entropy where the settings ask for it, its ``objective``.
    """

    def weights(self) -> WeightTable:
        """Return the table of weights."""
        ...

    def loss(
        self, weights: Tree, batch: Batch, keys_B: jax.Array | None
    ) -> tuple[jax.Array, jax.Array, dict[str, Any]]:
        """Return ``(sum of losses in nats, number of targets, further sums by name)``.

        Where training minimises something else than cross-entropy, that is the loss, and the further sum
        ``cross_entropy`` is what the log has as the loss.
        """
        ...


def initial_state(model: Model, optimizer: Optimizer, seed: int, mesh: jax.sharding.Mesh) -> State:
    """Return the state before the first step, its arrays on the devices of ``mesh``."""
    return jax.jit(_initial(model, optimizer, seed), out_shardings=replicated(mesh))()


def abstract_state(model: Model, optimizer: Optimizer, mesh: jax.sharding.Mesh) -> State:
    """Return shapes, dtypes and shardings of the state; no array is made, and nothing compiled."""
    shapes = jax.eval_shape(_initial(model, optimizer, 0))
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=replicated(mesh)), shapes)


def initial_weights(model: Model, seed: int) -> Tree:
    """Return a model's own initial weights, where it has ``initialize``, else those of its table; float32."""
    own = getattr(model, "initialize", None)
    return initialize(model.weights(), seed) if own is None else own(seed)


def make_step(
    model: Model,
    optimizer: Optimizer,
    rate_factor: Callable[[jax.Array], jax.Array],
    config: TrainConfig,
    mesh: jax.sharding.Mesh,
) -> Callable[[State, Batch], tuple[State, dict[str, jax.Array]]]:
    """Return the compiled ``step(state, batch) -> (state, metrics)``; it takes over the memory of ``state``.

    The gradient is that of the sum of all losses over the number of all targets, however the batch is cut into
    micro-batches and over devices. It is clipped by its global norm after accumulation. Where the loss or the norm is
    not finite, weights and optimizer stay as they were; the step counts all the same. After ``max_skipped`` such steps
    in a row no update is applied any more: the loop hears of it a step late, and the weights should be those of then.

    Metrics, all scalars: ``loss_sum``, ``cross_entropy`` (a sum too, which the loss is where the model has no other
    objective), ``targets``, ``gradient_norm`` (before clipping), ``rate_factor``, ``skipped`` (bool),
    ``skipped_in_a_row``.

    Raises:
        RungError: ``config`` asks for an objective that is not the model's.
    """
    _check_objective(model, config)
    n_micro = config.batch_size // (config.micro_batch_size or config.batch_size)

    def step(state: State, batch: Batch) -> tuple[State, dict[str, jax.Array]]:
        keys_B = row_keys(config.seed, state["step"], config.batch_size)
        (loss_sum, (targets, cross_entropy)), gradients = accumulate(model, state["weights"], batch, keys_B, n_micro)
        mean = 1 / jnp.maximum(targets, 1).astype(jnp.float32)
        norm = global_norm(gradients) * mean
        scale = mean * (jnp.minimum(1.0, config.clip_norm / jnp.maximum(norm, 1e-30)) if config.clip_norm else 1.0)
        gradients = jax.tree.map(lambda g: g * scale, gradients)
        factor = rate_factor(state["step"])
        new = optimizer.update(gradients, state["optimizer"], state["weights"], factor)

        halted = state["skipped_in_a_row"] >= config.max_skipped
        good = jnp.isfinite(norm) & jnp.isfinite(loss_sum) & ~halted
        old = (state["weights"], state["optimizer"])
        weights, optimizer_state = jax.tree.map(lambda n, o: jnp.where(good, n, o), new, old)
        skipped_in_a_row = jnp.where(good, 0, state["skipped_in_a_row"] + 1)
        metrics = {
            "loss_sum": loss_sum,
            "cross_entropy": cross_entropy,
            "targets": targets,
            "gradient_norm": norm,
            "rate_factor": factor,
            "skipped": ~good,
            "skipped_in_a_row": skipped_in_a_row,
        }
        state = {
            "weights": weights,
            "optimizer": optimizer_state,
            "step": state["step"] + 1,
            "skipped_in_a_row": skipped_in_a_row,
        }
        return state, metrics

    # The optimizer's own products are as precise as the model's; of a model that does not say, float32 on every device.
    with_precision = jax.default_matmul_precision(getattr(model, "matmul_precision", "float32"))(step)
    return jax.jit(with_precision, donate_argnums=0, out_shardings=replicated(mesh))


def _check_objective(model: Model, config: TrainConfig) -> None:
    asked, own = Objective.of(config), getattr(model, "objective", None)
    if asked != (own or Objective()):
        hint = (
            "leave both at 0; a model that has them in its loss says so: `objective`"
            if own is None
            else "build it with Decoder.of(config)"
        )
        raise RungError(
            f"train.label_smoothing {asked.label_smoothing:g} and train.z_loss {asked.z_loss:g} are not what the loss "
            f"of the model has, a {type(model).__name__}",
            hint,
        )


def row_keys(seed: int, step: jax.Array | int, batch_size: int) -> jax.Array:
    """Return a PRNG key [B] for each row of the global batch of a step, a function of (seed, step, row) alone."""
    key = jax.random.fold_in(jax.random.fold_in(jax.random.key(seed, impl="threefry2x32"), _DATA_KEY), step)
    return jax.vmap(jax.random.fold_in, (None, 0))(key, jnp.arange(batch_size))


def place(batch: dict[str, Any], mesh: jax.sharding.Mesh) -> Batch:
    """Return a host batch on the devices, its rows split over the data axis."""
    return jax.device_put(batch, batch_sharding(mesh))


def accumulate(model: Model, weights: Tree, batch: Batch, keys_B: jax.Array, n_micro: int) -> tuple[Any, Tree]:
    """Return ``((sum, (targets, cross-entropy)), gradient)`` over the batch, one micro-batch at a time.

    The gradient is of the sum of losses; the plain cross-entropy is a sum too, and the same one unless the model says
    otherwise.
    """

    def sums(weights: Tree, batch: Batch, keys: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        loss_sum, targets, further = model.loss(weights, batch, keys)
        return loss_sum, (targets, further.get("cross_entropy", loss_sum))

    gradient = jax.value_and_grad(sums, has_aux=True)
    if n_micro == 1:
        return gradient(weights, batch, keys_B)

    def add(total: Any, part: tuple[Batch, jax.Array]) -> tuple[Any, None]:
        return jax.tree.map(jnp.add, total, gradient(weights, *part)), None

    zero = ((jnp.float32(0), (jnp.int32(0), jnp.float32(0))), jax.tree.map(jnp.zeros_like, weights))
    parts = jax.tree.map(lambda x: _strided(x, n_micro), (batch, keys_B))
    return jax.lax.scan(add, zero, parts)[0]


def _initial(model: Model, optimizer: Optimizer, seed: int) -> Callable[[], State]:
    def make() -> State:
        weights = initial_weights(model, seed)
        return {
            "weights": weights,
            "optimizer": optimizer.init(weights),
            "step": jnp.int32(0),
            "skipped_in_a_row": jnp.int32(0),
        }

    return make


def _strided(x_B: jax.Array, n_micro: int) -> jax.Array:
    """Return [micro, B / micro, ...], every micro-th row in a micro-batch, so that each device keeps its own rows."""
    return jnp.swapaxes(x_B.reshape(x_B.shape[0] // n_micro, n_micro, *x_B.shape[1:]), 0, 1)
