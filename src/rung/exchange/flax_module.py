"""A user's Flax NNX module as a model of ours: it trains in the same harness, with its own initial values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from rung.errors import RungError
from rung.model.losses import IGNORED
from rung.model.weights import Tree, Weight, WeightTable, flatten, unflatten


class FlaxModel:
    """A Flax NNX module that maps ``tokens_BT`` to ``logits_BTV``, as a model that our harness trains.

    Its weights are its ``nnx.Param`` variables, named by their paths in the module; a parameter that stands in two
    places is one weight. They are kept in float32 and handed to the module in the dtype it declares for them.

    In training the module is put in training mode and mapped over the rows of the batch, each row with random streams
    made from that row's key, so that its dropout masks do not depend on how the batch is split.

    Args:
        make: the module from its random streams, as ``lambda rngs: MyModule(256, rngs=rngs)``.
        decay: whether weight decay acts on a weight, from its path and shape; the default: on all of rank 2 or more.
        segments: the module is called with ``(tokens_BT, segments_BT)``, and lets a token see only its own document.

    Raises:
        RungError: the module has variables other than parameters and random streams, as BatchNorm's running averages,
            which a pure function of the weights cannot carry; or a parameter of whole numbers.
    """

    def __init__(
        self,
        make: Callable[[nnx.Rngs], nnx.Module],
        decay: Callable[[str, tuple[int, ...]], bool] = lambda path, shape: len(shape) >= 2,
        segments: bool = False,
    ):
        self._make = make
        self._decay = decay
        self._segments = segments
        abstract = nnx.eval_shape(lambda: make(nnx.Rngs(0)))
        parts: Any = nnx.split(abstract, nnx.Param, nnx.RngState, ...)
        self._graph, self._parameters, self._streams, others = parts
        for path, variable in nnx.to_flat_state(others):
            raise RungError(
                f"the Flax module has a variable that is no parameter: {_name(path)} ({type(variable).__name__})",
                "only parameters and random streams are carried through training",
            )
        for name, value in _by_path(self._parameters).items():
            if not jnp.issubdtype(value.dtype, jnp.floating):
                raise RungError(
                    f"parameter {name} of the Flax module is {value.dtype}", "parameters are floating point"
                )

    def weights(self) -> WeightTable:
        """Return the table of weights. Its initial values are those of ``initialize``, not the table's."""
        return tuple(
            Weight(path, value.shape, ("unnamed",) * len(value.shape), decay=self._decay(path, value.shape))
            for path, value in _by_path(self._parameters).items()
        )

    def initialize(self, seed: int) -> Tree:
        """Return the values that ``make(nnx.Rngs(seed))`` has, in float32."""
        values = _by_path(nnx.state(self._make(nnx.Rngs(seed)), nnx.Param))
        return unflatten({path: value.astype(jnp.float32) for path, value in values.items()})

    def logits(self, weights: Tree, batch: dict[str, jax.Array], keys_B: jax.Array | None) -> jax.Array:
        """Return the module's logits [B, T, V], in float32; ``keys_B`` as in ``loss``."""
        inputs = [batch["tokens"]]
        if self._segments:
            inputs.append(batch["segments"])
        elif "segments" in batch:
            raise RungError(
                "the data keep documents apart, and the Flax module is not told where they begin",
                "set data.cross_documents, or take FlaxModel(..., segments=True)",
            )
        if keys_B is None:
            module = self._module(weights, jax.random.key(0))
            module.eval()
            return module(*inputs).astype(jnp.float32)

        def of_row(key: jax.Array, *row: jax.Array) -> jax.Array:
            module = self._module(weights, key)
            module.train()
            return module(*(x_T[None] for x_T in row))[0]

        return jax.vmap(of_row)(keys_B, *inputs).astype(jnp.float32)

    def loss(
        self, weights: Tree, batch: dict[str, jax.Array], keys_B: jax.Array | None
    ) -> tuple[jax.Array, jax.Array, dict[str, Any]]:
        """Return ``(sum of losses in nats, number of targets, {})`` of a batch: plain cross-entropy.

        ``train.label_smoothing`` and ``train.z_loss`` are not in it, and ``rung.train.step.make_step`` refuses them.

        Args:
            weights: nested dict in the shape of the table.
            batch: ``tokens`` and ``targets`` int32 [B, T] (targets -1 where there is none), and ``segments``.
            keys_B: one PRNG key a row for the module's random streams; ``None``: the module in evaluation mode.
        """
        log_probabilities_BTV = jax.nn.log_softmax(self.logits(weights, batch, keys_B))
        targets_BT = batch["targets"]
        has_target_BT = targets_BT != IGNORED
        at_target_BT = jnp.take_along_axis(log_probabilities_BTV, jnp.maximum(targets_BT, 0)[..., None], -1)[..., 0]
        return -jnp.sum(jnp.where(has_target_BT, at_target_BT, 0.0)), jnp.sum(has_target_BT), {}

    def _module(self, weights: Tree, key: jax.Array) -> Any:
        """Return the module with these weights, its random streams begun anew from ``key``."""
        flat = flatten(weights)
        parameters = [
            (path, variable.replace(flat[_name(path)].astype(variable.get_value().dtype)))
            for path, variable in nnx.to_flat_state(self._parameters)
        ]
        streams = [
            (path, variable.replace(_stream(variable.get_value(), jax.random.fold_in(key, number))))
            for number, (path, variable) in enumerate(nnx.to_flat_state(self._streams))
        ]
        return nnx.merge(self._graph, nnx.from_flat_state(parameters), nnx.from_flat_state(streams))


def _stream(like: jax.ShapeDtypeStruct, key: jax.Array) -> jax.Array:
    """Return the first value of a stream's variable: its key or keys, or a count of zero."""
    if jnp.issubdtype(like.dtype, jax.dtypes.prng_key):
        return key if like.shape == () else jax.random.split(key, like.shape)
    return jnp.zeros(like.shape, like.dtype)


def _by_path(state: Any) -> dict[str, Any]:
    return {_name(path): variable.get_value() for path, variable in nnx.to_flat_state(state)}


def _name(path: tuple[Any, ...]) -> str:
    return ".".join(map(str, path))
