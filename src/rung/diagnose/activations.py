"""What a model computes inside on one batch, by name: where a value stops being finite, and the largest before it."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np

from rung.diagnose.watch import Sighting, largest_magnitude, watch
from rung.model.weights import Tree, flatten
from rung.train.optimizer import global_norm
from rung.train.step import Batch, Model, accumulate

Named = tuple[str, float]

_LARGEST = 5  # values told of


@dataclass(frozen=True)
class Findings:
    """What was found on looking into the loss and the gradient of one batch.

    Attributes:
        loss: nats per target.
        targets: in the batch.
        gradient_norm: global norm of the gradient of ``loss``, before clipping.
        first_not_finite: the first value, in the order of execution, with an infinity or a NaN: ``layers.2.mlp (exp)``,
            or ``weight layers.2.mlp.up``; ``None``: there is none.
        largest: the values of largest magnitude before it, the largest first; single numbers, as sums, are left out.
        largest_weight: the path and the magnitude of the weights' largest entry.
        largest_gradient: the same, of the gradient of the summed loss, of the weights whose gradient is finite.
        gradients_not_finite: paths of the other weights.
    """

    loss: float
    targets: int
    gradient_norm: float
    first_not_finite: str | None
    largest: list[Named] = field(default_factory=list)
    largest_weight: Named = ("", 0.0)
    largest_gradient: Named = ("", 0.0)
    gradients_not_finite: list[str] = field(default_factory=list)

    @property
    def finite(self) -> bool:
        """Whether a step would apply the update: the loss and the norm of its gradient are finite."""
        return math.isfinite(self.loss) and math.isfinite(self.gradient_norm)


def examine(model: Model, weights: Tree, batch: Batch, keys_B: jax.Array | None, micro_batch_size: int = 0) -> Findings:
    """Return what is found on computing the loss of a batch and its gradient, as the training step computes them.

    The program is compiled at the first call for a model and a shape of batch, and kept. It needs about the memory of
    a training step without the optimizer.

    Args:
        model: any that the harness trains.
        weights: in the shape of its table, on the devices or the host.
        batch: arrays [B, ...], on one device or split over several.
        keys_B: the keys of the batch's rows, ``row_keys(seed, step, B)``; ``None``: no dropout.
        micro_batch_size: rows at once, as in training; 0: all.
    """
    n_rows = next(iter(batch.values())).shape[0]
    compiled = _compiled(cast(Any, model), n_rows // (micro_batch_size or n_rows))
    numbers, gradients, sightings = jax.device_get(compiled(weights, batch, keys_B))
    order = _Order(sightings)
    weight_sizes = {s.name: float(s.largest) for s in sightings if s.is_argument}
    gradient_sizes = {path: float(size) for path, size in flatten(gradients).items()}
    return Findings(
        loss=float(numbers["loss_sum"]) / max(1, int(numbers["targets"])),
        targets=int(numbers["targets"]),
        gradient_norm=float(numbers["gradient_norm"]),
        first_not_finite=order.first_not_finite,
        largest=order.largest,
        largest_weight=_largest_of(weight_sizes),
        largest_gradient=_largest_of({path: size for path, size in gradient_sizes.items() if math.isfinite(size)}),
        gradients_not_finite=[path for path, size in gradient_sizes.items() if not math.isfinite(size)],
    )


def row_losses(model: Model, weights: Tree, batch: Batch, keys_B: jax.Array | None) -> tuple[np.ndarray, np.ndarray]:
    """Return ``(sum of losses [B], number of targets [B])`` of each row of a batch by itself; arguments as above."""
    losses_B, targets_B = jax.device_get(_row_losses(cast(Any, model))(weights, batch, keys_B))
    return np.asarray(losses_B), np.asarray(targets_B)


def describe(findings: Findings) -> str:
    """Return what was found as one line."""
    parts = []
    before = ""
    if findings.first_not_finite is not None:
        if math.isfinite(findings.loss):
            parts.append(f"the loss is {_short(findings.loss)}, its gradient is not finite")
        parts.append(f"first not finite: {findings.first_not_finite}")
        before = " before it"
    elif findings.finite:
        parts.append(f"all values are finite, the loss {_short(findings.loss)}")
    else:
        parts.append("all values are finite, but not the norm of the gradient, whose squares overflow")
    if findings.largest:
        parts.append(f"largest activation{before}: {_told(findings.largest[0])}")
    parts.append(f"largest weight: {_told(findings.largest_weight)}")
    if findings.largest_gradient[0] and findings.first_not_finite is None:
        parts.append(f"largest gradient: {_told(findings.largest_gradient)}")
    return "; ".join(parts)


# How


@functools.lru_cache(maxsize=2)
def _compiled(model: Any, n_micro: int) -> Any:
    """Return the program that looks into a step; compiled once for each shape of its arguments."""

    def inspect(weights: Tree, batch: Batch, keys_B: jax.Array | None) -> Any:
        def step(weights: Tree) -> Any:
            return accumulate(model, weights, batch, cast(Any, keys_B), n_micro)

        paths = jax.tree.leaves(_paths(weights))
        ((loss_sum, (targets, _)), gradients), sightings = watch(step, [weights], paths)
        mean = 1 / jnp.maximum(targets, 1).astype(jnp.float32)
        numbers = {"loss_sum": loss_sum, "targets": targets, "gradient_norm": global_norm(gradients) * mean}
        return numbers, jax.tree.map(largest_magnitude, gradients), sightings

    return jax.jit(inspect)


@functools.lru_cache(maxsize=2)
def _row_losses(model: Any) -> Any:
    def losses(weights: Tree, batch: Batch, keys_B: jax.Array | None) -> Any:
        def of_row(row: Any) -> Any:
            loss_sum, targets, _ = model.loss(weights, *jax.tree.map(lambda x: x[None], row))
            return loss_sum, targets

        return jax.lax.map(of_row, (batch, keys_B))

    return jax.jit(losses)


def _paths(weights: Tree) -> Tree:
    """Return a tree of the shape of ``weights`` with each one's path at its place."""

    def name(path: Any, _: Any) -> str:
        return ".".join(str(getattr(part, "key", getattr(part, "idx", part))) for part in path)

    return jax.tree_util.tree_map_with_path(name, weights)


class _Order:
    """The sightings in the order of execution: what was the first not finite, and the largest before it."""

    def __init__(self, sightings: Sequence[Sighting]):
        found = [(key, s, index) for s in sightings for key, index in _not_finite(s)]
        first, sighting, index = min(found, key=lambda one: one[0]) if found else ((math.inf,), None, ())
        self.first_not_finite = None if sighting is None else _told_of(sighting, index)
        sizes: dict[str, float] = {}
        for s in sightings:
            if not (s.is_argument or s.is_scalar):
                size = max((float(s.largest[index]) for key, index in _keys(s) if key < first), default=-1.0)
                sizes[s.name] = max(size, sizes.get(s.name, -1.0))
        ranked = sorted(((name, size) for name, size in sizes.items() if size >= 0), key=lambda named: -named[1])
        self.largest = ranked[:_LARGEST]


def _keys(sighting: Sighting, where: Any = None) -> Iterator[tuple[tuple[float, ...], tuple[int, ...]]]:
    """Yield (place in the order of execution, index) of every pass that a value was seen in."""
    shape = np.shape(sighting.largest)
    for index in np.ndindex(shape):
        times = (
            length - 1 - i if backwards else i
            for i, length, backwards in zip(index, shape, sighting.backwards, strict=True)
        )
        key = [sighting.place[0]]
        for time, place in zip(times, sighting.place[1:], strict=True):
            key += [time, place]
        yield tuple(key), index


def _not_finite(sighting: Sighting) -> Iterator[tuple[tuple[float, ...], tuple[int, ...]]]:
    if not np.all(np.isfinite(sighting.largest)):
        yield from (one for one in _keys(sighting) if not np.isfinite(sighting.largest[one[1]]))


def _told_of(sighting: Sighting, index: tuple[int, ...]) -> str:
    """Return which value it was, in which pass of the loops that it is in, for people."""
    loops = zip(index, np.shape(sighting.largest), strict=True)
    passes = [f", pass {number + 1} of {length}" for number, length in loops if length > 1]
    return ("weight " if sighting.is_argument else "") + sighting.name + "".join(passes)


def _largest_of(sizes: dict[str, float]) -> Named:
    """Return the largest, which is one that is not a number where there is one."""
    return max(sizes.items(), key=lambda item: math.inf if math.isnan(item[1]) else item[1], default=("", 0.0))


def _told(named: Named) -> str:
    return f"{named[0]} {_short(named[1])}"


def _short(number: float) -> str:
    return f"{number:.3g}"
